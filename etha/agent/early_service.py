"""The bus's service while the agent imports torch and what moves tensors, which takes most of its start.

It greets workers and tells whether their memory is within reach. Everything else waits, in order, for the agent:

    worker --Hello, Probe--> answered here
           --anything else-> kept --hand_over--> Agent
                                  --deadline, cancel--> an error
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from typing import Any, Protocol

from etha.agent.greeting import Greeting
from etha.bus.codec import Request
from etha.bus.handshake import WorkerHello, WorkerWelcome
from etha.bus.messages import Probe, Probed
from etha.bus.server import Service
from etha.bus.sessions import Peer, Reason
from etha.errors import AgentUnavailableError, EthaError, ProtocolError
from etha.memory.process import ProcessMemory
from etha.memory.reach import ReachError

log = logging.getLogger(__name__)


class LateService(Service, Protocol):
    """The agent: a service that also takes over sessions that were greeted before."""

    def admit(self, peer: Peer, hello: WorkerHello, welcome: WorkerWelcome) -> None:
        """Open the session of a peer that got ``welcome``; EthaError or ReachError if its process has ended."""

    def note_reach(self, peer: Peer, why_not: str) -> None:
        """A worker's memory was found within reach ("") or not."""


class EarlyService:
    """Answers what needs no torch, and keeps the rest until ``hand_over`` or ``fail``."""

    def __init__(self, greeting: Greeting) -> None:
        self._greeting = greeting
        self._workers: set[str] = set()
        #: What happened, in order, as calls of the agent that make up for it, by peer.
        self._kept: list[tuple[Peer, Callable[[LateService], None]]] = []
        #: Descriptors that no one has taken yet, by the key of their peer.
        self._fds: dict[str, list[int]] = {}
        #: What ends the wait of a request, by its peer's key and its id.
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    def hello(self, peer: Peer, hello: WorkerHello) -> WorkerWelcome:
        """A worker or an observer connects; ConfigError refuses it."""
        welcome = self._greeting.welcome(peer, hello, alone=not self._workers, warning="")
        if not hello.observer and not welcome.leaving:
            self._workers.add(peer.key)
        self._keep(peer, lambda agent: agent.admit(peer, hello, welcome))
        return welcome

    def received(self, peer: Peer, request: Request) -> None:
        """Keep a request. A worker's Probe is answered, because its connection is open only then."""
        message = request.message
        if isinstance(message, Probe) and peer.key in self._workers:
            why_not = probe(peer, message)
            self._keep(peer, lambda agent: agent.note_reach(peer, why_not))
            peer.reply(request.id, Probed(reaches=not why_not, text=why_not))
        else:
            self._keep(peer, lambda agent: _deliver(agent, peer, request))
            if request.deadline < math.inf:
                loop = asyncio.get_running_loop()
                self._timers[peer.key, request.id] = loop.call_at(request.deadline, self._end, peer, request.id)

    def said(self, peer: Peer, message: Any) -> None:
        """What workers say without being asked is about a transfer, and there is none yet."""
        raise ProtocolError("no transfer has begun")

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """A worker does not want an answer any more, and waits for a confirmation."""
        self._end(peer, request_id)

    def descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None:
        """Keep memory that a worker shares."""
        self._fds.setdefault(peer.key, []).extend(fds)
        self._keep(peer, lambda agent: agent.descriptors(peer, header, fds))

    def on_disconnected(self, peer: Peer, reason: Reason) -> None:
        """Forget a session: the agent need not hear of it."""
        log.debug("%r has left (%s) before the agent was ready", peer, reason)
        self._workers.discard(peer.key)
        self._kept = [(other, call) for other, call in self._kept if other is not peer]
        for key in [key for key in self._timers if key[0] == peer.key]:
            self._timers.pop(key).cancel()
        for fd in self._fds.pop(peer.key, []):
            os.close(fd)

    def hand_over(self, agent: LateService) -> None:
        """Let ``agent`` hear all that happened. From now on it is the bus's service."""
        kept, self._kept = self._kept, []
        self._stop_timers()
        self._fds.clear()  # the agent owns them, even if it refuses them
        for peer, call in kept:
            try:
                call(agent)
            except (EthaError, ReachError) as error:
                log.warning("%r: %s", peer, error)

    def fail(self, error: EthaError) -> None:
        """There will be no agent: ``error`` is the answer to every request that waits."""
        for peer in {peer.key: peer for peer, _ in self._kept}.values():
            for request_id in sorted(peer.requests):
                peer.fail(request_id, error)
            self.on_disconnected(peer, "closed")

    def _keep(self, peer: Peer, call: Callable[[LateService], None]) -> None:
        self._kept.append((peer, call))

    def _end(self, peer: Peer, request_id: int) -> None:
        """Answer a request whose time is up or whose worker has given it up. The agent never sees it."""
        if (timer := self._timers.pop((peer.key, request_id), None)) is not None:
            timer.cancel()
        peer.fail(
            request_id,
            AgentUnavailableError(
                f"no agent of {self._greeting.device} was ready in time; waited for process {os.getpid()}, which "
                f"still imports torch. It goes on: the next call finds it. Give more time, or start one by `etha agent`"
            ),
        )

    def _stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


def _deliver(agent: LateService, peer: Peer, request: Request) -> None:
    """A request that waited, unless it has its answer; an error is its answer, as on the bus."""
    if request.id not in peer.requests:
        return
    try:
        agent.received(peer, request)
    except EthaError as error:
        peer.fail(request.id, error)


def probe(peer: Peer, message: Probe) -> str:
    """Why this process cannot reach a worker's private memory; "" if it can."""
    try:
        memory = ProcessMemory(peer.pid, peer.start)
    except ReachError as error:
        return str(error)
    try:
        memory.probe(message.address, message.token)
    except ReachError as error:
        return str(error)
    finally:
        memory.close()
    return ""
