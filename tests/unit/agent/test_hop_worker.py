"""What one rank of a holder knows of a subscriber: a batch stands, or is registered again, whoever left it and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from etha.agent.runtime import hop_worker
from etha.agent.runtime.hop_worker import HopWorker, StandingTensors
from etha.agent.runtime.sessions import HopClaim
from etha.bus.messages import BatchLost, InitPair, Moved, PairFormed, PairLost, Register, Registered, Transfer

HOP = HopClaim(claim=1)


class Played:
    """The worker inside the agent. ``answers`` are called one after the other with each request and ``pushed``."""

    answers: list[Callable[[Any, Played], Any]]

    def __init__(self, dispatcher: Any, segments: Any, pushed: Callable[[Any], None], limit: Any = None) -> None:
        self.pushed, self.asked = pushed, list[type]()
        self.cancels = False
        self.session = SimpleNamespace(hops={})

    async def request(self, message: Any, on_cancel: Callable[[Any], None] | None = None) -> Any:
        self.asked.append(type(message))
        answer = self.answers.pop(0)(message, self) if self.answers else usual(message, self)
        await asyncio.sleep(0)  # the task that asked goes on later than the answer comes
        if self.cancels:
            self.cancels = False
            if on_cancel is not None:
                on_cancel(answer)
            raise asyncio.CancelledError
        return answer

    def close(self) -> None:
        """Nothing is left."""


def registered(generation: int) -> Registered:
    return Registered(
        generation=generation, seq=0, atomic=False, shadows=False, send=True, recv=True, receives=False, summary={}
    )


def usual(message: Any, worker: Played) -> Any:
    match message:
        case InitPair():
            return PairFormed(epoch=1, local_world_size=1, remote_world_size=1)
        case Register():
            return registered(worker.asked.count(Register))
        case Transfer():
            return Moved(seq=1, version=1, nbytes=0, seconds=0.0, peers=(), peak_staging=0)
    raise AssertionError(message)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> HopWorker:
    Played.answers = []
    monkeypatch.setattr(hop_worker, "InProcessWorker", Played)
    tensors = StandingTensors(side="trainer", world_size=1, rank=0, layouts=(), entries=(), slots=((),))
    return HopWorker(None, tensors, (), pair="p", remote="s", left=lambda: None)  # type: ignore[arg-type]


async def ready() -> None:
    """Nothing holds it."""


def lost(generation: int) -> BatchLost:
    return BatchLost(pair="p", epoch=1, batch="b", generation=generation, reason="closed", text="left")


async def test_rendezvous_and_registration_happen_once(worker: HopWorker) -> None:
    for _ in range(2):
        await worker.send("b", 0, 1, ready, HOP)
    assert worker._worker.asked == [InitPair, Register, Transfer, Transfer]  # type: ignore[attr-defined]


async def test_a_batch_that_is_over_before_its_answer_was_read_is_registered_again(worker: HopWorker) -> None:
    def left_at_once(message: Any, played: Played) -> Any:
        played.pushed(lost(1))
        return registered(1)

    Played.answers = [usual, left_at_once]
    await worker.send("b", 0, 1, ready, HOP)
    assert worker._worker.asked == [InitPair, Register, Register, Transfer]  # type: ignore[attr-defined]


async def test_a_pair_that_is_over_before_its_answer_was_read_is_joined_again(worker: HopWorker) -> None:
    def lost_at_once(message: Any, played: Played) -> Any:
        played.pushed(PairLost(pair="p", epoch=1, reason="closed", text="left"))
        return usual(message, played)

    Played.answers = [lost_at_once, lambda *_: PairFormed(epoch=2, local_world_size=1, remote_world_size=1)]
    await worker.send("b", 0, 1, ready, HOP)
    assert worker._worker.asked == [InitPair, InitPair, Register, Transfer]  # type: ignore[attr-defined]


async def test_a_registration_that_came_as_its_hop_was_cancelled_stands(worker: HopWorker) -> None:
    def late(message: Any, played: Played) -> Any:
        played.cancels = True
        return registered(1)

    Played.answers = [usual, late]
    with pytest.raises(asyncio.CancelledError):
        await worker.send("b", 0, 1, ready, HOP)
    await worker.send("b", 0, 1, ready, HOP)
    assert worker._worker.asked == [InitPair, Register, Transfer]  # type: ignore[attr-defined]
    worker._worker.pushed(lost(1))  # type: ignore[attr-defined]
    await worker.send("b", 0, 1, ready, HOP)
    assert worker._worker.asked[3:] == [Register, Transfer]  # type: ignore[attr-defined]
