"""Carries out the calls of one configured group: in their order, one at a time, without the interpreter's lock.

    allreduce(...)  ->  submit(): queued, numbered  ->  the engine's thread, or the caller's own thread in wait()
                    ->  descriptor written, programs run by native.executor  ->  finish() of the work

A call that its caller waits for at once runs on the caller's thread, because handing it to another thread
costs more than a small call. An engine serves one epoch: after the first error every further call fails with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from etha import native
from etha.errors import GroupAbortedError, GroupError
from etha.groups import descriptor
from etha.groups.calls import FLOAT8, GroupCall, writing
from etha.groups.host import causes
from etha.groups.host.causes import Cause
from etha.groups.host.meeting import GroupPeer
from etha.groups.host.messages import Messages
from etha.groups.host.monitor import DeathMonitor
from etha.groups.host.places import OwnPlaces, PeerPlaces
from etha.groups.host.streams import Streams
from etha.groups.host.windows import CAUSE_BYTES, CAUSE_OFFSET, PLACES, SharedBlock
from etha.groups.schedule import (
    POINT_TO_POINT,
    REDUCTIONS,
    ROUND_BYTES,
    SEND,
    SMALL_BYTES,
    CallProgram,
    CallShape,
    CallStep,
    Kind,
    Spaces,
    Variant,
    is_small,
    match_program,
    program,
    sums_per_host,
)
from etha.groups.work import GroupWork
from etha.interruptible import holding, join
from etha.native.structs import CLAIM, FLAGS_AT

#: A run on the main thread comes back this often, because only there Python can act on a signal.
_SLICE_MS = 50
_STOP = 1
#: Seconds in which a run that was stopped ends: it finishes the piece that it copies.
_SETTLE = 5.0
#: How long a wait looks before it sleeps. Longer where each member may have a core of its own, because a core that
#: sleeps takes 50 to 100 us to come back; between hosts the thread of the streams needs it. The library does not look
#: while another member runs on the same core.
_SPIN_US, _SPIN_US_SHARED = 200, 20
#: Calls of at most so many bytes keep the interpreter's lock for a moment. They are mostly done before a thread that
#: waits for the lock would get it, and a call that has let go of it waits for 5 ms beside a busy thread.
_BRIEF_BYTES = 4 << 20
#: Flags of a descriptor beside those of descriptor.py: all members have the segments of the inputs mapped from an
#: earlier call; this member has just mapped those of all others.
_ALL_KNOWN, _MAPPED = 4, 8
#: How often a claim is tried while another member is in the middle of its own.
_CLAIM_TRIES = 1000

_DTYPES = {
    torch.float16: native.DtypeCode.F16,
    torch.bfloat16: native.DtypeCode.BF16,
    torch.float32: native.DtypeCode.F32,
    torch.float64: native.DtypeCode.F64,
    torch.uint8: native.DtypeCode.U8,
    torch.int8: native.DtypeCode.I8,
    torch.int16: native.DtypeCode.I16,
    torch.int32: native.DtypeCode.I32,
    torch.int64: native.DtypeCode.I64,
    torch.bool: native.DtypeCode.BOOL,
}
_DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    number: int
    call: GroupCall
    work: EngineWork
    timeout: float
    #: The segments in which its inputs lie, if others can read them there.
    inodes: frozenset[int] | None = None


class EngineWork(GroupWork):
    """The work of a call on an engine. A wait that ends early ends the group, because the call cannot be taken back."""

    def __init__(self, engine: Engine, call: GroupCall) -> None:
        super().__init__(call)
        self._engine = engine

    def expire(self, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        text = f"{self.call.describe()} on rank {self._engine.rank} had not ended after {seconds:g} s of wait()"
        self._engine.time_out(text, waited=True)
        self._end()

    def interrupt(self) -> None:
        self._engine.abort("interrupted by Ctrl-C")
        self._end()

    def _end(self) -> None:
        """The thread that carries the call out ends it, once it touches no tensor any more."""
        if not self._gate.wait(time.monotonic() + _SETTLE):
            self.finish(self._engine.error)


class Engine:
    """The members of one epoch and the calls between them."""

    def __init__(
        self,
        *,
        rank: int,
        block: SharedBlock,
        peers: dict[int, GroupPeer],
        timeout: float,
        epoch: int | None = None,
        name: str = "",
        hosts: tuple[int, ...] = (),
        by_host: bool = True,
        on_error: Callable[[GroupError], None] = lambda error: None,
    ) -> None:
        """Takes ``block`` and ``peers`` over; ``close()`` ends them. ``timeout``: seconds for each call. ``hosts``: the
        number of each rank's host. ``by_host``: members of one host are reduced before the hosts."""
        self.rank, self.size, self.epoch, self.name = rank, len(peers) + 1, epoch, name
        self.timeout = timeout
        self.error: GroupError | None = None
        self._on_error = on_error
        self._block, self._peers = block, peers
        self._blocks = [block if r == rank else peers[r].block for r in range(self.size)]
        self._layout = block.layout
        self._library = native.load()
        far = {r: peer.stream for r, peer in peers.items() if peer.stream is not None}
        #: The number of each rank's host; () if all are on one.
        self._hosts = hosts if far else ()
        self._by_host = by_host and bool(far)
        self._memory = native.GroupMemory(
            rank=rank,
            pages=[b.address for b in self._blocks],
            descriptor_offset=self._layout.descriptors,
            descriptor_stride=self._layout.descriptor_stride,
            ring_offset=self._layout.rings,
            ring_bytes=self._layout.ring,
            spin_us=_SPIN_US_SHARED if far or self.size > len(os.sched_getaffinity(0)) else _SPIN_US,
        )
        even = [b.window(w) for b in self._blocks for w in (0, 1)]
        odd = [b.window(w) for b in self._blocks for w in (1, 0)]
        self._windows = (even, odd)
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._phase = 0
        self._odd = 0
        #: Number of the next call. Number 0 is the meeting after configure.
        self._next = 1
        self._queue: deque[_Item] = deque()
        #: Held while the queue or the error changes.
        self._lock = threading.Lock()
        #: Held by the thread that carries out a call.
        self._turn = threading.RLock()
        #: The thread that has it.
        self._carrier: int | None = None
        #: The running call has the deadline of a wait, which is earlier than its own.
        self._waits = False
        #: Not a Semaphore: an interrupt in the middle of its ``release()`` would keep its lock for ever.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._running = -1
        self._own_places = OwnPlaces()
        #: False once a member could not map another's segment, because it cannot next time, either.
        self._in_place = not far
        self._places = {} if far else {peer.rank: PeerPlaces(peer.pidfd) for peer in peers.values()}
        self._streams = (
            Streams(
                self._library,
                self._memory,
                {r: sock.detach() for r, sock in far.items()},
                {r: peers[r].pidfd for r in far},
                cause_offset=CAUSE_OFFSET,
                cause_bytes=CAUSE_BYTES,
            )
            if far
            else None
        )
        self._far = frozenset(far)
        self._messages = Messages(self, self._library, self._memory)
        #: The last phase of the running call, once that is known.
        self._last_phase: int | None = None
        self._monitor = (
            DeathMonitor({peer.rank: peer.pidfd for peer in peers.values()}, self._on_death) if peers else None
        )
        _engines.add(self)

    # -- what a group asks -------------------------------------------------------------------------------------------

    def submit(self, call: GroupCall, timeout: float | None = None) -> EngineWork:
        """Begin a call. Never raises for what the group's state is: the work has the error then."""
        work = EngineWork(self, call)
        if os.getpid() != self._pid:
            work.finish(
                GroupError(f"{call.describe()}: this process was forked after configure, the group is its parent's")
            )
            return work
        if call.kind in POINT_TO_POINT:
            if self.error is None:
                self._messages.submit(call, work, timeout or self.timeout)
            else:
                work.finish(self.error)
            return work
        with self._lock:
            if self.error is None:
                item = _Item(number=self._next, call=call, work=work, timeout=timeout or self.timeout)
                self._next += 1
                work._run = lambda limit: self._help(item, limit)
                self._queue.append(item)
            else:
                work.finish(self.error)
                return work
        if call.async_op:
            try:
                self._start_thread()
                self._wake.put(None)
            except KeyboardInterrupt:
                self.abort("interrupted by Ctrl-C")
                raise
        return work

    def meet(self, deadline_ns: int) -> None:
        """Wait until all members have come so far; the error is that of the group."""
        with self._turn:
            common = descriptor.encode(Kind.BARRIER, extra=0 if self.epoch is None else self.epoch + 1)
            data = descriptor.encode_slot(common, 0)
            self._block.descriptor(0)[: len(data)] = data
            self._send_descriptor(deadline_ns, "configure")
            self._run(match_program(self.size), [], deadline_ns, f"configure for epoch {self.epoch}")

    def abort(self, why: str) -> None:
        """End the group: callers here get GroupAbortedError, other members GroupLostError."""
        text = f"rank {self.rank}{self._named(self.rank)} left the group: {why}"
        self.fail(Cause(kind="aborted", by=self.rank, text=text, reason="aborted"))

    def settle(self) -> None:
        """After ``abort``: wait until nothing touches a tensor any more. On a thread that ends a call: at once."""
        if self._carrier != threading.get_ident():
            holding(self._turn, lambda: None, time.monotonic() + _SETTLE)
        self._messages.settle(_SETTLE)

    def leave(self) -> None:
        """End the group because this member is done with it."""
        text = f"rank {self.rank}{self._named(self.rank)} has shut its group down"
        self.fail(Cause(kind="aborted", by=self.rank, text=text, reason="closed"))

    def time_out(self, text: str, ranks: tuple[int, ...] = (), *, waited: bool = False) -> GroupError:
        """End the group because a call took too long. ``waited``: only this member's ``wait(timeout)`` was over."""
        reason = causes.WAIT_IS_OVER if waited else ""
        return self.fail(Cause(kind="timeout", by=self.rank, text=text, ranks=ranks, reason=reason))

    def mismatch(self, text: str, calls: dict[int, str]) -> GroupError:
        """End the group because members meant different calls."""
        return self.fail(Cause(kind="mismatch", by=self.rank, text=text, calls=calls))

    def given_up(self, what: str, rank: int) -> GroupError:
        """End the group because ``rank`` has, in the words of its cause if it left one."""
        if rank in self._far and (cause := self._cause_of(rank)) is not None:
            return self.fail(cause)
        text = f"{what} ended because rank {rank}{self._named(rank)} gave it up"
        return self.fail(Cause(kind="lost", by=self.rank, text=text, ranks=(rank,), reason="gave up"))

    def broken(self, what: str, how: str) -> GroupError:
        """End the group because the library says what it should not."""
        text = f"{what} failed on rank {self.rank}: {how}, which is a bug of Etha"
        return self.fail(Cause(kind="failed", by=self.rank, text=text))

    def fail(self, cause: Cause, *, stop: bool = True) -> GroupError:
        """End the group, unless it has ended; returns the error of this member. ``stop`` ends the running call, too."""
        if os.getpid() != self._pid:
            return GroupError("this process was forked after configure, the group is its parent's")
        with self._lock:
            if self.error is not None:
                return self.error
            running = self._running
            if running >= 0:
                number = running if stop else running + 1
            else:  # others may wait in a call that this member has made and that no thread has begun
                number = self._queue[0].number if self._queue else self._next
            first = self._claim(cause, number)
            if cause.kind == "aborted":
                first = cause  # the caller knows what it did
            self.error = error = causes.error_of(first, self.rank, self.epoch)
            if stop:
                self._library.stop(self._memory, _STOP)
            self._library.give_up(self._memory, number)
            waiting = [item for item in self._queue if item.number != running]
            self._queue.clear()
        for item in waiting:
            item.work.finish(error)
        self._on_error(error)
        return error

    def close(self) -> None:
        """End the group and free its memory; calls that run have ended when this returns. Idempotent."""
        if self._closing or os.getpid() != self._pid:
            return
        self.leave()
        self._closing = True
        if self.error is not None:
            # Its frames are those of whoever has waited: with this engine they would form a cycle, and keep tensors.
            self.error.__traceback__ = None
        if self._thread is not None:
            self._wake.put(None)
            if self._thread is not threading.current_thread():
                join(self._thread)
        self._messages.close()
        if self._streams is not None:
            self._streams.close()
        if self._monitor is not None:
            self._monitor.close()
        with self._turn:
            _engines.discard(self)
            for places in self._places.values():
                places.close()
            self._own_places.close()
            for peer in self._peers.values():
                peer.close()
            self._block.close()

    # -- threads -----------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="etha-group-engine", daemon=True)
                    self._thread.start()

    def _serve(self) -> None:
        while True:
            self._wake.get()
            if self._closing:
                return
            while self._queue:
                with self._turn:
                    tell = self._carry_out_next()
                tell()

    def _help(self, item: _Item, limit: timedelta | None) -> None:
        """Carry out calls on the caller's thread until ``item`` has ended."""
        until = None if limit is None else time.monotonic() + limit.total_seconds()
        callbacks: list[Callable[[], None]] = []

        def carry_out() -> None:
            if not item.work.is_completed():
                callbacks.append(self._carry_out_next(until))

        while not item.work.is_completed():
            if not holding(self._turn, carry_out, until):
                return
            while callbacks:
                callbacks.pop()()

    def _carry_out_next(self, until: float | None = None) -> Callable[[], None]:
        """Carry out the first call of the queue. The caller has the turn, and calls what this returns without it: the
        callbacks of a future may wait for other calls, or close the group."""
        with self._lock:
            if not self._queue:
                return lambda: None
            item = self._queue.popleft()
            self._running, self._last_phase = item.number, None
        self._carrier = threading.get_ident()
        error: BaseException | None = None
        interrupt: BaseException | None = None
        try:
            end = time.monotonic() + item.timeout
            self._waits = until is not None and until < end
            self._perform(item, int((end if until is None else min(end, until)) * 1e9))
        except GroupError as failed:
            # Who waits raises it again. The frames up to here would keep the call's tensors for as long as the error.
            error = failed.with_traceback(None)
            self._withdraw()
        except BaseException as failed:
            self._withdraw()
            interrupted = isinstance(failed, KeyboardInterrupt)
            self.abort("interrupted by Ctrl-C" if interrupted else f"{type(failed).__name__}: {failed}")
            error = GroupAbortedError(str(self.error))
            interrupt = failed if interrupted else None
        finally:
            with self._lock:
                self._running, self._last_phase = -1, None
                if self.error is not None:  # messages may still wait
                    self._library.stop(self._memory, _STOP)
            tell = item.work.end(error)
            self._carrier = None
        if interrupt is not None:
            tell()
            raise interrupt
        return tell

    def _withdraw(self) -> None:
        """A call has failed: nothing of its tensors is sent any more."""
        if self._streams is not None:
            self._streams.withdraw()

    def _on_death(self, rank: int) -> None:
        peer = self._peers[rank]
        text = f"rank {rank}{self._named(rank)}, process {peer.pid}, died"
        if rank in self._far and self._streams is not None:
            if (cause := self._cause_of(rank)) is not None:  # it has said why before
                self.fail(cause, stop=self._is_needed(rank))
                return
            text = f"rank {rank}{self._named(rank)} on another host is lost: {self._streams.describe_end(rank)}"
        cause = Cause(kind="lost", by=self.rank, text=text, ranks=(rank,), reason="died")
        self.fail(cause, stop=self._is_needed(rank))

    def _is_needed(self, rank: int) -> bool:
        """False for a member that has done all of its part in the running call: if it ends, the call loses nothing."""
        last = self._last_phase if self._running >= 0 else None
        return last is None or self._posted(rank) < last

    # -- one call ----------------------------------------------------------------------------------------------------

    def _perform(self, item: _Item, deadline_ns: int) -> None:
        call = item.call
        if self.error is not None:
            raise self.error
        tensors = _Contiguous(call, self.rank, self.size)
        first = next(iter(call.inputs or call.outputs), None)
        used = next(iter(tensors.inputs or call.outputs), None)
        shape = CallShape(
            kind=call.kind,
            itemsize=1 if used is None else used.element_size(),
            inputs=tuple(t.numel() for t in call.inputs),
            outputs=tuple(t.numel() for t in call.outputs),
            root=call.root,
        )
        native_dtype = 0 if used is None else _DTYPES.get(used.dtype, 0)
        op = 0 if call.op is None else native.ReduceCode[call.op.name]
        if self._by_host and native_dtype and op:
            shape = replace(shape, partial=native.partial_bytes(native_dtype, op))
        self._describe(item, shape, first, tensors.inputs)
        self._send_descriptor(deadline_ns, call)
        factor = 1.0 if call.factor is None else float(call.factor)
        if call.kind in REDUCTIONS and not native_dtype:
            raise GroupError(
                f"{call.describe()}: tensors of {first.dtype if first is not None else None} cannot be reduced"
            )
        peers: list[int] = []
        window = min(self._layout.window, ROUND_BYTES)
        if self.size > 1 and self._is_small(shape):
            variant = Variant.SMALL
        else:
            variant = Variant.WINDOWS
            if sums_per_host(shape, self._hosts):  # a round's bytes and the sums of a host
                window = min(self._layout.window, ROUND_BYTES + ROUND_BYTES // shape.itemsize * shape.partial)
            if self.size > 1:
                flags = self._run(match_program(self.size), [], deadline_ns, call, more=True, brief=True)
                if flags & descriptor.READABLE_IN_PLACE:
                    found = self._map_all(item, deadline_ns, known=bool(flags & _ALL_KNOWN))
                    if found is not None:
                        variant, peers = Variant.IN_PLACE, found
            if call.kind is Kind.ALLTOALL:
                slots = [bytes(block.descriptor(item.number)) for block in self._blocks]
                shape = replace(shape, matrix=descriptor.split_matrix(slots))
        steps = program(shape, rank=self.rank, size=self.size, window_bytes=window, variant=variant, hosts=self._hosts)
        addresses, brief = (
            tensors.addresses,
            shape.itemsize * max(sum(shape.inputs), sum(shape.outputs)) <= _BRIEF_BYTES,
        )
        self._run(steps, addresses, deadline_ns, call, peers, dtype=native_dtype, op=op, factor=factor, brief=brief)
        tensors.copy_back()

    def _is_small(self, shape: CallShape) -> bool:
        return is_small(shape, self.size, min(SMALL_BYTES, self._layout.window, ROUND_BYTES))

    def _map_all(self, item: _Item, deadline_ns: int, *, known: bool) -> list[int] | None:
        """Where the inputs of all members lie in this process, rank by rank; None if not all members could map them.

        ``known``: all members have mapped them before. Otherwise they say in one more phase whether they could.
        """
        number, mine = item.number, len(item.call.inputs)
        found: list[int] = []
        possible = True
        for rank, block in enumerate(self._blocks):
            places = self._places.get(rank)
            addresses = [0] * mine if places is None else places.addresses(block.table(number))
            if addresses is None:
                possible = False
                break
            found += addresses + [0] * (mine - len(addresses))
        if not known:
            # Slots of this call stay as they are until all have posted the next one, so the flag is read safely.
            at = FLAGS_AT
            slot = self._block.descriptor(number)
            flags = int.from_bytes(slot[at : at + 8], "little") | (_MAPPED if possible else 0)
            slot[at : at + 8] = flags.to_bytes(8, "little")
            if not self._run(match_program(self.size), [], deadline_ns, item.call, more=True) & _MAPPED:
                self._in_place = False
                return None
            if item.inodes is not None:
                self._own_places.note(item.inodes)
        elif not possible:
            raise self.broken(item.call.describe(), "a tensor that was readable in place is not any more")
        return found

    def _describe(self, item: _Item, shape: CallShape, first: Tensor | None, used: list[Tensor]) -> None:
        """Write what this member says about the call into its block."""
        call = item.call
        counts = {
            Kind.ALLGATHER: shape.outputs,
            Kind.GATHER: shape.inputs,
            Kind.SCATTER: shape.outputs,
            Kind.ALLTOALL: (),
        }.get(call.kind, shape.inputs)
        common = descriptor.encode(
            call.kind,
            "none" if first is None else _DTYPE_NAMES[first.dtype],
            "none" if call.op is None else call.op.name,
            counts=counts,
            root=call.root,
            factor=0.0 if call.factor is None else float(call.factor),
            extra=call.tag,
        )
        if call.refused:
            reason = descriptor.encode_reason(call.refused, PLACES)
            self._block.table(item.number)[: len(reason)] = reason
        splits = b""
        if call.kind is Kind.ALLTOALL:
            splits = descriptor.encode_splits(shape.inputs, shape.outputs)
        data = descriptor.encode_slot(common, item.number, flags=self._offer(item, shape, used), splits=splits)
        self._block.descriptor(item.number)[: len(data)] = data

    def _send_descriptor(self, deadline_ns: int, call: GroupCall | str) -> None:
        """Send what this member says about the call to other hosts, before the phase that announces it."""
        if self._far:
            number = max(self._running, 0)
            stride, slot = self._layout.descriptor_stride, self._layout.descriptors
            at = self._block.address + slot + number % 2 * stride
            self._run(_descriptor_program(tuple(self._far), stride), [at], deadline_ns, call, more=True)

    def _offer(self, item: _Item, shape: CallShape, used: list[Tensor]) -> int:
        """Say where the inputs lie, if others can read them there; the flags of the call's descriptor."""
        if not self._in_place or self.size == 1 or not used or self._is_small(shape):
            return 0
        found = self._own_places.find(used)
        if found is None:
            return 0
        table, item.inodes = found
        self._block.table(item.number)[: len(table)] = table
        return descriptor.READABLE_IN_PLACE | (_ALL_KNOWN if self._own_places.all_known(item.inodes) else 0)

    def _run(
        self,
        steps: CallProgram,
        addresses: list[int],
        deadline_ns: int,
        call: GroupCall | str,
        peers: Sequence[int] = (),
        *,
        dtype: int = 0,
        op: int = 0,
        factor: float = 1.0,
        more: bool = False,
        brief: bool = False,
    ) -> int:
        """Run one program of a call; the flags that all members' descriptors have. Raises the error of the group.

        ``more``: another program of the call follows. ``peers``: where the members' inputs lie, to be read in place.
        ``brief``: the interpreter's lock is kept for a moment, because beside a busy thread it comes back late.
        """
        spaces = np.array([*addresses, *self._windows[self._odd], *peers], dtype=np.uint64)
        array, sources = steps.compile()
        number = max(self._running, 0)
        args = native.run_arguments(
            self._memory,
            array,
            sources,
            spaces,
            phase_base=self._phase,
            call_number=number,
            dtype=dtype,
            op=op,
            factor=factor,
            divisor=self.size,
            deadline_ns=deadline_ns,
            brief_us=native.BRIEF_US if brief else 0,
            slice_ms=_SLICE_MS if threading.get_ident() == self._main else 0,
        )
        if not more:
            self._last_phase = self._phase + steps.phases
        run = self._library.run
        while (result := run(args)) is native.RunResult.AGAIN:
            pass
        if result is not native.RunResult.DONE:
            raise self._failure(result, args, number, call)
        self._phase += steps.phases
        self._odd ^= steps.rounds & 1
        return int(args.flags_all)

    def _failure(
        self, result: native.RunResult, args: native.RunArguments, number: int, call: GroupCall | str
    ) -> GroupError:
        what = call if isinstance(call, str) else call.describe()
        failed = tuple(r for r in range(self.size) if args.failed_ranks[r])
        match result:
            case native.RunResult.TIMEOUT:
                who = ", ".join(f"rank {r}{self._named(r)}" for r in failed) or "its own turn"
                return self.time_out(
                    f"{what} on rank {self.rank} timed out, waiting for {who}", failed, waited=self._waits
                )
            case native.RunResult.MISMATCH:
                said = {r: self._said(b, number) for r, b in enumerate(self._blocks)}
                return self.mismatch(_mismatch(said, self._blocks, number), said)
            case native.RunResult.GAVE_UP:
                return self.given_up(what, args.failed_rank)
            case native.RunResult.STOPPED if self.error is not None:
                return self.error
            case _:
                return self.broken(what, result.name)

    def _said(self, block: SharedBlock, number: int) -> str:
        """What a member calls, in words; and why, if it has refused its own arguments."""
        common = bytes(block.descriptor(number)[: descriptor.COMMON])
        words = descriptor.decode(common)
        if descriptor.is_refusal(common) and (reason := descriptor.decode_reason(bytes(block.table(number)))):
            words += f": {reason}"  # there is none of a member of another host
        return words

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _claim(self, cause: Cause, number: int) -> Cause:
        """Claim the group's first cause; the cause that was first. ``number``: the call that is given up."""
        data = causes.encode(cause, CAUSE_BYTES - 4)
        view = self._block.view
        view[CAUSE_OFFSET : CAUSE_OFFSET + 4 + len(data)] = len(data).to_bytes(4, "little") + data
        if self._streams is not None:
            self._streams.tell_cause()
            if 0 in self._far:
                return self._ask_first(cause, number)
        for _ in range(_CLAIM_TRIES):
            by = self._library.claim_cause(self._blocks[0].address, self.rank)
            if by is not None:
                break
        else:
            return cause
        if self._streams is not None:
            self._streams.tell_cause()  # of rank 0: now it is known whose cause is the first
        return cause if by == self.rank else self._cause_of(by) or cause

    def _ask_first(self, cause: Cause, number: int) -> Cause:
        """The first cause in the words of rank 0, which is on another host; the own one if it cannot say."""
        assert self._streams is not None
        self._library.give_up(self._memory, number)  # before the answer, because others wait for this member
        if cause.kind != "aborted":
            self._streams.wait_for_claim()
        by = int.from_bytes(self._blocks[0].view[CLAIM : CLAIM + 8], "little") - 1
        if by == self.rank or not 0 <= by < self.size:
            return cause
        return self._cause_of(by) or cause

    def _cause_of(self, rank: int) -> Cause | None:
        """The cause that a member has written into its block; None if there is none."""
        found = self._blocks[rank].view
        length = int.from_bytes(found[CAUSE_OFFSET : CAUSE_OFFSET + 4], "little")
        if not length:
            return None
        return causes.decode(bytes(found[CAUSE_OFFSET + 4 : CAUSE_OFFSET + 4 + min(length, CAUSE_BYTES - 4)]))

    def _posted(self, rank: int) -> int:
        return int.from_bytes(self._blocks[rank].view[:8], "little")

    def _named(self, rank: int) -> str:
        name = self.name if rank == self.rank else self._peers[rank].name
        return f" ({name})" if name else ""

    def disown(self) -> None:
        """In a forked child: forget everything that is the parent's."""
        for places in self._places.values():
            places.disown()
        for peer in self._peers.values():
            os.close(peer.pidfd)
            peer.block.disown()
        self._block.disown()
        if self._streams is not None:
            self._streams.disown()
        if self._monitor is not None:
            self._monitor.disown()


@lru_cache(maxsize=64)
def _descriptor_program(peers: tuple[int, ...], nbytes: int) -> CallProgram:
    """Sends what lies in space 0 to some ranks."""
    return CallProgram(
        steps=[CallStep(SEND, amount=nbytes, peer=peer) for peer in peers],
        spaces=Spaces(inputs=1, outputs=0, size=0, peer_inputs=0),
        phases=0,
        rounds=0,
    )


class _Contiguous:
    """The tensors of a call as contiguous memory: themselves where they are, copies otherwise."""

    def __init__(self, call: GroupCall, rank: int, size: int) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []
        shared = call.inputs is call.outputs or (
            len(call.inputs) == len(call.outputs)
            and all(a is b for a, b in zip(call.inputs, call.outputs, strict=True))
        )
        self.inputs = [_plain(t) for t in call.inputs]
        wide = call.kind in REDUCTIONS and any(t.dtype in FLOAT8 for t in self.inputs)
        if wide:
            self.inputs = [t.float() for t in self.inputs]
        for i in () if shared else _overwritten(call, rank, size):
            if self.inputs[i] is call.inputs[i]:
                self.inputs[i] = call.inputs[i].detach().clone()
        if shared:
            self._outputs = self.inputs
        else:
            kept = [_is_plain(t) and not wide for t in call.outputs]
            self._outputs = [
                t if keep else torch.empty(t.shape, dtype=torch.float32 if wide else t.dtype)
                for t, keep in zip(call.outputs, kept, strict=True)
            ]
        for given, used in zip(call.outputs, self._outputs, strict=True):
            if given is not used:
                self._back.append((given, used))
        self.addresses = [t.data_ptr() for t in self.inputs] + [t.data_ptr() for t in self._outputs]

    def copy_back(self) -> None:
        """Give the outputs what their copies hold."""
        if self._back:
            with writing([given for given, _ in self._back]):
                for given, used in self._back:
                    given.copy_(used)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: Tensor) -> Tensor:
    if _is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _overwritten(call: GroupCall, rank: int, size: int) -> list[int]:
    """The inputs of which an output may overwrite bytes that this member or others have not read yet.

    An input that is this member's own piece of an output, or the other way round, is as good as copied already.
    """
    storages = {t.untyped_storage().data_ptr() for t in call.inputs if t.numel()}
    written = [(j, t) for j, t in enumerate(call.outputs) if t.numel() and t.untyped_storage().data_ptr() in storages]
    if not written:
        return []
    spans = [(j, t, *_span(t)) for j, t in written]
    found = []
    for i, source in enumerate(call.inputs):
        if not source.numel():
            continue
        lo, hi = _span(source)
        for j, target, start, end in spans:
            if start < hi and lo < end and not (_own_piece(call.kind, i, j, rank, size) and _same(source, target)):
                found.append(i)
                break
    return found


def _own_piece(kind: Kind, i: int, j: int, rank: int, size: int) -> bool:
    """Whether output ``j`` is what this member gives itself as input ``i``, so that they may be the same memory."""
    match kind:
        case Kind.ALLGATHER:
            return j == i * size + rank
        case Kind.REDUCE_SCATTER:
            return i == j * size + rank
        case Kind.GATHER:
            return j == rank
        case Kind.SCATTER:
            return i == rank
        case _:
            return False


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and _is_plain(a) and _is_plain(b)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor's memory and the one after the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _mismatch(said: dict[int, str], blocks: list[SharedBlock], number: int) -> str:
    """The text for members that mean different calls; what differs if their words are the same."""
    by_text: dict[str, list[int]] = {}
    for rank, text in said.items():
        by_text.setdefault(text, []).append(rank)
    groups = "; ".join(f"{'ranks' if len(r) > 1 else 'rank'} {', '.join(map(str, r))}: {t}" for t, r in by_text.items())
    if len(by_text) == 1:
        slots = [bytes(b.descriptor(number)) for b in blocks]
        differing = next((d for s in slots[1:] if (d := descriptor.difference(slots[0][:128], s[:128]))), "")
        if not differing:
            wrong = descriptor.wrong_splits(slots)
            differing = "; ".join(f"rank {s} gives rank {d} {g} elements, which takes {t}" for s, d, g, t in wrong[:4])
        groups += f" (they differ in: {differing})"
    return f"the members of the group called different things: {groups}"


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _forked() -> None:
    for engine in list(_engines):
        with contextlib.suppress(OSError):
            engine.disown()


os.register_at_fork(after_in_child=_forked)
