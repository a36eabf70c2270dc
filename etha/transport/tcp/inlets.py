"""Inlets: streams from another agent.   header -> its run -> span by span: straight into memory | receive, unpack"""

from __future__ import annotations

import logging
import select
import socket
from typing import Protocol

from etha.errors import ProtocolError, TransferError
from etha.transport.geometry.iovec import Op
from etha.transport.tcp.header import HEADER_BYTES, Header
from etha.transport.tcp.run import Exchange
from etha.transport.tcp.streams import CALL, Hall, Stream
from etha.transport.wire.flows import Flow, Span

log = logging.getLogger(__name__)

#: Bytes that are worth waking up for, where so many are still to come.
WORTH = 256 << 10


class Lobby(Hall, Protocol):
    """A hall that knows the runs which inlets are for."""

    def match(self, inlet: Inlet, header: Header) -> Exchange | None:
        """The run that a header belongs to, waited for; None when the inlet is shut first."""
        ...

    def left(self, inlet: Inlet, error: Exception) -> None:
        """The other end has closed the inlet between two runs."""
        ...

    def forget(self, inlet: Inlet) -> None:
        """The inlet's thread ends."""
        ...


class Inlet(Stream):
    """Receives what its header announces, run after run."""

    def __init__(self, conn: socket.socket, peer: str, lobby: Lobby, opening: bytes) -> None:
        super().__init__(conn, peer, lobby, "recv")
        self._lobby = lobby
        self.opening = opening

    def work(self) -> None:
        """Header, run, header, run, until the stream ends."""
        data = memoryview(bytearray(HEADER_BYTES))
        while True:
            try:
                self._fill(data)
                header = Header.unpack(bytes(data))
            except (OSError, TransferError, ProtocolError) as error:
                if not self.closed:
                    self._left(error)
                return
            exchange = self._lobby.match(self, header)
            if exchange is None or not exchange.begin(self):
                return
            with self.part(exchange):
                self._run(exchange, self._agree(exchange, header), header.lane)
            if self.closed:
                return
            del exchange

    def _left(self, error: Exception) -> None:
        """The other end has closed an idle stream, or talks nonsense: runs that it has yet to begin never will."""
        if isinstance(error, ProtocolError):
            log.warning("a data stream from agent %s was closed: %s", self.peer, error)
        self._lobby.left(self, self.lost(error) if isinstance(error, OSError) else error)

    def _agree(self, exchange: Exchange, header: Header) -> Flow:
        """The flow that a header announces; ProtocolError before anything is written where it differs."""
        flow = exchange.program.receives.get(self.peer)
        lanes = () if flow is None else flow.lanes
        mine = Header.of(flow, header.lane, exchange.label) if flow and header.lane < len(lanes) else None
        if flow is None or header != mine:
            raise ProtocolError(
                f"agent {self.peer} is about to send {header.nbytes} bytes in {header.lanes} streams "
                f"(stream {header.lane}: {header.wire} bytes, digest {header.digest.hex()[:12]}), planned here are "
                f"{flow.nbytes if flow else 0} in {len(lanes)} (digest {flow.digest.hex()[:12] if flow else 'none'}): "
                f"both agents must have the same plan, bucket size, streams and staging"
            )
        return flow

    def _run(self, exchange: Exchange, flow: Flow, lane: int) -> None:
        for span in flow.lanes[lane]:
            if span.index >= 0:
                self._contribution(exchange, span)
            elif span.memory is not None:
                self._straight(exchange, span, span.memory)
            else:
                self._unpacked(exchange, span)
            if span.arrivals:
                exchange.laid(span.arrivals)
            exchange.moved(span.nbytes)
            self.hall.count(self.peer, 0, span.nbytes)

    def _contribution(self, exchange: Exchange, span: Span) -> None:
        part = span.parts[0]
        exchange.admit(part)
        room = exchange.room(part, part.far.index(span.index), span.nbytes)
        self._fill(memoryview(room.numpy()))  # type: ignore[arg-type, unused-ignore]
        self._skip(span)
        exchange.arrived(part)

    def _straight(self, exchange: Exchange, span: Span, memory: memoryview) -> None:
        at, lowest = 0, 1
        while at < len(memory):
            worth = min(WORTH, len(memory) - at)
            if worth != lowest:
                lowest = worth
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, worth)
            self.wait(select.POLLIN)
            with self.hall.desks.one() as desk, desk.inside(exchange.guards, span.owners):
                try:
                    n = self.sock.recv_into(memory[at : at + CALL], 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                exchange.touched = exchange.touched or n > 0
            if n == 0:
                raise self.lost()
            at += n
        if lowest != 1:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._skip(span)

    def _unpacked(self, exchange: Exchange, span: Span) -> None:
        chunk = self.chunk(exchange)
        self._fill(chunk.reserve(exchange.program.chunk)[: span.wire])
        ops = []
        for place, piece in span.pieces:
            dense, base = chunk.view(piece.dtype), place // piece.dtype.itemsize
            for end in piece.ends:
                assert end.view is not None, "a target that lies nowhere"
                ops += [Op(tile, dense, end.view, base + at, offset) for tile, offset, at in end.steps]
        with self.hall.desks.one() as desk, desk.inside(exchange.guards, span.owners), exchange.writing(desk):
            desk.run(ops)

    def gone(self) -> None:
        self._lobby.forget(self)

    def _fill(self, memory: memoryview) -> None:
        """Receive exactly ``memory``, which is this agent's own; PeerLostError at the end of the stream."""
        at = 0
        while at < len(memory):
            n = self.sock.recv_into(memory[at:], 0, socket.MSG_WAITALL)
            if n == 0:
                raise self.lost()
            at += n

    def _skip(self, span: Span) -> None:
        if span.wire > span.nbytes:
            self._fill(memoryview(bytearray(span.wire - span.nbytes)))
