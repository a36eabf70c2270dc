# Everything is made in .venv of this clone; nothing is written elsewhere but package caches.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# PyPI's Linux wheels of torch bring CUDA; this index has CPU builds for who sets it: make install TORCH_INDEX=URL
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: install demo test lint proof bench gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		|| { echo "Etha needs Python 3.11 to 3.13: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/etha demo $(DEMO)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict etha

test: lint
	$(BIN)/python -m pytest $(PYTEST)

# 10,000 random layout pairs against enumerated truth; the suite takes 1,000.
proof: install
	ETHA_PROOF=10000 $(BIN)/python -m pytest tests/proof --timeout 3600 $(PYTEST)

bench: install
	$(BIN)/python bench/copy.py
	$(BIN)/python bench/roundtrip.py
	$(BIN)/python bench/transfer.py
	$(BIN)/python bench/latency.py
	$(BIN)/python bench/loop.py
	$(BIN)/python bench/plan.py

# With the Python on the path, where a GPU and its torch are; no virtual environment is made.
gpu:
	python -m pytest tests/gpu -m gpu $(PYTEST)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
