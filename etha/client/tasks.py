"""How a call waits: deadlines, waits that a cancellation does not cut short, and exceptions of its task."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Deadline:
    """The remaining seconds of a call that has several steps. ``begun``: when it began, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self._at = math.inf if seconds == math.inf else asyncio.get_running_loop().time() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 or more; ``math.inf`` without a deadline."""
        return self._at if self._at == math.inf else max(0.0, self._at - asyncio.get_running_loop().time())


@contextmanager
def reminded(seconds: float, text: str) -> Iterator[None]:
    """Log ``text`` as a warning if what is inside takes longer than ``seconds``."""
    timer = asyncio.get_running_loop().call_later(seconds, log.warning, "%s", text)
    try:
        yield
    finally:
        timer.cancel()


class Shield:
    """Waits of one task that a cancellation does not cut short: it is raised after the awaited work has ended.

    ``cut()`` is called at a cancellation, to make that work end soon.
    """

    def __init__(self, cut: Callable[[], None] | None = None) -> None:
        self.cancelled: asyncio.CancelledError | None = None
        self._cut = cut

    async def wait(self, future: asyncio.Future[Any], seconds: float = math.inf) -> bool:
        """Wait until ``future`` has ended or ``seconds`` have passed; returns whether it has ended."""
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
        """Run blocking work off the loop, to its end."""
        try:
            # Not a task, because the end of an event loop cancels all tasks.
            running = asyncio.get_running_loop().run_in_executor(None, work)
        except RuntimeError:  # the interpreter is exiting and starts no threads any more
            return work()
        await self.wait(running)
        return running.result()

    def release(self, failed: BaseException | None = None) -> None:
        """Raise a cancellation that came meanwhile, else ``failed``. If there are both, ``failed`` is logged."""
        if self.cancelled is not None:
            if failed is not None and not isinstance(failed, asyncio.CancelledError):
                log.error("failed after its call was cancelled", exc_info=failed)
            raise self.cancelled
        if failed is not None:
            raise failed


class Contained(Exception):
    """Carries SystemExit or KeyboardInterrupt of a callback to the caller, because in a task it would end the loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


def contain(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> asyncio.Task[T]:
    """``work`` as a task whose exceptions never end its event loop; see ``error_of``."""
    task = loop.create_task(_contained(work))
    task.add_done_callback(lambda _: work.close())  # if cancelled before its first step, it would never be awaited
    return task


async def on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Await ``work()`` on another loop, which runs."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))


async def _contained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise Contained(error) from None


def error_of(task: asyncio.Future[Any]) -> BaseException | None:
    """The exception of a task that has ended; None if it has returned or was cancelled."""
    error = None if task.cancelled() else task.exception()
    return error.error if isinstance(error, Contained) else error
