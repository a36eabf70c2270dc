"""Streams: one thread and one blocking socket each, data in one direction; the GIL is free while bytes move.

A worker's memory is touched without waiting only: a thread waits for the socket outside of the call's
guard, and each system call inside moves what is there. ``shut`` wakes a thread wherever it waits.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from abc import ABC, abstractmethod
from typing import Protocol

from etha.transport.base import StreamLost
from etha.transport.exchange import Ended, Exchange
from etha.transport.staging import Budget, Chunk, Desks, StagingMemory

#: Most bytes of one system call inside a worker's memory.
CALL = 2 << 20


class Hall(Protocol):
    """Where streams belong: the data plane of this agent."""

    desks: Desks
    budget: Budget
    memory: StagingMemory

    def count(self, peer: str, sent: int, received: int) -> None:
        """Payload that went to or came from a peer."""
        ...


class Stream(ABC):
    """What both directions share: a socket, its thread, a chunk."""

    def __init__(self, conn: socket.socket, peer: str, hall: Hall, name: str) -> None:
        self.peer = peer
        self.closed = False
        self.sock, self.hall = conn, hall
        self.chunk = Chunk(hall.budget, hall.memory)
        self._lock = threading.Lock()
        #: Held by who uses the socket from another thread than the stream's own.
        self.using = threading.Lock()
        conn.setblocking(True)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
                self.chunk.release()
            self.gone()

    @abstractmethod
    def work(self) -> None:
        """All that the thread does."""

    def gone(self) -> None:  # noqa: B027 - not every direction has something to do at its end
        """The thread ends."""

    def lost(self, error: OSError | None = None) -> StreamLost:
        """The error of a stream that the other end has closed."""
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
        self._exchange.end(self._stream, error)
        if error is not None:
            self._stream.shut()
        return True
