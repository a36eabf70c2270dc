"""A Ctrl-C at any place of a blocking call: KeyboardInterrupt, and the work on the loop has ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from etha import interruptible
from etha.client import loop_thread as module
from etha.client.loop_thread import LoopThread
from tests.interrupts import InterruptAt

#: Places up to the first wait, and some more in it.
PLACES = 25

pytestmark = [
    pytest.mark.timeout(60),
    # A call that was interrupted before it had taken the coroutine.
    pytest.mark.filterwarnings(
        "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    found = LoopThread()
    yield found
    found.close()


def test_an_interrupt_at_any_place_of_a_short_call(loop_thread: LoopThread) -> None:
    async def work() -> int:
        return 7

    def call() -> None:
        assert loop_thread.call(work()) == 7

    for number in itertools.count(1):
        if not InterruptAt(number, module, interruptible).run(call):
            break
        call()  # the loop serves others
    assert number > 5, "places were found"


def test_an_interrupt_at_any_place_of_a_long_call_cancels_it(loop_thread: LoopThread) -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def nothing() -> None:
        pass

    for number in range(1, PLACES):
        ends.clear()
        assert InterruptAt(number, module, interruptible).run(lambda: loop_thread.call(work()))
        loop_thread.call(nothing())
        assert ends in ([], ["cancelled"]) and not loop_thread._work, f"place {number}"
