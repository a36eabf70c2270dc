"""The end of an event loop is heard: asyncio's and uvloop's, closed or dropped; a forgotten one is not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest
import uvloop

from etha.client.loop_end import LoopEnd


class Holder:
    """As a client: what it asks to be called holds it, and it holds the LoopEnd."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ends = 0
        self.loop_end = LoopEnd(loop, self.ended)

    def ended(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("new", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_loop_that_is_closed_is_heard_once(new: Callable[[], asyncio.AbstractEventLoop], cancelled: bool) -> None:
    loop = new()
    holder = Holder(loop)
    loop.run_until_complete(asyncio.sleep(0))
    assert holder.ends == 0
    if cancelled:
        holder.loop_end.cancel()
        holder.loop_end.cancel()
    loop.close()
    gc.collect()
    assert holder.ends == (0 if cancelled else 1)
    holder.loop_end.cancel()


def test_forgotten_ends_leave_nothing_in_a_loop_that_lives() -> None:
    async def main() -> None:
        for _ in range(1000):
            LoopEnd(asyncio.get_running_loop(), lambda: None).cancel()
        await asyncio.sleep(0)
        scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert len(scheduled) < 300, "cancelled timers are cleaned up as the loop goes"

    asyncio.run(main())
