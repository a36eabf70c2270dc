"""TransferFuture: a transfer that goes on behind the call that began it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Self

from etha.bus.process import check_not_forked
from etha.client.loop_end import LoopEnd
from etha.client.results import TransferResult
from etha.client.tasks import error_of
from etha.errors import AgentLostError, ConfigError

log = logging.getLogger(__name__)


class TransferFuture:
    """A transfer under way, of either client: ask it from any thread, or ``await`` it on any event loop.

    Awaiting, ``result`` and ``exception`` only look: when the awaiting task is cancelled, the transfer goes
    on. ``cancel`` ends it. It is done once it has really ended, that is once nothing writes into the
    tensors any more. An error that nobody asks for is kept and not told to anybody. In a forked child
    every method raises ConfigError.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Not for users: see ``of_task``; the blocking client's is made by its loop thread."""
        self._loop = loop
        self._pid = os.getpid()
        self._task: asyncio.Task[TransferResult] | None = None
        self._cancelled = False
        self._loop_end: LoopEnd | None = None
        self._future: concurrent.futures.Future[TransferResult] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()  # it ends when the task has ended, not when that is asked to

    @classmethod
    def of_task(cls, task: asyncio.Task[TransferResult]) -> Self:
        """The future of a task of the running event loop, which it keeps alive."""
        future = cls(task.get_loop())
        future.follow(task)
        return future

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        self._check_process()
        return self._future.done()

    def cancelled(self) -> bool:
        """Whether it has ended by ``cancel``."""
        self._check_process()
        return self._cancelled and self._future.done()

    def cancel(self) -> bool:
        """Ask for its end, from any thread; False when it is over already.

        Before GO the call is withdrawn, after GO it aborts for all. Where the others have a result by then,
        this worker's tensors hold the new version, too.
        """
        self._check_process()
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
        """Call ``function(self)`` at the end, on the client's loop thread, or at once if it is over.

        What it raises on the loop thread is logged.
        """
        self._check_process()
        if not callable(function):
            raise ConfigError(f"add_done_callback takes a function of the future, not {function!r}")
        caller = threading.get_ident()

        def call_function(_: object) -> None:
            try:
                function(self)
            except (SystemExit, KeyboardInterrupt):
                if adding and threading.get_ident() == caller:
                    raise
                log.exception("a done callback of a transfer raised; it does not end the event loop")

        adding = True
        self._future.add_done_callback(call_function)
        adding = False

    def __await__(self) -> Generator[Any, None, TransferResult]:
        self._check_process()
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

    def follow(self, task: asyncio.Task[TransferResult]) -> None:
        """Not for users: it ends with ``task``."""
        self._task = task
        # A loop that ends unfinished tells no task; whoever waits in another thread would wait for ever.
        self._loop_end = LoopEnd(self._loop, self.abandon)
        task.add_done_callback(self._end)

    def abandon(self) -> None:
        """Not for users: the event loop has ended before the transfer."""
        if not self._future.done():
            text = "the event loop of this transfer's client has ended: nobody knows how the transfer did"
            self._future.set_exception(AgentLostError(text))

    def _stop(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _end(self, task: asyncio.Task[TransferResult]) -> None:
        if self._loop_end is not None:
            self._loop_end.cancel()
        if self._future.done():
            return
        if task.cancelled():
            self._cancelled = True
            self._future.set_exception(concurrent.futures.CancelledError())
        elif (error := error_of(task)) is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())

    def _check_process(self) -> None:
        """A forked child has a copy that nothing ends any more: the threads and loops are its parent's."""
        check_not_forked(self._pid, "transfer")

    def _check_may_block(self) -> None:
        self._check_process()
        if self._future.done():
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise ConfigError("this transfer has not ended, and waiting for it here would block the event loop: await it")
