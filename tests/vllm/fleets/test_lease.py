"""A trainer that is killed between pause and resume: its engine goes on by itself, with a whole version."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

pytest.importorskip("vllm")
from etha.errors import ConfigError
from etha.integrations.vllm.engine.lease import Lease, _refuse_asleep
from tests.vllm.engines import Server
from tests.vllm.nursery import PATIENCE
from tests.vllm.trainers import Trainer

Checkpoints = Callable[[str, int], Path]
Fresh = Callable[[Path, int], tuple[list[list[int]], dict[str, str]]]
Env = dict[str, str]
#: Requests of an update, which of its kind each is; the first update_weights claims the pause, the third releases it.
CALLS = [
    ("/update_weights", 1),
    ("/pause", 1),
    ("/update_weights", 2),
    ("/finish_weight_update", 1),
    ("/update_weights", 3),
]
MOMENTS = [(route, number, moment) for route, number in CALLS for moment in ("sent", "answered")]


def test_a_trainer_is_killed_at_any_moment_of_a_pause(
    checkpoints: Checkpoints, fresh: Fresh, env: Env, logs: Path
) -> None:
    old, new = (checkpoints("qwen3", seed) for seed in (0, 1))
    tokens = {str(path): fresh(path, 1)[0] for path in (old, new)}
    server = Server(old, 1, env, logs / "server.log")
    trainer: Trainer | None = None
    try:
        server.wait()
        for at, (route, number, moment) in enumerate(MOMENTS):
            trainer = Trainer((), old, server.url, env, logs, lease=1.0)
            trainer.join()
            trainer.send(old, f"before {at}")
            assert (server.version(), server.answers()) == (f"before {at}", tokens[str(old)]), "the next trainer's"
            trainer.ranks[0].send("die at", route, number, moment, str(new), f"killed {at}")
            trainer.ranks[0].ended()
            answers, version = server.answers(), server.version()
            sent = CALLS.index((route, number))
            if sent < CALLS.index(("/finish_weight_update", 1)):
                assert (version, answers) == (f"before {at}", tokens[str(old)]), (route, moment)
            else:
                assert (version, answers) == (f"killed {at}", tokens[str(new)]), (route, moment)
            trainer.kill()
        check_somebody_elses(server, old, new, env, logs)
        check_somebody_elses_lives(server, old, new, tokens, env, logs)
        assert server.answers() == tokens[str(old)]
    finally:
        if trainer is not None:
            trainer.kill()
        server.kill()


def check_somebody_elses(server: Server, old: Path, new: Path, env: Env, logs: Path) -> None:
    """A pause that was there before the trainer's stays when the trainer is killed, until that somebody ends it."""
    trainer = Trainer((), old, server.url, env, logs, lease=0.0)
    try:
        trainer.join()
        trainer.send(old)
        requests.post(f"{server.url}/pause", params={"mode": "keep"}, timeout=PATIENCE).raise_for_status()
        trainer.ranks[0].send("die at", "/pause", 1, "answered", str(new), "never")
        trainer.ranks[0].ended()
        until = time.monotonic() + PATIENCE
        while "stays paused: somebody else" not in server.child.log.read_text(errors="replace"):
            assert time.monotonic() < until, server.child.tail()
            time.sleep(0.2)  # nothing tells of what is logged
        follower = Trainer((), old, server.url, env, logs, lease=0.0)
        try:
            follower.join()
            assert requests.get(f"{server.url}/is_paused", timeout=PATIENCE).json()["is_paused"] is True
        finally:
            follower.kill()
        requests.post(f"{server.url}/resume", timeout=PATIENCE).raise_for_status()
    finally:
        trainer.kill()


def check_somebody_elses_lives(
    server: Server, old: Path, new: Path, tokens: dict[str, list[list[int]]], env: Env, logs: Path
) -> None:
    """A version comes into an engine that somebody has paused, and the engine stays paused until they end that."""
    trainer = Trainer((), old, server.url, env, logs)
    try:
        trainer.join()
        for mode in ("keep", "wait"):
            requests.post(f"{server.url}/pause", params={"mode": mode}, timeout=PATIENCE).raise_for_status()
            trainer.send(new, f"into a pause, {mode}")
            trainer.send(new, f"once more into a pause, {mode}")
            assert requests.get(f"{server.url}/is_paused", timeout=PATIENCE).json()["is_paused"] is True
            requests.post(f"{server.url}/resume", timeout=PATIENCE).raise_for_status()
            assert (server.version(), server.answers()) == (f"once more into a pause, {mode}", tokens[str(new)])
            trainer.send(old)
            assert requests.get(f"{server.url}/is_paused", timeout=PATIENCE).json()["is_paused"] is False
    finally:
        trainer.end()


def test_a_pause_that_nobody_claimed_is_never_due() -> None:
    lease = Lease()
    lease.paused("wait", already=False)
    assert not lease.holder_lost("trainer")
    assert not lease.due


def test_a_claimed_pause_is_due_when_its_holder_has_gone() -> None:
    lease = Lease()
    lease.claim("trainer", seconds=3.0, in_place=False)
    lease.paused("wait", already=False)
    assert not lease.holder_lost("another")
    assert not lease.due
    assert lease.holder_lost("trainer")
    assert lease.due
    lease.resumed()
    assert not lease.due


def test_a_holder_that_had_gone_before_its_pause_came() -> None:
    lease = Lease()
    lease.claim("trainer", seconds=3.0, in_place=False)
    assert lease.holder_lost("trainer"), "its pause may be on its way"
    lease.paused("wait", already=False)
    assert lease.due


def test_a_claim_of_one_that_has_gone_is_not_for_the_next_pause_of_anybody() -> None:
    lease = Lease()
    lease.claim("trainer", seconds=3.0, in_place=False)
    assert lease.holder_lost("trainer")
    assert not lease.late("trainer")
    lease.paused("wait", already=False)
    assert not lease.due


def test_a_second_pause_of_somebody_else_stays() -> None:
    lease = Lease()
    lease.claim("trainer", seconds=3.0, in_place=False)
    lease.paused("wait", already=False)
    lease.paused("keep", already=True)
    lease.holder_lost("trainer")
    assert not lease.due


def test_the_next_trainers_pause_takes_the_place_of_a_dead_ones() -> None:
    lease = Lease()
    for holder in ("one", "two"):
        lease.claim(holder, seconds=3.0, in_place=False)
        lease.paused("wait", already=holder == "two")
    lease.holder_lost("one")
    assert not lease.due
    assert lease.holder_lost("two")
    assert lease.due


@pytest.mark.parametrize("others_first", [False, True])
def test_a_released_pause_ends_only_the_holders_own(others_first: bool) -> None:
    lease = Lease()
    if others_first:
        lease.paused("keep", already=False)
    lease.claim("trainer", seconds=3.0, in_place=False)
    lease.paused("wait", already=others_first)
    if not others_first:
        lease.paused("keep", already=True)
    assert not lease.released("trainer")
    lease.claim("trainer", seconds=3.0, in_place=False)
    lease.paused("wait", already=True)
    assert not lease.released("trainer"), "nor the second time"
    lease.resumed()
    lease.claim("trainer", seconds=3.0, in_place=False)
    lease.paused("wait", already=False)
    assert not lease.released("another")
    assert lease.released("trainer")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_of_two_versions_stays_paused(in_place: bool) -> None:
    """What goes into the live model as it comes is of two versions until it is whole; else while it is brought in."""
    lease = Lease()
    lease.claim("trainer", seconds=3.0, in_place=in_place)
    lease.paused("wait", already=False)
    lease.holder_lost("trainer")
    lease.started()
    assert lease.due is not in_place
    lease.finished(False)
    assert not lease.due
    lease.finished(True)
    assert lease.due


@pytest.mark.parametrize(
    "reported", [{"claim": "trainer"}, {"release": "trainer"}, {"cancel": True}, {}, [{}], [{}, {}]]
)
def test_a_sleeping_engine_hears_whose_its_pause_is_and_takes_no_version(reported: object) -> None:
    engine = SimpleNamespace(model_executor=SimpleNamespace(sleeping_tags={"weights"}))
    with (
        nullcontext()
        if isinstance(reported, dict) and reported
        else pytest.raises(ConfigError, match="wake them up first")
    ):
        _refuse_asleep(engine, "update_weights", {"update_info": reported})
