"""The link port: accepts other agents' connections, bounds them, and passes their bytes on to the ROUTER.

    agent == TCP ==> Passage == private AF_UNIX connection ==> libzmq (CURVE, the gate)

libzmq accepts every connection, without a bound, and ends the process when it runs out of descriptors. So it listens
where only this process can connect, and gets only connections that have begun to speak ZMTP. A connection is proven
when libzmq sends READY on it, in clear, once the gate has let the key in. Unproven connections are bounded in number
and in time. When there are too many, the oldest is closed, preferably one that has sent nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections import deque

from etha import limits

log = logging.getLogger(__name__)

_HUNG_UP = "it closed the connection"

#: Seconds for which nothing is accepted after the process has run out of descriptors.
ACCEPT_PAUSE = 0.5
#: Most bytes from an unproven connection. CURVE's greeting, HELLO and INITIATE need less.
MAX_UNPROVEN_BYTES = 4096
_READ = 1 << 16
_GREETING_BYTES = 64
_SIGNATURE_BYTES = 10


class Private:
    """An AF_UNIX listener without a name in any file system. Only this process can connect to it."""

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="etha-")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.listener.bind(f"/proc/self/fd/{place}/links")  # a short name, wherever the directory is
            self.listener.listen(limits.MAX_UNPROVEN)
            self._name: int = os.open("links", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            os.unlink("links", dir_fd=place)
        except BaseException:
            self.listener.close()
            raise
        finally:
            os.close(place)
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # noqa: PTH106

    def connect(self) -> socket.socket:
        """A connection to the listener. Raises OSError."""
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            conn.connect(f"/proc/self/fd/{self._name}")
        except BaseException:
            conn.close()
            raise
        return conn

    def close(self) -> None:
        """Let nobody connect any more. The listener belongs to whoever it was given to. Idempotent."""
        if self._name >= 0:
            os.close(self._name)
            self._name = -1


class Answers:
    """Parses what libzmq sends on a connection until it has sent READY; pure."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._greeted = False
        self.ready = False

    def feed(self, data: bytes) -> bool:
        """Parse ``data``. Whether the connection is proven now."""
        self._data += data
        if not self._greeted and len(self._data) >= _GREETING_BYTES:
            del self._data[:_GREETING_BYTES]
            self._greeted = True
        # Commands of a handshake are short frames: flags, one byte of size, one byte of the name's size, the name.
        while self._greeted and not self.ready and len(self._data) >= 2 and len(self._data) >= 2 + self._data[1]:
            self.ready = self._data[2 : 2 + self._data[1]].startswith(b"\x05READY")
            del self._data[: 2 + self._data[1]]
        return self.ready


class Passage:
    """One connection of another agent or of a stranger, and the bytes that it passes in both directions."""

    def __init__(self, front: Front, outer: socket.socket) -> None:
        self._front, self._outer = front, outer
        self._inner: socket.socket | None = None
        self._to_inner, self._to_outer = bytearray(), bytearray()
        self._answers = Answers()
        self._taken = 0
        #: The ends that take no more now; what comes for them is not read.
        self._full: set[socket.socket] = set()
        #: Whether libzmq has accepted the connection and has answered.
        self.answered = False
        self.proven = False
        self.closed = False
        outer.setblocking(False)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            # The connections of a host that vanished must not stay for ever. Beats report it much sooner.
            (socket.TCP_KEEPIDLE, 15),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 3),
        ):
            outer.setsockopt(socket.IPPROTO_TCP, option, value)
        outer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        front.loop.add_reader(outer.fileno(), self._outer_readable)

    @property
    def spoke(self) -> bool:
        """Whether it has sent anything yet."""
        return self._taken > 0

    def enter(self, inner: socket.socket) -> None:
        """Connect it to libzmq, over ``inner``."""
        self._inner = inner
        self._front.loop.add_reader(inner.fileno(), self._inner_readable)
        self._flush(inner, self._to_inner)

    def close(self) -> None:
        """Close both ends at once, without an error to anybody. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for conn in (self._outer, self._inner):
            if conn is not None:
                self._front.loop.remove_reader(conn.fileno())
                self._front.loop.remove_writer(conn.fileno())
                conn.close()
        self._front.forget(self)

    def _outer_readable(self) -> None:
        try:
            data = self._outer.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            return self._front.ended(self, _HUNG_UP)
        self._taken += len(data)
        self._to_inner += data
        if not self.proven and self._taken > MAX_UNPROVEN_BYTES:
            return self._front.ended(self, f"it said {self._taken} bytes and proved nothing")
        if self._inner is not None:
            return self._flush(self._inner, self._to_inner)
        signature = self._to_inner[:_SIGNATURE_BYTES]
        if signature[0] != 0xFF or (len(signature) == _SIGNATURE_BYTES and not signature[9] & 1):
            return self._front.ended(self, "it does not speak ZMTP")
        if len(signature) == _SIGNATURE_BYTES:
            self._front.admit(self)

    def _inner_readable(self) -> None:
        assert self._inner is not None
        try:
            data = self._inner.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            if self._to_outer:  # an error that tells the other agent why it is refused
                with contextlib.suppress(OSError):
                    self._outer.send(self._to_outer, socket.MSG_NOSIGNAL)
            return self._front.ended(self, "it holds no key of an agent")
        if not self.answered:
            self.answered = True
            self._front.met(self)
        if not self.proven and self._answers.feed(data):
            self.proven = True
            self._front.prove(self)
        self._to_outer += data
        self._flush(self._outer, self._to_outer)

    def _flush(self, conn: socket.socket, pending: bytearray) -> None:
        """Send what ``conn`` takes. While something is left, its source is not read."""
        try:
            sent = conn.send(pending, socket.MSG_NOSIGNAL) if pending else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # it is closed, which the next read reports
        del pending[:sent]
        if self._inner is None or bool(pending) is (conn in self._full):
            return
        loop = self._front.loop
        source, read = (
            (self._outer, self._outer_readable) if conn is self._inner else (self._inner, self._inner_readable)
        )
        if pending:
            self._full.add(conn)
            loop.remove_reader(source.fileno())
            loop.add_writer(conn.fileno(), self._flush, conn, pending)
        else:
            self._full.discard(conn)
            loop.remove_writer(conn.fileno())
            loop.add_reader(source.fileno(), read)


class Front:
    """Accepts on ``listener`` (owned), whose address is ``address``, and connects to ``private``."""

    def __init__(self, listener: socket.socket, private: Private, address: str, patience: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._listener, self._private = listener, private
        self._address, self._patience = address, patience
        self._all: set[Passage] = set()
        #: In the order of their arrival. A proven connection is removed.
        self._unproven: dict[Passage, asyncio.TimerHandle] = {}
        #: Those that libzmq has not accepted yet. Each will take one more descriptor, from the reserve if need be.
        self._meeting: set[Passage] = set()
        self._queue: deque[Passage] = deque()
        self._strangers = limits.WarningLimit(log)
        self._pause: asyncio.TimerHandle | None = None
        self.loop.add_reader(listener.fileno(), self._accept)

    @property
    def unproven(self) -> int:
        """Number of connections that have proven nothing yet."""
        return len(self._unproven)

    def close(self) -> None:
        """Close the port and every connection. Idempotent."""
        if self._listener.fileno() >= 0:
            if self._pause is not None:
                self._pause.cancel()
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for passage in list(self._all):
            passage.close()
        self._private.close()
        self._strangers.close()

    def admit(self, passage: Passage) -> None:
        """It speaks ZMTP: connect it to libzmq once libzmq has accepted enough of those before it."""
        self._queue.append(passage)
        self._admit_next()

    def met(self, passage: Passage) -> None:
        """libzmq has accepted it."""
        self._meeting.discard(passage)
        self._admit_next()

    def prove(self, passage: Passage) -> None:
        """The gate has let it in."""
        timer = self._unproven.pop(passage, None)
        if timer is not None:
            timer.cancel()

    def ended(self, passage: Passage, why: str) -> None:
        """One end has closed, or it is not an agent's connection."""
        if why is _HUNG_UP and not passage.spoke:
            log.debug("a connection to %s was closed before it said a word, as by `etha doctor`", self._address)
        elif not passage.proven:
            self._strangers.warn("dropped a connection to %s that does not speak as agents do: %s", self._address, why)
        passage.close()

    def forget(self, passage: Passage) -> None:
        self._all.discard(passage)
        self.prove(passage)
        if passage in self._meeting:
            self.met(passage)

    def _admit_next(self) -> None:
        while self._queue and len(self._meeting) < limits.reserve() // 2:
            passage = self._queue.popleft()
            if passage.closed:
                continue
            try:
                inner = self._private.connect()
            except OSError as error:
                self.ended(passage, f"it cannot be served: {error.strerror}")
                continue
            if limits.in_reserve(inner.fileno()):
                inner.close()
                self._strangers.warn("closed a connection to %s: no file descriptors are left", self._address)
                passage.close()
                continue
            self._meeting.add(passage)
            passage.enter(inner)

    def _accept(self) -> None:
        for _ in range(64):  # bounded, so that the loop gets its turn in a flood, too
            try:
                conn, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("the link port cannot accept: %s", error)
                self.loop.remove_reader(self._listener.fileno())
                self._pause = self.loop.call_later(ACCEPT_PAUSE, self._resume)
                return
            if limits.in_reserve(conn.fileno()):
                self._strangers.warn("closed a connection to %s: no file descriptors are left", self._address)
                conn.close()
                self._evict()
                continue
            if len(self._unproven) >= limits.max_unproven():
                self._strangers.warn("closed a connection to %s: too many have proven nothing yet", self._address)
                self._evict()
            passage = Passage(self, conn)
            self._all.add(passage)
            self._unproven[passage] = self.loop.call_later(self._patience, self._late, passage)

    def _evict(self) -> None:
        oldest = next((p for p in self._unproven if not p.spoke), None) or next(iter(self._unproven), None)
        if oldest is not None:
            oldest.close()

    def _late(self, passage: Passage) -> None:
        self.ended(passage, f"it proved nothing in {self._patience:g} s")

    def _resume(self) -> None:
        self.loop.add_reader(self._listener.fileno(), self._accept)
