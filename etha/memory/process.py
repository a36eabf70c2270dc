"""Another process's memory, by ``process_vm_readv`` and ``process_vm_writev``.

The calls go through ctypes, so the GIL is released while bytes move. The worker does nothing, and errors are return
codes, never signals. Pids are reused, so a process is identified by pid and start time, and before each call a pidfd
tells whether it still lives.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from etha.memory.reach import AccessError, FaultError, ReachError, WorkerGoneError
from etha.memory.refusal import why_refused

#: Rows (address, length) of uint64: the kernel's struct iovec.
IoVec = npt.NDArray[np.uint64]
#: Most segments that one call takes (UIO_MAXIOV).
MAX_SEGMENTS = 1024
MAX_TOKEN = 256
_MAX_PID = (1 << 31) - 1
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)


def _declare(name: str) -> Any:
    call = getattr(_libc, name)
    call.restype = ctypes.c_ssize_t
    call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return call


_readv, _writev = _declare("process_vm_readv"), _declare("process_vm_writev")


def allow_reading() -> None:
    """In the worker: let any process of the same user read and write it, even if Yama would forbid that.

    Yama (ptrace_scope 1) remembers only one pid, but two agents may need it, so any process is allowed. Without Yama
    this does nothing.
    """
    _libc.prctl(ctypes.c_int(_PR_SET_PTRACER), _PR_SET_PTRACER_ANY, 0, 0, 0)


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot. WorkerGoneError if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        raise WorkerGoneError(f"process {pid} is gone", pid=pid) from None
    return int(stat.rpartition(")")[2].split()[19])


class ProcessMemory:
    """The private memory of one living process. Call close() when the worker's session ends."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.started = started
        self._pidfd = -1
        if not 0 < pid <= _MAX_PID:  # another agent may claim any number
            raise WorkerGoneError(f"there is no process {pid}", pid=pid)
        try:
            self._pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, FileNotFoundError):  # the latter from Linux 6.16 on, while it ends
            raise WorkerGoneError(f"process {pid} is gone", pid=pid) from None
        try:
            if start_time(pid) != started:
                raise WorkerGoneError(f"process {pid} is another one than the worker's", pid=pid)
        except BaseException:
            self.close()
            raise

    @property
    def pidfd(self) -> int:
        """The descriptor of the process; -1 after close()."""
        return self._pidfd

    def close(self) -> None:
        """Release the process. Idempotent. No lane may be using it any more."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def alive(self) -> bool:
        """Whether the process has not died; False after close()."""
        if self._pidfd < 0:
            return False
        watch = select.poll()  # one per call, because a poll object refuses two threads at once
        watch.register(self._pidfd, select.POLLIN)
        return not watch.poll(0)

    def read(self, local: IoVec, remote: IoVec) -> int:
        """Copy from the worker (``remote``) to here (``local``), tables of equal total length. Returns the bytes
        copied.

        The tables may be cut differently and have any number of rows. The caller vouches for ``local``.
        """
        return self._move(_readv, local, remote)

    def write(self, local: IoVec, remote: IoVec) -> int:
        """Copy from here (``local``) into the worker (``remote``); otherwise like ``read``."""
        return self._move(_writev, local, remote)

    def _move(self, call: Any, local: IoVec, remote: IoVec) -> int:
        if not self.alive():
            raise WorkerGoneError(f"worker process {self.pid} has died", pid=self.pid)
        total = int(local[:, 1].sum())
        # The kernel stops at the end of the shorter table, so a window of each is enough.
        done = n = 0
        try:
            while True:
                n = self._call(call, local, remote)
                done += n
                if done >= total:
                    return done
                local, remote = _after(local, n), _after(remote, n)
        except ReachError as error:
            error.moved = done
            raise

    def _call(self, call: Any, local: IoVec, remote: IoVec) -> int:
        n = call(
            self.pid,
            local.ctypes.data,
            min(len(local), MAX_SEGMENTS),
            remote.ctypes.data,
            min(len(remote), MAX_SEGMENTS),
            0,
        )
        if n <= 0:
            code = ctypes.get_errno() if n < 0 else errno.EFAULT
            raise self.error(code, int(remote[0, 0]), writes=call is _writev)
        return int(n)

    def error(self, code: int, address: int, *, writes: bool = False) -> ReachError:
        """The error for a copy from or to ``address`` in the process that failed with errno ``code``."""
        text = f"worker process {self.pid}"
        if code == errno.ESRCH:
            return WorkerGoneError(f"{text} has died", pid=self.pid)
        if code == errno.EPERM:
            why = why_refused(self.pid, itself=_reads_itself())
            return AccessError(f"the kernel refuses access to the memory of {text}: {why}", pid=self.pid)
        if code == errno.EFAULT:
            why = "that may be written: was it freed, or is it read-only?" if writes else "to read: was it freed?"
            error = FaultError(f"{text} has no memory at {address:#x} {why}", pid=self.pid)
            error.address = address
            return error
        return ReachError(f"access to the memory of {text}: {os.strerror(code)}", pid=self.pid)

    def probe(self, address: int, token: bytes) -> None:
        """Prove both directions: read ``token`` at ``address``, and write it back right after it.

        Raises a ReachError if a direction is refused or other bytes are found. See ``Beacon``.
        """
        if not 0 < len(token) <= MAX_TOKEN:
            raise ReachError(f"a probe's token has 1 to {MAX_TOKEN} bytes, not {len(token)}", pid=self.pid)
        if not 0 < address < 1 << 63:
            raise FaultError(f"{address:#x} is not an address", pid=self.pid)
        buffer = np.zeros(len(token), np.uint8)
        here = np.array([[buffer.ctypes.data, len(token)]], np.uint64)
        self.read(here, np.array([[address, len(token)]], np.uint64))
        if buffer.tobytes() != token:
            raise ReachError(f"process {self.pid} here is not the worker: the probe found other bytes", pid=self.pid)
        self.write(here, np.array([[address + len(token), len(token)]], np.uint64))


def _reads_itself() -> bool:
    """Whether process_vm_readv works on this process, as it does unless a filter forbids the system call."""
    there, here = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    local, remote = (np.array([[byte.ctypes.data, 1]], np.uint64) for byte in (here, there))
    return bool(_readv(os.getpid(), local.ctypes.data, 1, remote.ctypes.data, 1, 0) == 1)


def _after(table: IoVec, nbytes: int) -> IoVec:
    """``table`` without its first ``nbytes``, which one call has copied."""
    # Only the rows that the call was given: a table may have hundreds of times as many.
    ends = np.cumsum(table[:MAX_SEGMENTS, 1])
    i = int(np.searchsorted(ends, np.uint64(nbytes), side="right"))
    rest = table[i:]
    taken = nbytes - (int(ends[i - 1]) if i else 0)
    if taken:
        rest = rest.copy()
        rest[0, 0] += np.uint64(taken)
        rest[0, 1] -= np.uint64(taken)
    return rest


class Beacon:
    """In the worker: a token in private memory, which an agent's ``probe`` finds and echoes."""

    def __init__(self) -> None:
        self.token = os.urandom(32)
        self._buffer = np.frombuffer(bytearray(self.token + bytes(32)), np.uint8)

    @property
    def address(self) -> int:
        """Where the token lies in this process."""
        return int(self._buffer.ctypes.data)

    @property
    def echoed(self) -> bool:
        """Whether some process has written the token right after itself."""
        return self._buffer[32:].tobytes() == self.token


def lie_inside(rows: IoVec, spans: IoVec) -> bool:
    """Whether every row lies inside one of ``spans``, or in several that touch. Both are rows (address, bytes)."""
    spans = _merged(spans)
    begin, stop = rows[:, 0], rows[:, 0] + rows[:, 1]
    span = np.searchsorted(spans[:, 0], begin, "right") - 1
    inside = (span >= 0) & (stop >= begin)
    inside &= stop <= spans[span, 0] + spans[span, 1]
    return bool(inside.all())


def _merged(spans: IoVec) -> IoVec:
    """Sorted spans of which none touches another: rows may reach from one tensor into the next one's memory."""
    if not len(spans):
        return np.zeros((1, 2), np.uint64)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    stop = np.maximum.accumulate(spans[:, 0] + spans[:, 1])
    first = np.flatnonzero(np.append(True, spans[1:, 0] > stop[:-1]))
    merged = np.empty((len(first), 2), np.uint64)
    merged[:, 0] = spans[first, 0]
    merged[:, 1] = np.append(stop[first[1:] - 1], stop[-1]) - merged[:, 0]
    return merged
