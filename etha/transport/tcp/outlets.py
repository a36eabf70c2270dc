"""Outlets: streams to another agent.   job -> header, then span by span: straight from memory | pack, send"""

from __future__ import annotations

import contextlib
import select
import socket
from queue import SimpleQueue

from etha.transport.copy.staging import dense_view
from etha.transport.geometry.iovec import Op
from etha.transport.tcp.header import Header
from etha.transport.tcp.run import Exchange
from etha.transport.tcp.streams import CALL, Hall, Stream
from etha.transport.wire.flows import Flow, Piece, Span

#: So little is sent at once by who asks for it: one socket buffer takes it, and two threads need not meet.
LITTLE = 8 << 10


class Outlet(Stream):
    """Sends the lanes that it is given, one after the other."""

    def __init__(self, conn: socket.socket, peer: str, hall: Hall) -> None:
        super().__init__(conn, peer, hall, "send")
        self._jobs: SimpleQueue[tuple[Exchange, Flow, int] | None] = SimpleQueue()
        self._queued = 0

    def send(self, exchange: Exchange, flow: Flow, lane: int) -> None:
        """Queue a lane of a run; from one thread only. What is little and can go at once has gone."""
        with self._lock:
            idle = self._queued == 0
            self._queued += 1
        if not (idle and self._at_once(exchange, flow, lane)):
            self._jobs.put((exchange, flow, lane))

    def _at_once(self, exchange: Exchange, flow: Flow, lane: int) -> bool:
        """Send without waiting for anything; False where that cannot be."""
        with self.using:
            return not self.closed and self._try(exchange, flow, lane)

    def _try(self, exchange: Exchange, flow: Flow, lane: int) -> bool:
        span = flow.lanes[lane][0]
        if len(flow.lanes[lane]) > 1 or span.wire > LITTLE or span.parts or span.after or not self._writable():
            return False
        desk = self.hall.desks.free()
        if desk is None:
            return False
        try:
            if exchange.begin(self):
                with self.part(exchange):
                    memory, ops = self._pack(exchange, span)
                    with desk.inside(exchange.guards, span.owners):
                        desk.run(ops)
                    self.sock.sendall(Header.of(flow, lane, exchange.label).pack() + memory)
                    self._sent(exchange, span)
        finally:
            self.hall.desks.leave(desk)
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
        """As of any stream; also ends the wait for jobs."""
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
        """Job after job until the stream is shut."""
        while (job := self._jobs.get()) is not None:
            exchange, flow, lane = job
            if exchange.begin(self):
                with self.part(exchange):
                    self._run(exchange, flow, lane)
            self._done()
            if self.closed:
                return
            del job, exchange, flow

    def _run(self, exchange: Exchange, flow: Flow, lane: int) -> None:
        spans = flow.lanes[lane]
        # Held back for the first bytes, unless these have to wait for a reduction, or to come in.
        more = 0 if spans[0].parts or spans[0].after else socket.MSG_MORE
        self.sock.sendall(Header.of(flow, lane, exchange.label).pack(), more)
        for span in spans:
            if span.after:
                exchange.await_laid(span.after)
            if span.memory is not None:
                self._straight(exchange, span, span.memory)
            else:
                self._packed(exchange, span)
            self._sent(exchange, span)

    def _sent(self, exchange: Exchange, span: Span) -> None:
        exchange.moved(span.nbytes)
        self.hall.count(self.peer, span.nbytes, 0)
        for part in span.parts:
            exchange.sent(part)

    def _straight(self, exchange: Exchange, span: Span, memory: memoryview) -> None:
        at = 0
        while at < len(memory):
            n = 0
            with self.hall.desks.one() as desk, desk.inside(exchange.guards, span.owners):
                with contextlib.suppress(BlockingIOError):
                    n = self.sock.send(memory[at : at + CALL], socket.MSG_DONTWAIT)
            at += n
            if at < len(memory):
                self.wait(select.POLLOUT)
        if span.wire > span.nbytes:
            self.sock.sendall(bytes(span.wire - span.nbytes))

    def _packed(self, exchange: Exchange, span: Span) -> None:
        memory, ops = self._pack(exchange, span)
        with self.hall.desks.one() as desk, desk.inside(exchange.guards, span.owners):
            desk.run(ops)
        self.sock.sendall(memory)

    def _pack(self, exchange: Exchange, span: Span) -> tuple[memoryview, list[Op]]:
        """Where the span's bytes go, and the copies that fill them; waits for the parts whose values it sends."""
        values = {part.number: dense_view(exchange.value(part)) for part in span.parts}
        chunk = self.chunk(exchange)
        memory = chunk.reserve(exchange.program.chunk)[: span.wire]
        ops = []
        for place, piece in span.pieces:
            end = piece.ends[0]
            source = end.view if end.view is not None else values[_part_of(piece)]
            dense, base = chunk.view(piece.dtype), place // piece.dtype.itemsize
            ops += [Op(tile, source, dense, offset, base + at) for tile, offset, at in end.steps]
        return memory, ops


def _part_of(piece: Piece) -> int:
    assert piece.part is not None, "a piece without a source"
    return piece.part.number
