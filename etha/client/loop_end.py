"""Call a function when an event loop ends, which means that it was closed or collected.

asyncio reports to nobody that a loop is closed. But a closed loop drops its timers, and with a timer the objects that
it holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from weakref import finalize, ref

#: Seconds; longer than any loop lives.
_NEVER = 1e8


class LoopEnd:
    """Calls ``function()`` once when ``loop`` ends, from any thread. Holds it until then, or until ``cancel``.

    Does nothing in a forked child, whose copy of the loop has no meaning.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        anchor = _Anchor()
        # Only the loop may hold the timer. Otherwise this object would keep alive whatever ``function`` holds.
        self._timer = ref(loop.call_later(_NEVER, anchor.hold))
        self._finalizer = finalize(anchor, _end, os.getpid(), function)
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """Forget the function; idempotent. On the loop's thread if the loop runs."""
        if self._finalizer.detach() is not None and (timer := self._timer()) is not None:
            timer.cancel()


class _Anchor:
    """Held by a timer that never fires."""

    def hold(self) -> None:
        """Never called. It is the timer's callback, so that the timer holds this object."""


def _end(owner: int, function: Callable[[], None]) -> None:
    if os.getpid() == owner:
        function()
