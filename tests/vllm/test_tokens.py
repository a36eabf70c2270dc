"""A version that was brought into a live engine answers as a fresh engine does that loaded it from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engines import Server
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: Every shape of trainer: plain tensors, FSDP2 even and uneven, FSDP2 x TP.
SHAPES = ((), (2,), (3,), (2, 2))


@pytest.mark.parametrize("workers", [1, 2])
def test_versions_from_every_trainer(
    workers: int, checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path
) -> None:
    """One server, four trainers one after another, two versions each; nothing is left over."""
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    server = Server(models[0], workers, env, logs / "server.log")
    try:
        server.wait()
        before = server.answers()
        for shape in SHAPES:
            trainer = Trainer(shape, models[0], server.url, env, logs)
            try:
                trainer.join()
                for number, model in enumerate(models):
                    version = f"{len(shape)}-{shape}-{number}"
                    sent = trainer.send(model, version)
                    tokens, checksums = fresh(model, workers)
                    assert server.version() == version
                    assert [v for v, *_ in sent] == [version] * len(trainer.ranks)
                    assert server.answers() == tokens != before, shape
                    assert server.checksums() == checksums, shape
            finally:
                trainer.end()
    finally:
        server.kill()


@pytest.mark.parametrize(("kind", "direct"), [("llama", False), ("moe", True)])
def test_other_models(kind: str, direct: bool, checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path) -> None:
    """Two workers; where tensors may be written in place, some are."""
    model = checkpoints(kind, 0)
    server = Server(model, 2, env, logs / "server.log")
    trainer = Trainer((), model, server.url, env, logs, direct=direct)
    try:
        trainer.join()
        trainer.send(model)
        tokens, checksums = fresh(model, 2)
        assert server.version() == "1"
        assert server.answers() == tokens
        assert server.checksums() == checksums
        assert ("0 written in place" in server.child.log.read_text()) is not direct
        assert "received whole: none" in server.child.log.read_text()
    finally:
        trainer.end()
        server.kill()
