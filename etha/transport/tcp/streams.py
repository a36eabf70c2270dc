"""Streams: one thread and one blocking socket each, data in one direction. The GIL is free while bytes move.

    receive   header -> its run -> span by span: straight into memory | receive, unpack
    send      job -> header, then span by span: straight from memory | pack, send
    both      a stretch of spans that a worker moves itself: lend it the socket, wait

A thread never waits inside a call's guard: it waits for the socket outside, and each system call inside moves only what
is ready. ``shut`` wakes a thread wherever it waits.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from etha.errors import ProtocolError, TransferError
from etha.native.difference import Bytes, load_difference, most_bytes
from etha.observe import trace
from etha.transport.base import StreamLost
from etha.transport.copy.staging import CopySlots, Pool, StagingChunk, dense_view
from etha.transport.geometry.iovec import Op
from etha.transport.tcp.run import Ended, TcpRun
from etha.transport.wire.carrying import RingPlace
from etha.transport.wire.differences import BaseVersion
from etha.transport.wire.flows import CHUNK, Flow, FlowPiece, Span, count_pieces, divide
from etha.transport.wire.worker_rows import Stretch

_MAGIC = b"etha-w3\0"
#: magic, key, digest of the flow, seq, lane, lanes, payload of the flow, bytes of this stream, base, asks.
_HEADER = struct.Struct("<8s32s32sQIIQQQ?")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a stream announces before a run's bytes; the other end compares it with its own plan.

    ``base``: what follows is the difference to the version of this number, which the targets hold; 0: all bytes.
    ``asks``: the sender waits until the receiver has answered which pieces it has, a bit for each, and leaves them out.
    """

    key: bytes
    digest: bytes
    seq: int
    lane: int
    lanes: int
    nbytes: int
    wire: int
    base: int = 0
    asks: bool = False

    @classmethod
    def of(cls, flow: Flow, lane: int, label: tuple[bytes, int], base: int = 0, asks: bool = False) -> Header:
        """The header of one lane of a flow."""
        return cls(
            key=label[0], digest=flow.digest, seq=label[1], lane=lane, lanes=len(flow.lanes), nbytes=flow.nbytes,
            wire=sum(span.wire for span in flow.lanes[lane]), base=base, asks=asks,
        )  # fmt: skip

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC, self.key, self.digest, self.seq, self.lane, self.lanes, self.nbytes, self.wire, self.base, self.asks
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """The inverse of ``pack``. ProtocolError for anything else."""
        magic, key, digest, seq, lane, lanes, nbytes, wire, base, asks = _HEADER.unpack(data)
        if magic != _MAGIC:
            raise ProtocolError(f"the other agent's data begin with {magic!r}: use one version of etha")
        return cls(
            key=key, digest=digest, seq=seq, lane=lane, lanes=lanes, nbytes=nbytes, wire=wire, base=base, asks=asks
        )


#: Most bytes of one system call inside a worker's memory.
CALL = 2 << 20
#: Keepalive, in seconds: idle time before the first probe, time between probes, and number of probes after which the
#: connection is lost. The other end's kernel answers, whatever its agent waits for.
SILENT, ASK_EVERY, ASK_TIMES = 8, 3, 4
#: Seconds after which a connection whose other end does not answer is lost.
STALLED = SILENT + ASK_EVERY * ASK_TIMES
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASK_TIMES),
)


#: Sockets of streams that may be lent. That of an encrypted one leads to the thread that encrypts.
_LENDABLE = (socket.AF_INET, socket.AF_INET6)
#: Numbers of streams in the trace.
_numbers = itertools.count(1)


class StreamOwner(Protocol):
    """What streams need of their owner, the data plane of this agent."""

    copy_slots: CopySlots
    pool: Pool

    def count(self, peer: str, sent: int, received: int) -> None:
        """Count payload sent to or received from a peer."""
        ...


class Stream(ABC):
    """What both directions share: a socket, its thread, and a chunk while it packs or unpacks for a run."""

    def __init__(self, conn: socket.socket, peer: str, owner: StreamOwner, name: str) -> None:
        self.peer = peer
        self.track = f"{name} {peer} {next(_numbers)}"
        self.closed = False
        self.sock, self.owner = conn, owner
        self._chunk: StagingChunk | None = None
        self._more: StagingChunk | None = None
        self._lock = threading.Lock()
        #: Held by a thread other than the stream's own while it uses the socket.
        self.using = threading.Lock()
        conn.setblocking(True)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in _KEEPALIVE:
            conn.setsockopt(level, option, value)
        self._thread = threading.Thread(target=self._live, name=f"etha-{name}-{peer[:8]}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def shut(self) -> None:
        """Shut the socket down in both directions; this wakes the thread, which closes it. Idempotent; returns at
        once."""
        with self._lock:
            if not self.closed:
                self.closed = True
                with contextlib.suppress(OSError):  # the other end has closed it before
                    self.sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until the thread of a stream that is shut has ended."""
        if self._thread.is_alive():
            self._thread.join()

    def _live(self) -> None:
        try:
            self.work()
        finally:
            self.shut()
            with self.using:
                self.sock.close()
            self.on_end()

    @abstractmethod
    def work(self) -> None:
        """The thread's work."""

    def on_end(self) -> None:  # noqa: B027 - not every direction has something to do at its end
        """Called when the thread ends."""

    def chunk(self, run: TcpRun) -> StagingChunk:
        """The chunk that this stream packs or unpacks in, of the size that the run has booked. It keeps it for its
        part."""
        if self._chunk is None:
            self._chunk = self.owner.pool.take(run.program.chunk)
        return self._chunk

    def difference_chunk(self, run: TcpRun) -> StagingChunk:
        """The chunk that it needs besides for differences: what was sent before, and frames."""
        if self._more is None:
            self._more = self.owner.pool.take(difference_room(run.program.chunk))
        return self._more

    def leave_chunks(self) -> None:
        """Give the chunks back. Idempotent."""
        chunks, self._chunk, self._more = (self._chunk, self._more), None, None
        for chunk in chunks:
            if chunk is not None:
                self.owner.pool.give(chunk)

    def lost(self, error: OSError | None = None) -> TransferError:
        """The error for a stream that the other end has closed, or that answers nothing any more."""
        if error is not None and error.errno == errno.ETIMEDOUT:
            return TransferError(
                f"the data connection with agent {self.peer} stands still: its host has answered nothing on it for "
                f"{STALLED} s, but does on the link; look for a firewall or a broken way between the data ports"
            )
        why = f": {error.strerror or error}" if error is not None else ""
        return StreamLost(f"the data stream with agent {self.peer} is closed{why}", reason="died")

    def fill(self, memory: memoryview) -> None:
        """Receive exactly ``memory``, which is this agent's own. PeerLostError at the end of the stream."""
        at = 0
        while at < len(memory):
            n = self.sock.recv_into(memory[at:], 0, socket.MSG_WAITALL)
            if n == 0:
                raise self.lost()
            at += n

    def wait(self, event: int) -> None:
        """Wait until the socket is ready for a poll event, or shut."""
        poll = select.poll()
        poll.register(self.sock, event)
        poll.poll()

    def lent(self, run: TcpRun, lane: int, first: int, *, sends: bool) -> Stretch | None:
        """Have a worker move the stretch that begins with span number ``first``. None if this thread has to."""
        if run.lender is None or self.sock.family not in _LENDABLE:
            return None
        stretch = run.lender.stretch(self.peer, sends, lane, first)
        if stretch is None:
            return None
        loan, counted = run.lender.lend(stretch, self.sock, run.wake), 0
        try:
            while not loan.over:
                run.await_loan(loan)
                share = stretch.nbytes * loan.done // stretch.wire
                run.moved(share - counted)
                counted = share
        finally:
            run.lender.give_up(loan)
            if not sends and not loan.declined and (loan.done or not loan.over):
                run.touched = True
        if loan.declined:
            return None
        if loan.error is not None:
            raise self.lost() if loan.ended else loan.error
        run.moved(0, 0 if sends else stretch.wire)
        self.owner.count(self.peer, *((stretch.nbytes, 0) if sends else (0, stretch.nbytes)))
        return stretch

    def part(self, run: TcpRun, lane: int) -> _Part:
        """Context of this stream's part of a run, one lane of a flow. An error in it ends the run and the stream."""
        return _Part(self, run, lane)


class _Part:
    """A stream's part of a run. Errors in it end the run, and name the peer."""

    def __init__(self, stream: Stream, run: TcpRun, lane: int) -> None:
        self._stream, self._tcp_run, self._lane = stream, run, lane
        self._begun = 0

    def __enter__(self) -> None:
        if trace.active is not None:
            self._begun = time.monotonic_ns()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Ended):
            error = self._tcp_run.error or error
        elif isinstance(error, OSError):
            error = self._stream.lost(error)
        if (tracer := trace.active) is not None:
            self._trace(tracer, error)
        self._stream.leave_chunks()  # before the run can be over, because its bookings are free then
        self._tcp_run.end(self._stream, error)
        if error is not None:
            self._stream.shut()
        return True

    def _trace(self, tracer: trace.Tracer, error: BaseException | None) -> None:
        stream, run = self._stream, self._tcp_run
        kind = stream.track.partition(" ")[0]
        flow = (run.program.sends if kind == "send" else run.program.receives).get(stream.peer)
        spans = flow.lanes[self._lane] if flow is not None and self._lane < len(flow.lanes) else ()
        about = {
            "key": run.label[0].hex(),
            "seq": run.label[1],
            "lane": self._lane,
            "bytes": sum(span.nbytes for span in spans),
        }
        if error is not None:
            about["error"] = f"{type(error).__name__}: {error}"
        tracer.span(stream.track, kind, self._begun, time.monotonic_ns(), about)


log = logging.getLogger(__name__)

#: Wake up only for this many bytes while at least as many are still to come.
WORTH = 256 << 10
#: The same where others are sent on what comes, and the least that is sent on at once.
PASSED = 64 << 10


class RunRegistry(StreamOwner, Protocol):
    """A stream owner that knows the runs for which inlets receive."""

    def match(self, inlet: ReceiveStream, header: Header) -> TcpRun | None:
        """The run that a header belongs to. Waits for it; None if the stream is shut first."""
        ...

    def left(self, inlet: ReceiveStream, error: Exception) -> None:
        """The other end closed the stream between two runs."""
        ...

    def forget(self, inlet: ReceiveStream) -> None:
        """The stream's thread ends."""
        ...


class ReceiveStream(Stream):
    """Receives what its headers announce, run after run."""

    def __init__(self, conn: socket.socket, peer: str, registry: RunRegistry, opening: bytes) -> None:
        super().__init__(conn, peer, registry, "receive")
        self._registry = registry
        self.opening = opening

    def work(self) -> None:
        data = memoryview(bytearray(HEADER_BYTES))
        while True:
            try:
                self.fill(data)
                header = Header.unpack(bytes(data))
            except (OSError, TransferError, ProtocolError) as error:
                if not self.closed:
                    self._left(error)
                return
            run = self._registry.match(self, header)
            if run is None or not run.begin(self):
                return
            with self.part(run, header.lane):
                self._run(run, self._agree(run, header), header)
            if self.closed:
                return
            del run

    def _left(self, error: Exception) -> None:
        """The other end closed an idle stream, or sent nonsense. Runs that have yet to begin on it never will."""
        if isinstance(error, ProtocolError):
            log.warning("a data stream from agent %s was closed: %s", self.peer, error)
        self._registry.left(self, self.lost(error) if isinstance(error, OSError) else error)

    def _agree(self, run: TcpRun, header: Header) -> Flow:
        """The flow that a header announces. ProtocolError, before anything is written, if the header differs from the
        plan."""
        flow = run.program.receives.get(self.peer)
        lanes = () if flow is None else flow.lanes
        mine = None
        if flow and header.lane < len(lanes):
            mine = Header.of(flow, header.lane, run.label, header.base, header.asks)
        if flow is None or header != mine:
            raise ProtocolError(
                f"agent {self.peer} is about to send {header.nbytes} bytes in {header.lanes} streams "
                f"(stream {header.lane}: {header.wire} bytes, digest {header.digest.hex()[:12]}), planned here are "
                f"{flow.nbytes if flow else 0} in {len(lanes)} (digest {flow.digest.hex()[:12] if flow else 'none'}): "
                f"both agents must have the same plan, bucket size, streams and staging"
            )
        if header.base not in (0, run.held):
            raise ProtocolError(
                f"agent {self.peer} is about to send the difference to version {header.base}, but the tensors here "
                f"hold {run.held or 'none'}"
            )
        return flow

    def _run(self, run: TcpRun, flow: Flow, header: Header) -> None:
        spans, base = flow.lanes[header.lane], header.base
        kept = self._say_kept(run, spans) if header.asks else None
        past = 0
        for number, whole in enumerate(spans):
            if number < past:
                continue
            if not base and kept is None and (stretch := self.lent(run, header.lane, number, sends=False)) is not None:
                past = number + len(stretch.spans)
                continue
            rest, had = ([whole], []) if kept is None else divide(whole, kept[number])
            for span in had:
                assert run.arriving is not None
                run.arriving.finish(span)
                run.moved(span.nbytes)
            for span in rest:
                self._take(run, span, base)

    def _say_kept(self, run: TcpRun, spans: Sequence[Span]) -> list[list[bool]]:
        """Answer which pieces of a lane are here already."""
        if run.arriving is None:
            kept = [[False] * count_pieces(span) for span in spans]
        else:
            kept = [run.arriving.kept(span) for span in spans]
        self.sock.sendall(np.packbits([had for some in kept for had in some], bitorder="little").tobytes())
        return kept

    def _take(self, run: TcpRun, span: Span, base: int) -> None:
        wired = span.wire
        if span.ring:
            self._carry(run, span.ring)
        elif base and not span.carried:
            wired = self._difference(run, span)
        elif span.index >= 0:
            self._contribution(run, span)
        elif span.memory is not None:
            self._straight(run, span, span.memory)
        else:
            self._unpacked(run, span)
        if span.arrivals:
            run.laid(span.arrivals)
        if run.arriving is not None:
            run.arriving.finish(span)
        run.moved(span.nbytes, wired)
        self.owner.count(self.peer, 0, span.nbytes)

    def _contribution(self, run: TcpRun, span: Span) -> None:
        part = span.parts[0]
        run.admit(part)
        room = run.room(part, part.far.index(span.index), span.nbytes)
        self.fill(memoryview(room.numpy()))  # type: ignore[arg-type, unused-ignore]
        self._skip(span)
        run.arrived(part)

    def _carry(self, run: TcpRun, places: Sequence[RingPlace]) -> None:
        """Receive carried pieces, as many at a time as the ring has room for."""
        while places:
            room = run.room_in_ring(places)
            came, places = places[: len(room)], places[len(room) :]
            while room:
                n = self.sock.recvmsg_into(room, 0, socket.MSG_WAITALL)[0]
                if n == 0:
                    raise self.lost()
                room = _after(room, n)
            run.came(came)

    def _straight(self, run: TcpRun, span: Span, memory: memoryview) -> None:
        at, lowest = 0, 1
        arriving = run.arriving
        while at < len(memory):
            worth = min(WORTH if arriving is None or not arriving.followed else PASSED, len(memory) - at)
            if worth != lowest:
                lowest = worth
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, worth)
            self.wait(select.POLLIN)
            with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
                try:
                    n = self.sock.recv_into(memory[at : at + CALL], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                run.touched = run.touched or n > 0
            if n == 0:
                raise self.lost()
            if arriving is not None:
                arriving.come(span.cuts[0].view, span.cuts[0].offset + at, n)
            at += n
        if lowest != 1:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._skip(span)

    def _unpacked(self, run: TcpRun, span: Span) -> None:
        chunk = self.chunk(run)
        self.fill(chunk.reserve(run.program.chunk)[: span.wire])
        self._unpack(run, span, chunk)

    def _unpack(self, run: TcpRun, span: Span, chunk: StagingChunk) -> None:
        ops = []
        for place, piece in span.pieces:
            dense, base = chunk.view(piece.dtype), place // piece.dtype.itemsize
            for end in piece.ends:
                assert end.view is not None, "a target that lies nowhere"
                ops += [Op(tile, dense, end.view, base + at, offset) for tile, offset, at in end.steps]
        with (
            self.owner.copy_slots.one() as copy_slot,
            copy_slot.inside(run.guards, span.owners),
            run.writing(copy_slot),
        ):
            run.check()  # it may have ended while others had the slots, and who has called waits for all copies
            copy_slot.run(ops)

    # ---- differences --------------------------------------------------------------------------

    def _difference(self, run: TcpRun, span: Span) -> int:
        """Receive what has changed in a span, piece by piece, and return the bytes that came for it."""
        frames = self.difference_chunk(run).reserve(difference_room(run.program.chunk))
        if span.memory is not None:
            return self._changed_straight(run, span, span.memory, frames)
        assert span.pieces, "a contribution in a difference"
        return self._changed_packed(run, span, frames)

    def _changed_straight(self, run: TcpRun, span: Span, memory: memoryview, frames: memoryview) -> int:
        wired = at = 0
        for cut in span.cuts:
            records = self._frame(cut.nbytes, frames)
            with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
                run.touched = True
                self._apply(memory[at : at + cut.nbytes], cut.nbytes, cut.dtype, records)
            wired += FRAME.size + records.nbytes
            at += cut.nbytes
        return wired

    def _changed_packed(self, run: TcpRun, span: Span, frames: memoryview) -> int:
        """What has not changed is taken from the targets themselves, so that they are written as a whole."""
        chunk, wired, loaded = self.chunk(run), 0, False
        memory = chunk.reserve(run.program.chunk)
        for place, piece in span.pieces:
            records = self._frame(piece.nbytes, frames)
            wired += FRAME.size + records.nbytes
            if not self._apply(None, piece.nbytes, piece.dtype, records):
                continue
            if not loaded:
                loaded = True
                with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
                    _load(span, chunk)
            self._apply(memory[place : place + piece.nbytes], piece.nbytes, piece.dtype, records)
        if loaded:
            self._unpack(run, span, chunk)
        return wired

    def _frame(self, nbytes: int, frames: memoryview) -> Bytes:
        """Receive the records of a piece. ProtocolError if there are more than there can be."""
        head = bytearray(FRAME.size)
        self.fill(memoryview(head))
        (length,) = FRAME.unpack(head)
        if length > most_bytes(nbytes):
            raise ProtocolError(f"agent {self.peer} sends a difference of {length} bytes for a piece of {nbytes}")
        self.fill(frames[:length])
        return np.frombuffer(frames[:length], np.uint8)

    def _apply(self, memory: memoryview | None, nbytes: int, dtype: torch.dtype, records: Bytes) -> int:
        target = None if memory is None else np.frombuffer(memory, np.uint8)
        changed = load_difference().apply(target, nbytes, element_bytes(dtype), records)
        if changed < 0:
            raise ProtocolError(f"agent {self.peer} sends a malformed difference")
        return changed

    def on_end(self) -> None:
        self._registry.forget(self)

    def _skip(self, span: Span) -> None:
        if span.wire > span.nbytes:
            self.fill(memoryview(bytearray(span.wire - span.nbytes)))


#: A lane of at most this many bytes is sent at once by the calling thread: it fits one socket buffer, and no other
#: thread has to be woken.
LITTLE = 8 << 10


class SendStream(Stream):
    """Sends the lanes that it is given, one after the other."""

    def __init__(self, conn: socket.socket, peer: str, owner: StreamOwner) -> None:
        super().__init__(conn, peer, owner, "send")
        self._jobs: SimpleQueue[tuple[TcpRun, Flow, int] | None] = SimpleQueue()
        self._queued = 0

    def send(self, run: TcpRun, flow: Flow, lane: int) -> None:
        """Send a lane of a run now if it is little and nothing has to be waited for, otherwise queue it. Call it from
        one thread only."""
        with self._lock:
            idle = self._queued == 0
            self._queued += 1
        if not (idle and self._at_once(run, flow, lane)):
            self._jobs.put((run, flow, lane))

    def _at_once(self, run: TcpRun, flow: Flow, lane: int) -> bool:
        """Try to send without waiting for anything. False if that is not possible."""
        with self.using:
            return not self.closed and self._try(run, flow, lane)

    def _try(self, run: TcpRun, flow: Flow, lane: int) -> bool:
        span = flow.lanes[lane][0]
        if len(flow.lanes[lane]) > 1 or span.wire > LITTLE or run.limit is not None:
            return False
        if span.parts or span.after or span.ring:
            return False
        if run.passed is not None or self.peer in run.resumed:  # it may have to be waited for
            return False
        if not self._writable():
            return False
        copy_slot = self.owner.copy_slots.free()
        if copy_slot is None:
            return False
        try:
            if run.begin(self):
                with self.part(run, lane):
                    memory, ops = self._pack(run, span)
                    with copy_slot.inside(run.guards, span.owners):
                        copy_slot.run(ops)
                    self.sock.sendall(Header.of(flow, lane, run.label).pack() + memory)
                    self._sent(run, span)
        finally:
            self.owner.copy_slots.leave(copy_slot)
            self._done()
        return True

    def _writable(self) -> bool:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        return [event for _, event in poll.poll(0)] == [select.POLLOUT]

    def _done(self) -> None:
        with self._lock:
            self._queued -= 1

    def shut(self) -> None:
        """Shut the stream, and end the wait for jobs."""
        super().shut()
        self._jobs.put(None)

    @property
    def healthy(self) -> bool:
        """Whether the other end still listens, as far as the kernel knows."""
        if self.closed:
            return False
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, flow, lane = job
            if run.begin(self):
                with self.part(run, lane):
                    self._run(run, flow, lane)
            self._done()
            if self.closed:
                return
            del job, run, flow

    def _run(self, run: TcpRun, flow: Flow, lane: int) -> None:
        spans = flow.lanes[lane]
        base = run.bases.get(self.peer)
        # Hold the header back until the first bytes, unless they wait for a reduction or for data from others.
        asks = self.peer in run.resumed
        waits = spans[0].parts or spans[0].after or spans[0].ring
        more = 0 if waits or run.passed is not None or asks else socket.MSG_MORE
        self.sock.sendall(Header.of(flow, lane, run.label, 0 if base is None else base.seq, asks).pack(), more)
        kept = self._ask(spans) if asks else None
        past = 0
        for number, whole in enumerate(spans):
            if number < past:
                continue
            if base is None and kept is None and (stretch := self.lent(run, lane, number, sends=True)) is not None:
                past = number + len(stretch.spans)
                continue
            rest, had = ([whole], []) if kept is None else divide(whole, kept[number])
            for span in had:
                run.moved(span.nbytes)
            for span in rest:
                self._give(run, span, base)

    def _ask(self, spans: Sequence[Span]) -> list[list[bool]]:
        """For each piece of a lane, whether the receiver has it already."""
        counts = [count_pieces(span) for span in spans]
        said = bytearray(-(-sum(counts) // 8))
        self.fill(memoryview(said))
        bits = iter(np.unpackbits(np.frombuffer(said, np.uint8), bitorder="little").astype(bool).tolist())
        return [list(itertools.islice(bits, count)) for count in counts]

    def _give(self, run: TcpRun, span: Span, base: BaseVersion | None) -> None:
        if span.after:
            run.await_laid(span.after)
        if span.ring:
            self._hand_on(run, span.ring)
        elif base is not None and not span.carried:
            self._difference(run, span, base)
        elif span.memory is not None:
            self._straight(run, span, span.memory)
        else:
            self._packed(run, span)
        self._sent(run, span)

    def _sent(self, run: TcpRun, span: Span) -> None:
        run.moved(span.nbytes)
        self.owner.count(self.peer, span.nbytes, 0)
        for part in span.parts:
            run.sent(part)

    def _hand_on(self, run: TcpRun, places: Sequence[RingPlace]) -> None:
        """Send carried pieces, as many at a time as have come."""
        while places:
            some = run.carried(places)
            sent, places = places[: len(some)], places[len(some) :]
            while some and run.limit is None:
                some = _after(some, self.sock.sendmsg(some))
            for memory in some:
                self._send_all(run, memory)
            run.went(sent)

    def _straight(self, run: TcpRun, span: Span, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            n, most = 0, run.room_to_send(CALL)
            if run.passed is not None:
                view, offset, _, _ = span.cuts[0]
                left = len(memory) - at
                most = run.await_bytes(view, offset + at, min(PASSED, most, left), min(most, left))
            with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
                with contextlib.suppress(BlockingIOError):
                    n = self.sock.send(memory[at : at + most], socket.MSG_DONTWAIT)
            run.spend(n)
            at += n
            if at < len(memory):
                self.wait(select.POLLOUT)
        if span.wire > span.nbytes:
            self.sock.sendall(bytes(span.wire - span.nbytes))

    def _packed(self, run: TcpRun, span: Span) -> None:
        run.await_span(span)
        memory, ops = self._pack(run, span)
        with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
            run.check()
            copy_slot.run(ops)
        self._send_all(run, memory)

    def _send_all(self, run: TcpRun, memory: memoryview) -> None:
        """Send memory of this agent's own, as fast as the run may."""
        at = 0
        while at < len(memory):
            most = run.room_to_send(len(memory))
            self.sock.sendall(memory[at : at + most])
            run.spend(min(most, len(memory) - at))
            at += most

    # ---- differences --------------------------------------------------------------------------

    def _difference(self, run: TcpRun, span: Span, base: BaseVersion) -> None:
        """Send what has changed in a span since ``base``, piece by piece."""
        room = self.difference_chunk(run).reserve(difference_room(run.program.chunk))
        frames = FrameWriter(lambda some: self._send_all(run, some), room[run.program.chunk :], base.intact)
        if span.memory is not None:
            at = 0
            for cut in span.cuts:
                newer = span.memory[at : at + cut.nbytes]
                older = base.memory(cut.view, cut.offset, cut.nbytes)
                with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
                    frames.add(newer, older, cut.dtype)
                frames.send()
                at += cut.nbytes
        else:
            memory, ops = self._pack(run, span)
            before = room[: run.program.chunk]
            with self.owner.copy_slots.one() as copy_slot, copy_slot.inside(run.guards, span.owners):
                copy_slot.run(ops)
                copy_slot.run(self._pack_base(run, span, base))
            for place, piece in span.pieces:
                end = place + piece.nbytes
                frames.add(memory[place:end], before[place:end], piece.dtype)
                frames.send()
        frames.send(last=True)

    def _pack_base(self, run: TcpRun, span: Span, base: BaseVersion) -> list[Op]:
        """The copies that fill the other chunk with the span's bytes of ``base``."""
        chunk, ops = self.difference_chunk(run), []
        for place, piece in span.pieces:
            end = piece.ends[0]
            assert end.view is not None, "a result in a difference"
            older, dense, first = base.view(end.view), chunk.view(piece.dtype), place // piece.dtype.itemsize
            ops += [Op(tile, older, dense, offset, first + at) for tile, offset, at in end.steps]
        return ops

    def _pack(self, run: TcpRun, span: Span) -> tuple[memoryview, list[Op]]:
        """The memory for the span's bytes, and the copies that fill it. Waits for the parts whose values it sends."""
        values = {part.number: dense_view(run.value(part)) for part in span.parts}
        chunk = self.chunk(run)
        memory = chunk.reserve(run.program.chunk)[: span.wire]
        ops = []
        for place, piece in span.pieces:
            end = piece.ends[0]
            source = end.view if end.view is not None else values[_part_of(piece)]
            dense, base = chunk.view(piece.dtype), place // piece.dtype.itemsize
            ops += [Op(tile, source, dense, offset, base + at) for tile, offset, at in end.steps]
        return memory, ops


def _after(parts: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of them after so many bytes."""
    for number, part in enumerate(parts):
        if nbytes < len(part):
            return [part[nbytes:], *parts[number + 1 :]]
        nbytes -= len(part)
    return []


def _part_of(piece: FlowPiece) -> int:
    assert piece.part is not None, "a piece without a source"
    return piece.part.number


#: Before the records of each piece in a difference: how many bytes they are.
FRAME = struct.Struct("<I")
#: Frames are sent once there are this many bytes of them.
_FULL = 256 << 10


def difference_room(chunk: int) -> int:
    """Bytes that a lane needs for differences besides its chunk of that size: what that held before, and frames."""
    return chunk + FRAME.size + most_bytes(CHUNK) + _FULL


def element_bytes(dtype: torch.dtype) -> int:
    """Bytes that differ together."""
    return min(dtype.itemsize, 8)


class FrameWriter:
    """Collects the frames of a span in ``room``, which has space for the longest one beside _FULL bytes.

    Once the version that it compares with is not ``intact`` any more, it sends all bytes.
    """

    def __init__(self, send: Callable[[memoryview], None], room: memoryview, intact: Callable[[], bool]) -> None:
        self._send, self._room, self._intact = send, room, intact
        self._at = 0

    def add(self, newer: memoryview, older: memoryview, dtype: torch.dtype) -> None:
        """Add the frame of a piece."""
        out = np.frombuffer(self._room, np.uint8)[self._at + FRAME.size :]
        fresh, item, library = np.frombuffer(newer, np.uint8), element_bytes(dtype), load_difference()
        length = library.encode(fresh, np.frombuffer(older, np.uint8), item, out)
        if not self._intact():  # what was compared may have been torn
            length = library.encode(fresh, None, item, out)
        FRAME.pack_into(self._room, self._at, length)
        self._at += FRAME.size + length

    def send(self, *, last: bool = False) -> None:
        """Send what has been collected, if that is much or if there will be no more."""
        if self._at and (last or self._at >= _FULL):
            self._send(self._room[: self._at])
            self._at = 0


def _load(span: Span, chunk: StagingChunk) -> None:
    """Fill a chunk with what the targets of a span hold; the opposite of unpacking it. Nothing is cast."""
    for place, piece in span.pieces:
        dense = chunk.view(piece.dtype)
        for end in piece.ends:
            assert end.view is not None and end.view.raw is not None and dense.raw is not None
            for tile, offset, at in end.steps:
                first = place // piece.dtype.itemsize + at
                _strided(dense.raw, tile.counts, tile.source_strides, first).copy_(
                    _strided(end.view.raw, tile.counts, tile.target_strides, offset)
                )


def _strided(flat: torch.Tensor, counts: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    return flat.as_strided(counts, strides, int(flat.storage_offset()) + offset)
