"""Reaper: a thread that frees device memory, for callers that must not wait for the device.

    release(), or a garbage collection in any thread  --hand-->  queue  -->  cudaFree, cudaFreeHost

CUDA frees memory only once all work of the context is done, and until then no other call of the process returns (seen
on an H200: queries, copies and launches of other threads waited for as long). An NCCL kernel is done only when its peer
comes or somebody aborts it. Behind one that waits for a dead peer, freeing memory would stop the thread that is to
abort it. So this thread frees nothing while somebody ``holds``, as an NCCL pipeline does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)

#: Seconds that an agent waits at its end for memory to be freed. The process's end frees it in any case.
PATIENCE = 10.0


class Reaper:
    """See the module. Thread-safe. Memory that was handed over must not be used any more."""

    def __init__(self) -> None:
        # The only queue that a finalizer may put into while its own thread is inside of ``put``.
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition(threading.Lock())
        self._holds, self._freeing = 0, False

    def hold(self) -> None:
        """Nothing is freed until as many ``let_go``. Waits for what is being freed, for which no NCCL kernel is waited
        for."""
        with self._changed:
            self._holds += 1
            self._changed.wait_for(lambda: not self._freeing)

    def let_go(self) -> None:
        """End a ``hold``."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()

    def begin(self) -> None:
        """Start the thread if needed. Whoever allocates calls it, because a garbage collection must not start
        threads."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="etha-reaper", daemon=True)
                self._thread.start()

    def hand(self, give_back: Callable[[], None]) -> None:
        """Have ``give_back`` called some time later. Returns at once; may be called anywhere."""
        self._queue.put(give_back)

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Wait until everything handed over so far is freed. False if that took too long. Do not call it on a loop."""
        if self._thread is None:
            return self._queue.empty()
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(seconds)

    def _run(self) -> None:
        while True:
            give_back = self._queue.get()
            with self._changed:
                self._changed.wait_for(lambda: not self._holds)
                self._freeing = True
            try:
                give_back()
            except Exception as error:
                log.error("memory was not given back: %s", error)
            finally:
                with self._changed:
                    self._freeing = False
                    self._changed.notify_all()
            del give_back  # a waiting thread must keep nothing alive


#: The reaper of this process.
reaper = Reaper()
