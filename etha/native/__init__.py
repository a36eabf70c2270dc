"""Inner loops of process groups that run without the interpreter's lock (docs/adr/0012).

``load()`` gives the compiled library where there is one of this source, otherwise Python that does the same, slower.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etha.config import native_allowed
from etha.native.fallback import PythonLibrary
from etha.native.structs import (
    ALL,
    BRIEF_US,
    MESSAGE,
    SOURCE,
    STEP,
    DtypeCode,
    GroupMemory,
    MessageKind,
    NativeLibrary,
    ProgressArguments,
    ReduceCode,
    RingLinks,
    RunArguments,
    RunResult,
    StepKind,
    StreamEnd,
    StreamsStruct,
    StreamTable,
    partial_bytes,
    ring_length,
    run_arguments,
)

__all__ = [
    "ALL",
    "BRIEF_US",
    "MESSAGE",
    "SOURCE",
    "STEP",
    "CompiledLibrary",
    "DtypeCode",
    "GroupMemory",
    "MessageKind",
    "NativeLibrary",
    "PythonLibrary",
    "ReduceCode",
    "RingLinks",
    "RunArguments",
    "RunResult",
    "StepKind",
    "StreamEnd",
    "StreamTable",
    "load",
    "open_library",
    "partial_bytes",
    "ring_length",
    "run_arguments",
    "why_python",
]

log = logging.getLogger(__name__)


class CompiledLibrary:
    """executor.c, compiled. Calls release the interpreter's lock."""

    name = "compiled"

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._source = library.etha_source
        self._source.restype = ctypes.c_char_p
        self._run = library.etha_run
        self._run.argtypes, self._run.restype = [ctypes.POINTER(RunArguments)], ctypes.c_int
        # Called with the interpreter's lock held.
        self._run_briefly = ctypes.PyDLL(str(path)).etha_run_briefly
        self._run_briefly.argtypes, self._run_briefly.restype = [ctypes.POINTER(RunArguments)], ctypes.c_int
        self._ring = library.etha_ring
        self._ring.argtypes, self._ring.restype = [ctypes.c_void_p], None
        self._stop = library.etha_stop
        self._stop.argtypes, self._stop.restype = [ctypes.c_void_p, ctypes.c_uint32], None
        self._give_up = library.etha_give_up
        self._give_up.argtypes, self._give_up.restype = [ctypes.c_void_p, ctypes.c_uint64], None
        self._progress = library.etha_progress
        self._progress.argtypes, self._progress.restype = [ctypes.POINTER(ProgressArguments)], ctypes.c_int
        self._kick = library.etha_kick
        self._kick.argtypes, self._kick.restype = [ctypes.POINTER(ProgressArguments)], None
        self._claim = library.etha_claim_cause
        self._claim.argtypes, self._claim.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.c_uint64
        library.etha_stream_bytes.restype = ctypes.c_uint64
        self._stream_bytes = int(library.etha_stream_bytes())
        self._serve = library.etha_serve_streams
        self._serve.argtypes, self._serve.restype = [ctypes.POINTER(StreamsStruct)], None
        self._wake = library.etha_wake_streams
        self._wake.argtypes, self._wake.restype = [ctypes.c_void_p], None
        self._withdraw = library.etha_withdraw
        self._withdraw.argtypes, self._withdraw.restype = [ctypes.c_void_p], None

    @property
    def source(self) -> str:
        """The hash of the source that was compiled."""
        return str(self._source().decode())

    def run(self, args: RunArguments) -> RunResult:
        if args.brief_us:
            result = self._run_briefly(ctypes.byref(args))
            if result != RunResult.AGAIN:
                return RunResult(result)
        return RunResult(self._run(ctypes.byref(args)))

    def ring(self, page: int) -> None:
        self._ring(page)

    def stop(self, memory: GroupMemory, reason: int) -> None:
        self._stop(memory.address, reason)

    def give_up(self, memory: GroupMemory, call_number: int) -> None:
        self._give_up(memory.address, call_number)

    def claim_cause(self, page0: int, rank: int) -> int | None:
        claimed = int(self._claim(page0, rank))
        return claimed - 1 if claimed else None

    def progress(self, links: RingLinks, messages: NDArray[np.void], *, slice_ms: int = 0) -> RunResult:
        links.point_at(messages, slice_ms)
        return RunResult(self._progress(ctypes.byref(links.struct)))

    def kick(self, links: RingLinks) -> None:
        self._kick(ctypes.byref(links.struct))

    def open_streams(self, table: StreamTable) -> None:
        table.private = np.zeros((table.memory.size, self._stream_bytes), dtype=np.uint8)
        for rank in range(table.memory.size):
            words = table.private[rank, :8].view(np.int32)
            words[0], words[1] = table.sockets.get(rank, -1), table.deaths.get(rank, -1)
        table.struct.streams = table.private.ctypes.data
        table.memory.streams = table
        table.memory.struct.streams = ctypes.addressof(table.struct)

    def serve_streams(self, table: StreamTable) -> None:
        self._serve(ctypes.byref(table.struct))

    def close_streams(self, table: StreamTable) -> None:
        table.struct.closing = 1
        self._wake(table.memory.address)

    def tell_cause(self, table: StreamTable) -> None:
        table.struct.cause_ready = 1
        self._wake(table.memory.address)

    def withdraw(self, table: StreamTable) -> None:
        self._withdraw(table.memory.address)

    def stream_end(self, table: StreamTable, rank: int) -> tuple[StreamEnd, int]:
        words = table.private[rank, 8:16].view(np.uint32)
        return StreamEnd(int(words[0])), int(words[1])

    def open_sockets(self, table: StreamTable) -> list[int]:
        """The sockets that are open, for a forked child to close."""
        found = [int(row[:4].view(np.int32)[0]) for row in table.private]
        return [fd for fd in found if fd >= 0]


def open_library(path: Path) -> CompiledLibrary | None:
    """The compiled library at ``path``. None if there is none; also with a warning if it is of another source or does
    not load."""
    found = _opened(path)
    if isinstance(found, CompiledLibrary):
        return found
    if path.exists():
        log.warning("groups run in Python: %s", found)
    return None


def why_python() -> str:
    """Why ``load()`` gives Python, with what mends it; "" if it gives the compiled library."""
    from etha.native.build import LIBRARY

    if not native_allowed():
        return "ETHA_NATIVE=0 asks for it"
    found = _opened(LIBRARY)
    return found if isinstance(found, str) else ""


def _opened(path: Path) -> CompiledLibrary | str:
    """The library, or why it cannot be used. One of another source is not loaded, because its structs may be others."""
    from etha.native.build import is_current  # here, because `python -m etha.native.build` imports this package first

    cure = "run python -m etha.native.build"
    if not path.exists():
        return f"{path} is not there, because the machine that installed Etha had no C compiler: {cure} where one is"
    if not is_current(path):
        return f"{path} is of another version of executor.c: {cure}"
    try:
        return CompiledLibrary(path)
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded ({error}): {cure} on this machine"


@cache
def load() -> NativeLibrary:
    """The library of this process. ``ETHA_NATIVE=0`` asks for Python."""
    from etha.native.build import LIBRARY

    library = open_library(LIBRARY) if native_allowed() else None
    return library or PythonLibrary()
