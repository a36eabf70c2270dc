"""The loop thread behind the blocking clients of one process: coroutines go in, results come out.

One thread a process, started with the first blocking client and ended with the last. A forked child has
no such thread: its own clients start another.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from etha.client.future import TransferFuture
from etha.client.results import TransferResult

T = TypeVar("T")


class Portal:
    """An event loop on a daemon thread. ``call`` blocks, ``submit`` does not."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etha-portal", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Coroutine[Any, Any, TransferResult]) -> TransferFuture:
        """Begin a transfer on the loop."""
        return TransferFuture.of_coroutine(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it.

        Ctrl-C cancels it and waits until it has really ended (the agent has confirmed that it touches
        nothing any more) before KeyboardInterrupt goes on; a second Ctrl-C does not wait.
        """
        running = _Running(work, self._loop)
        try:
            running.start()
            running.wait()
        except BaseException:
            running.cancel()
            running.wait()
            raise
        result: T = running.result()
        return result

    def close(self) -> None:
        """Stop the loop and its thread; idempotent."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Running:
    """A coroutine on the loop of another thread whose real end can be waited for."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        # A bare lock that is held until the end: waking from an Event costs as much as a small transfer.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._work, self._loop = work, loop
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> None:
        with self._ended:
            return

    def _begin(self) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._work)
            self._task.add_done_callback(lambda _: self._ended.release())

    def _cancel(self) -> None:
        self._begin()  # an interrupt may come before ``start`` has been heard
        assert self._task is not None
        self._task.cancel()

    def result(self) -> Any:
        assert self._task is not None
        return self._task.result()


_lock = threading.Lock()
_shared: list[tuple[int, Portal, set[int]]] = []


def enter(user: object) -> Portal:
    """The process's portal, kept open until every user has left."""
    with _lock:
        if _shared and _shared[0][0] != os.getpid():
            _shared.clear()  # after a fork: the thread stayed with the parent
        if not _shared:
            _shared.append((os.getpid(), Portal(), set()))
        _, portal, users = _shared[0]
        users.add(id(user))
        return portal


def leave(user: object) -> None:
    """``user`` needs the portal no more; the last one out closes it."""
    with _lock:
        if not _shared or _shared[0][0] != os.getpid():
            return
        _, portal, users = _shared[0]
        users.discard(id(user))
        if users:
            return
        _shared.clear()
    portal.close()
