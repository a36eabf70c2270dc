"""TransferFuture: a transfer that goes on behind the call that began it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Self

from etha.client.results import TransferResult
from etha.errors import ConfigError


class TransferFuture:
    """A transfer under way, of either client: ask it from any thread, or ``await`` it on any event loop.

    Awaiting, ``result`` and ``exception`` only look: when the awaiting task is cancelled, the transfer goes
    on. ``cancel`` ends it. It is done once it has really ended, that is once nothing writes into the
    tensors any more. An error that nobody asks for is kept and not told to anybody.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Not for users: see ``of_task`` and ``of_coroutine``."""
        self._loop = loop
        self._task: asyncio.Task[TransferResult] | None = None
        self._cancelled = False
        self._future: concurrent.futures.Future[TransferResult] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()  # it ends when the task has ended, not when that is asked to

    @classmethod
    def of_task(cls, task: asyncio.Task[TransferResult]) -> Self:
        """The future of a task of the running event loop, which it keeps alive."""
        future = cls(task.get_loop())
        future._follow(task)
        return future

    @classmethod
    def of_coroutine(cls, work: Coroutine[Any, Any, TransferResult], loop: asyncio.AbstractEventLoop) -> Self:
        """Begin ``work`` on ``loop``, which runs in another thread."""
        future = cls(loop)
        loop.call_soon_threadsafe(lambda: future._follow(loop.create_task(work)))
        return future

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def cancelled(self) -> bool:
        """Whether it has ended by ``cancel``."""
        return self._cancelled and self._future.done()

    def cancel(self) -> bool:
        """Ask for its end, from any thread; False when it is over already.

        Before GO the call is withdrawn, after GO it aborts for all. Where the others have a result by then,
        this worker's tensors hold the new version, too.
        """
        if self._future.done():
            return False
        with suppress(RuntimeError):  # a loop that is closed runs nothing any more
            self._loop.call_soon_threadsafe(self._stop)
            return True
        return False

    def result(self, timeout: float | None = None) -> TransferResult:
        """Block for the result or raise the transfer's error; TimeoutError after ``timeout`` seconds.

        concurrent.futures.CancelledError after ``cancel``; ConfigError where it would block a running event loop.
        """
        self._check_may_block()
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block for the end; the transfer's error, or None when it went well. Else as ``result``."""
        self._check_may_block()
        error = self._future.exception(timeout)
        if isinstance(error, concurrent.futures.CancelledError):
            raise error
        return error

    def add_done_callback(self, function: Callable[[TransferFuture], None]) -> None:
        """Call ``function(self)`` at the end, on the client's loop thread, or at once if it is over."""
        self._future.add_done_callback(lambda _: function(self))

    def __await__(self) -> Generator[Any, None, TransferResult]:
        if not self._future.done():
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not ended.done():
                    ended.set_result(None)

            def tell(_: object) -> None:
                with suppress(RuntimeError):  # who awaited has left with its loop
                    loop.call_soon_threadsafe(wake)

            self._future.add_done_callback(tell)
            yield from ended
        if self.cancelled():
            raise asyncio.CancelledError
        return self._future.result()

    # ---- on the loop of the transfer -----------------------------------------------------------

    def _follow(self, task: asyncio.Task[TransferResult]) -> None:
        self._task = task
        task.add_done_callback(self._end)

    def _stop(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _end(self, task: asyncio.Task[TransferResult]) -> None:
        if task.cancelled():
            self._cancelled = True
            self._future.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())

    def _check_may_block(self) -> None:
        if self._future.done():
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise ConfigError("this transfer has not ended, and waiting for it here would block the event loop: await it")
