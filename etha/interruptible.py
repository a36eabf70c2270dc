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
from contextlib import suppress
from typing import Any

#: Seconds after which a signal is noticed at the latest.
_SLICE = 0.1
_MAIN = threading.main_thread().ident


def acquire(lock: threading.Lock, until: float | None = None) -> bool:
    """Take ``lock``; False if it is not free at ``until`` (of ``time.monotonic()``; None: wait without a limit)."""
    if threading.get_ident() != _MAIN:
        return lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic()))
    while not lock.acquire(timeout=_slice(until)):
        if _over(until):
            return False
    return True


def wait(event: threading.Event, until: float) -> bool:
    """Whether ``event`` is set at ``until``."""
    if threading.get_ident() != _MAIN:
        return event.wait(max(0.0, until - time.monotonic()))
    while not event.wait(_slice(until)):
        if _over(until):
            return False
    return True


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


def _slice(until: float | None) -> float:
    return _SLICE if until is None else max(0.0, min(_SLICE, until - time.monotonic()))


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until
