"""A version ends in the same way on every rank of its trainer, whoever is killed while rank 0 speaks to the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etha import PeerLostError
from tests.vllm.engines import Server
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: What rank 0 asks of the engine once the bytes are there.
CALLS = ("pause", "update_weights", "finish_weight_update", "release")


def outcomes(trainer: Trainer, model: Path, call: str, pid: int) -> list[type[Exception] | None]:
    """How ``send_weights`` ends on each rank when ``pid`` is killed before ``call``; None: it returns."""
    for rank, child in enumerate(trainer.ranks):
        child.send(*(("kill", str(model), call, call, pid) if rank == 0 else ("send", str(model), call)))
    found: list[type[Exception] | None] = []
    for child in trainer.ranks:
        try:
            child.hear()
        except Exception as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


def test_an_engine_that_is_killed_is_a_lost_peer_on_every_rank(
    checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path
) -> None:
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    server = Server(models[0], 1, env, logs / "server.log").wait()
    trainer = Trainer((2,), models[0], server.url, env, logs)
    try:
        trainer.join()
        for number, call in enumerate(CALLS):
            assert outcomes(trainer, models[0], call, server.child.pid) == [PeerLostError] * 2, call
            server.kill()
            server = Server(models[0], 1, env, logs / f"{call}.log", port=server.port).wait()
            model = models[number % 2]
            trainer.send(model, f"after {call}")
            assert (server.version(), server.answers()) == (f"after {call}", fresh(model, 1)[0])
    finally:
        trainer.kill()
        server.kill()


def test_rank_0_that_is_killed_is_a_lost_peer_on_the_others(
    checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path
) -> None:
    models = [checkpoints("qwen3", seed) for seed in (0, 1)]
    server = Server(models[0], 1, env, logs / "server.log").wait()
    trainers = []
    try:
        for number, call in enumerate(("update_weights", "release")):
            trainers.append(Trainer((2,), models[0], server.url, env, logs))
            trainers[-1].join()
            dead = trainers[-1].ranks[0].pid
            assert outcomes(trainers[-1], models[1 - number], call, dead)[1] is PeerLostError, call
            trainers[-1].kill()
            trainers.append(Trainer((), models[0], server.url, env, logs))
            trainers[-1].join()
            trainers[-1].send(models[number], "next")
            assert (server.version(), server.answers()) == ("next", fresh(models[number], 1)[0])
            trainers[-1].end()
    finally:
        for trainer in trainers:
            trainer.kill()
        server.kill()
