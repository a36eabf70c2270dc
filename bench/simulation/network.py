"""Links between agents without sockets: a hub with the interface of ``etha.peer.hub.Hub``.

    opener --knock--> the other's gate (which may read all agents from Redis) --admitted--> Hello --> Welcome --> open

Messages are really encoded and decoded, and arrive in order after the latency. What ZeroMQ, CURVE and the kernel cost
is not simulated. Constants (``Costs``) stand for it, measured by ``link_cost.py`` with two real hubs. Nothing is lost,
but an agent that is too busy to answer beats loses its links, as it does in reality.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from etha.addresses import format_address, parse_address
from etha.errors import AgentUnavailableError, EthaError, PeerLostError, ProtocolError
from etha.peer.gate import MAX_WAITING, REFRESH_DELAY, REFRESH_GAP, REFRESH_TIMEOUT
from etha.peer.hub import BEAT, MISSES, PeerStatus
from etha.peer.keys import Keys
from etha.peer.sockets import HANDSHAKE
from etha.peer.wire import Beat, Hello, Said, Scope, Welcome, decode, encode
from etha.version import __version__
from simulation.virtual_time import Actor, VirtualLoop

log = logging.getLogger(__name__)

#: Round trips of a link before the other end's gate is asked (TCP, ZMTP's greeting, CURVE's hello), and from its answer
#: to Hello.
_BEFORE, _AFTER = 3, 0.5
#: The part of an end's costs of a link that comes before the opener connects, and before the other asks its gate.
_FIRST = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Processor time of an agent for what is not simulated: its end of opening a link, and of one message.

    Seconds of its loop, and of ZeroMQ's threads beside it.
    """

    link: tuple[float, float]
    message: tuple[float, float]


class Network:
    """All hubs and data ports, by address. ``latency`` in seconds, one way."""

    def __init__(self, loop: VirtualLoop, *, latency: float, costs: Costs, beats: bool) -> None:
        self.loop, self.latency, self.costs, self.beats = loop, latency, costs, beats
        self.hubs: dict[str, SimulatedHub] = {}
        #: The messages that all agents have sent since the counters were cleared, by kind: how many, and their bytes.
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        #: What a token is shown to, and the agent that it belongs to, by the address of a data port.
        self.doors: dict[str, tuple[Actor, Callable[[bytes], str | None]]] = {}

    def clear_counters(self) -> None:
        """Count anew."""
        self.messages.clear()
        self.bytes.clear()

    def send(self, to: Actor, trips: float, callback: Callable[..., None], *args: Any) -> None:
        """Call ``callback`` at another agent after so many round trips."""
        at = self.loop.time() + 2 * trips * self.latency
        self.loop.call_at(at, callback, *args, context=to.context)


class SimulatedLink:
    """This agent's own link to another. ``opened`` as in ``etha.peer.link.Link``."""

    __slots__ = ("address", "agent", "heard", "hub", "missed", "opened", "public_key", "sent", "since", "waiting")

    def __init__(self, loop: VirtualLoop, agent: str, address: str, public_key: str, hub: SimulatedHub) -> None:
        self.agent, self.address, self.public_key = agent, address, public_key
        self.hub = hub
        self.opened: asyncio.Future[str | None] = loop.create_future()
        self.since = self.heard = loop.time()
        self.missed = self.sent = self.waiting = 0

    @property
    def is_open(self) -> bool:
        return self.opened.done() and self.opened.result() is None


@dataclass(slots=True)
class _Session:
    """What another agent has opened to this one. ``held``: what it said before this one's link to it was open."""

    received: int = 0
    held: list[tuple[Scope, Said]] = field(default_factory=list)


class SimulatedHub:
    """One agent's links to all others."""

    warning = ""

    def __init__(
        self,
        network: Network,
        listen: str,
        keys: Keys,
        *,
        known: Callable[[str], str | None],
        on_message: Callable[[str, Scope, Said], None],
        on_agent_lost: Callable[[str, str], None],
        refresh: Callable[[], Awaitable[None]],
        advertised: bool,
    ) -> None:
        assert not advertised
        self.network, self.address, self.keys = network, listen, keys
        host, port = parse_address(listen)
        self.data_address = format_address(host, port + 1)
        self._known, self._refresh = known, refresh
        self._on_message, self._on_agent_lost = on_message, on_agent_lost
        self._loop = network.loop
        self.actor = self._loop.actor
        self._links: dict[str, SimulatedLink] = {}
        self._sessions: dict[str, _Session] = {}
        #: Who waits for the gate.
        self._waiting: list[tuple[SimulatedHub, SimulatedLink]] = []
        self._wanted = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._beat = 0

    @property
    def data(self) -> DataPort:
        """What stands for the listening socket of data connections."""
        return DataPort(self.network, self.actor, self.data_address)

    async def __aenter__(self) -> Self:
        self.network.hubs[self.address] = self
        self._gatekeeper = self._loop.create_task(self._keep_gate(), name="gate")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop. Nobody hears of it, because all agents end together."""
        self._gatekeeper.cancel()
        if self._timer is not None:
            self._timer.cancel()

    # ---- what agents ask ----------------------------------------------------------------------

    async def open(self, agent: str, address: str, public_key: str, timeout: float) -> None:
        """As ``Hub.open``."""
        link = self._links.get(agent)
        if link is None:
            other = self.network.hubs[address]
            link = self._links[agent] = SimulatedLink(self._loop, agent, address, public_key, other)
            self.actor.account.links += 1
            self._charge_link(_FIRST)
            self._loop.call_later(HANDSHAKE / 1000, self._end, link, "the handshake took too long")
            self.network.send(other.actor, _BEFORE + 0.5, other._knocked, self, link)
            self._keep_beating()
        link.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                failed = await asyncio.shield(link.opened)
        except TimeoutError:
            failed = f"it did not answer within {timeout:g} s"
        finally:
            link.waiting -= 1
            if not link.waiting:
                self._end(link, "nobody waits for it any more")
        if failed is not None:
            raise AgentUnavailableError(f"no link to agent {agent} at {address}: {failed}")

    def send(self, agent: str, scope: Scope, *messages: Said) -> None:
        """As ``Hub.send``, but each message travels by itself: what it costs was measured so."""
        for message in messages:
            self._send(agent, scope, message)

    def _send(self, agent: str, scope: Scope, message: Said) -> None:
        link = self._links.get(agent)
        data = encode(scope, message)
        if link is None or not link.is_open:
            raise PeerLostError(f"{type(message).__name__} not sent: no open link to agent {agent}", reason="died")
        link.sent += 1
        account = self.actor.account
        account.messages += 1
        account.sent += len(data)
        kind = type(message).__name__
        self.network.messages[kind] += 1
        self.network.bytes[kind] += len(data)
        self._post(link.hub, link.hub._heard, self._name, data)

    def linked(self, agent: str) -> bool:
        """As ``Hub.linked``."""
        link = self._links.get(agent)
        return link is not None and link.is_open and agent in self._sessions

    def admit_known(self) -> None:
        """As ``Hub.admit_known``."""
        waiting, self._waiting = self._waiting, []
        for opener, link in waiting:
            if self._known(opener.keys.public) is None:
                self._waiting.append((opener, link))
            else:
                self._decide(opener, link)

    def drop(self, agent: str) -> None:
        """As ``Hub.drop``. Nothing that is simulated calls it."""
        raise NotImplementedError

    def peers(self) -> tuple[PeerStatus, ...]:
        """As ``Hub.peers``."""
        now = self._loop.time()
        return tuple(
            PeerStatus(
                agent=agent,
                address=link.address,
                state="open" if link.is_open else "opening",
                age=now - link.since,
                silent=now - link.heard,
                round_trip=None,
                missed=link.missed,
                sent=link.sent,
                received=self._sessions[agent].received if agent in self._sessions else 0,
            )
            for agent, link in sorted(self._links.items())
        )

    # ---- opening ------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.keys.public

    def _post(self, other: SimulatedHub, callback: Callable[..., None], *args: Any) -> None:
        """Send a message, which the other end hears half a round trip later."""
        self._loop.charge(*self.network.costs.message)
        self.network.send(other.actor, 0.5, callback, *args)

    def _knocked(self, opener: SimulatedHub, link: SimulatedLink) -> None:
        """Another agent's link asks to be let in, as ``etha.peer.gate`` does it."""
        self._charge_link(_FIRST)
        if self._known(opener.keys.public) is None and len(self._waiting) < MAX_WAITING:
            self._waiting.append((opener, link))
            self._wanted.set()
        else:
            self._decide(opener, link)

    async def _keep_gate(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(REFRESH_DELAY)
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            if not waiting:
                continue
            earliest = self._loop.time() + REFRESH_GAP
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT):
                    await self._refresh()
            except (EthaError, TimeoutError) as error:
                log.warning("agents could not be looked up for %d new links: %s", len(waiting), error)
            for opener, link in waiting:
                self._decide(opener, link)
            await asyncio.sleep(max(0.0, earliest - self._loop.time()))

    def _decide(self, opener: SimulatedHub, link: SimulatedLink) -> None:
        if self._known(opener.keys.public) is None:
            log.warning("refused a link: its key is no agent's of this namespace")
            self.network.send(opener.actor, _AFTER, opener._end, link, "it refused this agent's key")
        else:
            self.network.send(opener.actor, _AFTER, opener._admitted, link)

    def _charge_link(self, part: float) -> None:
        loop, beside = self.network.costs.link
        self._loop.charge(part * loop, part * beside)

    def _admitted(self, link: SimulatedLink) -> None:
        self._charge_link(1 - _FIRST)
        if not link.opened.done():
            self._post(link.hub, link.hub._greeted, self, link, encode(None, Hello(version=__version__, losses=0)))

    def _greeted(self, opener: SimulatedHub, link: SimulatedLink, data: bytes) -> None:
        self._charge_link(1 - _FIRST)
        self._loop.charge(*self.network.costs.message)
        decode(data)
        agent = self._known(opener.keys.public)
        assert agent is not None
        self._sessions[agent] = _Session()
        self._post(opener, opener._welcomed, link, encode(None, Welcome(version=__version__)))

    def _welcomed(self, link: SimulatedLink, data: bytes) -> None:
        self._loop.charge(*self.network.costs.message)
        decode(data)
        if link.opened.done():
            return
        link.heard = self._loop.time()
        link.opened.set_result(None)
        session = self._sessions.get(link.agent)
        if session is not None:
            held, session.held = session.held, []
            for scope, message in held:
                self._deliver(link.agent, scope, message)

    def _end(self, link: SimulatedLink, text: str) -> None:
        """A link that is not open will not be."""
        if not link.opened.done():
            link.opened.set_result(text)
            if self._links.get(link.agent) is link:
                del self._links[link.agent]

    # ---- messages -----------------------------------------------------------------------------

    def _heard(self, key: str, data: bytes) -> None:
        self._loop.charge(*self.network.costs.message)
        envelope = decode(data)
        agent = self._known(key)
        session = self._sessions.get(agent or "")
        if agent is None or session is None:
            return  # of a link that was lost
        assert envelope.scope is not None
        link = self._links.get(agent)
        message: Any = envelope.message
        session.received += 1
        if link is not None and link.is_open:
            self._deliver(agent, envelope.scope, message)
        else:
            session.held.append((envelope.scope, message))

    def _deliver(self, agent: str, scope: Scope, message: Said) -> None:
        try:
            self._on_message(agent, scope, message)
        except ProtocolError as error:
            log.warning("dropped from agent %s: %s of %s: %s", agent, type(message).__name__, scope, error)
        except Exception:  # a mistake here must not lose the messages that follow
            log.exception("%s of %s from agent %s could not be handled", type(message).__name__, scope, agent)

    # ---- beats --------------------------------------------------------------------------------

    def _keep_beating(self) -> None:
        if self._timer is None and self._links and self.network.beats:
            self._timer = self._loop.call_later(BEAT, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._beat += 1
        for link in [link for link in self._links.values() if link.is_open]:
            if link.missed >= MISSES:
                self._lose(link, f"it missed {link.missed} beats, silent for {self._loop.time() - link.heard:.1f} s")
                continue
            link.missed += 1
            self.actor.account.beats += 1
            self._post(link.hub, link.hub._beaten, self, link, encode(None, Beat(number=self._beat)))
        self._keep_beating()

    def _beaten(self, opener: SimulatedHub, link: SimulatedLink, data: bytes) -> None:
        self._loop.charge(*self.network.costs.message)
        self._post(opener, opener._beat_returned, link, encode(None, decode(data).message))

    def _beat_returned(self, link: SimulatedLink, data: bytes) -> None:
        self._loop.charge(*self.network.costs.message)
        decode(data)
        link.heard, link.missed = self._loop.time(), 0

    def _lose(self, link: SimulatedLink, text: str) -> None:
        """An open link is lost, and so is the other agent's link to this one."""
        if self._links.get(link.agent) is not link:
            return
        del self._links[link.agent]
        self._sessions.pop(link.agent, None)
        log.warning("agent %s is gone: %s", link.agent, text)
        self._on_agent_lost(link.agent, text)
        self.network.send(link.hub.actor, 0.5, link.hub._lost_by, self.keys.public)

    def _lost_by(self, key: str) -> None:
        link = self._links.get(self._known(key) or "")
        if link is not None:
            self._lose(link, "the other agent lost its link")


@dataclass(frozen=True, slots=True)
class DataPort:
    """Stands for the listening socket of an agent's data connections."""

    network: Network
    actor: Actor
    address: str
