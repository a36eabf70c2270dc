"""Does what executor.c does in Python and NumPy, where there is no compiled library. Members of both kinds go together.

Memory ordering. Words are read and written by single machine instructions, because they are aligned. Python has no
atomic operations, so the kernel performs them: FUTEX_WAKE_OP adds to a word as one step and is a full barrier on every
processor. It counts the sleepers, changes bells, and is the fence between "write my word" and "read yours". On x86
stores become visible in their order and loads are not reordered; elsewhere a fence stands before each post and after
each wait.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etha.errors import GroupError
from etha.native.fallback_streams import PythonStreams, streams_of
from etha.native.structs import (
    ALL,
    BELL,
    CALL_AT,
    CLAIM,
    CLAIM_LOCK,
    COMMON_BYTES,
    FLAGS_AT,
    GAVE_UP,
    HAS_SPLITS,
    HEADER,
    ITEMSIZE,
    POSTED,
    RING_LINES,
    SLEEPING,
    SPLITS_AT,
    DtypeCode,
    EarlyMessage,
    GroupMemory,
    MessageKind,
    ReduceCode,
    RingLinks,
    RunArguments,
    RunResult,
    StepKind,
    StreamEnd,
    StreamTable,
    partial_bytes,
)

#: Number of the system call futex by machine.
SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "loongarch64": 98}
FUTEX_TRYLOCK_PI, FUTEX_WAKE_OP, FUTEX_WAIT_BITSET = 8, 5, 9
FUTEX_OP_ADD = 1 << 28
EVERYBODY = 0x7FFFFFFF
#: Elements that are reduced at once, and bytes that are copied at once; between them the stop word is read.
BLOCK, CHUNK = 1 << 16, 1 << 20

DTYPES: dict[int, Any] = {
    DtypeCode.F16: np.float16,
    DtypeCode.BF16: np.uint16,
    DtypeCode.F32: np.float32,
    DtypeCode.F64: np.float64,
    DtypeCode.U8: np.uint8,
    DtypeCode.I8: np.int8,
    DtypeCode.I16: np.int16,
    DtypeCode.I32: np.int32,
    DtypeCode.I64: np.int64,
    DtypeCode.BOOL: np.uint8,
}


def _least(a: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """As the library has it: of equal ones (0 and -0) the first, and a NaN before anything else."""
    return np.where((x != x) | (x < a), x, a)


def _most(a: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    return np.where((x != x) | (x > a), x, a)


COMBINE: dict[int, Callable[..., Any]] = {
    ReduceCode.SUM: np.add,
    ReduceCode.AVG: np.add,
    ReduceCode.PREMUL_SUM: np.add,
    ReduceCode.PRODUCT: np.multiply,
    ReduceCode.MIN: _least,
    ReduceCode.MAX: _most,
    ReduceCode.BAND: np.bitwise_and,
    ReduceCode.BOR: np.bitwise_or,
    ReduceCode.BXOR: np.bitwise_xor,
}
#: What a reduction of bools is: 0 and 1 are added as "any" and multiplied as "all".
FOR_BOOL: dict[int, ReduceCode] = {
    ReduceCode.SUM: ReduceCode.BOR,
    ReduceCode.PRODUCT: ReduceCode.BAND,
    ReduceCode.MIN: ReduceCode.BAND,
    ReduceCode.MAX: ReduceCode.BOR,
    ReduceCode.BAND: ReduceCode.BAND,
    ReduceCode.BOR: ReduceCode.BOR,
    ReduceCode.BXOR: ReduceCode.BXOR,
}
FLOATS = (DtypeCode.F16, DtypeCode.BF16, DtypeCode.F32, DtypeCode.F64)
REDUCES = (StepKind.REDUCE, StepKind.PARTIAL, StepKind.COMBINE, StepKind.GROUPED)


class _Memory:
    """Bytes at an address, as NumPy sees them."""

    def __init__(self, address: int, count: int, dtype: Any) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


def _array(address: int, count: int, dtype: Any = np.uint8) -> NDArray[Any]:
    return np.asarray(_Memory(address, count, dtype))


def _u64(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _u32(address: int) -> int:
    return int(ctypes.c_uint32.from_address(address).value)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class PythonLibrary:
    """The same calls as the compiled library's."""

    name = "python"

    def __init__(self, machine: str = "") -> None:
        machine = machine or platform.machine()
        if machine not in SYS_FUTEX:
            raise GroupError(f"groups need the compiled library on {machine}: run python -m etha.native.build")
        self._number = SYS_FUTEX[machine]
        self._ordered = machine == "x86_64"
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._nothing = ctypes.c_uint32(0)

    # ---- words ----

    def _futex(self, address: int, operation: int, value: int, timeout: Any, address2: int | None, value3: int) -> int:
        """0 or the errno."""
        done = self._syscall(
            ctypes.c_long(self._number),
            ctypes.c_void_p(address),
            ctypes.c_int(operation),
            ctypes.c_uint32(value),
            timeout,
            ctypes.c_void_p(address2),
            ctypes.c_uint32(value3),
        )
        return ctypes.get_errno() if done < 0 else 0

    def _add(self, address: int, number: int, wake: int = 0) -> None:
        """Add atomically, then wake that many sleepers; a full barrier."""
        operation = FUTEX_OP_ADD | (number & 0xFFF) << 12
        self._futex(address, FUTEX_WAKE_OP, wake, ctypes.c_void_p(0), address, operation)

    def fence(self) -> None:
        self._add(ctypes.addressof(self._nothing), 0)

    def _ring_others(self, memory: GroupMemory, ranks: Iterator[int] | range) -> None:
        self.fence()
        for r in ranks:
            if r != memory.rank and _u32(int(memory.pages[r]) + SLEEPING):
                self.ring(int(memory.pages[r]))
        if memory.streams is not None:
            streams_of(memory).wake()

    def ring(self, page: int) -> None:
        self._add(page + BELL, 1, EVERYBODY)

    def stop(self, memory: GroupMemory, reason: int) -> None:
        memory.stop_word[0] = reason
        self.ring(int(memory.pages[memory.rank]))

    def give_up(self, memory: GroupMemory, call_number: int) -> None:
        word = ctypes.c_uint64.from_address(int(memory.pages[memory.rank]) + GAVE_UP)
        word.value = word.value or call_number + 1
        self._ring_others(memory, range(memory.size))

    def claim_cause(self, page0: int, rank: int) -> int | None:
        if self._futex(page0 + CLAIM_LOCK, FUTEX_TRYLOCK_PI, 0, ctypes.c_void_p(0), None, 0) == 0:
            ctypes.c_uint64.from_address(page0 + CLAIM).value = rank + 1
        claimed = _u64(page0 + CLAIM)
        return claimed - 1 if claimed else None

    # ---- waiting ----

    def _has_posted(self, page: int, phase: int) -> bool:
        posted = _u64(page + POSTED) >= phase
        if posted and not self._ordered:
            self.fence()
        return posted

    def _wait_until(
        self, memory: GroupMemory, deadline: int, slice_ms: int, look: Callable[[], RunResult | bool]
    ) -> RunResult:
        """``look`` returns a result, True if bytes have moved, or False."""
        own = int(memory.pages[memory.rank])
        slice_end = time.monotonic_ns() + slice_ms * 1_000_000 if slice_ms else 0
        until = min((x for x in (deadline, slice_end) if x), default=0)
        found = look()
        while found is True or found is False:
            now = time.monotonic_ns()
            if memory.stop_word[0]:
                return RunResult.STOPPED
            if until and now >= until:
                return RunResult.TIMEOUT if deadline and now >= deadline else RunResult.AGAIN
            seen = _u32(own + BELL)
            self._add(own + SLEEPING, 1)
            try:
                found, slept = look(), 0
                if found is False and not memory.stop_word[0]:
                    slept = self._sleep(own, seen, until)
            finally:
                self._add(own + SLEEPING, -1)
            if found is False:
                found = look()
            if slept == errno.EINTR and (found is True or found is False):
                return RunResult.AGAIN
        return RunResult(found)

    def _sleep(self, own: int, seen: int, until: int) -> int:
        at = ctypes.byref(_Timespec(until // 10**9, until % 10**9)) if until else ctypes.c_void_p(0)
        return self._futex(own + BELL, FUTEX_WAIT_BITSET, seen, at, None, 0xFFFFFFFF)

    def _has_given_up(self, page: int, call_number: int) -> bool:
        at = _u64(page + GAVE_UP)
        return at != 0 and at - 1 <= call_number

    # ---- streams ----

    def open_streams(self, table: StreamTable) -> None:
        table.private = PythonStreams(self, table)
        table.memory.streams = table

    def serve_streams(self, table: StreamTable) -> None:
        streams_of(table.memory).serve()

    def close_streams(self, table: StreamTable) -> None:
        table.struct.closing = 1
        self._wake_streams(table.memory)

    def tell_cause(self, table: StreamTable) -> None:
        table.struct.cause_ready = 1
        self._wake_streams(table.memory)

    def open_sockets(self, table: StreamTable) -> list[int]:
        return [t.fd for t in streams_of(table.memory).streams.values() if t.fd >= 0]

    def stream_end(self, table: StreamTable, rank: int) -> tuple[StreamEnd, int]:
        stream = streams_of(table.memory).streams[rank]
        return stream.ended, stream.error

    def _wake_streams(self, memory: GroupMemory) -> None:
        if memory.streams is not None:
            self.fence()
            streams_of(memory).wake()

    def _send(self, args: RunArguments, step: Any) -> RunResult:
        memory, spaces, peer = args.memory, args.kept[2], int(step["n"])
        if memory.streams is None or peer >= memory.size or not memory.streams.far[peer]:
            return RunResult.INVALID
        data = int(spaces[step["src_space"]]) + int(step["src"])
        at = int(spaces[step["dst_space"]]) + int(step["dst"]) - int(memory.pages[memory.rank])
        streams_of(memory).push(peer, data, at, int(step["count"]))
        return RunResult.DONE

    def _flush(self, args: RunArguments) -> RunResult:
        memory = args.memory
        if memory.streams is None:
            return RunResult.INVALID
        streams = streams_of(memory)
        result = self._wait_until(
            memory,
            args.deadline_ns,
            args.slice_ms,
            lambda: False if streams.unsent() else RunResult.DONE,
        )
        if result is not RunResult.TIMEOUT:
            return result
        for r in streams.unsent():
            _note_failed(args, r)
        return RunResult.TIMEOUT

    def withdraw(self, table: StreamTable) -> None:
        streams_of(table.memory).withdraw()

    # ---- steps ----

    def run(self, args: RunArguments) -> RunResult:
        memory, steps = args.memory, args.kept[0]
        args.failed_rank = ALL
        if memory.stop_word[0]:
            return RunResult.STOPPED
        while args.next < len(steps):
            result = self._step(args, steps[args.next])
            if result is not RunResult.DONE:
                return result
            args.next += 1
        self.fence()
        if memory.stop_word[0]:
            return RunResult.STOPPED
        return RunResult.GAVE_UP if self._find_given_up(args) else RunResult.DONE

    def _step(self, args: RunArguments, step: Any) -> RunResult:
        kind = int(step["kind"])
        if kind == StepKind.COPY:
            return self._copy(args, step)
        if kind in REDUCES:
            return self._reduce(args, step)
        if kind == StepKind.POST:
            return self._post(args, int(step["count"]))
        if kind == StepKind.SEND:
            return self._send(args, step)
        if kind == StepKind.FLUSH:
            return self._flush(args)
        if kind == StepKind.WAIT:
            return self._wait(args, int(step["count"]), int(step["src_space"]))
        return self._match(args) if kind == StepKind.MATCH else RunResult.INVALID

    def _post(self, args: RunArguments, phase: int) -> RunResult:
        memory = args.memory
        if not self._ordered:
            self.fence()
        ctypes.c_uint64.from_address(int(memory.pages[memory.rank]) + POSTED).value = args.phase_base + phase
        self._ring_others(memory, range(memory.size))
        return RunResult.DONE

    def _wait(self, args: RunArguments, phase: int, rank: int) -> RunResult:
        memory = args.memory
        phase += args.phase_base
        ranks = [r for r in range(memory.size) if r != memory.rank and rank in (ALL, r)]
        pages = [int(memory.pages[r]) for r in ranks]

        def is_missing() -> bool:
            return not all(self._has_posted(page, phase) for page in pages)

        def look() -> RunResult | bool:
            if not is_missing():
                return RunResult.DONE
            if not self._find_given_up(args):
                return False
            if is_missing():  # read again, because a member that posted and then gave up has posted
                return RunResult.GAVE_UP
            args.failed_rank = ALL
            return RunResult.DONE

        result = self._wait_until(memory, args.deadline_ns, args.slice_ms, look)
        if result is not RunResult.TIMEOUT:
            return result
        for r, page in zip(ranks, pages, strict=True):
            if not self._has_posted(page, phase):
                _note_failed(args, r)
        return RunResult.DONE if args.failed_rank == ALL else result

    def _find_given_up(self, args: RunArguments) -> bool:
        """Note who has given this call up, which therefore fails for everybody."""
        for r, page in enumerate(args.memory.pages):
            if r != args.memory.rank and self._has_given_up(int(page), args.call_number):
                _note_failed(args, r)
        return bool(args.failed_rank != ALL)

    def _match(self, args: RunArguments) -> RunResult:
        memory = args.memory
        size, group = memory.size, memory.struct
        at = group.descriptor_offset + args.call_number % 2 * group.descriptor_stride
        slots = [ctypes.string_at(int(page) + at, SPLITS_AT + 16 * size) for page in memory.pages]
        own = slots[memory.rank]
        flags = int.from_bytes(own[FLAGS_AT:CALL_AT], "little")
        has_splits = flags & HAS_SPLITS
        splits = [np.frombuffer(slot, np.uint64, 2 * size, SPLITS_AT) for slot in slots]
        mine = splits[memory.rank]
        for r, slot in enumerate(slots):
            same = (
                slot[:COMMON_BYTES] == own[:COMMON_BYTES] and slot[CALL_AT : CALL_AT + 8] == own[CALL_AT : CALL_AT + 8]
            )
            if same and has_splits:
                other = splits[r]
                same = bool(mine[size + r] == other[memory.rank] and mine[r] == other[size + memory.rank])
            if not same:
                _note_failed(args, r)
            flags &= int.from_bytes(slot[FLAGS_AT:CALL_AT], "little")
        args.flags_all = flags
        return RunResult.DONE if args.failed_rank == ALL else RunResult.MISMATCH

    def _copy(self, args: RunArguments, step: Any) -> RunResult:
        spaces = args.kept[2]
        dst = int(spaces[step["dst_space"]]) + int(step["dst"])
        src = int(spaces[step["src_space"]]) + int(step["src"])
        count = int(step["count"])
        for at in range(0, count, CHUNK):
            if at and args.memory.stop_word[0]:
                return RunResult.STOPPED
            ctypes.memmove(dst + at, src + at, min(CHUNK, count - at))
        return RunResult.DONE

    def _reduce(self, args: RunArguments, step: Any) -> RunResult:
        kind, dtype, op, n, count = int(step["kind"]), args.dtype, args.op, int(step["n"]), int(step["count"])
        if not _has_meaning(dtype, op) or not 0 < n <= 1024:
            return RunResult.INVALID
        wide = partial_bytes(dtype, op)
        if kind == StepKind.GROUPED and not wide:
            kind = StepKind.REDUCE
        if kind != StepKind.REDUCE and not wide:
            return RunResult.INVALID
        spaces = args.kept[2]
        table = args.kept[1][int(step["src"]) : int(step["src"]) + n]
        src = [int(spaces[s["space"]]) + int(s["offset"]) for s in table]
        dst = int(spaces[step["dst_space"]]) + int(step["dst"])
        element = np.dtype(DTYPES[dtype])
        between = np.dtype(np.float32) if wide > element.itemsize else element
        given = between if kind == StepKind.COMBINE else element
        made = between if kind == StepKind.PARTIAL else element
        factor, divisor = args.factor, args.divisor or n
        hosts = [int(s["host"]) for s in table]
        for at in range(0, count, BLOCK):
            if at and args.memory.stop_word[0]:
                return RunResult.STOPPED
            m = min(BLOCK, count - at)
            parts = [_array(address + at * given.itemsize, m, given) for address in src]
            if kind == StepKind.PARTIAL:
                result = partial_arrays(dtype, op, parts, factor=factor)
            elif kind == StepKind.COMBINE:
                result = combine_arrays(dtype, op, parts, divisor=divisor)
            elif kind == StepKind.GROUPED:
                each = [[parts[i] for i in range(n) if hosts[i] == host] for host in dict.fromkeys(hosts)]
                sums = [partial_arrays(dtype, op, those, factor=factor) for those in each]
                result = combine_arrays(dtype, op, sums, divisor=divisor)
            else:
                result = reduce_arrays(dtype, op, parts, factor=factor, divisor=divisor)
            _array(dst + at * made.itemsize, m, made)[:] = result
        return RunResult.DONE

    # ---- point to point ----

    def kick(self, links: RingLinks) -> None:
        links.struct.kick = 1
        self.ring(int(links.memory.pages[links.memory.rank]))

    def progress(self, links: RingLinks, messages: NDArray[np.void], *, slice_ms: int = 0) -> RunResult:
        links.point_at(messages, slice_ms)
        memory = links.memory
        if memory.stop_word[0]:
            return RunResult.STOPPED
        pending = [m for m in messages if m["status"] == RunResult.AGAIN]
        deadline = min((int(m["deadline_ns"]) for m in pending if m["deadline_ns"] > 0), default=0)
        turn = _Turn(self, links, pending)
        result = self._wait_until(memory, deadline, slice_ms, turn.look)
        if result is not RunResult.TIMEOUT:
            return result
        for m in pending:
            if m["status"] == RunResult.AGAIN and 0 < m["deadline_ns"] <= deadline:
                m["status"] = RunResult.TIMEOUT
        return RunResult.DONE


class _Turn:
    """One call of ``progress``: the messages that were pending when it began."""

    def __init__(self, library: PythonLibrary, links: RingLinks, messages: list[Any]) -> None:
        self.library, self.links, self.memory, self.messages = library, links, links.memory, messages
        self.ring_bytes = int(links.memory.struct.ring_bytes)
        self.finished = 0
        self.touched: set[int] = set()

    def look(self) -> RunResult | bool:
        self.finished, moved, busy = 0, False, set()
        self.take_early()
        for peer in range(self.memory.size):
            if peer != self.memory.rank:
                moved |= self.receive_from(peer)
        for m in self.messages:
            if m["status"] != RunResult.AGAIN:
                continue
            if self.is_impossible(m):
                m["status"] = RunResult.INVALID
            elif m["kind"] == MessageKind.SEND and int(m["peer"]) not in busy:
                moved |= self.send(m)
                if m["status"] == RunResult.AGAIN:
                    busy.add(int(m["peer"]))
            if m["status"] == RunResult.AGAIN:
                self.check_given_up(m)
            else:
                self.finished += 1
        if self.touched:
            self.library._ring_others(self.memory, iter(self.touched))
            self.touched = set()
        if self.finished:
            return RunResult.DONE
        if self.links.struct.kick:
            self.links.struct.kick = 0
            return RunResult.AGAIN
        return moved

    def ring_of(self, owner: int, destination: int) -> int:
        offset = int(self.memory.struct.ring_offset) + destination * (RING_LINES + self.ring_bytes)
        return int(self.memory.pages[owner]) + offset

    def is_impossible(self, m: Any) -> bool:
        if m["peer"] == ALL:
            return bool(m["kind"] != MessageKind.RECEIVE)
        if m["peer"] >= self.memory.size or m["peer"] == self.memory.rank:
            return True
        if m["kind"] == MessageKind.RECEIVE:
            return bool(self.links.links[m["peer"]]["broken"])
        return bool(m["kind"] != MessageKind.SEND)

    def waiting_for(self, source: int) -> list[Any]:
        """The receives that a message of that source may fit."""
        return [
            m
            for m in self.messages
            if m["kind"] == MessageKind.RECEIVE
            and m["status"] == RunResult.AGAIN
            and not m["started"]
            and m["peer"] in (source, ALL)
        ]

    def finish(self, m: Any, source: int, nbytes: int, dtype: int) -> bool:
        m["source"], m["got_bytes"], m["got_dtype"] = source, nbytes, dtype
        fits = bool(m["nbytes"] == nbytes and m["dtype"] == dtype)
        m["status"] = RunResult.DONE if fits else RunResult.MISMATCH
        self.finished += 1
        return fits

    def take_early(self) -> None:
        for early in [e for e in self.links.early if len(e.data) == e.nbytes]:
            m = next((m for m in self.waiting_for(early.source) if m["tag"] == early.tag), None)
            if m is None:
                continue
            if self.finish(m, early.source, early.nbytes, early.dtype):
                ctypes.memmove(int(m["data"]), bytes(early.data), early.nbytes)
            self.links.early.remove(early)

    def begin(self, link: Any, source: int, header: tuple[int, ...]) -> bool:
        """Decide where the next message goes. False: it stays in the ring."""
        tag, nbytes, sequence, dtype, _ = header
        waiting = self.waiting_for(source)
        if sequence != link["received"]:
            link["broken"] = 1
            return False
        found = next((m for m in waiting if m["tag"] == tag), None)
        if found is not None:
            found["source"] = source
            if found["nbytes"] == nbytes and found["dtype"] == dtype:
                found["started"], link["in_state"] = 1, 1
            else:
                self.finish(found, source, nbytes, dtype)
                link["in_state"] = 3
        else:
            used = sum(48 + e.nbytes for e in self.links.early)
            if not waiting or used + 48 + nbytes > len(self.links.aside):
                return False
            self.links.early.append(EarlyMessage(source=source, tag=tag, nbytes=nbytes, dtype=dtype, data=bytearray()))
            link["in_state"] = 2
        link["in_left"] = nbytes
        link["received"] += 1
        return True

    def take_bytes(self, link: Any, source: int, ring: int, tail: int, available: int) -> int:
        """Take what there is of the current message; the number of bytes."""
        n = min(available, int(link["in_left"]))
        link["in_left"] -= n
        target = None
        if link["in_state"] == 1:
            current = (
                m
                for m in self.messages
                if m["kind"] == MessageKind.RECEIVE
                and m["status"] == RunResult.AGAIN
                and m["started"]
                and m["source"] == source
            )
            target = next(current, None)
        if target is not None:
            self.read(ring, tail, int(target["data"]) + int(target["done"]), n)
            target["done"] += n
        if link["in_state"] == 2:
            early = next((e for e in self.links.early if e.source == source and len(e.data) < e.nbytes), None)
            if early is not None:
                piece = ctypes.create_string_buffer(max(n, 1))
                self.read(ring, tail, ctypes.addressof(piece), n)
                early.data += piece.raw[:n]
        if link["in_left"]:
            return n
        if target is not None:
            self.finish(target, source, int(target["nbytes"]), int(target["dtype"]))
        if link["in_state"] == 2:
            self.take_early()
        link["in_state"] = 0
        return n

    def receive_from(self, source: int) -> bool:
        link = self.links.links[source]
        ring = self.ring_of(source, self.memory.rank)
        head, tail = _u64(ring), _u64(ring + 64)
        begin = tail
        if not self.library._ordered:
            self.library.fence()
        if not 0 <= head - tail <= self.ring_bytes:
            link["broken"] = 1
        while not link["broken"]:
            if link["in_state"] == 0:
                if head - tail < HEADER.size:
                    break
                piece = ctypes.create_string_buffer(HEADER.size)
                self.read(ring, tail, ctypes.addressof(piece), HEADER.size)
                if not self.begin(link, source, HEADER.unpack(piece.raw)):
                    break
                tail += HEADER.size
            tail += self.take_bytes(link, source, ring, tail, head - tail)
            if link["in_left"]:
                break
        if tail == begin:
            return False
        if not self.library._ordered:
            self.library.fence()
        ctypes.c_uint64.from_address(ring + 64).value = tail
        self.touched.add(source)
        return True

    def send(self, m: Any) -> bool:
        peer = int(m["peer"])
        link, ring = self.links.links[peer], self.ring_of(self.memory.rank, peer)
        head = begin = _u64(ring)
        room = self.ring_bytes - (head - _u64(ring + 64))
        if not 0 <= room <= self.ring_bytes or (not m["started"] and link["out_left"]):
            m["status"] = RunResult.INVALID
            return False
        if not m["started"]:
            if room < HEADER.size:
                return False
            header = HEADER.pack(int(m["tag"]), int(m["nbytes"]), int(link["sent"]), int(m["dtype"]), 0)
            piece = ctypes.create_string_buffer(header, HEADER.size)
            self.write(ring, head, ctypes.addressof(piece), HEADER.size)
            head, room = head + HEADER.size, room - HEADER.size
            m["started"], link["out_left"] = 1, m["nbytes"]
            link["sent"] += 1
        n = min(room, int(link["out_left"]), self.ring_bytes // 4)
        self.write(ring, head, int(m["data"]) + int(m["done"]), n)
        m["done"] += n
        link["out_left"] -= n
        head += n
        if head == begin:
            return False
        if not self.library._ordered:
            self.library.fence()
        ctypes.c_uint64.from_address(ring).value = head
        if not link["out_left"]:
            m["status"] = RunResult.DONE
        self.touched.add(peer)
        return True

    def check_given_up(self, m: Any) -> None:
        receive = m["kind"] == MessageKind.RECEIVE
        peer = int(m["source"] if m["started"] and receive else m["peer"])
        for r in range(self.memory.size):
            if r == self.memory.rank or peer not in (ALL, r):
                continue
            if not self.library._has_given_up(int(self.memory.pages[r]), int(m["call_number"])):
                continue
            if receive and m["status"] == RunResult.AGAIN:
                self.receive_from(r)
            if m["status"] == RunResult.AGAIN:
                m["status"], m["source"] = RunResult.GAVE_UP, r
                self.finished += 1

    def read(self, ring: int, at: int, to: int, n: int) -> None:
        begin = at % self.ring_bytes
        first = min(n, self.ring_bytes - begin)
        ctypes.memmove(to, ring + RING_LINES + begin, first)
        ctypes.memmove(to + first, ring + RING_LINES, n - first)

    def write(self, ring: int, at: int, source: int, n: int) -> None:
        begin = at % self.ring_bytes
        first = min(n, self.ring_bytes - begin)
        ctypes.memmove(ring + RING_LINES + begin, source, first)
        ctypes.memmove(ring + RING_LINES, source + first, n - first)


def _note_failed(args: RunArguments, rank: int) -> None:
    if args.failed_rank == ALL:
        args.failed_rank = rank
    args.failed_ranks[rank] = 1


def _has_meaning(dtype: int, op: int) -> bool:
    if dtype == DtypeCode.BOOL:
        return op in FOR_BOOL
    return dtype in DTYPES and op in COMBINE and (dtype not in FLOATS or op <= ReduceCode.MAX)


def _to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even; a NaN stays one."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | np.uint32(0x40), rounded).astype(np.uint16)


def reduce_arrays(dtype: int, op: int, parts: list[NDArray[Any]], *, factor: float, divisor: int) -> NDArray[Any]:
    """The sources combined one after the other, as executor.c does: 16-bit floats in float32, rounded once."""
    with np.errstate(all="ignore"):
        if dtype == DtypeCode.BOOL:
            op = FOR_BOOL[op]
            parts = [(x != 0).astype(np.uint8) for x in parts]
        if dtype in (DtypeCode.F16, DtypeCode.BF16):
            parts = _float32(dtype, parts)
        if dtype not in FLOATS and op == ReduceCode.AVG:
            parts = [x.astype(np.int64) for x in parts]
        scale = op == ReduceCode.PREMUL_SUM
        by = parts[0].dtype.type(factor) if dtype in FLOATS else _wrapped(factor, parts[0].dtype)
        total = parts[0] * by if scale else parts[0]
        for x in parts[1:]:
            total = COMBINE[op](total, x * by if scale else x)
        if op == ReduceCode.AVG:
            if dtype in FLOATS:
                total = total / total.dtype.type(divisor)
            else:
                quotient = total // divisor  # rounds down; the library truncates
                total = quotient + ((total < 0) & (quotient * divisor != total))
        return _to_bf16(total) if dtype == DtypeCode.BF16 else total.astype(DTYPES[dtype])


def partial_arrays(dtype: int, op: int, parts: list[NDArray[Any]], *, factor: float) -> NDArray[Any]:
    """What PARTIAL makes of sources: of 16-bit floats that are summed it is float32."""
    op = ReduceCode.SUM if op == ReduceCode.AVG else op
    if partial_bytes(dtype, op) > ITEMSIZE[dtype]:
        widened = _float32(dtype, parts)
        return reduce_arrays(DtypeCode.F32, op, widened, factor=factor, divisor=1)
    return reduce_arrays(dtype, op, parts, factor=factor, divisor=1)


def combine_arrays(dtype: int, op: int, parts: list[NDArray[Any]], *, divisor: int) -> NDArray[Any]:
    """What COMBINE makes of what PARTIAL made."""
    op = ReduceCode.SUM if op == ReduceCode.PREMUL_SUM else op
    if partial_bytes(dtype, op) > ITEMSIZE[dtype]:
        total = reduce_arrays(DtypeCode.F32, op, parts, factor=1.0, divisor=divisor)
        return _to_bf16(total) if dtype == DtypeCode.BF16 else _to_f16(total)
    return reduce_arrays(dtype, op, parts, factor=1.0, divisor=divisor)


def _float32(dtype: int, parts: list[NDArray[Any]]) -> list[NDArray[Any]]:
    if dtype == DtypeCode.F16:
        return [x.astype(np.float32) for x in parts]
    return [(x.astype(np.uint32) << np.uint32(16)).view(np.float32) for x in parts]


def _to_f16(x: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(all="ignore"):
        return x.astype(np.float16)


def _wrapped(factor: float, dtype: np.dtype[Any]) -> Any:
    whole = int(factor) if -(2.0**63) <= factor < 2.0**63 else 0
    return np.array(whole, np.int64).astype(dtype)[()]
