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
        ("chunks", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("next", ctypes.c_uint64),
        ("done", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("address", ctypes.c_uint64),
    )


class PullLibrary:
    """Carries out pulls without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._run = library.etha_run_pull
        self._run.argtypes, self._run.restype = [ctypes.POINTER(PullStruct)], None
        library.etha_pull_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_pull_bytes())

    def run(self, pull: PullStruct) -> None:
        """Copy everything, or until ``stop`` is set or a copy fails (``error``, ``pid``, ``address``)."""
        self._run(ctypes.byref(pull))


@cache
def load_pull() -> PullLibrary | None:
    """The compiled library; None where there is none, or ``ETHA_NATIVE=0`` forbids it."""
    return opened(PullLibrary)
