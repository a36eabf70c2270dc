"""What Python and executor.c share: arrays of steps and sources, codes, the structs of a call, what a library offers.

A call is an array of steps over numbered spaces. ``spaces[k]`` is the address at which space k begins; a step names
bytes by a space and an offset. The numbers below are also in executor.c.
"""

from __future__ import annotations

import ctypes
import enum
import os
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: COPY: ``count`` bytes from ``src_space + src`` to ``dst_space + dst``. REDUCE: ``count`` elements of ``n`` sources,
#: from index ``src`` of the source table, in that order, into the destination, which may be one of the sources exactly.
#: POST: the own phase becomes ``phase_base + count``. WAIT: until rank ``src_space`` (``ALL``: everybody) has posted
#: that phase. MATCH: compare the descriptors of all members. SEND: ``count`` bytes from ``src_space + src`` go to rank
#: ``n``, a member of another host, as those at ``dst_space + dst`` in the own memfd. FLUSH: until the kernel has all
#: that was to be sent. PARTIAL: a REDUCE whose results are ``partial_bytes`` long and are not divided yet; COMBINE: a
#: REDUCE of such results, which also divides; GROUPED: both at once, with the sources of one ``host`` side by side.
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
SOURCE = np.dtype([("space", "<u4"), ("host", "<u4"), ("offset", "<u8")])
#: The rank in a WAIT that means all others; also "no rank" in ``RunArguments.failed_rank``.
ALL = 0xFFFFFFFF

#: How long a small call may keep the interpreter's lock: as long as any thread that computes does. Less than a tick of
#: the kernel's clock (4 ms) costs more, because each sleep then sets a timer.
BRIEF_US = 5000

#: Where the words of a member lie in the first page of its memfd.
POSTED, GAVE_UP, BELL, SLEEPING, CLAIM, CLAIM_LOCK = 0, 64, 128, 132, 192, 200
#: A descriptor: common bytes that are equal on all ranks, flags, call number, then what each rank gives and takes.
COMMON_BYTES, FLAGS_AT, CALL_AT, SPLITS_AT = 128, 128, 136, 256
#: Flag of a descriptor: what I give each rank and take from it stands behind, and is compared.
HAS_SPLITS = 2


#: A message that is to be sent or received. Messages of one peer stand in the order in which they were asked for.
#: ``status`` is a RunResult, AGAIN as long as it is pending; ``peer`` of a receive may be ``ALL``. ``done`` and
#: ``started`` begin as 0 and belong to the library; ``source``, ``got_bytes`` and ``got_dtype`` say what came.
#: ``deadline_ns`` is of ``time.monotonic_ns()``, 0 for none. ``call_number`` is compared with the call at which a peer
#: gave up.
MESSAGE = np.dtype(
    [
        ("kind", "<u4"),
        ("peer", "<u4"),
        ("tag", "<u8"),
        ("data", "<u8"),
        ("nbytes", "<u8"),
        ("done", "<u8"),
        ("dtype", "<u4"),
        ("status", "<u4"),
        ("source", "<u4"),
        ("started", "<u4"),
        ("deadline_ns", "<i8"),
        ("call_number", "<u8"),
        ("got_bytes", "<u8"),
        ("got_dtype", "<u4"),
        ("pad", "<u4"),
    ]
)
#: What a member knows of its rings from and to one peer; private.
PEER_LINK = np.dtype(
    [
        ("sent", "<u8"),
        ("received", "<u8"),
        ("in_left", "<u8"),
        ("out_left", "<u8"),
        ("in_state", "<u4"),
        ("out_busy", "<u4"),
        ("touched", "<u4"),
        ("broken", "<u4"),
    ]
)
#: Head and tail of a ring, before its bytes; the header of a message: tag, bytes, sequence, dtype.
RING_LINES, HEADER = 128, struct.Struct("<QQQII")


def ring_length(ring_bytes: int) -> int:
    """How many bytes a ring takes in a memfd; those of all destinations follow each other."""
    return RING_LINES + ring_bytes


class StepKind(enum.IntEnum):
    COPY = 1
    REDUCE = 2
    POST = 3
    WAIT = 4
    MATCH = 5
    SEND = 6
    FLUSH = 7
    PARTIAL = 8
    COMBINE = 9
    GROUPED = 10


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


#: Bytes of an element by DtypeCode.
ITEMSIZE = (0, 2, 2, 4, 8, 1, 1, 2, 4, 8, 1)


def partial_bytes(dtype: int, op: int) -> int:
    """Bytes of an element between PARTIAL and COMBINE; 0 for an average of integers, which has none: its sum is wider.

    Sums of 16-bit floats are float32 there, so that they are rounded once.
    """
    if op == ReduceCode.AVG and dtype > DtypeCode.F64:
        return 0
    if dtype in (DtypeCode.F16, DtypeCode.BF16) and op < ReduceCode.MIN:
        return 4
    return ITEMSIZE[dtype]


class MessageKind(enum.IntEnum):
    SEND = 1
    RECEIVE = 2


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
        ("streams", ctypes.c_void_p),
    )
    streams: int | None


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
        #: Those to members of other hosts, if there are any.
        self.streams: StreamTable | None = None


class StreamEnd(enum.IntEnum):
    """Why a stream has ended: the other side closed it, an error of the socket, no word for three beats, a frame that
    makes no sense, or this side has closed it."""

    OPEN = 0
    END_OF_STREAM = 1
    BROKEN = 2
    SILENT = 3
    NONSENSE = 4
    LEFT = 5


class StreamsStruct(ctypes.Structure):
    """``etha_streams`` of streams.c; made by ``StreamTable``."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("streams", ctypes.c_void_p),
        ("far", ctypes.c_void_p),
        ("wake_fd", ctypes.c_int32),
        ("claim_fd", ctypes.c_int32),
        ("asleep", ctypes.c_uint32),
        ("cause_ready", ctypes.c_uint32),
        ("closing", ctypes.c_uint32),
        ("beat_ms", ctypes.c_uint32),
        ("cause_offset", ctypes.c_uint64),
        ("cause_bytes", ctypes.c_uint64),
        ("flushing", ctypes.c_uint32),
        ("withdrawn", ctypes.c_uint32),
        ("is_withdrawn", ctypes.c_uint32),
    )
    asleep: int
    cause_ready: int
    closing: int


class StreamTable:
    """A member's streams: one connected TCP socket for each member of another host.

    ``sockets`` and ``deaths``, by rank: descriptors of sockets, which the library closes, and of eventfds that become
    readable when a stream has ended. ``library.open_streams`` completes it.
    """

    def __init__(
        self,
        memory: GroupMemory,
        sockets: dict[int, int],
        deaths: dict[int, int],
        *,
        cause_offset: int,
        cause_bytes: int,
        beat_ms: int = 1000,
    ) -> None:
        self.memory, self.sockets, self.deaths = memory, sockets, deaths
        self.far = np.zeros(memory.size, dtype=np.uint8)
        self.far[list(sockets)] = 1
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        #: Becomes readable when rank 0 has said whose cause was the first.
        self.claim_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.struct = StreamsStruct(
            group=memory.address,
            far=self.far.ctypes.data,
            wake_fd=self.wake_fd,
            claim_fd=self.claim_fd,
            beat_ms=beat_ms,
            cause_offset=cause_offset,
            cause_bytes=cause_bytes,
        )
        #: What the library keeps.
        self.private: Any = None

    def close(self) -> None:
        """Close what is no socket. Nobody serves or wakes the streams any more."""
        os.close(self.wake_fd)
        os.close(self.claim_fd)


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
        ("brief_us", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )
    next: int
    brief_us: int
    failed_rank: int
    flags_all: int
    #: What the addresses above point into, kept as long as the arguments.
    kept: tuple[NDArray[np.void], NDArray[np.void], NDArray[np.uint64]]
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
    brief_us: int = 0,
) -> RunArguments:
    """The arguments of one run. ``deadline_ns`` is of ``time.monotonic_ns()``, 0 for none; ``slice_ms`` is after how
    long a run that still waits returns AGAIN, 0 for never; ``divisor`` 0 means the number of sources. For its first
    ``brief_us`` a run keeps the interpreter's lock, even while it waits. ``BRIEF_US`` suits small calls for which the
    caller waits anyway, 0 large ones and those that run beside other work."""
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
        brief_us=brief_us,
        deadline_ns=deadline_ns,
        failed=failed.ctypes.data,
        failed_rank=ALL,
    )
    args.kept, args.memory, args.failed_ranks = (steps, sources, spaces), memory, failed
    return args


class ProgressArguments(ctypes.Structure):
    """``etha_progress_args`` of executor.c; kept by ``RingLinks``."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("links", ctypes.c_void_p),
        ("messages", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("aside", ctypes.c_void_p),
        ("aside_bytes", ctypes.c_uint64),
        ("aside_used", ctypes.c_uint64),
        ("kick", ctypes.c_uint32),
        ("slice_ms", ctypes.c_uint32),
    )
    messages: int
    count: int
    aside_used: int
    kick: int
    slice_ms: int


@dataclass(slots=True, kw_only=True)
class EarlyMessage:
    """A message that the Python library has set aside."""

    source: int
    tag: int
    nbytes: int
    dtype: int
    data: bytearray


class RingLinks:
    """The point-to-point state of a member: one thread at a time may make progress with it.

    Messages for which nobody waits are set aside, up to ``aside_bytes``, if somebody waits for a later one.
    """

    def __init__(self, memory: GroupMemory, *, aside_bytes: int = 4 << 20) -> None:
        if memory.struct.ring_bytes < 4 * HEADER.size:
            raise ValueError(f"rings of {memory.struct.ring_bytes} bytes cannot hold messages")
        self.memory = memory
        self.links = np.zeros(memory.size, dtype=PEER_LINK)
        self.aside = np.empty(aside_bytes, dtype=np.uint8)
        #: What the Python library has set aside instead.
        self.early: list[EarlyMessage] = []
        self.struct = ProgressArguments(
            group=memory.address,
            links=self.links.ctypes.data,
            aside=self.aside.ctypes.data,
            aside_bytes=aside_bytes,
        )

    def point_at(self, messages: NDArray[np.void], slice_ms: int) -> None:
        """Set the messages of the next progress. They must stay until it has returned."""
        if messages.dtype != MESSAGE or not messages.flags.c_contiguous:
            raise TypeError(f"messages are an array of {messages.dtype}, not of MESSAGE without gaps")
        self.struct.messages, self.struct.count, self.struct.slice_ms = messages.ctypes.data, len(messages), slice_ms


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

    def progress(self, links: RingLinks, messages: NDArray[np.void], *, slice_ms: int = 0) -> RunResult:
        """Move messages (``MESSAGE``) until at least one that was pending has ended: DONE, its status says how.
        AGAIN: a signal, a kick, or the slice is over; STOPPED: the stop word."""

    def open_streams(self, table: StreamTable) -> None:
        """From now on what is posted, and all other words, goes to the members of other hosts, too."""

    def serve_streams(self, table: StreamTable) -> None:
        """Send and receive until ``close_streams``; a thread of its own calls it."""

    def close_streams(self, table: StreamTable) -> None:
        """Have ``serve_streams`` return once the others know the last words, or after one beat."""

    def withdraw(self, table: StreamTable) -> None:
        """A call has failed: when this returns, nothing of a tensor is read to be sent any more."""

    def tell_cause(self, table: StreamTable) -> None:
        """The own cause stands in the own memfd: all members of other hosts get it."""

    def open_sockets(self, table: StreamTable) -> list[int]:
        """The sockets that are open, for a forked child to close."""

    def stream_end(self, table: StreamTable, rank: int) -> tuple[StreamEnd, int]:
        """Why the stream to a rank has ended, and the error's number."""

    def kick(self, links: RingLinks) -> None:
        """Have a ``progress`` of another thread return AGAIN, because there are more messages."""
