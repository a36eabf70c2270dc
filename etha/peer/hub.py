"""An agent's links to all others, on its event loop: open, send, receive, and report losses.

Each agent sends on links that it opened and receives on those that others opened to it, so two agents that open links
to each other at once never collide. Messages from an agent are held until this one has an open link to it, so every
agent that ``on_message`` has named is reported by ``on_agent_lost`` when it is lost. A loss holds for both agents: the
one that loses a link says so on the other's, and nothing more is received on that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

import zmq

from etha import limits
from etha.addresses import parse_address
from etha.errors import AgentUnavailableError, PeerLostError
from etha.peer.gate import Gate
from etha.peer.keys import Keys
from etha.peer.link import Link, State
from etha.peer.listener import Listener
from etha.peer.ports import Ports
from etha.peer.sessions import Sessions
from etha.peer.wire import Control, Hello, Said, Scope
from etha.version import __version__

log = logging.getLogger(__name__)

#: Seconds between beats, and how many of them in a row may go unanswered.
BEAT = 1.0
MISSES = 3
#: Seconds for other agents to receive a goodbye.
LEAVE_TIMEOUT = 1.0
#: Descriptors that a link takes: its connection, and what libzmq needs for the socket and for its events.
LINK_DESCRIPTORS = 5
#: From this many seconds on, a timeout means no timeout.
_FOREVER = 1e9
_REACHABLE = "an agent that other hosts are to reach needs ETHA_LISTEN=HOST:PORT with an address of its network"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One link as ``status`` shows it.

    ``age`` and ``silent`` are seconds since it was begun and since it was last heard; ``round_trip`` is that of its
    last beat.
    """

    agent: str
    address: str
    state: str
    age: float
    silent: float
    round_trip: float | None
    missed: int
    sent: int
    received: int


class Hub:
    """Listens while entered. Call it on the loop's thread only.

    ``known``: public key -> agent id, from what the namespace's agents have published. If a key is unknown, one
    ``refresh`` is awaited, and ``known`` is asked again. ``on_message(agent, scope, message)`` is called in order for
    each agent, from the moment that the link to it is open. ``on_agent_lost(agent, text)`` is called once for each link
    that was open, except for those that this hub drops itself. Then nothing more is received from that agent until
    ``open`` has succeeded again. ``data`` listens on PORT+1 for whoever accepts there.
    """

    def __init__(
        self,
        listen: str | None,
        keys: Keys,
        *,
        known: Callable[[str], str | None],
        on_message: Callable[[str, Scope, Said], None],
        on_agent_lost: Callable[[str, str], None],
        refresh: Callable[[], Awaitable[None]] | None = None,
        beat: float = BEAT,
        misses: int = MISSES,
        advertised: bool = False,
    ) -> None:
        self._advertised = advertised
        self._listen, self.keys = listen, keys
        self._known, self._refresh = known, refresh
        self._on_agent_lost = on_agent_lost
        self._links: dict[str, Link] = {}
        self._sessions = Sessions(self._links.get, self._answer, on_message, self._lost_before)
        self._beat, self._misses = beat, misses
        #: (agent, its key) -> losses of links between the two that this agent knows of.
        self._losses: dict[tuple[str, str], int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._closing = False

    @property
    def address(self) -> str:
        """HOST:PORT for links, as published."""
        return self._ports.address

    @property
    def data_address(self) -> str:
        """HOST:PORT+1, where data connections arrive."""
        return self._ports.data_address

    @property
    def warning(self) -> str:
        """What may be wrong with these addresses; empty if nothing."""
        return self._ports.warning

    @property
    def data(self) -> socket.socket:
        """The listening, non-blocking socket of ``data_address``. The hub closes it."""
        return self._ports.data

    async def __aenter__(self) -> Hub:
        self._loop = asyncio.get_running_loop()
        self._ports = Ports.bind(self._listen, advertised=self._advertised)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._gate = Gate(self._context, self._known, self._refresh)
            self._listener = Listener(self._context, self.keys, self._ports, self._sessions.heard)
        except BaseException:
            self._context.destroy(0)
            self._ports.close()
            raise
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._gatekeeper = self._tasks.create_task(self._gate.run(), name="gate")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            self._gatekeeper.cancel()
            # The body's error is raised as it is, not in the group's ExceptionGroup.
            await self._tasks.__aexit__(None, None, None)

    async def open(self, agent: str, address: str, public_key: str, timeout: float) -> None:
        """Return once messages can be sent to ``agent``; at once if they can already.

        If the open link leads to another life of the agent (another address or key), that link is lost first.
        AgentUnavailableError says why the agent cannot be linked within ``timeout`` seconds.
        """
        link = self._links.get(agent)
        if link is not None and (link.address, link.public_key) != (address, public_key):
            link.end("it came back with another address or key")
        while (link := self._links.get(agent)) is not None and link.state is State.CLOSED:
            await link.over.wait()  # its end is reported before another link begins
        if self._closing:
            raise AgentUnavailableError(f"agent {agent} is not linked: this agent is leaving")
        if link is None:
            if (why := limits.shortage(LINK_DESCRIPTORS)) is not None:
                raise AgentUnavailableError(f"no link to agent {agent} at {address}: this agent is full: {why}")
            hello = Hello(version=__version__, losses=self._losses.get((agent, public_key), 0))
            try:
                link = self._links[agent] = Link(
                    self._context,
                    self.keys,
                    hello,
                    agent=agent,
                    address=address,
                    public_key=public_key,
                    on_open=self._opened,
                    on_end=self._ended,
                )
            except zmq.ZMQError as error:
                raise AgentUnavailableError(f"no link to agent {agent} at {address}: {error}") from error
            self._empty.clear()
            self._keep_beating()
        link.waiting += 1
        try:
            async with asyncio.timeout(timeout if timeout < _FOREVER else None):
                failed = await asyncio.shield(link.opened)
        except TimeoutError:
            failed = (
                f"it did not answer within {timeout:g} s: is it stopped, or does a firewall drop what is sent there?"
            )
        finally:
            link.waiting -= 1
            if not link.waiting and link.state is State.OPENING:
                link.end("nobody waits for it any more")
        if failed is not None:
            # Who has answered can be reached.
            hint = "" if link.answered else f"{_no_route(address)} ({_REACHABLE})"
            raise AgentUnavailableError(f"no link to agent {agent} at {address}: {failed}{hint}")

    def send(self, agent: str, scope: Scope, *messages: Said) -> None:
        """Send on the open link to ``agent``, in order and in one piece, at most ``wire.MAX_TOGETHER``.

        PeerLostError if there is none (``on_agent_lost`` reports it, too), ProtocolError for what cannot be encoded.
        """
        link = self._links.get(agent)
        if link is None or not link.send(scope, *messages):
            names = ", ".join(type(message).__name__ for message in messages)
            raise PeerLostError(f"{names} not sent: no open link to agent {agent}", reason="died")

    def admit_known(self) -> None:
        """``known`` knows more agents now: admit those that wait for it."""
        self._gate.look_again()

    def linked(self, agent: str) -> bool:
        """Whether the two hear each other: both have opened their link."""
        link = self._links.get(agent)
        return link is not None and link.state is State.OPEN and self._sessions.paired(link)

    def drop(self, agent: str) -> None:
        """End the links with ``agent`` in both directions, without ``on_agent_lost`` here. Does nothing if there are
        none."""
        self._sessions.drop(agent, "the other agent dropped the link")
        link = self._links.pop(agent, None)
        if link is not None:
            link.close()
            link.over.set()
            if not link.opened.done():
                link.opened.set_result("it was dropped")
            elif link.opened.result() is None:
                self._lost_before(agent, link.public_key, link.losses + 1)
        self._settle()

    def peers(self) -> tuple[PeerStatus, ...]:
        """The links that this agent opened, by agent."""
        now = self._loop.time()
        return tuple(
            PeerStatus(
                agent=agent,
                address=link.address,
                state=link.state.value,
                age=now - link.since,
                silent=now - link.heard,
                round_trip=link.round_trip,
                missed=link.missed,
                sent=link.sent,
                received=self._sessions.received(link),
            )
            for agent, link in sorted(self._links.items())
        )

    async def close(self) -> None:
        """Say goodbye after everything sent, wait at most a second, close. Idempotent; does not call
        ``on_agent_lost``."""
        if self._closing:
            return
        self._closing = self._sessions.closing = True
        for link in list(self._links.values()):
            if link.state is State.OPEN:
                link.leave("the other agent left")
            else:
                link.end("this agent is leaving")
        try:
            if self._links:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE_TIMEOUT):
                        await self._empty.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for link in self._links.values():
                link.close()
            self._links.clear()
            self._listener.close()
            self._gate.close()
            self._ports.close()
            self._context.term()

    def _keep_beating(self) -> None:
        if self._timer is None and self._links:
            self._timer = self._loop.call_later(self._beat, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for link in list(self._links.values()):
            link.beat(self._misses)
        self._keep_beating()

    def _opened(self, link: Link) -> None:
        log.info("linked to agent %s at %s", link.agent, link.address)
        self._sessions.opened(link)

    def _ended(self, link: Link, text: str) -> None:
        # In the loop's next turn: not inside a send, and after everything that arrived before the end.
        self._loop.call_soon(self._lost, link, text)

    def _lost(self, link: Link, text: str) -> None:
        agent = link.agent
        if self._links.get(agent) is not link:
            return
        del self._links[agent]
        link.over.set()
        self._sessions.lost(link, text)
        self._settle()
        if link.opened.result() is not None:  # it was never open, and its openers know
            return
        self._lost_before(agent, link.public_key, link.losses + 1)
        if not self._closing:
            log.warning("agent %s is gone: %s", agent, text)
            self._on_agent_lost(agent, text)

    def _lost_before(self, agent: str, key: str, losses: int) -> None:
        """So many losses are known of, here or there."""
        self._losses[agent, key] = max(self._losses.get((agent, key), 0), losses)

    def _settle(self) -> None:
        if not self._links:
            self._empty.set()

    def _answer(self, connection: bytes, message: Control) -> None:
        self._listener.answer(connection, message)


def _no_route(address: str) -> str:
    """What the kernel says if this host has no way to a numeric ``address`` at all; "" if it has one. Sends nothing."""
    host, port = parse_address(address, most=65535)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as unsent:
            unsent.connect(found[0][4])
    except socket.gaierror:
        return ""
    except OSError as error:
        return f"; this host has no route to {host}: {error.strerror}. Give both hosts a network that they share"
    return ""
