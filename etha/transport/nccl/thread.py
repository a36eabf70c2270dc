"""NcclThread: the only thread of an agent that calls NCCL, and the tasks that take turns on it.

    loop: start(task) -> future     thread: next(task), next(other), ... until each has returned or raised

A task is a generator that yields True after it has done something, and False if it has to ask again. So while one
communicator forms, which its other ranks may take long to do, a transfer over another one goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Task = Generator[bool, None, T]

#: Seconds between two questions to NCCL or the device while a task waits for it: the first, doubled up to the last.
#: Neither wakes a waiting thread, and a thread that slept inside of either could not abort what it waits for. With
#: DEPTH groups queued, the device has work for longer than this, and a stop wakes the thread at once.
_FIRST, _LAST = 20e-6, 1e-3


class _Job:
    def __init__(self, task: Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.task, self.loop = task, loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def step(self) -> bool | None:
        """Whether it has done something; None if it is over."""
        try:
            return next(self.task)
        except StopIteration as stop:
            self._tell(_succeed, stop.value)
        except BaseException as error:
            self._tell(_fail, error)
        return None

    def _tell(self, how: Callable[[asyncio.Future[Any], Any], None], what: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, so nobody waits for the result
            self.loop.call_soon_threadsafe(how, self.future, what)


def _succeed(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class NcclThread:
    """See the module. The first task starts it; ``close`` ends it once all tasks are over."""

    def __init__(self, name: str = "etha-nccl") -> None:
        self._changed = threading.Condition(threading.Lock())
        self._arrived: list[_Job] = []
        self._nudged = self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, task: Task[T]) -> asyncio.Future[T]:
        """Run a task. The future belongs to the running loop; cancelling it stops nothing."""
        job = _Job(task, asyncio.get_running_loop())
        with self._changed:
            if self._closed:
                raise RuntimeError("this thread was closed")
            if not self._thread.is_alive():
                self._thread.start()
            self._arrived.append(job)
            self._changed.notify_all()
        return job.future

    def nudge(self) -> None:
        """Have all tasks look again at once."""
        with self._changed:
            self._nudged = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more tasks; the thread ends after those that it has. Idempotent; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Wait at most ``seconds``; whether the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        jobs: list[_Job] = []
        pause = _FIRST
        while True:
            with self._changed:
                if not self._arrived and not self._nudged:
                    if jobs:
                        if self._changed.wait(pause):
                            pause = _FIRST
                    elif self._closed:
                        return
                    else:
                        self._changed.wait()
                jobs += self._arrived
                self._arrived, self._nudged = [], False
            moved = False
            for job in list(jobs):
                stepped = job.step()
                if stepped is None:
                    jobs.remove(job)
                moved = moved or stepped is not False
            pause = _FIRST if moved else min(2 * pause, _LAST)
