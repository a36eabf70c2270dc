"""Streams and events of a fake GPU: a thread with a queue each, and recordings that live in (shared) memory.

A page of an event: the number of its newest recording, then a ring of the numbers that are done. Other processes wait
on it by futex; the timeout of that is for noticing the recorder's death only.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections import deque
from collections.abc import Callable

from tests.fakes.pages import PAGE, Pages

_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_WAIT, _WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_RING = PAGE // 4 - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Recordings:
    """The page of one event; ``alive`` says whether the process that records is."""

    def __init__(self, pages: Pages, alive: Callable[[], bool]) -> None:
        self.pages, self.alive = pages, alive
        self._words = (ctypes.c_uint32 * (_RING + 1)).from_address(pages.address)
        self._lock = threading.Lock()

    def begin(self) -> int:
        """A new recording, not done; its number."""
        with self._lock:
            number = int(self._words[0]) + 1
            self._words[0] = number
            return number

    def finish(self, number: int) -> None:
        slot = 1 + number % _RING
        self._words[slot] = number
        _libc.syscall(_FUTEX, ctypes.c_void_p(self.pages.address + 4 * slot), _WAKE, 1 << 30, None, None, 0)

    @property
    def newest(self) -> int:
        """0: never recorded."""
        return int(self._words[0])

    def done(self, number: int) -> bool:
        return number == 0 or int(self._words[1 + number % _RING]) >= number

    def wait(self, number: int, stop: Callable[[], bool]) -> bool:
        """True once it is done; False once ``stop()``, which is asked 20 times a second."""
        slot, timeout = 1 + number % _RING, _Time(0, 50_000_000)
        while not self.done(number):
            if stop():
                return False
            seen = int(self._words[slot])
            if seen < number:
                address = ctypes.c_void_p(self.pages.address + 4 * slot)
                _libc.syscall(_FUTEX, address, _WAIT, seen, ctypes.byref(timeout), None, 0)
        return True


_STREAM = "fake-stream-"


def on_stream() -> bool:
    """Whether this code is work of a stream: a part of a kernel, which no call of the host keeps waiting."""
    return threading.current_thread().name.startswith(_STREAM)


class Stream:
    """Work in order, on a thread that begins with the first piece; ``failed`` is told what a piece raises."""

    def __init__(self, handle: int, uuid: str, failed: Callable[[int, BaseException], None]) -> None:
        self.handle, self.uuid, self._failed = handle, uuid, failed
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], None], Callable[[], None] | None]] = deque()
        self._thread: threading.Thread | None = None
        self._held = self._busy = self._ended = self.stopping = False

    def put(self, work: Callable[[], None], tell: Callable[[], None] | None = None) -> None:
        """``tell`` tells others that the piece is done: whoever has heard it finds the piece pending no more."""
        with self._changed:
            assert not self._ended, f"stream {self.handle:#x} is used after drop_stream"
            self._queue.append((work, tell))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{_STREAM}{self.handle:#x}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    @property
    def pending(self) -> int:
        """Pieces that are queued or at work."""
        with self._changed:
            return len(self._queue) + self._busy

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is queued; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, seconds)

    def end(self) -> None:
        """No more is queued; what is queued still runs."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Forget what is queued, and wait for what runs."""
        with self._changed:
            self.stopping = self._ended = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: (self._queue and not self._held) or (self._ended and not self._queue))
                if not self._queue:
                    return
                (work, tell), self._busy = self._queue.popleft(), True
            try:
                work()
            except BaseException as error:
                self._failed(self.handle, error)
            if tell is not None:
                with self._changed:
                    self._busy = False
                    tell()
            del work, tell
