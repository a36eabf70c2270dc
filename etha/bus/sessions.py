"""One session of one worker: the part that the agent's service sees, and the part that the bus holds.

The service gets ``Peer`` and answers by it. ``Session`` holds the pidfd, the descriptor connection and the time limit
for Attach.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback as tracebacks
from collections.abc import Callable, Sequence
from typing import Any, Literal

from etha.bus.attachments import Attachment
from etha.bus.codec import Envelope, Failure, Push, Reply
from etha.bus.connections import Connection
from etha.bus.handshake import WorkerHello
from etha.bus.process import open_pidfd
from etha.errors import EthaError

log = logging.getLogger(__name__)

#: "closed": it said goodbye. "died": its process is gone, left the bus without a goodbye, or does not read.
Reason = Literal["closed", "died"]

#: Requests of one session that may wait for their answers.
MAX_REQUESTS = 4096


class Peer:
    """One session of one worker process.

    ``key`` names the session (secret, hex). ``pid`` and ``uid`` are from the kernel (``pid`` 0: not visible in this pid
    namespace), ``start`` is the process's start time in clock ticks, and ``hello`` is what it said about itself. A
    worker may have several sessions.
    """

    __slots__ = ("_hand", "_post", "disconnected", "hello", "key", "pid", "requests", "start", "uid")

    def __init__(
        self,
        *,
        key: str,
        pid: int,
        uid: int,
        start: int,
        hello: WorkerHello,
        post: Callable[[Peer, Envelope], None],
        hand: Callable[[Peer, Push, Sequence[int]], bool],
    ) -> None:
        self.key = key
        self.pid = pid
        self.uid = uid
        self.start = start
        self.hello = hello
        #: ids of the requests that have no answer yet.
        self.requests: set[int] = set()
        self.disconnected = False
        self._post, self._hand = post, hand

    def __repr__(self) -> str:
        return f"<Peer pid {self.pid} session {self.key[:8]}>"

    def reply(self, id: int, message: Any) -> None:
        """Answer request ``id``. Does nothing if the session is gone or ``id`` was answered."""
        self._answer(Reply(id, message))

    def fail(self, id: int, error: EthaError, traceback: str | None = None) -> None:
        """Answer request ``id`` with an error. ``traceback`` defaults to the error's own, as text."""
        if traceback is None:
            traceback = error.remote_traceback
        if traceback is None and error.__traceback__ is not None:
            traceback = "".join(tracebacks.format_exception(error))
        self._answer(Failure(id, error, traceback))

    def push(self, message: Any, id: int = 0) -> None:
        """Send a message that was not asked for, about request ``id`` or about the session.

        If the worker does not read, a push about a request is dropped; any other message that finds no room ends the
        session.
        """
        if not self.disconnected:
            self._post(self, Push(id, message))

    def hand(self, message: Any, id: int, fds: Sequence[int]) -> bool:
        """Send a message about request ``id`` with descriptors, which stay the caller's. False if the worker does not
        read, or has gone."""
        return not self.disconnected and self._hand(self, Push(id, message), fds)

    def _answer(self, envelope: Reply | Failure) -> None:
        if self.disconnected:
            return
        if envelope.id not in self.requests:
            log.debug("%r: no request %d waits for an answer", self, envelope.id)
            return
        self.requests.discard(envelope.id)
        self._post(self, envelope)


class Session:
    """Calls ``on_end(session, reason)`` when its worker is gone. ``connection`` is the one that it came on."""

    def __init__(self, peer: Peer, connection: Connection, on_end: Callable[[Session, Reason], None]) -> None:
        self.peer = peer
        self.connection = connection
        #: Its further bus connections, and those on which requests came that have no answer yet.
        self.direct: set[Connection] = set()
        self.routes: dict[int, Connection] = {}
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._attachment: Attachment | None = None
        self._pidfd: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def attached(self) -> bool:
        """Whether the worker has attached its descriptor connection; requests are accepted from then on."""
        return self._attachment is not None

    def watch(self, attach_timeout: float) -> None:
        """Watch the process's death from now on, and give it ``attach_timeout`` seconds to attach."""
        self._timer = self._loop.call_later(attach_timeout, self._end, "closed")
        self._pidfd = open_pidfd(self.peer.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._end, "died")
        elif self.peer.pid:
            self._loop.call_soon(self._end, "died")

    def attach(self, attachment: Attachment, take: Callable[[Peer, dict[str, Any], list[int]], None]) -> None:
        """Attach the descriptor connection. ``take(peer, header, fds)`` gets the descriptors that arrive, and owns
        them."""
        self._attachment = attachment
        attachment.serve(lambda header, fds: take(self.peer, header, fds), self._disconnected)
        if self._timer is not None:
            self._timer.cancel()

    def route(self, envelope: Envelope) -> Connection:
        """The connection on which to send what is about a request: that on which the request came."""
        if isinstance(envelope, Push):
            return self.routes.get(envelope.id, self.connection)
        return self.routes.pop(envelope.id, self.connection)

    def leave(self, connection: Connection) -> None:
        """A further connection has ended. What is still to be said about its requests goes over the first one."""
        self.direct.discard(connection)
        self.routes = {id: other for id, other in self.routes.items() if other is not connection}

    def hand(self, envelope: Envelope, fds: Sequence[int]) -> bool:
        """Send on the descriptor connection. False if the worker does not read, or has gone."""
        return self._attachment is not None and self._attachment.hand(envelope, fds)

    def release(self) -> None:
        """Release everything and report nothing any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._attachment is not None:
            self._attachment.close()

    def _disconnected(self) -> None:
        # A closed client has said goodbye before. A dropped client counts as dead for its peers, like a process.
        self._end("died")

    def _end(self, reason: Reason) -> None:
        self._on_end(self, reason)
