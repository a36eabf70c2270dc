"""Waits that Ctrl-C always ends.

Python looks for signals before it waits, and a signal that comes during the wait ends it. One that comes in between, or
that the kernel gives to another thread, would be noticed only after the wait. So the main thread, which runs the
handlers, waits in slices.
"""

from __future__ import annotations

import concurrent.futures
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: Seconds after which a signal is noticed at the latest.
_SLICE = 0.1
#: Seconds after which another thread than the main one looks at a latch again.
_LOOK = 1.0
_MAIN = threading.main_thread().ident


def holding(lock: threading.RLock, work: Callable[[], object], until: float | None = None) -> bool:
    """Call ``work`` with ``lock`` held; False if it is not free at ``until`` (of ``time.monotonic()``; None: no limit).

    An interrupt at any moment gives the lock back. One between ``acquire()`` and a ``try`` would not: only an RLock
    knows itself whose it is, and here nothing is called before ``release``.
    """
    try:
        if not _acquire(lock, until):
            return False
        work()
        return True
    finally:
        try:  # noqa: SIM105 - contextlib.suppress would be called first
            lock.release()
        except RuntimeError:
            pass  # it was not taken


def _acquire(lock: threading.RLock, until: float | None) -> bool:
    if threading.get_ident() != _MAIN:
        return lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic()))
    while not lock.acquire(timeout=_slice(until)):
        if _over(until):
            return False
    return True


def join(thread: threading.Thread) -> None:
    """Wait for a thread that ends soon. One whose ``start()`` was interrupted ends by itself, or has never begun."""
    with suppress(RuntimeError):
        thread.join()


class Latch:
    """Opens once, and lets everybody through from then on. A lock costs a third of an Event.

    An interrupt at any moment leaves nobody waiting: an open latch is not locked for long. An Event that is interrupted
    in ``wait`` may keep its lock, and then blocks whoever sets it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """From any thread; a second time does nothing."""
        self.is_open = True
        try:  # noqa: SIM105 - contextlib.suppress would be called first
            self._lock.release()
        except RuntimeError:
            pass  # somebody else has released it, because it is open

    def wait(self, until: float | None = None) -> bool:
        """Whether it is open at ``until``."""
        main = threading.get_ident() == _MAIN
        try:
            while not self.is_open:
                # Whoever is interrupted right after it has taken the lock may keep it: other threads look again, too.
                left = _slice(until, _SLICE if main else _LOOK)
                if not self._lock.acquire(timeout=left) and _over(until):
                    return self.is_open
            return True
        finally:
            if self.is_open:
                self.open()


def settled(future: concurrent.futures.Future[Any], until: float | None = None) -> bool:
    """Whether ``future`` has ended, however it did, at ``until``."""
    main = threading.get_ident() == _MAIN
    while not future.done():
        left = _slice(until) if main else None if until is None else max(0.0, until - time.monotonic())
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            future.exception(left)
        if _over(until):
            return future.done()
    return True


def readable(sock: socket.socket, until: float | None = None) -> bool:
    """Wait until ``sock`` has something to read, or has ended; False if that is not so at ``until``."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if threading.get_ident() != _MAIN:
        return bool(poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000))
    while not poll.poll(_slice(until) * 1000):
        if _over(until):
            return False
    return True


def _slice(until: float | None, most: float = _SLICE) -> float:
    return most if until is None else max(0.0, min(most, until - time.monotonic()))


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until
