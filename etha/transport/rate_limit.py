"""How many bytes a second may be sent: one account that any number of streams and transfers share.

``delay()`` says for how long a stream waits; whoever sends says afterwards what it has sent (``spend``). So the account
never counts what a socket did not take, and several threads that ask at once overdraw it by a quantum each, which the
next ones wait for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

#: Seconds of the rate that may be sent at once after a pause, and that one call sends.
BURST, QUANTUM = 0.05, 0.01
#: Least and most bytes of one call.
LEAST, MOST = 4 << 10, 1 << 20


class RateLimit:
    """A rate in bytes per second, infinite until ``lower``. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.rate = math.inf
        #: When everything that was sent is paid for.
        self._paid = -math.inf

    def lower(self, rate: float) -> None:
        """The rate is at most this from now on."""
        with self._lock:
            self.rate = min(self.rate, rate)

    @property
    def quantum(self) -> int:
        """Most bytes to send before ``delay`` is asked again."""
        return int(min(MOST, max(LEAST, self.rate * QUANTUM)))

    def delay(self) -> float:
        """Seconds until something may be sent; 0 if it may now."""
        with self._lock:
            return max(0.0, self._paid - self._clock())

    def spend(self, nbytes: int) -> None:
        """So many bytes were sent."""
        with self._lock:
            self._paid = max(self._paid, self._clock() - BURST) + nbytes / self.rate
