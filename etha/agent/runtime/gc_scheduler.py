"""Memory that Python's collector has to find is found soon after whoever it was for has gone.

What moves a batch names itself in circles (a transfer and its callbacks), and its views keep workers' memory mapped.
An agent makes little garbage, so that by itself the collector may not come by for hours; meanwhile the memory of
trainers that have ended long ago, which may be most of the host's, would stay in use.
"""

from __future__ import annotations

import asyncio
import gc
import logging

log = logging.getLogger(__name__)

#: Seconds after a departure: a thousand ranks that leave together cost one collection.
DELAY = 1.0


class GcScheduler:
    """One collection at a time, on the loop that asks for it."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Somebody has gone: collect within ``DELAY``."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY, self._run)

    def cancel(self) -> None:
        """The agent ends, and all its memory with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        found = gc.collect()
        log.debug("swept %d objects", found)


def settle() -> None:
    """What is there when an agent begins stays: no collection looks at it again, which makes each a few ms."""
    gc.collect()
    gc.freeze()
