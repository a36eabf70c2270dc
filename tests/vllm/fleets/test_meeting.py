"""An engine that meets a trainer: it answers while ranks are late, and after a trainer has died as it joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import Server
from tests.vllm.happenings import Happenings, happenings
from tests.vllm.replicas import Logits, different, reference
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Env = dict[str, str]


def joined(side: str) -> dict[str, str]:
    return {"kind": "joined", "pair": "weights", "side": side, "rank": "0"}


def begin(trainer: Trainer, events: Happenings) -> None:
    """Rank 0 and the engine wait for each other, and for rank 1, which is held back."""
    trainer.ranks[0].send("join")
    assert trainer.ranks[1].ask("join late") == "holds"
    events.wait(joined("trainer"), joined("inference"))


@pytest.fixture(scope="module")
def versions(checkpoints: Checkpoints) -> list[Path]:
    return [checkpoints("qwen3", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def fresh_logits(versions: list[Path], env: Env, room: Path) -> list[Logits]:
    return [reference(version, env, room / f"logits{n}.log") for n, version in enumerate(versions)]


@pytest.fixture(scope="module")
def live(versions: list[Path], env: Env, room: Path) -> Iterator[Server]:
    server = Server(versions[0], 1, env, room / "meeting.log", raw_logits=True)
    try:
        yield server.wait()
    finally:
        server.kill()


@pytest.fixture
def events(env: Env, logs: Path) -> Iterator[Happenings]:
    with happenings(env, logs / "agent.log") as found:
        yield found


def test_the_engine_answers_while_a_rank_of_the_trainer_is_late(
    versions: list[Path], fresh_logits: list[Logits], live: Server, events: Happenings, env: Env, logs: Path
) -> None:
    before = live.answers()
    trainer = Trainer((2,), versions[1], live.url, env, logs, stages="alone")
    try:
        begin(trainer, events)
        assert live.answers() == before, "the late rank is held until the answers have come"
        trainer.ranks[1].send("go")
        for rank in trainer.ranks:
            rank.hear()
        trainer.send(versions[1], "late")
        assert live.version() == "late"
        wrong = different(live.logits(), fresh_logits[1])
        assert wrong is None, wrong
    finally:
        trainer.end()


def test_a_trainer_that_is_killed_as_it_joins_leaves_the_engine_to_the_next(
    versions: list[Path], fresh_logits: list[Logits], live: Server, events: Happenings, env: Env, logs: Path
) -> None:
    before = live.answers()
    dead = Trainer((2,), versions[0], live.url, env, logs, stages="alone")
    try:
        begin(dead, events)
    finally:
        dead.kill()
    events.wait({**joined("inference"), "kind": "left"})  # long before its deadline
    assert live.answers() == before
    for number, shape in enumerate(((), (2,))):
        following = Trainer(shape, versions[number], live.url, env, logs)
        try:
            following.join()
            following.send(versions[number], f"after {number}")
            assert live.version() == f"after {number}"
            wrong = different(live.logits(), fresh_logits[number])
            assert wrong is None, wrong
        finally:
            following.end()
