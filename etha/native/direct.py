"""The compiled exchange of a worker's thread with its agent (direct.c): its struct, and the call that does it."""

from __future__ import annotations

import ctypes
import enum
from functools import cache

from etha.native.opened import opened


class Exchanged(enum.IntEnum):
    """Why an exchange has returned. INTERRUPTED: by a signal."""

    HEARD = 0
    WOKEN = 1
    SLICE_OVER = 2
    ENDED = 3
    INTERRUPTED = 4


class DirectStruct(ctypes.Structure):
    """``etha_direct`` of direct.c. ``out`` and ``into`` are addresses of buffers, which must live as long as it."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("wake", ctypes.c_int32),
        ("also", ctypes.c_int32),
        ("slice_ms", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("into", ctypes.c_void_p),
        ("out_bytes", ctypes.c_uint64),
        ("sent", ctypes.c_uint64),
        ("in_bytes", ctypes.c_uint64),
        ("got", ctypes.c_uint64),
        ("error", ctypes.c_int32),
    )


class DirectLibrary:
    """Sends and receives without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._exchange = library.etha_exchange
        self._exchange.argtypes, self._exchange.restype = [ctypes.POINTER(DirectStruct)], ctypes.c_int
        library.etha_direct_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_direct_bytes())

    def exchange(self, direct: DirectStruct) -> Exchanged:
        """Send what is left to send, then wait for more bytes, at most ``slice_ms``."""
        return Exchanged(self._exchange(ctypes.byref(direct)))


@cache
def load_direct() -> DirectLibrary | None:
    """The compiled library; None where there is none, or ``ETHA_NATIVE=0`` forbids it."""
    return opened(DirectLibrary)
