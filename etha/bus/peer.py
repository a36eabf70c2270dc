"""The agent's view of one worker's session, and what an agent does with the sessions of its bus."""

from __future__ import annotations

import logging
import traceback as tracebacks
from collections.abc import Callable
from typing import Any, Literal, Protocol

from etha.bus.codec import Envelope, Failure, Push, Reply, Request
from etha.bus.handshake import WorkerHello, WorkerWelcome
from etha.errors import EthaError

log = logging.getLogger(__name__)

#: "closed": it said goodbye; "died": its process is gone or it let go of the bus without a word, or it never reads.
Reason = Literal["closed", "died"]

#: Requests of one session that may wait for their answers.
MAX_REQUESTS = 4096


class Peer:
    """One session of one worker process.

    ``key`` names the session (secret, hex), ``pid`` and ``uid`` are the kernel's word on the process
    (``pid`` 0: in a pid namespace that cannot be seen), ``start`` its start time in clock ticks,
    ``hello`` what it said of itself. A worker may have several sessions.
    """

    __slots__ = ("_post", "disconnected", "hello", "key", "pid", "requests", "start", "uid")

    def __init__(
        self,
        *,
        key: str,
        pid: int,
        uid: int,
        start: int,
        hello: WorkerHello,
        post: Callable[[Peer, Envelope], None],
    ) -> None:
        self.key = key
        self.pid = pid
        self.uid = uid
        self.start = start
        self.hello = hello
        #: ids of the requests that have no answer yet.
        self.requests: set[int] = set()
        self.disconnected = False
        self._post = post

    def __repr__(self) -> str:
        return f"<Peer pid {self.pid} session {self.key[:8]}>"

    def reply(self, id: int, message: Any) -> None:
        """Answer request ``id``; nothing happens when the session is gone or ``id`` was answered."""
        self._answer(Reply(id, message))

    def fail(self, id: int, error: EthaError, traceback: str | None = None) -> None:
        """Answer request ``id`` with an error; ``traceback`` defaults to the error's own, as text."""
        if traceback is None:
            traceback = error.remote_traceback
        if traceback is None and error.__traceback__ is not None:
            traceback = "".join(tracebacks.format_exception(error))
        self._answer(Failure(id, error, traceback))

    def push(self, message: Any, id: int = 0) -> None:
        """Tell it something unasked, about its request ``id`` or about the session.

        A push about a request is dropped when the worker does not read; any other message that finds
        no room ends the session.
        """
        if not self.disconnected:
            self._post(self, Push(id, message))

    def _answer(self, envelope: Reply | Failure) -> None:
        if self.disconnected:
            return
        if envelope.id not in self.requests:
            log.debug("%r: no request %d waits for an answer", self, envelope.id)
            return
        self.requests.discard(envelope.id)
        self._post(self, envelope)


class Service(Protocol):
    """What the agent does with its sessions. Nothing here may block or wait: everything is called on the loop."""

    def hello(self, peer: Peer, hello: WorkerHello) -> WorkerWelcome:
        """A worker of this user came; raise EthaError to refuse it. ``Welcome.session`` is filled in later."""

    def received(self, peer: Peer, request: Request) -> None:
        """Answer now or later by ``peer.reply`` or ``peer.fail``; ``request.deadline`` is in loop time.

        An exception raised here is the answer.
        """

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """The worker waits for ``request_id`` no more; it still has to be answered, soon."""

    def descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None:
        """File descriptors came, ``fds`` are the service's from now on, also when it raises EthaError to refuse."""

    def on_disconnected(self, peer: Peer, reason: Reason) -> None:
        """The session is over; called once for every peer whose hello was not refused."""
