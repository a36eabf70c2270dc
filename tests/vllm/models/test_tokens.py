"""A version that was brought into a live engine answers as a fresh engine does that loaded it from a file.

Each worker receives what it keeps: its part of what is cut, and all of what every worker has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.checkpoints import Checkpoint
from tests.vllm.engines import Server
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: Every shape of trainer: plain tensors, FSDP2 even and uneven, FSDP2 x TP.
SHAPES = ((), (2,), (3,), (2, 2))
#: Tensors that every tensor-parallel worker holds whole.
REPLICATED = re.compile(r"norm\.weight$|mlp\.gate\.weight$")


def check_bytes(server: Server, model: Path) -> None:
    """Every worker recorded every tensor, and received within 1 % what it needs of the checkpoint, each time."""
    needed = 0.0
    for name, tensor in Checkpoint(model).tensors().items():
        needed += tensor.nbytes if REPLICATED.search(name) else tensor.nbytes / server.workers
    log = server.child.log.read_text()
    planned = [kept for _, kept, _ in server.received()]
    moved = [int(n) for n in re.findall(r"is live: (\d+) bytes received", log)]
    assert log.count("received whole: none") == len(planned) >= server.workers
    assert len(moved) >= server.workers
    assert [n / needed for n in (*planned, *moved)] == [pytest.approx(1, abs=0.01)] * len((*planned, *moved))


def check_versions(server: Server, models: list[Path], fresh: Fresh, env: Env, logs: Path) -> None:
    """Four trainers one after another, two versions each; nothing is left over."""
    for shape in SHAPES:
        trainer = Trainer(shape, models[0], server.url, env, logs)
        try:
            trainer.join()
            for number, model in enumerate(models):
                version = f"{shape}-{number}"
                sent = trainer.send(model, version)
                tokens, checksums = fresh(model, server.workers)
                assert server.version() == version
                assert [v for v, *_ in sent] == [version] * len(trainer.ranks)
                assert server.answers() == tokens, shape
                assert server.checksums() == checksums, shape
        finally:
            trainer.end()
    assert fresh(models[0], server.workers)[0] != fresh(models[1], server.workers)[0]
    check_bytes(server, models[0])


def test_one_worker(checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path) -> None:
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    server = Server(models[0], 1, env, logs / "server.log")
    try:
        before = server.wait().answers()
        stranger = Trainer((), models[0], server.url, env, logs)
        try:
            with pytest.raises(
                Exception, match=r"does not take 1 of .* tensors, 'value_head\.weight' of shape .* first"
            ):
                stranger.join("value_head.weight")
        finally:
            stranger.end()
        assert server.answers() == before, "a trainer that does not fit changes nothing"
        check_versions(server, models, fresh, env, logs)
        check_second_trainer(server, models[1], fresh, env, logs)
    finally:
        server.kill()


def check_second_trainer(server: Server, model: Path, fresh: Fresh, env: Env, logs: Path) -> None:
    """While a trainer lives another one is refused, and the first goes on; its requests under way are kept."""
    trainer = Trainer((), model, server.url, env, logs, pause="keep")
    second = Trainer((), model, server.url, env, logs, direct=True)
    try:
        trainer.join()
        with pytest.raises(Exception, match=r"is alive|a trainer that lives"):
            second.join()
        trainer.send(model, "kept")
        assert (server.version(), server.answers()) == ("kept", fresh(model, server.workers)[0])
    finally:
        second.end()
        trainer.end()


def test_stages_of_a_pipeline(checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path) -> None:
    """Each rank of the trainer has a layer; what it knows of the others it learns from them, or from its source."""
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    server = Server(models[0], 1, env, logs / "server.log")
    try:
        server.wait()
        for number, stages in enumerate(("held", "iterated")):
            trainer = Trainer((2,), models[0], server.url, env, logs, stages=stages)
            try:
                trainer.join()
                for model in (models[number], models[1 - number]):
                    trainer.send(model)
                    assert server.answers() == fresh(model, 1)[0], stages
            finally:
                trainer.end()
    finally:
        server.kill()


@pytest.mark.parametrize(("kind", "atomic"), [("llama", True), ("moe", False)])
def test_other_models(kind: str, atomic: bool, checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path) -> None:
    """Two workers; what can be is written in place, after all have it, or at once. The trainer is there first."""
    model = checkpoints(kind, 0)
    server = Server(model, 2, env, logs / "server.log")
    trainer = Trainer((), model, server.url, env, logs, direct=True, atomic=atomic)
    try:
        trainer.join()
        ((_, number, _),) = trainer.send(model)
        tokens, checksums = fresh(model, 2)
        assert server.version() == str(number), "without a name, a version is called by its number"
        assert server.answers() == tokens
        assert server.checksums() == checksums
        check_bytes(server, model)
        assert "; 0 written in place" not in server.child.log.read_text()
    finally:
        trainer.end()
        server.kill()
