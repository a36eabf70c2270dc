"""Waits that a cancellation does not cut short: the cancellation goes on once what was waited for has ended."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Shield:
    """Of one task, over several waits. ``cut()`` is called at a cancellation, to make what is waited for end soon."""

    def __init__(self, cut: Callable[[], None] | None = None) -> None:
        self.cancelled: asyncio.CancelledError | None = None
        self._cut = cut

    async def wait(self, future: asyncio.Future[Any], seconds: float = math.inf) -> bool:
        """Wait until ``future`` has ended, or ``seconds`` have passed; tells whether it has."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not future.done():
            left = None if until == math.inf else until - loop.time()
            if left is not None and left <= 0:
                return False
            try:
                await asyncio.wait({future}, timeout=left)
            except asyncio.CancelledError as error:
                self.cancelled = error
                if self._cut is not None:
                    self._cut()
        return True

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine to its end."""
        running = asyncio.ensure_future(work)
        await self.wait(running)
        return running.result()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what blocks off the loop, to its end."""
        try:
            # Not a task, which the end of an event loop cancels with all others.
            running = asyncio.get_running_loop().run_in_executor(None, work)
        except RuntimeError:  # the interpreter is exiting and starts no threads any more
            return work()
        await self.wait(running)
        return running.result()

    def release(self, failed: BaseException | None = None) -> None:
        """Raise the cancellation that came meanwhile; else ``failed``, which is logged where both are."""
        if self.cancelled is not None:
            if failed is not None and not isinstance(failed, asyncio.CancelledError):
                log.error("failed after its call was cancelled", exc_info=failed)
            raise self.cancelled
        if failed is not None:
            raise failed
