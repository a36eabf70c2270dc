"""The deadlines of open calls, which share one timer."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

from etha.agent.protocol.effects import CallKey
from etha.agent.runtime.sessions import OpenCalls
from etha.bus.codec import Request

PEER: Any = SimpleNamespace(key="w", reply=lambda id, message: None, fail=lambda id, error: None)


class Ends:
    """What calls were told, in order."""

    def __init__(self, calls: OpenCalls) -> None:
        self.calls, self.heard = calls, list[tuple[int, bool]]()
        self.changed = asyncio.Event()

    def open(self, id: int, deadline: float) -> CallKey:
        return self.calls.open(PEER, Request(id, None, "asked", deadline), self.end)

    def end(self, key: CallKey, expired: bool) -> None:
        self.heard.append((key[1], expired))
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.heard) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_calls_end_at_their_deadlines_in_their_order_and_once() -> None:
    loop, ends = asyncio.get_running_loop(), Ends(OpenCalls())
    now = loop.time()
    ends.open(1, now + 0.06)
    ends.open(2, now + 0.03)  # earlier than what the timer waits for
    ends.open(3, now + 3600)
    ends.open(4, math.inf)
    ends.open(5, now - 1)
    assert not ends.heard, "an end is told by the loop, not by open()"
    await ends.until(3)
    assert ends.heard == [(5, True), (2, True), (1, True)]
    assert loop.time() >= now + 0.06 - 0.002, "before its deadline"
    # A call that was told stays open until it is answered, and is not told again; one that was not can be cancelled.
    ends.calls.cancelled(PEER, 1)
    ends.calls.cancelled(PEER, 4)
    assert ends.heard[3:] == [(4, False)] and len(list(ends.calls)) == 5


async def test_a_call_that_was_answered_does_not_end_and_later_ones_do() -> None:
    loop, ends = asyncio.get_running_loop(), Ends(OpenCalls())
    now = loop.time()
    first = ends.open(1, now + 0.02)
    ends.calls.answer(first, "done")
    ends.open(2, now + 0.04)
    ends.open(3, now + 0.04)
    await ends.until(2)
    assert ends.heard == [(2, True), (3, True)]
    ends.open(4, loop.time() + 0.01)  # the timer has run
    await ends.until(3)
    assert ends.heard[2:] == [(4, True)]


async def test_a_call_whose_end_fails_does_not_keep_others_from_ending() -> None:
    loop, ends = asyncio.get_running_loop(), Ends(OpenCalls())
    failed: list[Any] = []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))

    def fails(key: CallKey, expired: bool) -> None:
        raise RuntimeError("of the first")

    now = loop.time()
    ends.calls.open(PEER, Request(1, None, "asked", now), fails)
    ends.open(2, now)
    ends.open(3, now + 0.02)
    await ends.until(2)
    assert ends.heard == [(2, True), (3, True)] and [str(error) for error in failed] == ["of the first"]
