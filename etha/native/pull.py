"""The compiled copies of a pull (pull.c): its struct, and the call that carries it out."""

from __future__ import annotations

import ctypes
from functools import cache

from etha.native.opened import opened


class PullStruct(ctypes.Structure):
    """``etha_pull`` of pull.c. Tables are addresses of arrays, which must live while it runs."""

    _fields_ = (
        ("local", ctypes.c_void_p),
        ("remote", ctypes.c_void_p),
        ("local_ends", ctypes.c_void_p),
        ("remote_ends", ctypes.c_void_p),
        ("pids", ctypes.c_void_p),
        ("casts", ctypes.c_void_p),
        ("chunks", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("next", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("ended", ctypes.c_int32),
        ("running", ctypes.c_uint32),
        ("started", ctypes.c_uint32),
        ("own", ctypes.c_int32),
        ("workers", ctypes.c_uint64 * 16),
    )


class PullLibrary:
    """Carries out pulls without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._start, self._join = library.etha_start_pull, library.etha_join_pull
        self._start.argtypes, self._start.restype = [ctypes.POINTER(PullStruct)], ctypes.c_uint32
        self._join.argtypes, self._join.restype = [ctypes.POINTER(PullStruct)], None
        library.etha_pull_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_pull_bytes())

    def start(self, pull: PullStruct) -> int:
        """Begin to copy everything, until ``stop`` is set or a copy fails (``error``, ``pid``, ``address``).

        Returns the number of threads that do so. The last to end makes the eventfd ``ended`` readable, and ``running``
        is 0 then. If there are any, ``join`` must follow.
        """
        return int(self._start(ctypes.byref(pull)))

    def join(self, pull: PullStruct) -> None:
        """Wait until its threads have ended."""
        self._join(ctypes.byref(pull))


@cache
def load_pull() -> PullLibrary | None:
    """The compiled library; None where there is none, or ``ETHA_NATIVE=0`` forbids it."""
    return opened(PullLibrary)
