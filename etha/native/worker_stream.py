"""The compiled loop of a worker's stream (worker_stream.c): its struct, and the call that starts it."""

from __future__ import annotations

import ctypes
from functools import cache

from etha.native.opened import opened


class WorkerStreamStruct(ctypes.Structure):
    """``etha_worker_stream`` of worker_stream.c. ``rows`` is the address of an array, which must live until the end."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("nrows", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("fd", ctypes.c_int32),
        ("end_fd", ctypes.c_int32),
        ("sends", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("done", ctypes.c_uint64),
    )


class WorkerStreamLibrary:
    """Moves streams on threads of its own, without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._start = library.etha_start_worker_stream
        self._start.argtypes, self._start.restype = [ctypes.POINTER(WorkerStreamStruct)], ctypes.c_int
        library.etha_worker_stream_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_worker_stream_bytes())

    def start(self, stream: WorkerStreamStruct) -> int:
        """Begin. ``end_fd`` becomes readable when nothing is moved any more; 0, or the errno if nothing was begun."""
        return int(self._start(ctypes.byref(stream)))


@cache
def load_worker_stream() -> WorkerStreamLibrary | None:
    """The compiled library; None where there is none, or ``ETHA_NATIVE=0`` forbids it."""
    return opened(WorkerStreamLibrary)
