"""TransferFuture: a transfer that continues after the call that began it has returned."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Self

from etha.bus.process import check_not_forked
from etha.client.loop_end import LoopEnd
from etha.client.results import OfOneProcess, TransferResult
from etha.client.tasks import error_of
from etha.errors import AgentLostError, ConfigError
from etha.interruptible import settled

log = logging.getLogger(__name__)


class TransferFuture(OfOneProcess):
    """A running transfer of either client. Use it from any thread, or ``await`` it on any event loop.

    Cancelling a task that awaits it does not end the transfer; ``cancel`` does. The future is done once nothing writes
    into the tensors any more. An error that nobody asks for is kept and not reported. In a forked child every method
    raises ConfigError.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Not for users. Use ``of_task``; the loop thread makes those of the blocking client."""
        self._loop = loop
        self._pid = os.getpid()
        self._task: asyncio.Task[TransferResult] | None = None
        self._cancelled = False
        self._loop_end: LoopEnd | None = None
        self._future: concurrent.futures.Future[TransferResult] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()  # it ends when the task has ended, not when its end is requested

    @classmethod
    def of_task(cls, task: asyncio.Task[TransferResult]) -> Self:
        """The future of a task of the running event loop. The future keeps the task alive."""
        future = cls(task.get_loop())
        future.follow(task)
        return future

    def done(self) -> bool:
        """Whether the transfer has ended, successfully or not."""
        self._check_process()
        return self._future.done()

    def cancelled(self) -> bool:
        """Whether ``cancel`` has ended the transfer."""
        self._check_process()
        return self._cancelled and self._future.done()

    def cancel(self) -> bool:
        """Ask for the transfer's end, from any thread; False if it is over already.

        Before GO the call is withdrawn, after GO it aborts for all. If the transfer is committed meanwhile, this
        worker's tensors hold the new version, too.
        """
        self._check_process()
        if self._future.done():
            return False
        with suppress(RuntimeError):  # a closed loop runs nothing any more
            self._loop.call_soon_threadsafe(self._stop)
            return True
        return False

    def result(self, timeout: float | None = None) -> TransferResult:
        """Block for the result or raise the transfer's error; TimeoutError after ``timeout`` seconds.

        Raises concurrent.futures.CancelledError after ``cancel``, and ConfigError if it would block a running event
        loop.
        """
        self._check_may_block()
        self._settle(timeout)
        return self._future.result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block for the end, and return the transfer's error, or None if it succeeded. Raises as ``result``
        otherwise."""
        self._check_may_block()
        self._settle(timeout)
        error = self._future.exception(0)
        if isinstance(error, concurrent.futures.CancelledError):
            raise error
        return error

    def _settle(self, timeout: float | None) -> None:
        settled(self._future, None if timeout is None else time.monotonic() + timeout)

    def add_done_callback(self, function: Callable[[TransferFuture], None]) -> None:
        """Call ``function(self)`` at the end, on the client's loop thread, or at once if the transfer is over.

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
                with suppress(RuntimeError):  # the awaiting task has left with its loop
                    loop.call_soon_threadsafe(wake)

            self._future.add_done_callback(tell)
            yield from ended
        if self.cancelled():
            raise asyncio.CancelledError
        return self._future.result()

    # ---- on the loop of the transfer -----------------------------------------------------------

    def follow(self, task: asyncio.Task[TransferResult]) -> None:
        """Not for users. End with ``task``."""
        self._task = task
        # A loop that is stopped before the end informs no task, and a waiting thread would wait for ever.
        self._loop_end = LoopEnd(self._loop, self.abandon)
        task.add_done_callback(self._end)

    def abandon(self) -> None:
        """Not for users. The event loop has ended before the transfer."""
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
        """Refuse a forked child: its copy never ends, because the threads and loops belong to the parent."""
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
