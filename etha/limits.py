"""Limits on what strangers cost this process: descriptors, connections that have proven nothing, lines of its log.

The kernel gives a new descriptor the lowest free number. So if listeners close every connection whose number is among
the last ``reserve()``, those descriptors remain for what must not fail: libzmq ends the process when it gets none, and
a Redis that comes back must be connected to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from typing import Any

#: Most connections to one listener that may be unproven at once.
MAX_UNPROVEN = 256
#: Seconds between two warnings about strangers.
WARNING_GAP = 1.0


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def descriptors_open() -> int:
    """How many descriptors this process has open."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - one of them reads the directory
    except OSError:  # no descriptor is left to read it with
        return descriptor_limit()


def reserve() -> int:
    """Number of descriptors that no incoming connection may take."""
    return max(16, min(128, descriptor_limit() // 8))


def max_unproven() -> int:
    """Most connections to one listener that may be unproven at once, within this process's descriptors."""
    return max(8, min(MAX_UNPROVEN, descriptor_limit() // 8))


def in_reserve(descriptor: int) -> bool:
    """Whether a connection that was just accepted has taken a descriptor of the reserve."""
    return descriptor >= descriptor_limit() - reserve()


def shortage(wanted: int) -> str | None:
    """Why ``wanted`` more descriptors cannot be had, in words for a user; None if they can."""
    limit, used = descriptor_limit(), descriptors_open()
    if used + wanted + reserve() <= limit:
        return None
    return (
        f"{used} of its {limit} file descriptors are in use and {reserve()} are kept in reserve: raise its limit "
        f"(ulimit -Hn, LimitNOFILE=) or let it serve fewer workers and agents"
    )


class WarningLimit:
    """Limits warnings about strangers to one a second. The next one says how many were left out."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._left_out = 0
        self._last: tuple[str, tuple[Any, ...]] = ("", ())
        self._timer: asyncio.TimerHandle | None = None

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, or count it. Call it on the loop's thread only."""
        if self._timer is not None:
            self._left_out += 1
            self._last = (text, args)
            return
        self._log.warning(text, *args)
        self._timer = asyncio.get_running_loop().call_later(WARNING_GAP, self._again)

    def close(self) -> None:
        """Log what was left out so far. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flush()

    def _again(self) -> None:
        self._timer = None
        if self._flush():
            self._timer = asyncio.get_running_loop().call_later(WARNING_GAP, self._again)

    def _flush(self) -> bool:
        count, self._left_out = self._left_out, 0
        text, args = self._last
        if count:
            self._log.warning(text + " (%d such in a second)", *args, count)
        return count > 0
