"""What Python and executor.c share: arrays of steps and sources, codes, the structs of a call, what a library offers.

A call is an array of steps over numbered spaces. ``spaces[k]`` is the address at which space k begins; a step names
bytes by a space and an offset. The numbers below are also in executor.c.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: COPY: ``count`` bytes from ``src_space + src`` to ``dst_space + dst``. REDUCE: ``count`` elements of ``n`` sources,
#: from index ``src`` of the source table, in that order, into the destination, which may be one of the sources exactly.
#: POST: the own phase becomes ``phase_base + count``. WAIT: until rank ``src_space`` (``ALL``: everybody) has posted
#: that phase. MATCH: compare the descriptors of all members.
STEP = np.dtype(
    [
        ("kind", "<u4"),
        ("n", "<u4"),
        ("dst_space", "<u4"),
        ("src_space", "<u4"),
        ("dst", "<u8"),
        ("src", "<u8"),
        ("count", "<u8"),
    ]
)
SOURCE = np.dtype([("space", "<u4"), ("pad", "<u4"), ("offset", "<u8")])
#: The rank in a WAIT that means all others; also "no rank" in ``RunArguments.failed_rank``.
ALL = 0xFFFFFFFF

#: Where the words of a member lie in the first page of its memfd.
POSTED, GAVE_UP, BELL, SLEEPING, CLAIM, CLAIM_LOCK = 0, 64, 128, 132, 192, 200
#: A descriptor: common bytes that are equal on all ranks, flags, call number, then what each rank gives and takes.
COMMON_BYTES, FLAGS_AT, CALL_AT, SPLITS_AT = 128, 128, 136, 256
#: Flag of a descriptor: what I give each rank and take from it stands behind, and is compared.
HAS_SPLITS = 2


class StepKind(enum.IntEnum):
    COPY = 1
    REDUCE = 2
    POST = 3
    WAIT = 4
    MATCH = 5


class ReduceCode(enum.IntEnum):
    """How elements are combined. AVG divides the sum before it is rounded; PREMUL_SUM multiplies each element first."""

    SUM = 1
    AVG = 2
    PREMUL_SUM = 3
    PRODUCT = 4
    MIN = 5
    MAX = 6
    BAND = 7
    BOR = 8
    BXOR = 9


class DtypeCode(enum.IntEnum):
    F16 = 1
    BF16 = 2
    F32 = 3
    F64 = 4
    U8 = 5
    I8 = 6
    I16 = 7
    I32 = 8
    I64 = 9
    BOOL = 10


class RunResult(enum.IntEnum):
    """How a run ended. AGAIN: a signal came or the slice is over, call again with the same arguments."""

    DONE = 0
    AGAIN = 1
    TIMEOUT = 2
    STOPPED = 3
    GAVE_UP = 4
    MISMATCH = 5
    INVALID = 6


class GroupStruct(ctypes.Structure):
    """``etha_group`` of executor.c; made by ``GroupMemory``."""

    _fields_ = (
        ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("pages", ctypes.c_void_p),
        ("descriptor_offset", ctypes.c_uint64),
        ("descriptor_stride", ctypes.c_uint64),
        ("stop", ctypes.c_void_p),
        ("ring_offset", ctypes.c_uint64),
        ("ring_bytes", ctypes.c_uint64),
        ("spin_us", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )


class GroupMemory:
    """A member's view of its group: where each member's memfd is mapped in this process, and the own stop word.

    ``pages[r]`` is the address of rank r's mapping. The mappings must stay as long as a library uses this object.
    """

    def __init__(
        self,
        *,
        rank: int,
        pages: list[int],
        descriptor_offset: int = 4096,
        descriptor_stride: int = 0,
        ring_offset: int = 0,
        ring_bytes: int = 0,
        spin_us: int = 0,
    ) -> None:
        if not 0 <= rank < len(pages):
            raise ValueError(f"rank {rank} is none of {len(pages)} members")
        self.rank, self.size = rank, len(pages)
        self.pages = np.array(pages, dtype=np.uint64)
        self.stop_word = np.zeros(1, dtype=np.uint32)
        self.struct = GroupStruct(
            rank=rank,
            size=len(pages),
            pages=self.pages.ctypes.data,
            descriptor_offset=descriptor_offset,
            descriptor_stride=descriptor_stride,
            stop=self.stop_word.ctypes.data,
            ring_offset=ring_offset,
            ring_bytes=ring_bytes,
            spin_us=spin_us,
        )
        self.address = ctypes.addressof(self.struct)


class RunArguments(ctypes.Structure):
    """``etha_run_args`` of executor.c; made by ``run_arguments``. After a run ``next`` is the step that it stopped at,
    ``failed_rank`` the first rank to blame (``ALL``: none), ``flags_all`` the flags that all descriptors have."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("nsteps", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("sources", ctypes.c_void_p),
        ("spaces", ctypes.c_void_p),
        ("phase_base", ctypes.c_uint64),
        ("call_number", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("op", ctypes.c_uint32),
        ("factor", ctypes.c_double),
        ("divisor", ctypes.c_uint32),
        ("slice_ms", ctypes.c_uint32),
        ("deadline_ns", ctypes.c_int64),
        ("failed", ctypes.c_void_p),
        ("failed_rank", ctypes.c_uint32),
        ("flags_all", ctypes.c_uint32),
    )
    next: int
    failed_rank: int
    flags_all: int
    #: What the addresses above point into, kept as long as the arguments.
    kept: tuple[object, ...]
    memory: GroupMemory
    failed_ranks: NDArray[np.uint8]


def run_arguments(
    memory: GroupMemory,
    steps: NDArray[np.void],
    sources: NDArray[np.void],
    spaces: NDArray[np.uint64],
    *,
    phase_base: int,
    call_number: int,
    dtype: int = 0,
    op: int = 0,
    factor: float = 1.0,
    divisor: int = 0,
    deadline_ns: int = 0,
    slice_ms: int = 0,
) -> RunArguments:
    """The arguments of one run. ``deadline_ns`` is of ``time.monotonic_ns()``, 0 for none; ``slice_ms`` is after how
    long a run that still waits returns AGAIN, 0 for never; ``divisor`` 0 means the number of sources."""
    if steps.dtype != STEP or sources.dtype != SOURCE or spaces.dtype != np.uint64:
        raise TypeError(f"steps, sources, spaces have dtypes {steps.dtype}, {sources.dtype}, {spaces.dtype}")
    failed = np.zeros(memory.size, dtype=np.uint8)
    args = RunArguments(
        group=memory.address,
        steps=steps.ctypes.data,
        nsteps=len(steps),
        sources=sources.ctypes.data,
        spaces=spaces.ctypes.data,
        phase_base=phase_base,
        call_number=call_number,
        dtype=dtype,
        op=op,
        factor=factor,
        divisor=divisor,
        slice_ms=slice_ms,
        deadline_ns=deadline_ns,
        failed=failed.ctypes.data,
        failed_rank=ALL,
    )
    args.kept, args.memory, args.failed_ranks = (steps, sources, spaces), memory, failed
    return args


class NativeLibrary(Protocol):
    """What runs calls: the compiled library, or Python in its place."""

    #: "compiled" or "python".
    name: str

    def run(self, args: RunArguments) -> RunResult:
        """Run the steps from ``args.next``."""

    def ring(self, page: int) -> None:
        """Wake whoever sleeps on the bell of the member whose memfd is mapped at ``page``."""

    def stop(self, memory: GroupMemory, reason: int) -> None:
        """End this process's runs in ``memory`` with STOPPED; ``reason`` is not 0. From any thread."""

    def give_up(self, memory: GroupMemory, call_number: int) -> None:
        """Say to the others that this member takes no part in the call and later ones; their waits end."""

    def claim_cause(self, page0: int, rank: int) -> int | None:
        """The rank whose cause of failure is the group's first: ``rank`` itself if nobody was earlier, None if another
        one is just claiming. ``page0`` is where rank 0's memfd is mapped."""
