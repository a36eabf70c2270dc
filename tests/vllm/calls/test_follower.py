"""When an engine that follows a publication brings a version in, in every order of what its workers and others say."""

from __future__ import annotations

import random

import pytest

from etha.errors import EthaError
from etha.integrations.vllm.engine.follower import (
    LAST_DELAY,
    Collect,
    EngineFollower,
    FollowerState,
    InstallVersion,
    Pause,
    Receive,
    Retry,
    WorkerOutcome,
)

ONE, TWO = WorkerOutcome(seq=1, version="one"), WorkerOutcome(seq=2, version="two")


def started() -> EngineFollower:
    follower = EngineFollower()
    assert follower.start([ONE, ONE]) == [Receive(turn=1, newer_than=1, renew=False)]
    return follower


def test_a_version_comes_in_when_all_workers_hold_it_and_the_engine_has_paused() -> None:
    follower = started()
    assert follower.reported(1) == [Collect()]
    assert follower.collected([TWO, TWO]) == [Pause()]
    assert follower.paused(ours=True) == [InstallVersion("two")]
    assert follower.brought_in() == [Receive(turn=2, newer_than=2, renew=False)]


def test_an_engine_that_somebody_has_let_go_on_is_paused_again() -> None:
    follower = started()
    follower.collected([TWO, TWO])
    assert follower.paused(ours=False) == [Pause()]
    assert follower.paused(ours=True) == [InstallVersion("two")]


def test_words_of_an_earlier_receive_are_late() -> None:
    follower = started()
    follower.collected([TWO, TWO])
    assert follower.reported(1) == []
    follower.paused(ours=True)
    follower.brought_in()
    assert follower.reported(1) == []
    assert follower.due(1) == []
    assert follower.paused(ours=True) == []


def test_a_worker_that_failed_keeps_the_version_out_and_all_begin_again() -> None:
    follower = started()
    (retry,) = follower.collected([TWO, WorkerOutcome(error="Redis is away")])
    assert retry == Retry(1, 1.0, "worker 1 of the engine: Redis is away")
    assert follower.due(1) == [Receive(turn=2, newer_than=1, renew=False)]


def test_workers_with_different_versions_enter_again() -> None:
    follower = started()
    (retry,) = follower.collected([ONE, TWO])
    assert isinstance(retry, Retry)
    assert "[1, 2]" in retry.why
    assert follower.due(1) == [Receive(turn=2, newer_than=1, renew=True)]


def test_all_workers_enter_again_if_one_has_to() -> None:
    follower = started()
    follower.collected([TWO, WorkerOutcome(error="the agent is gone", lost=True)])
    assert follower.due(1) == [Receive(turn=2, newer_than=1, renew=True)]
    follower.collected([TWO, WorkerOutcome(error="Redis is away")])
    assert follower.due(2) == [Receive(turn=3, newer_than=1, renew=False)]


def test_what_does_not_fit_is_not_asked_for_again_before_there_is_another_version() -> None:
    follower = started()
    follower.collected([WorkerOutcome(error="shapes", refused=5), WorkerOutcome(error="shapes", refused=4)])
    assert follower.due(1) == [Receive(turn=2, newer_than=5, renew=False)]


def test_delays_grow_to_a_limit_and_begin_anew_after_a_version() -> None:
    follower = started()
    seconds = []
    for _ in range(8):
        (retry,) = follower.collected([WorkerOutcome(error="no")])
        assert isinstance(retry, Retry)
        seconds.append(retry.seconds)
        follower.due(follower.turn)
    assert seconds == [1.0, 2.0, 4.0, 8.0, 16.0, LAST_DELAY, LAST_DELAY, LAST_DELAY]
    follower.collected([TWO])
    follower.paused(ours=True)
    follower.brought_in()
    (retry,) = follower.collected([WorkerOutcome(error="no")])
    assert isinstance(retry, Retry)
    assert retry.seconds == 1.0


def test_an_impossible_event_tells_the_story() -> None:
    follower = started()
    follower.collected([TWO, TWO])
    with pytest.raises(EthaError, match="collected is impossible while pausing; so far: new, receiving, pausing"):
        follower.collected([TWO, TWO])


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_of_events_no_version_comes_in_that_not_all_hold_or_that_is_older(seed: int) -> None:
    choose = random.Random(seed)
    follower, held, newest = started(), 1, 1
    claimed: list[WorkerOutcome] = []
    for _ in range(300):
        newest += choose.random() < 0.3
        event = choose.choice(("reported", "collected", "paused", "due"))
        if event == "reported":
            effects = follower.reported(choose.choice((follower.turn, follower.turn - 1)))
        elif event == "due":
            effects = follower.due(choose.choice((follower.turn, follower.turn - 1)))
        elif event == "paused":
            effects = follower.paused(ours=choose.random() < 0.7)
        elif follower.state is FollowerState.RECEIVING:
            seqs = [newest + 1] * 2 if choose.random() < 0.6 else [newest + 1, newest + 2]
            newest = max(newest, *seqs)
            claimed = [WorkerOutcome(seq=seq, version=str(seq)) for seq in seqs]
            if choose.random() < 0.3:
                claimed[choose.randrange(2)] = WorkerOutcome(error="no", lost=choose.random() < 0.5)
            effects = follower.collected(claimed)
        else:
            continue
        for effect in effects:
            if isinstance(effect, InstallVersion):
                assert len(set(claimed)) == 1
                assert not claimed[0].error
                assert claimed[0].seq > held
                held = claimed[0].seq
                follower.brought_in()
        assert follower.seq == held
