"""The agent's end of the bus: sessions of workers over their bus connections, and a descriptor socket.

Hello ------------------> uid by SO_PEERCRED, pidfd, service.hello --------> Welcome(session)
Attach on cpu.fds ------> uid and pid by SO_PEERCRED, session -------------> Done
JoinSession ------------> a further bus connection of the same process ----> Done
requests <--------------> service.received, peer.reply
end: Goodbye ("closed"), or the process dies or closes the descriptor connection without Goodbye ("died")
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import msgspec

from etha import limits
from etha.bus.attachments import Attachment, Attachments
from etha.bus.codec import MAX_MESSAGE, Cancel, Envelope, Failure, Malformed, Push, Reply, Request, decode, encode
from etha.bus.connections import Connection, Connections
from etha.bus.handshake import Goodbye, HandshakeDone, JoinSession, WorkerHello, WorkerWelcome
from etha.bus.listen import PathLock, SocketEntry, listen
from etha.bus.process import Credentials, start_time
from etha.bus.sessions import MAX_REQUESTS, Peer, Reason, Session
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError, ProtocolError

__all__ = ["BusServer", "Peer", "Service"]

log = logging.getLogger(__name__)

#: Messages that may wait for one worker that does not read, and from one worker.
HIGH_WATER = 10_000
MAX_SESSIONS = 4096
#: Seconds from Hello to Attach, and for workers to answer a Goodbye.
ATTACH_TIMEOUT = 10.0
LEAVE_TIMEOUT = 1.0
#: Descriptors of a session besides its bus connection: a pidfd, the descriptor connection, and those that it sends.
SESSION_DESCRIPTORS = 4
#: Further bus connections of one session. A worker has one, and those that it is about to close.
MAX_DIRECT = 16


class Service(Protocol):
    """What the agent does with its sessions. Everything is called on the loop, so nothing here may block or wait."""

    def hello(self, peer: Peer, hello: WorkerHello) -> WorkerWelcome:
        """A worker of this user has come; raise EthaError to refuse it. The server fills in ``Welcome.session``
        later."""

    def received(self, peer: Peer, request: Request) -> None:
        """Answer now or later by ``peer.reply`` or ``peer.fail``. ``request.deadline`` is in loop time.

        An exception raised here is sent as the answer.
        """

    def said(self, peer: Peer, message: Any) -> None:
        """The worker says something that needs no answer. An exception raised here is logged."""

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """The worker does not wait for ``request_id`` any more. The service must still answer it soon."""

    def descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None:
        """File descriptors arrived. The service owns ``fds``, even if it raises EthaError to refuse them."""

    def on_disconnected(self, peer: Peer, reason: Reason) -> None:
        """The session is over; called once for every peer whose hello was not refused."""


class BusServer:
    """Serves ``service`` at ``path`` (``.../cpu.sock``; lock and descriptor socket beside it) while entered."""

    def __init__(self, path: Path, service: Service) -> None:
        self._path = path
        #: May be replaced between two events.
        self.service = service
        self._uid = os.geteuid()
        self._sessions: dict[Connection, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._complaints = limits.WarningLimit(log)
        self._refusals = limits.WarningLimit(log)
        self._left = asyncio.Event()
        self._closing = False

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The living sessions by key."""
        return MappingProxyType({key: session.peer for key, session in self._by_key.items()})

    async def __aenter__(self) -> BusServer:
        self._loop = asyncio.get_running_loop()
        self._lock = PathLock(self._path.with_suffix(".lock"), str(self._path))
        try:
            listener = listen(self._path, socket.SOCK_STREAM)
            attachments = listen(self._path.with_suffix(".fds"), socket.SOCK_SEQPACKET)
        except BaseException:
            self._lock.release()
            raise
        self._entries = [SocketEntry(path) for path in (self._path, self._path.with_suffix(".fds"))]
        self._connections = Connections(
            listener,
            on_message=self._received,
            on_end=self._disconnected,
            max_message=MAX_MESSAGE,
            high_water=HIGH_WATER,
            patience=ATTACH_TIMEOUT,
            path=str(self._path),
        )
        self._attachments = Attachments(attachments, self._uid, self._attach, ATTACH_TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close("the agent leaves")

    async def close(self, text: str) -> None:
        """Say goodbye to all workers after their pending answers, wait up to a second, remove the sockets."""
        if self._closing:
            return
        self._closing = True
        for session in list(self._by_key.values()):
            session.peer.push(Goodbye(text=text))
        if self._by_key:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await self._left.wait()
        for session in list(self._by_key.values()):
            self._end(session, "closed")
        self._attachments.close()
        self._connections.abort()
        self._complaints.close()
        self._refusals.close()
        for entry in self._entries:
            entry.remove()
        self._lock.release()

    # ---- what arrives on the bus -----------------------------------------------------------------

    def _received(self, connection: Connection, parts: list[bytes]) -> None:
        session = self._sessions.get(connection)
        try:
            if len(parts) != 1:
                raise Malformed(f"a message of {len(parts)} parts instead of 1")
            envelope = decode(parts[0], self._loop.time())
        except Malformed as error:
            return self._malformed(connection, session, error)
        if session is None:
            return self._greet(connection, envelope)
        match envelope:
            case Request():
                self._request(session, connection, envelope)
            case Cancel(id):
                if id in session.peer.requests:
                    self.service.cancelled(session.peer, id)
            case Push(0, message) if session.attached:
                self._hear(session.peer, message)
            case _:
                self._malformed(connection, session, Malformed(f"a {type(envelope).__name__} from a worker"))

    def _request(self, session: Session, connection: Connection, request: Request) -> None:
        peer = session.peer
        if isinstance(request.message, Goodbye):
            self._post(peer, Reply(request.id, HandshakeDone()))
            return self._end(session, "closed")
        if request.id in peer.requests or len(peer.requests) >= MAX_REQUESTS:
            text = f"request id {request.id} is taken, or {MAX_REQUESTS} requests wait"
            return self._post(peer, Failure(request.id, ProtocolError(text)))
        peer.requests.add(request.id)
        if connection is not session.connection:
            session.routes[request.id] = connection
        if not session.attached:
            return peer.fail(request.id, ProtocolError("a request before Attach on the descriptor socket"))
        try:
            self.service.received(peer, request)
        except Exception as error:
            peer.fail(request.id, _told(request, error))

    def _hear(self, peer: Peer, message: Any) -> None:
        try:
            self.service.said(peer, message)
        except EthaError as error:
            log.warning("dropped a %s from %r: %s", type(message).__name__, peer, error)
        except Exception:
            log.exception("the agent failed on a %s from %r", type(message).__name__, peer)

    def _greet(self, connection: Connection, envelope: Envelope) -> None:
        credentials = connection.credentials
        if not isinstance(envelope, Request):
            return log.debug("dropped a %s without a session from %r", type(envelope).__name__, connection)
        if isinstance(envelope.message, JoinSession):
            return self._join(connection, envelope.id, envelope.message.session)
        try:
            session = self._admit(connection, credentials, envelope.message)
            welcome = self.service.hello(session.peer, envelope.message)
        except Exception as error:
            self._refusals.warn("refused process %d of uid %d: %s", credentials.pid, credentials.uid, error)
            return self._send(connection, Failure(envelope.id, _told(envelope, error)))
        self._sessions[connection] = self._by_key[session.peer.key] = session
        session.watch(ATTACH_TIMEOUT)
        self._connections.prove(connection)
        self._left.clear()
        self._post(session.peer, Reply(envelope.id, msgspec.structs.replace(welcome, session=session.peer.key)))

    def _admit(self, connection: Connection, credentials: Credentials, message: object) -> Session:
        if credentials.uid != self._uid:
            raise ConfigError(
                f"the agent at {self._path} belongs to uid {self._uid} and serves no process of "
                f"uid {credentials.uid}: set ETHA_RUNTIME_DIR to a directory of your own"
            )
        if not isinstance(message, WorkerHello):
            raise AgentLostError("no session with this agent: it was restarted, or the session was ended")
        if self._closing or len(self._by_key) >= MAX_SESSIONS:
            text = "the agent is leaving" if self._closing else f"{MAX_SESSIONS} sessions are open already"
            raise AgentLostError(f"{text}: try again")
        if (why := limits.shortage(SESSION_DESCRIPTORS)) is not None:
            raise AgentUnavailableError(f"it takes no more workers: {why}")
        peer = Peer(
            key=secrets.token_hex(16),
            pid=credentials.pid,
            uid=credentials.uid,
            start=start_time(credentials.pid) if credentials.pid else 0,
            hello=message,
            post=self._post,
            hand=self._hand,
        )
        return Session(peer, connection, self._end)

    def _join(self, connection: Connection, id: int, key: str) -> None:
        session = self._by_key.get(key)
        if session is None or not session.attached:
            return self._send(connection, Failure(id, ProtocolError("no such session, or it is not attached yet")))
        if connection.credentials != session.connection.credentials or len(session.direct) >= MAX_DIRECT:
            text = f"it is another process's, or it has {MAX_DIRECT} further connections"
            return self._send(
                connection, Failure(id, ProtocolError(f"the session takes no further connection: {text}"))
            )
        self._sessions[connection] = session
        session.direct.add(connection)
        self._connections.prove(connection)
        self._send(connection, Reply(id, HandshakeDone()))

    def _malformed(self, connection: Connection, session: Session | None, error: Malformed) -> None:
        """Answer a request if its id could be read; anything else ends its session. One log line each."""
        if session is not None:
            log.warning("dropped from %r: %s", session.peer, error)
        else:
            self._complaints.warn("dropped from a stranger: %s", error)
        if error.id:
            self._send(connection, Failure(error.id, ProtocolError(error.message)))
        elif session is not None:
            self._end(session, "closed")

    # ---- what is sent ----------------------------------------------------------------------------

    def _post(self, peer: Peer, envelope: Envelope) -> None:
        session = self._by_key.get(peer.key)
        if session is None:
            return
        try:
            self._send(session.route(envelope), envelope)
        except BlockingIOError:
            if isinstance(envelope, Push) and envelope.id:
                return
            log.warning("%r does not read: %d messages wait for it; its session ends", peer, HIGH_WATER)
            self._end(session, "died")

    def _hand(self, peer: Peer, envelope: Push, fds: Sequence[int]) -> bool:
        session = self._by_key.get(peer.key)
        return session is not None and session.hand(envelope, fds)

    def _send(self, connection: Connection, envelope: Envelope) -> None:
        """Queue one message; BlockingIOError when the worker does not read."""
        try:
            data = encode(envelope)
        except ProtocolError as error:
            log.exception("an answer cannot be sent")
            if not isinstance(envelope, Reply | Failure):
                return
            data = encode(Failure(envelope.id, error))
        connection.send(data)

    # ---- how sessions begin and end --------------------------------------------------------------

    def _attach(self, attachment: Attachment, key: str) -> None:
        """Accept an authenticated descriptor connection; ProtocolError refuses it."""
        session = self._by_key.get(key)
        if session is None or session.attached:
            raise ProtocolError("no such session, or it has its descriptor connection already")
        if attachment.credentials != Credentials(session.peer.pid, session.peer.uid):
            raise ProtocolError(f"{session.peer!r} attached from process {attachment.credentials.pid}")
        session.attach(attachment, self._descriptors)

    def _descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None:
        # Not the service's own method, because the service may be replaced while the connection lasts.
        self.service.descriptors(peer, header, fds)

    def _disconnected(self, connection: Connection) -> None:
        session = self._sessions.get(connection)
        if session is None:
            return
        if connection in session.direct:
            del self._sessions[connection]
            return session.leave(connection)
        self._end(session, "died")

    def _end(self, session: Session, reason: Reason) -> None:
        peer = session.peer
        if peer.disconnected:
            return
        if self._closing:  # it heard our goodbye and closed
            reason = "closed"
        peer.disconnected = True
        session.release()
        self._by_key.pop(peer.key, None)
        self._sessions.pop(session.connection, None)
        self._connections.demote(session.connection)
        for connection in session.direct:
            self._sessions.pop(connection, None)
            connection.close()
        if not self._by_key:
            self._left.set()
        log.debug("%r is gone: %s", peer, reason)
        self.service.on_disconnected(peer, reason)


def _told(request: Request, error: Exception) -> EthaError:
    """``error`` as it is sent to a worker. One that is not an EthaError is a bug in the agent, and logged."""
    if isinstance(error, EthaError):
        return error
    name = type(request.message).__name__
    log.error("the agent failed on %s", name, exc_info=error)
    return EthaError(f"the agent failed on {name}: {type(error).__name__}: {error}").with_traceback(error.__traceback__)
