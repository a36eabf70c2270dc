"""Run ``gc.collect()`` shortly after a registration or a worker has ended.

The objects that move a batch form reference cycles (a transfer and its callbacks), and their views keep workers' memory
mapped. An agent makes little garbage, so the collector may not run by itself for hours. Until then the memory of
trainers that ended long ago, which may be most of the host's, would stay in use.
"""

from __future__ import annotations

import asyncio
import gc
import logging

log = logging.getLogger(__name__)

#: Seconds between an end and the collection, so that a thousand ranks that leave together cost one collection.
DELAY = 1.0


class GcScheduler:
    """Schedules at most one collection at a time, on the caller's loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Collect within ``DELAY``."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY, self._run)

    def cancel(self) -> None:
        """Cancel the scheduled collection, because the agent ends, and all its memory with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        found = gc.collect()
        log.debug("swept %d objects", found)


def settle() -> None:
    """Exempt what exists when an agent begins from later collections, which then take only a few ms each."""
    gc.collect()
    gc.freeze()
