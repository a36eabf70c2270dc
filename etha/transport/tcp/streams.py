"""Streams: one thread and one blocking socket each, data in one direction; the GIL is free while bytes move.

A worker's memory is touched without waiting only: a thread waits for the socket outside of the call's
guard, and each system call inside moves what is there. ``shut`` wakes a thread wherever it waits.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from abc import ABC, abstractmethod
from typing import Protocol

from etha.errors import TransferError
from etha.transport.base import StreamLost
from etha.transport.copy.staging import Chunk, Desks, Pool
from etha.transport.tcp.run import Ended, Exchange

#: Most bytes of one system call inside a worker's memory.
CALL = 2 << 20
#: Seconds after which a connection whose other end says nothing at all is lost: as many without a byte, then asked
#: every so many seconds as often. The other end's kernel answers, whatever its agent waits for.
SILENT, ASK_EVERY, ASK_TIMES = 8, 3, 4
#: All of it together.
STALLED = SILENT + ASK_EVERY * ASK_TIMES
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASK_TIMES),
)


class Hall(Protocol):
    """Where streams belong: the data plane of this agent."""

    desks: Desks
    pool: Pool

    def count(self, peer: str, sent: int, received: int) -> None:
        """Payload that went to or came from a peer."""
        ...


class Stream(ABC):
    """What both directions share: a socket, its thread, and a chunk for as long as it packs or unpacks for a run."""

    def __init__(self, conn: socket.socket, peer: str, hall: Hall, name: str) -> None:
        self.peer = peer
        self.closed = False
        self.sock, self.hall = conn, hall
        self._chunk: Chunk | None = None
        self._lock = threading.Lock()
        #: Held by who uses the socket from another thread than the stream's own.
        self.using = threading.Lock()
        conn.setblocking(True)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in _KEEPALIVE:
            conn.setsockopt(level, option, value)
        self._thread = threading.Thread(target=self._live, name=f"etha-{name}-{peer[:8]}", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def shut(self) -> None:
        """No more data either way; wakes the thread, which closes the socket. Idempotent, returns at once."""
        with self._lock:
            if not self.closed:
                self.closed = True
                with contextlib.suppress(OSError):  # the other end has gone before
                    self.sock.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the end of a stream that is shut."""
        if self._thread.is_alive():
            self._thread.join()

    def _live(self) -> None:
        try:
            self.work()
        finally:
            self.shut()
            with self.using:
                self.sock.close()
            self.gone()

    @abstractmethod
    def work(self) -> None:
        """All that the thread does."""

    def gone(self) -> None:  # noqa: B027 - not every direction has something to do at its end
        """The thread ends."""

    def chunk(self, exchange: Exchange) -> Chunk:
        """What this stream packs or unpacks in, of the size that the run has booked; its own until its part is over."""
        if self._chunk is None:
            self._chunk = self.hall.pool.take(exchange.program.chunk)
        return self._chunk

    def leave_chunk(self) -> None:
        """Give it back; idempotent."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self.hall.pool.give(chunk)

    def lost(self, error: OSError | None = None) -> TransferError:
        """The error of a stream that the other end has closed, or of a way on which nothing comes back."""
        if error is not None and error.errno == errno.ETIMEDOUT:
            return TransferError(
                f"the data connection with agent {self.peer} stands still: its host has answered nothing on it for "
                f"{STALLED} s, but does on the link; look for a firewall or a broken way between the data ports"
            )
        why = f": {error.strerror or error}" if error is not None else ""
        return StreamLost(f"the data stream with agent {self.peer} is closed{why}", reason="closed")

    def wait(self, event: int) -> None:
        """Until the socket is ready for a poll event, or shut."""
        poll = select.poll()
        poll.register(self.sock, event)
        poll.poll()

    def part(self, exchange: Exchange) -> _Part:
        """Around what this stream does for a run: an error in it ends the run and the stream."""
        return _Part(self, exchange)


class _Part:
    """A stream's part of a run: errors end the run, in words that name the peer."""

    def __init__(self, stream: Stream, exchange: Exchange) -> None:
        self._stream, self._exchange = stream, exchange

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Ended):
            error = self._exchange.error or error
        elif isinstance(error, OSError):
            error = self._stream.lost(error)
        self._stream.leave_chunk()  # before the run can be over: what it has booked is free then
        self._exchange.end(self._stream, error)
        if error is not None:
            self._stream.shut()
        return True
