"""The agent's descriptor socket: authenticated connections that bring file descriptors by SCM_RIGHTS.

Each connection belongs to one session and lives as long as it. When the connection ends, the agent knows that a living
process has left the bus. Anything unexpected closes a connection, with one log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from etha import limits
from etha.bus.codec import Envelope, Failure, Malformed, Push, Reply, Request, decode, encode
from etha.bus.handshake import Attach, Descriptors, Goodbye, HandshakeDone
from etha.bus.packets import PacketConnection, close_all
from etha.bus.process import Credentials
from etha.errors import EthaError, ProtocolError

log = logging.getLogger(__name__)

_ACCEPT_PAUSE = 0.5
#: Descriptors that a new worker will take: this connection, one on the bus, a pidfd, and those that it sends.
_COMER_DESCRIPTORS = 4


class Attachments:
    """Accepts connections on ``listener`` (owned) and hands each to ``on_attach(attachment, session)``."""

    def __init__(
        self, listener: socket.socket, uid: int, on_attach: Callable[[Attachment, str], None], timeout: float
    ) -> None:
        self._listener = listener
        self._uid = uid
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self.on_attach = on_attach
        self.strangers: set[Attachment] = set()
        self._refusals = limits.WarningLimit(log)
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening, and close the connections that belong to no session. Idempotent."""
        if self._listener.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for stranger in list(self.strangers):
            stranger.close()
        self._refusals.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors: the listener stays readable, so look away
                log.error("cannot accept a descriptor connection: %s", error)
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(_ACCEPT_PAUSE, self._resume)
                return
            credentials = Credentials.of_socket(connection)
            if credentials.uid != self._uid:
                self._refusals.warn(
                    "refused process %d of uid %d: this agent runs as uid %d and serves no other user; every user "
                    "needs an ETHA_RUNTIME_DIR of their own",
                    credentials.pid,
                    credentials.uid,
                    self._uid,
                )
                connection.close()
                continue
            if (why := self._crowded()) is not None:
                # A worker comes here first, so it knows nothing about this agent yet.
                self._refusals.warn("refused process %d: %s", credentials.pid, why)
                with contextlib.suppress(OSError):
                    connection.send(encode(Push(0, Goodbye(text=f"it takes no more workers: {why}"))))
                connection.close()
                continue
            self.strangers.add(Attachment(self, connection, credentials, self._timeout))

    def _crowded(self) -> str | None:
        """Why no other connection can be accepted now; None if one can."""
        if len(self.strangers) >= limits.max_unproven():
            return f"{len(self.strangers)} others are coming at this moment: try again"
        return limits.shortage(_COMER_DESCRIPTORS * (1 + len(self.strangers)))

    def _resume(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)


class Attachment:
    """One descriptor connection; ``credentials`` are the kernel's."""

    def __init__(self, owner: Attachments, connection: socket.socket, credentials: Credentials, timeout: float) -> None:
        self.credentials = credentials
        self._owner = owner
        self._packets = PacketConnection(connection, self._packet, self._ended)
        self._timer = asyncio.get_running_loop().call_later(timeout, self.close)
        self._take: Callable[[dict[str, Any], list[int]], None] | None = None
        self._gone: Callable[[], None] | None = None

    def serve(self, take: Callable[[dict[str, Any], list[int]], None], on_ended: Callable[[], None]) -> None:
        """Give this connection to a session: ``take(header, fds)`` owns the fds, ``on_ended()`` is called when it
        ends."""
        self._take, self._gone = take, on_ended
        self._timer.cancel()
        self._owner.strangers.discard(self)

    def hand(self, envelope: Envelope, fds: Sequence[int]) -> bool:
        """Send descriptors, which stay the caller's. False if the other end does not read, or has gone."""
        try:
            self._packets.send(encode(envelope), fds)
        except OSError:  # the connection's end is heard in another way
            return False
        return True

    def close(self) -> None:
        """Close; idempotent. ``on_ended`` is not called."""
        self._timer.cancel()
        self._owner.strangers.discard(self)
        self._packets.close()

    def _ended(self, text: str) -> None:
        if text:
            log.warning("dropped the descriptor connection of process %d: %s", self.credentials.pid, text)
        self.close()
        if self._gone is not None:
            self._gone()

    def _packet(self, data: bytes, fds: list[int]) -> None:
        try:
            request = decode(data)
            if not isinstance(request, Request):
                raise Malformed(f"a {type(request).__name__} instead of a request")
        except Malformed as error:
            close_all(fds)
            return self._ended(str(error))
        try:
            self._handle(request, fds)
        except EthaError as error:
            self._answer(Failure(request.id, error))
            if self._take is None:
                self._ended(str(error))
        except Exception as error:
            log.exception("descriptors of process %d could not be taken", self.credentials.pid)
            self._answer(Failure(request.id, EthaError(f"the agent failed: {type(error).__name__}: {error}")))
        else:
            self._answer(Reply(request.id, HandshakeDone()))

    def _handle(self, request: Request, fds: list[int]) -> None:
        match request.message:
            case Descriptors(header=header) if self._take is not None:
                return self._take(header, fds)
            case Attach(session=session) if self._take is None and not fds:
                return self._owner.on_attach(self, session)
        close_all(fds)
        raise ProtocolError(f"{type(request.message).__name__} is not expected here")

    def _answer(self, envelope: Envelope) -> None:
        try:
            self._packets.send(encode(envelope))
        except OSError as error:
            if not self._packets.closed:
                self._ended(f"an answer cannot be sent: {error.strerror}")
