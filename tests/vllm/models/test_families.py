"""Families of models: versions brought in live compute the logits of fresh engines that loaded them from files.

Every family on one worker and on two, tied and untied, from every kind of trainer: `make test-vllm-models`, with
FAMILY=name one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from etha.errors import ConfigError
from tests.vllm.checkpoints import FAMILIES, Family
from tests.vllm.replicas import Logits, Replica, compared, different, kind_of

#: Kinds of trainers: what ``Replica.join`` is told.
KINDS: dict[str, dict[str, Any]] = {
    "module": {"module": "bf16"},
    "FSDP2": {"module": "fsdp2"},
    "tensors": {},
}
#: A tied model, one of experts, and one whose loaders write past the parameters' own: they run with all other tests.
ALWAYS = {("qwen2", True, 1), ("mixtral", False, 1), ("gpt-oss", False, 1)}
#: Run as vLLM compiles them, too: a tied model, and one of experts.
COMPILED = ("qwen3", "moe")


def _cases() -> Iterator[Any]:
    wanted = os.environ.get("FAMILY")
    assert not wanted or wanted in FAMILIES, f"FAMILY={wanted!r}: one of {', '.join(FAMILIES)}"
    for name, family in FAMILIES.items():
        if wanted and name != wanted:
            continue
        for tied in family.tied:
            for workers in family.workers:
                usual = (name, tied, workers) in ALWAYS
                yield pytest.param(
                    name,
                    tied,
                    workers,
                    id=f"{name}-{'tied' if tied else 'untied'}-{workers}",
                    marks=[] if usual else [pytest.mark.families],
                )


@pytest.mark.parametrize(("name", "tied", "workers"), list(_cases()))
def test_versions_of_a_family(
    name: str, tied: bool, workers: int, checkpoints: Callable[..., Path], env: dict[str, str], logs: Path
) -> None:
    check(name, workers, [checkpoints(name, seed, tie_word_embeddings=tied) for seed in (0, 1)], env, logs)


@pytest.mark.families
@pytest.mark.parametrize("name", COMPILED)
def test_versions_of_a_compiled_model(
    name: str, checkpoints: Callable[..., Path], env: dict[str, str], logs: Path
) -> None:
    """Without ``enforce_eager``: what is compiled reads the live parameters' memory."""
    env = {**env, "TORCHDYNAMO_DISABLE": "0", "VLLM_CACHE_ROOT": str(logs / "cache")}
    check(name, 1, [checkpoints(name, seed) for seed in (0, 1)], env, logs, enforce_eager=False)


def check(name: str, workers: int, versions: list[Path], env: dict[str, str], logs: Path, **options: Any) -> None:
    """Version 0, version 1, and version 0 again, from every kind of trainer, one after the other."""
    family = FAMILIES[name]
    fresh = _fresh(workers, versions, env, logs, options)
    assert different(*fresh) is not None, "versions that differ"
    with Replica(versions[1], env, logs / "live.log", workers=workers, dummy=family.dummy, **options) as live:
        assert live.run(kind_of) == [family.vllm] * workers
        for kind, how in KINDS.items():
            if kind in family.refused:
                before = live.logits()
                with pytest.raises(ConfigError, match=family.refused[kind]):
                    live.join(versions[0], **how)
                assert different(live.logits(), before) is None, "a trainer that is refused changes nothing"
                continue
            live.join(versions[0], **how)
            for number in (0, 1, 0):
                live.send(versions[number])
                wrong = different(live.logits(), fresh[number])
                assert wrong is None, f"{name} from {kind}, version {number}: {wrong}"
            live.verify()
            for count, differs, left_out in live.run(compared):
                assert count and not differs, f"{name} from {kind}: {differs}"
                assert {".".join(path.split(".")[-2:]) for path in left_out} == family.uncompared, f"{name} from {kind}"


def _fresh(
    workers: int, versions: list[Path], env: dict[str, str], logs: Path, options: dict[str, Any]
) -> list[Logits]:
    """Logits of an engine for each version that has loaded it from its file."""
    found = []
    with ExitStack() as stack:
        engines = []
        for number, version in enumerate(versions):
            engine = Replica(version, env, logs / f"fresh{number}.log", workers=workers, core=number, **options)
            engines.append(stack.enter_context(engine))
            if workers > 1:  # one after the other, for each wants both cores
                found.append(engine.logits())
                stack.close()
        return found or [engine.logits() for engine in engines]


def test_the_table_of_families() -> None:
    """docs/vllm.md says of each family what is run here, and names every other class of vLLM's that generates text."""
    from vllm.model_executor.models import registry

    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    section = text.partition("\n## Families\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == [
        _row(name, family) for name, family in FAMILIES.items()
    ]
    known = {name for _, name in (registry._TEXT_GENERATION_MODELS | registry._TRANSFORMERS_SUPPORTED_MODELS).values()}
    untested = section.partition("**Not run:**")[2].partition(".\n")[0]
    assert re.findall(r"\w+", untested) == sorted(known - {family.vllm for family in FAMILIES.values()})


def _row(name: str, family: Family) -> str:
    heads = ", ".join("tied" if tied else "own" for tied in family.tied)
    trainers = ", ".join(kind for kind in KINDS if kind not in family.refused)
    refused = "; ".join(f"{kind}: {why}" for kind, why in family.refused.items())
    workers = ", ".join(map(str, family.workers))
    return f"| `{name}` | {family.vllm} | {workers} | {heads} | {trainers} | {refused or '-'} |"
