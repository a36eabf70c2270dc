"""What is to be done when an event loop ends: it was closed, or nobody holds it any more.

asyncio tells nobody that a loop is closed. But a closed loop drops its timers, and with a timer what it holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from weakref import finalize, ref

#: Seconds: later than any loop ends.
_NEVER = 1e8


class LoopEnd:
    """Calls ``function()`` once when ``loop`` ends, from whichever thread; holds it until then, or until ``cancel``.

    Not in a forked child, whose copy of the loop means nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        anchor = _Anchor()
        # Only the loop may hold the timer: whoever is held by ``function`` would keep it alive by this object.
        self._timer = ref(loop.call_later(_NEVER, anchor.hold))
        self._finalizer = finalize(anchor, _end, os.getpid(), function)
        self._finalizer.atexit = False

    def cancel(self) -> None:
        """Forget it; idempotent. On the loop's thread while the loop runs."""
        if self._finalizer.detach() is not None and (timer := self._timer()) is not None:
            timer.cancel()


class _Anchor:
    """Held by a timer that never fires."""

    def hold(self) -> None:
        """Not called: the timer's callback, so that the timer holds this object."""


def _end(owner: int, function: Callable[[], None]) -> None:
    if os.getpid() == owner:
        function()
