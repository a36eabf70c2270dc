"""Decoders of msgspec, made by one thread at a time.

msgspec keeps what it knows about a struct's fields in the struct's class, from the moment on at which it begins to
find that out. It runs Python for that, so another thread may come in between. If that one decodes the same class, or a
class that has such a field, it finds half of the fields, and the process crashes. Once a decoder has been made, any
thread may use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.msgpack import Decoder

T = TypeVar("T")

# One that a signal handler can take again: it interrupts the main thread at any place.
_lock = threading.RLock()


def _forked() -> None:
    """In the child the lock is held by the thread that forked, and nobody makes a decoder."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(before=lambda: _lock.acquire(), after_in_parent=lambda: _lock.release(), after_in_child=_forked)


def made_alone(make: Callable[[], T]) -> T:
    """What ``make`` returns, which makes decoders or converts to structs for the first time.

    Do so where a module is imported, if its structs are known there: what a signal handler needs is complete then, and
    no thread of the user waits for it in a call.
    """
    with _lock:
        return make()


def decoder(of: Any) -> Decoder[Any]:
    """The msgpack decoder of a type."""
    return made_alone(lambda: Decoder(of))
