"""Ask for huge pages under a worker's registered tensors, in the background.

An agent reads ordinary memory through the kernel, which looks up every page; with 4 KiB pages that costs as much as the
copy. The kernel can gather pages into huge ones in place, without changing data or addresses. This is a hint: if the
kernel refuses it, copies are slower, and nothing else changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from etha.memory.pages import HUGE, collapse

log = logging.getLogger(__name__)

#: Bytes per call, so that other calls into the kernel's memory management get a turn in between. A huge page takes a
#: millisecond, and up to ten where the kernel has to make room for it.
_STEP = 4 << 20
#: Most seconds for which a transfer delays the next step. A call may wait much longer until its bytes move.
_PATIENCE = 1.0
#: Ranges that lie as close as two tensors that were allocated one after the other count as one: what malloc keeps
#: between them, and the rest of a page. They lie in pages that are in use anyway.
_NEAR = 8192


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The (address, bytes) ranges in order, neighbours as one, because a huge page holds many small tensors."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        if found and address <= found[-1][0] + found[-1][1] + _NEAR:
            first = found[-1][0]
            found[-1] = first, max(found[-1][1], address + nbytes - first)
        else:
            found.append((address, nbytes))
    return found


class Collapser:
    """Collapses ranges on its own thread. Call cancel() when the process's client closes.

    No step begins while a transfer runs, because both need the kernel's tables of the process's memory: transfers right
    after the registration took five times as long. After each transfer there is time for one step, so a loop that does
    nothing but transfers gets its huge pages, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._transfers, self._over, self._patient_until = 0, 0, 0.0
        self._queue: list[tuple[int, int]] = []
        self._thread: threading.Thread | None = None
        self._cancelled = False
        #: Whether there is something to do, so that most transfers need not ask.
        self.working = False

    def ask(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Queue (address, bytes) ranges of this process's memory. Returns at once.

        If a range is freed meanwhile, the kernel refuses it, or it is some other memory by then, whose contents do not
        change either.
        """
        with self._lock:
            # Asked again for the same addresses, they may be new memory. If they are not, the kernel finds huge pages
            # already and returns at once.
            new = {r for r in joined(ranges) if r[1] >= HUGE} - set(self._queue)
            if not new or self._cancelled:
                return
            self._queue += sorted(new)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="etha-huge-pages", daemon=True)
                self._thread.start()
                self.working = True

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Begin no step within, for up to ``_PATIENCE``."""
        with self._lock:
            self._transfers += 1
            self._patient_until = time.monotonic() + _PATIENCE
        try:
            yield
        finally:
            with self._lock:
                self._transfers -= 1
                self._over += 1
                self._lock.notify_all()

    def _work(self) -> None:
        done = refused = 0
        while True:
            with self._lock:
                self._wait_for_a_gap()
                if self._cancelled or not self._queue:
                    self._thread, self.working = None, False
                    break
                address, nbytes = self._queue.pop(0)
                # A step ends where a huge page ends, because the kernel makes only whole ones.
                step = min(nbytes, (address + _STEP) // HUGE * HUGE - address)
                if nbytes - step >= HUGE:
                    self._queue.insert(0, (address + step, nbytes - step))
            if collapse(address, step):
                done += step
            else:
                refused += step
        log.debug("huge pages: %d bytes collapsed, %d refused", done, refused)

    def _wait_for_a_gap(self) -> None:
        over = self._over
        while self._transfers and not self._cancelled and self._over == over:
            if (left := self._patient_until - time.monotonic()) <= 0:
                return
            self._lock.wait(left)

    def settle(self, timeout: float | None = None) -> None:
        """Wait until everything that was asked for is done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def cancel(self) -> None:
        """Stop after the current step. Idempotent; does not wait."""
        with self._lock:
            self._cancelled = True
            self._queue.clear()
            self._lock.notify_all()
