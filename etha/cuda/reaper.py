"""Reaper: a thread that gives a device's memory back, for all who must not wait for the device.

    release(), or a garbage collection in whichever thread  --hand-->  queue  -->  cudaFree, cudaFreeHost

CUDA frees memory only once all work of the context is done, and an NCCL kernel is done only when its peer comes or
somebody aborts it. So whoever frees, an event loop above all, may wait for other hosts. Only this thread does: it holds
nothing meanwhile that others need.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

#: Seconds that an agent's end waits for what is to be given back; the process's end gives it back in any case.
PATIENCE = 10.0


class Reaper:
    """See the module's head. Any thread may use it; memory that was handed over is nobody's any more."""

    def __init__(self) -> None:
        # The one queue that a finalizer may put into while its own thread is inside of ``put``.
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have the thread run; by who takes memory, for a garbage collection is no place to start threads."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="etha-reaper", daemon=True)
                self._thread.start()

    def hand(self, give_back: Callable[[], None]) -> None:
        """Have ``give_back`` called, some time; returns at once, whoever calls and wherever."""
        self._queue.put(give_back)

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Wait until all that was handed over before is given back; False if that took too long. Not on a loop."""
        if self._thread is None:
            return self._queue.empty()
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(seconds)

    def _run(self) -> None:
        while True:
            give_back = self._queue.get()
            try:
                give_back()
            except Exception as error:
                log.error("memory was not given back: %s", error)
            del give_back  # a thread that waits keeps nothing alive


#: This process's.
reaper = Reaper()
