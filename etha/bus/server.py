"""The agent's end of the bus: sessions of workers over a ROUTER on ipc, and a descriptor socket beside it.

Hello ------------------> uid by Peer-Address, pidfd, service.hello -------> Welcome(session)
Attach on cpu.fds ------> uid and pid by SO_PEERCRED, session -------------> Done
requests <--------------> service.received, peer.reply
end: Goodbye, or the descriptor connection closes ("closed"), or the process dies ("died")
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType

import zmq
from zmq.utils.monitor import parse_monitor_message

from etha.bus.attachments import Attachment, Attachments
from etha.bus.codec import MAX_MESSAGE, Cancel, Envelope, Failure, Malformed, Push, Reply, Request, decode, encode
from etha.bus.handshake import Done, Goodbye, Hello
from etha.bus.listen import PathLock, listen
from etha.bus.peer import MAX_REQUESTS, Peer, Reason, Service
from etha.bus.process import Credentials, start_time
from etha.bus.sessions import Session
from etha.bus.socket import LoopSocket
from etha.errors import AgentLostError, ConfigError, EthaError, ProtocolError

__all__ = ["BusServer", "Peer", "Service"]

log = logging.getLogger(__name__)

#: Messages that may wait for one worker that does not read, and from one worker.
HIGH_WATER = 10_000
MAX_SESSIONS = 4096
#: Seconds from Hello to Attach, and for workers to hear a Goodbye.
ATTACH_TIMEOUT = 10.0
LEAVE_TIMEOUT = 1.0
_BAD_HANDSHAKE = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class BusServer:
    """Serves ``service`` at ``path`` (``.../cpu.sock``; lock and descriptor socket beside it) while entered."""

    def __init__(self, path: Path, service: Service) -> None:
        self._path = path
        self._service = service
        self._uid = os.geteuid()
        self._peers: dict[bytes, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._strangers: deque[bytes] = deque(maxlen=256)
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
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
            (zmq.USE_FD, listener.detach()),  # ZeroMQ closes it, and leaves the path to us
        ):
            router.setsockopt(option, value)
        router.bind(f"ipc://{self._path}")
        self._monitor = LoopSocket(router.get_monitor_socket(_BAD_HANDSHAKE), self._misfit)
        self._router = router
        self._socket = LoopSocket(router, self._frames)
        self._attachments = Attachments(attachments, self._uid, self._attach, ATTACH_TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close("the agent leaves")

    async def close(self, text: str) -> None:
        """Say goodbye to all after the answers they were given, wait up to a second, remove the sockets."""
        if self._closing:
            return
        self._closing = True
        for session in list(self._peers.values()):
            session.peer.push(Goodbye(text=text))
        if self._peers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await self._left.wait()
        for session in list(self._peers.values()):
            self._end(session, "closed")
        self._attachments.close()
        self._router.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        for path in (self._path, self._path.with_suffix(".fds")):
            path.unlink(missing_ok=True)
        self._lock.release()

    # What arrives on the bus ---------------------------------------------------------------------

    def _frames(self, frames: Sequence[zmq.Frame]) -> None:
        identity, session = frames[0].bytes, self._peers.get(frames[0].bytes)
        try:
            if len(frames) != 2:
                raise Malformed(f"a message of {len(frames)} parts instead of 2")
            address = _address(frames[1])
            if session is not None and session.address != address:
                raise Malformed(f"the identity of {session.peer!r} used from {address}")
            envelope = decode(frames[1].buffer, self._loop.time())
        except Malformed as error:
            return self._malformed(identity, session, error)
        if session is None:
            return self._greet(identity, address, envelope)
        match envelope:
            case Request():
                self._request(session, envelope)
            case Cancel(id):
                if id in session.peer.requests:
                    self._service.cancelled(session.peer, id)
            case _:
                self._malformed(identity, session, Malformed(f"a {type(envelope).__name__} from a worker"))

    def _request(self, session: Session, request: Request) -> None:
        peer = session.peer
        if isinstance(request.message, Goodbye):
            self._post(peer, Reply(request.id, Done()))
            return self._end(session, "closed")
        if request.id in peer.requests or len(peer.requests) >= MAX_REQUESTS:
            text = f"request id {request.id} is taken, or {MAX_REQUESTS} requests wait"
            return self._post(peer, Failure(request.id, ProtocolError(text)))
        peer.requests.add(request.id)
        if not session.attached:
            return peer.fail(request.id, ProtocolError("a request before Attach on the descriptor socket"))
        try:
            self._service.received(peer, request)
        except Exception as error:
            peer.fail(request.id, _told(request, error))

    def _greet(self, identity: bytes, address: str, envelope: Envelope) -> None:
        if not isinstance(envelope, Request):
            return log.debug("dropped a %s without a session from %s", type(envelope).__name__, address)
        credentials = Credentials.of_address(address)
        try:
            session = self._admit(identity, address, credentials, envelope.message)
            welcome = self._service.hello(session.peer, envelope.message)
        except Exception as error:
            log.warning("refused process %d of uid %d: %s", credentials.pid, credentials.uid, error)
            return self._send(identity, Failure(envelope.id, _told(envelope, error)))
        self._peers[identity] = self._by_key[session.peer.key] = session
        session.watch(ATTACH_TIMEOUT)
        self._left.clear()
        self._post(session.peer, Reply(envelope.id, replace(welcome, session=session.peer.key)))

    def _admit(self, identity: bytes, address: str, credentials: Credentials, message: object) -> Session:
        if credentials.uid != self._uid:
            raise ConfigError(
                f"the agent at {self._path} belongs to uid {self._uid} and serves no process of "
                f"uid {credentials.uid}: set ETHA_RUNTIME_DIR to a directory of your own"
            )
        if not isinstance(message, Hello):
            raise AgentLostError("no session with this agent: it was restarted, or the session was ended")
        if self._closing or len(self._peers) >= MAX_SESSIONS:
            text = "the agent is leaving" if self._closing else f"{MAX_SESSIONS} sessions are open already"
            raise AgentLostError(f"{text}: try again")
        peer = Peer(
            key=secrets.token_hex(16),
            identity=identity,
            pid=credentials.pid,
            uid=credentials.uid,
            start=start_time(credentials.pid) if credentials.pid else 0,
            hello=message,
            post=self._post,
        )
        return Session(peer, address, self._end)

    def _malformed(self, identity: bytes, session: Session | None, error: Malformed) -> None:
        """A request that can be answered is; anything else ends the session it came in. One line each."""
        if session is not None or identity not in self._strangers:
            log.warning("dropped from %s: %s", session.peer if session else "a stranger", error)
        if session is None:
            self._strangers.append(identity)
        if error.id:
            self._send(identity, Failure(error.id, ProtocolError(error.message)))
        elif session is not None:
            self._end(session, "closed")

    def _misfit(self, frames: Sequence[zmq.Frame]) -> None:
        event = parse_monitor_message([frame.bytes for frame in frames])
        if event["event"] & _BAD_HANDSHAKE:
            log.warning("dropped a connection to %s that does not speak ZeroMQ", self._path)

    # What leaves ---------------------------------------------------------------------------------

    def _post(self, peer: Peer, envelope: Envelope) -> None:
        try:
            self._send(peer.identity, envelope)
        except zmq.Again:
            if isinstance(envelope, Push) and envelope.id:
                return
            log.warning("%r does not read: %d messages wait for it; its session ends", peer, HIGH_WATER)
            if peer.identity in self._peers:
                self._end(self._peers[peer.identity], "died")

    def _send(self, identity: bytes, envelope: Envelope) -> None:
        """Hand one message to ZeroMQ; zmq.Again when the worker does not read."""
        try:
            data = encode(envelope)
        except ProtocolError as error:
            log.exception("an answer cannot be sent")
            if not isinstance(envelope, Reply | Failure):
                return
            data = encode(Failure(envelope.id, error))
        try:
            self._socket.send(identity, data)
        except zmq.Again:
            raise
        except zmq.ZMQError as error:  # gone from the bus: the descriptor connection or the pidfd tells
            log.debug("not sent: %s", error)

    # How sessions begin and end ------------------------------------------------------------------

    def _attach(self, attachment: Attachment, key: str) -> None:
        """An authenticated descriptor connection; ProtocolError refuses it."""
        session = self._by_key.get(key)
        if session is None or session.attached:
            raise ProtocolError("no such session, or it has its descriptor connection already")
        if attachment.credentials != Credentials(session.peer.pid, session.peer.uid):
            raise ProtocolError(f"{session.peer!r} attached from process {attachment.credentials.pid}")
        session.attach(attachment, self._service.descriptors)

    def _end(self, session: Session, reason: Reason) -> None:
        peer = session.peer
        if peer.gone:
            return
        peer.gone = True
        session.release()
        self._peers.pop(peer.identity, None)
        self._by_key.pop(peer.key, None)
        if not self._peers:
            self._left.set()
        log.debug("%r is gone: %s", peer, reason)
        self._service.gone(peer, reason)


def _address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # ZMTP 1.0, which libzmq takes almost any bytes for, has no properties
        raise Malformed("a message of a peer that does not speak ZMTP 3") from None


def _told(request: Request, error: Exception) -> EthaError:
    """``error`` as a worker may hear it; one that is not ours is a mistake in the agent, and logged."""
    if isinstance(error, EthaError):
        return error
    name = type(request.message).__name__
    log.error("the agent failed on %s", name, exc_info=error)
    return EthaError(f"the agent failed on {name}: {type(error).__name__}: {error}").with_traceback(error.__traceback__)
