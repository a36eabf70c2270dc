"""A worker without a process: the agent asks itself what a worker would ask it over the bus.

    publication service --request--> InProcessWorker --> the agent's dispatcher --> pairs, registrations, transfers
                        <--reply---                  <-- Peer.reply, Peer.fail, Peer.push

So a standing registration takes part in pairs by the ordinary machinery, while its worker is busy, stopped or dead. The
memory of such a worker is what this agent holds itself.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from etha.agent.runtime.sessions import WorkerSession
from etha.bus.codec import Envelope, Failure, Push, Reply, Request
from etha.bus.handshake import WorkerHello
from etha.bus.sessions import Peer
from etha.errors import AgentLostError
from etha.memory.mapping import StandingSegment, WorkerMemory
from etha.store.records import RankHolder
from etha.transport.rate_limit import RateLimit
from etha.version import __version__


class Dispatcher(Protocol):
    """What the agent does for workers inside of it."""

    @property
    def holder(self) -> RankHolder:
        """This agent's own process, as the holder of ranks."""
        ...

    def enter(self, session: WorkerSession) -> None:
        """A worker inside the agent has come."""
        ...

    def received(self, peer: Peer, request: Request) -> None:
        """Handle one of its requests."""
        ...

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """It does not want an answer any more."""
        ...

    def leave(self, session: WorkerSession) -> None:
        """It leaves, in order."""
        ...


class InProcessWorker:
    """One worker of this kind, which has one pair at most. ``pushed(message)`` gets what nobody has asked for."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        segments: Iterable[StandingSegment],
        pushed: Callable[[Any], None],
        limit: RateLimit | None = None,
    ) -> None:
        self._dispatcher, self._pushed = dispatcher, pushed
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        holder = dispatcher.holder
        hello = WorkerHello(
            version=__version__, namespace="", redis=None, host=holder.host, pid=holder.pid, start=holder.start
        )
        self.peer = Peer(
            key=f"in-process-{secrets.token_hex(16)}",
            pid=holder.pid,
            uid=os.geteuid(),
            start=holder.start,
            hello=hello,
            post=self._post,
            hand=lambda *_: False,  # its calls block no thread
        )
        memory = WorkerMemory(holder.pid, holder.start, private=False)
        for segment in segments:
            memory.adopt(segment)
        self.session = WorkerSession(peer=self.peer, holder=holder, memory=memory, rate_limit=limit)
        dispatcher.enter(self.session)

    async def request(
        self, message: Any, timeout: float = math.inf, on_cancel: Callable[[Any], None] | None = None
    ) -> Any:
        """Ask, and return the answer or raise its error.

        If the caller is cancelled, the request ends first; ``on_cancel`` gets its answer if it was carried out.
        """
        if self.peer.disconnected:
            raise AgentLostError("this agent is leaving", outcome="withdrawn")
        loop = asyncio.get_running_loop()
        id, answer = next(self._ids), loop.create_future()
        self._waiting[id] = answer
        self.peer.requests.add(id)
        deadline = math.inf if timeout == math.inf else loop.time() + timeout
        left = None if timeout == math.inf else timeout
        self._dispatcher.received(self.peer, Request(id, left, message, deadline))
        cancelled: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.wait({answer})
            except asyncio.CancelledError as error:
                cancelled = error
                self._dispatcher.cancelled(self.peer, id)
        if cancelled is not None:
            if answer.exception() is None and on_cancel is not None:
                on_cancel(answer.result())
            raise cancelled
        return answer.result()

    def close(self) -> None:
        """Leave its pair. Running requests fail. Idempotent."""
        if self.peer.disconnected:
            return
        self._dispatcher.leave(self.session)
        self.peer.disconnected = True
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.set_exception(AgentLostError("the standing registration has ended", outcome="withdrawn"))

    def _post(self, peer: Peer, envelope: Envelope) -> None:
        match envelope:
            case Reply(id=id, message=message):
                if (answer := self._waiting.pop(id, None)) is not None:
                    answer.set_result(message)
            case Failure(id=id, error=error):
                if (answer := self._waiting.pop(id, None)) is not None:
                    answer.set_exception(error)
            case Push(message=message):
                self._pushed(message)
