"""The agent's bus socket: accepts and limits the connections of workers, and speaks ZMTP itself.

A connection is *unproven* until it has a session (``Connection.proven``). The number of unproven connections and their
time are limited. If there are too many, the oldest that has sent nothing is closed, else the oldest. No connection may
take a descriptor of the reserve (``etha.limits``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable

from etha import limits
from etha.bus.process import Credentials
from etha.bus.zmtp import NotZmtp, Parser, frame, opening

log = logging.getLogger(__name__)

#: Seconds without accepting after the process has run out of descriptors.
ACCEPT_PAUSE = 0.5
_OPENING = opening(b"ROUTER")
#: Bytes of one read, and reads until the loop runs other callbacks.
_READ = 1 << 18
_READS = 8


class Connection:
    """One worker's connection. ``credentials`` are from the kernel."""

    def __init__(self, owner: Connections, conn: socket.socket) -> None:
        self.credentials = Credentials.of_socket(conn)
        self.proven = self.closed = False
        #: Whether it has sent anything yet.
        self.spoke = False
        self._owner, self._conn = owner, conn
        self._parser = Parser(owner.max_message)
        self._waiting: deque[memoryview] = deque()
        conn.setblocking(False)
        owner.loop.add_reader(conn.fileno(), self._readable)
        self._write(_OPENING)

    def __repr__(self) -> str:
        return f"a connection of process {self.credentials.pid}"

    def send(self, data: bytes) -> None:
        """Queue one message. BlockingIOError if the worker does not read. A closed connection drops it."""
        if len(self._waiting) >= self._owner.high_water:
            raise BlockingIOError
        if not self.closed:
            self._write(frame(data))

    def close(self) -> None:
        """Close at once and call nobody. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._owner.forget(self)
        fd = self._conn.fileno()
        self._owner.loop.remove_reader(fd)
        self._owner.loop.remove_writer(fd)
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self._conn.shutdown(socket.SHUT_RDWR)
        self._conn.close()

    def _write(self, data: bytes) -> None:
        sent = 0
        if not self._waiting:
            try:
                sent = self._conn.send(data, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:  # it is gone; reading will report the end
                return
            if sent == len(data):
                return
            self._owner.loop.add_writer(self._conn.fileno(), self._writable)
        self._waiting.append(memoryview(data)[sent:])

    def _writable(self) -> None:
        while self._waiting:
            try:
                sent = self._conn.send(self._waiting[0], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._waiting.clear()
                break
            if sent < len(self._waiting[0]):
                self._waiting[0] = self._waiting[0][sent:]
                return
            self._waiting.popleft()
        self._owner.loop.remove_writer(self._conn.fileno())

    def _readable(self) -> None:
        for _ in range(_READS):
            try:
                count = self._conn.recv_into(self._owner.received)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                count = 0
            if not count:
                return self._owner.ended(self, "" if self._parser.ready or not self.spoke else "it ended early")
            self.spoke = True
            try:
                for parts in self._parser.feed(self._owner.received[:count]):
                    self._owner.heard(self, parts)
                    if self.closed:
                        return
            except NotZmtp as error:
                return self._owner.ended(self, str(error))
            if count < _READ:
                return


class Connections:
    """Accepts on ``listener`` (owned). Calls ``on_message(connection, parts)``, and ``on_end(connection)`` for proven
    ones."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        on_message: Callable[[Connection, list[bytes]], None],
        on_end: Callable[[Connection], None],
        max_message: int,
        high_water: int,
        patience: float,
        path: str,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        #: Buffer for reads, parsed at once. Shared, because malloc may map and unmap a new buffer for each read.
        self.received = memoryview(bytearray(_READ))
        self.max_message, self.high_water = max_message, high_water
        self._on_message, self._on_end = on_message, on_end
        self._listener, self._patience, self._path = listener, patience, path
        self._all: set[Connection] = set()
        #: In order of arrival; a proven connection is removed.
        self._unproven: dict[Connection, asyncio.TimerHandle] = {}
        self._strangers = limits.WarningLimit(log)
        self._pause: asyncio.TimerHandle | None = None
        self.loop.add_reader(listener.fileno(), self._accept)

    def prove(self, connection: Connection) -> None:
        """The connection has a session: it has no time limit any more."""
        connection.proven = True
        timer = self._unproven.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def demote(self, connection: Connection) -> None:
        """The session is over: the worker has ``patience`` seconds to read its last messages and close."""
        connection.proven = False
        if not connection.closed and connection not in self._unproven:
            self._unproven[connection] = self.loop.call_later(self._patience, connection.close)

    def abort(self) -> None:
        """Close the listener and every connection at once; idempotent."""
        if self._listener.fileno() >= 0:
            if self._pause is not None:
                self._pause.cancel()
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for connection in list(self._all):
            connection.close()
        self._strangers.close()

    def heard(self, connection: Connection, parts: list[bytes]) -> None:
        """Handle a whole message. An error in its handling must not lose the messages behind it."""
        try:
            self._on_message(connection, parts)
        except Exception:
            log.exception("a message could not be handled")

    def ended(self, connection: Connection, why: str) -> None:
        """The other end has closed, or has violated ZMTP."""
        if why:
            self._strangers.warn("dropped a connection to %s that does not speak ZeroMQ: %s", self._path, why)
        proven = connection.proven
        connection.close()
        if proven:
            self._on_end(connection)

    def forget(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._all.discard(connection)
        timer = self._unproven.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _accept(self) -> None:
        for _ in range(64):  # the loop must run other callbacks in a flood, too
            try:
                conn, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept a connection to %s: %s", self._path, error)
                self.loop.remove_reader(self._listener.fileno())
                self._pause = self.loop.call_later(ACCEPT_PAUSE, self._resume)
                return
            if limits.in_reserve(conn.fileno()):
                self._strangers.warn("closed a connection to %s: no file descriptors are left", self._path)
                conn.close()
                self._evict()
                continue
            if len(self._unproven) >= limits.max_unproven():
                self._strangers.warn("closed a connection to %s: too many have said nothing yet", self._path)
                self._evict()
            connection = Connection(self, conn)
            self._all.add(connection)
            self._unproven[connection] = self.loop.call_later(self._patience, self._late, connection)

    def _evict(self) -> None:
        oldest = next((c for c in self._unproven if not c.spoke), None) or next(iter(self._unproven), None)
        if oldest is not None:
            oldest.close()

    def _late(self, connection: Connection) -> None:
        self._strangers.warn("closed a connection to %s: no session in %.0f s", self._path, self._patience)
        connection.close()

    def _resume(self) -> None:
        self.loop.add_reader(self._listener.fileno(), self._accept)
