"""A trainer that drives the `LLM` of its own process: answers are those of fresh engines, cached ones as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.replicas import Replica, different

Checkpoints = Callable[[str, int], Path]
#: More than two blocks of the cache.
LONG = ({"prompt_token_ids": [5 + n % 20 for n in range(100)]},)
CACHED = {"enable_prefix_caching": True, "block_size": 32}


@pytest.mark.parametrize("core", ["0", "1"], ids=["core in the process", "core in its own"])
def test_an_llm_in_the_process_of_its_trainer(
    core: str, checkpoints: Checkpoints, env: dict[str, str], logs: Path
) -> None:
    """vLLM's core refuses pause="wait" where it runs in the process; nothing of an idle LLM need be paused."""
    env = {**env, "VLLM_ENABLE_V1_MULTIPROCESSING": core}
    versions = [checkpoints("llama", seed) for seed in (0, 1)]
    fresh = []
    for number, version in enumerate(versions):
        with Replica(version, env, logs / f"fresh{number}.log", **CACHED) as engine:
            fresh.append(engine.logits(LONG))
    assert different(*fresh) is not None, "versions that differ"
    with Replica(versions[0], env, logs / "live.log", dummy=True, **CACHED) as live:
        live.join(versions[0])
        for number in (0, 1, 0):
            live.send(versions[number])
            wrong = different(live.logits(LONG), fresh[number])
            assert wrong is None, f"version {number}: {wrong}"
            live.verify()
