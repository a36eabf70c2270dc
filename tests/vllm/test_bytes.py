"""Each worker receives what it keeps: half of what is cut in two, all of what both have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.checkpoints import Checkpoint
from tests.vllm.engines import Server
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
#: Tensors that every tensor-parallel worker holds whole.
REPLICATED = re.compile(r"norm\.weight$|mlp\.gate\.weight$")


def ideal(model: Path, workers: int) -> float:
    """Bytes that one worker needs of a checkpoint."""
    needed = 0.0
    for name, tensor in Checkpoint(model).tensors().items():
        needed += tensor.nbytes if REPLICATED.search(name) else tensor.nbytes / workers
    return needed


@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe"])
def test_two_workers_receive_half_of_what_is_cut(
    kind: str, checkpoints: Checkpoints, env: dict[str, str], logs: Path
) -> None:
    model = checkpoints(kind, 0)
    server = Server(model, 2, env, logs / "server.log")
    trainer = Trainer((), model, server.url, env, logs)
    try:
        trainer.join()
        trainer.send(model)
        log = server.child.log.read_text()
        assert log.count("received whole: none") == 2, "each worker has recorded every tensor"
        planned = [kept for _, kept, _ in server.received()]
        moved = [int(n) for n in re.findall(r"is live: (\d+) bytes received", log)]
        assert sorted(moved) == sorted(planned)
        assert [kept / ideal(model, 2) for kept in planned] == [pytest.approx(1, abs=0.01)] * 2
    finally:
        trainer.end()
        server.kill()
