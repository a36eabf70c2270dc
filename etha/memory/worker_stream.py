"""A worker's stream: a worker sends its own tensors over a socket that its agent has lent it, or receives into them.

Its processors are idle while it waits for a transfer, and the bytes cross no buffer of an agent. A process reads and
writes only its own memory in this way. Shutting the socket down, in either process, ends the work at once.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from etha.memory.process import IoVec, lie_inside
from etha.memory.reach import ReachError

if TYPE_CHECKING:
    from etha.native.worker_stream import WorkerStreamLibrary

#: Most bytes of one row without memory (``STREAM_PADDING`` of worker_stream.c), and most rows of one call of Python's.
MAX_PADDING, _ROWS = 64, 512
#: Most bytes of one call of Python's.
_CALL = 2 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamRows:
    """What travels, in order: rows (address, bytes). A row at address 0 is padding of fewer than MAX_PADDING bytes.

    ValueError for rows that cannot be.
    """

    rows: IoVec

    def __post_init__(self) -> None:
        padding = self.rows[:, 0] == 0
        if not len(self.rows) or not self.rows[:, 1].all() or (self.rows[padding, 1] >= MAX_PADDING).any():
            raise ValueError(f"a stream of {len(self.rows)} rows has empty rows, or padding without memory")

    @cached_property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return int(self.rows[:, 1].sum())

    @classmethod
    def from_bytes(cls, data: bytes) -> StreamRows:
        """The inverse of ``rows.tobytes()``."""
        return cls(rows=np.frombuffer(data, np.uint64).reshape(-1, 2))

    def check_inside(self, spans: IoVec) -> None:
        """ReachError unless every row lies inside ``spans``, rows (address, bytes): the kernel goes wherever it
        points."""
        if not lie_inside(self.rows[self.rows[:, 0] != 0], spans):
            raise ReachError(
                "the agent asks this worker to move bytes outside of its registered tensors, so nothing was moved: "
                "this is a fault in Etha, please report it"
            )


def load_worker_stream() -> WorkerStreamLibrary | None:
    """The compiled library; None where Python has to move the bytes."""
    from etha.native import worker_stream  # here, because most workers never stream

    return worker_stream.load_worker_stream()


#: ``StreamRun.error`` of a stream that the other end has closed.
ENDED = -1


class StreamRun:
    """One run over ``conn``, which is closed with it. ``end_fd`` becomes readable at its end; then ``close`` it.

    ``start`` returns at once. ``stop`` ends it soon, and the connection with it; call it at any time.
    """

    def __init__(self, rows: StreamRows, conn: socket.socket, *, sends: bool) -> None:
        from etha.native.worker_stream import WorkerStreamStruct  # as in load_worker_stream

        self._conn, self._rows = conn, rows
        self.end_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._struct = WorkerStreamStruct(
            rows=rows.rows.ctypes.data, nrows=len(rows.rows), nbytes=rows.nbytes,
            fd=conn.fileno(), end_fd=self.end_fd, sends=sends,
        )  # fmt: skip
        #: Keeps what a thread uses that the interpreter does not know, even while the interpreter ends.
        self._kept: ctypes.py_object | None = None

    @property
    def done(self) -> int:
        """Bytes that were moved."""
        return int(self._struct.done)

    @property
    def error(self) -> int:
        """After the end: 0 if all was moved, the errno of the connection or of memory, or ENDED if it was closed."""
        return int(self._struct.error)

    def start(self) -> None:
        """Begin. OSError if no thread can be had; nothing was moved then."""
        self._kept = ctypes.py_object((self._struct, self._rows))
        ctypes.pythonapi.Py_IncRef(self._kept)
        try:
            library = load_worker_stream()
            if library is None:
                threading.Thread(target=self._run_python, name="etha-stream", daemon=True).start()
            elif code := library.start(self._struct):
                raise OSError(code, os.strerror(code))
        except BaseException as error:
            self._let_go()
            if isinstance(error, RuntimeError):  # "can't start new thread"
                raise OSError(errno.EAGAIN, str(error)) from None
            raise

    def stop(self) -> None:
        """End it soon. Idempotent, until ``close``."""
        with suppress(OSError):  # the other end, or the agent, was quicker
            self._conn.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close both descriptors. Only once it has ended, or if it has not begun."""
        self._conn.close()
        os.close(self.end_fd)
        self._let_go()

    def _let_go(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            ctypes.pythonapi.Py_DecRef(kept)

    def _run_python(self) -> None:
        """The same without the compiled library."""
        struct, rows = self._struct, self._rows.rows.tolist()
        padding = memoryview(bytearray(MAX_PADDING))
        at = skip = 0
        try:
            while struct.done < struct.nbytes:
                window = _window(rows[at : at + _ROWS], skip, padding)
                n = self._conn.sendmsg(window, (), socket.MSG_NOSIGNAL) if struct.sends else self._receive(window)
                struct.done += n
                skip += n
                while at < len(rows) and skip >= rows[at][1]:
                    skip -= rows[at][1]
                    at += 1
        except OSError as error:
            struct.error = error.errno or ENDED
        finally:
            os.eventfd_write(self.end_fd, 1)

    def _receive(self, window: list[memoryview]) -> int:
        n = self._conn.recvmsg_into(window)[0]
        if n == 0:
            raise OSError("the other end has closed the stream")
        return n


def _window(rows: list[tuple[int, int]], skip: int, padding: memoryview) -> list[memoryview]:
    """Memory of the first rows without ``skip`` bytes, up to _CALL bytes."""
    found, room = [], _CALL
    for address, nbytes in rows:
        some = min(nbytes - skip, room)
        memory = (
            memoryview((ctypes.c_char * some).from_address(address + skip)).cast("B") if address else padding[:some]
        )
        found.append(memory)
        room, skip = room - some, 0
        if not room:
            break
    return found
