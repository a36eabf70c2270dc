"""What other agents opened to this one: whose connection is whose, and what may be received on it.

A session is *paired* with the open link to the same agent. Only then are its messages delivered, and the two end
together. Messages before that are held, in order and within bounds. Messages after that are answered with Bye.

A loss holds for both agents, and counts once. Each Hello says how many losses its agent knows of. The agent that knows
of fewer loses its link, too, takes over the number, and begins again. Only a link and a session of the same number are
paired.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from etha.errors import ProtocolError
from etha.observe import trace
from etha.peer.link import TRACED_BEATS, Link, State
from etha.peer.wire import Beat, Bye, Control, Envelope, Hello, Malformed, Said, Scope, Welcome
from etha.version import __version__

log = logging.getLogger(__name__)

#: Why a link ends whose agent has lost its own.
RELINKED = "it lost its link and opened another"
#: Most messages held of an agent until this one has opened its link to it.
MAX_HELD = 1000


@dataclass(slots=True, eq=False)
class PeerSession:
    """One connection that agent ``agent``, admitted with ``key``, opened to us. ``losses`` as in its Hello."""

    agent: str
    key: str
    connection: bytes
    losses: int
    received: int = 0
    held: list[tuple[Scope, Said]] = field(default_factory=list)


class Sessions:
    """At most one session per agent, the newest. ``link_to(agent)`` is our own link to it, in any state.
    ``lost_before(agent, key, losses)`` is called with what a Hello says."""

    def __init__(
        self,
        link_to: Callable[[str], Link | None],
        answer: Callable[[bytes, Control], None],
        on_message: Callable[[str, Scope, Said], None],
        lost_before: Callable[[str, str, int], None],
    ) -> None:
        self._link_to, self._answer, self._on_message = link_to, answer, on_message
        self._lost_before = lost_before
        self._sessions: dict[str, PeerSession] = {}
        self._paired: dict[Link, PeerSession] = {}
        #: Set when this agent leaves: nobody is greeted or heard any more.
        self.closing = False

    def paired(self, link: Link) -> bool:
        """Whether the agent of ``link`` is heard, too."""
        return link in self._paired

    def received(self, link: Link) -> int:
        """Messages received from the agent of ``link`` since the two were paired."""
        return self._paired[link].received if link in self._paired else 0

    def opened(self, link: Link) -> None:
        """Our link is open: deliver what its agent has sent so far."""
        session = self._sessions.get(link.agent)
        if session is None:
            return
        if session.key != link.public_key:
            return self._fence(session, "the other agent is linked to another life of this one")
        if session.losses > link.losses:
            return link.end(RELINKED)
        if session.losses < link.losses:  # it ends that link when it hears of the loss
            return None
        self._paired[link] = session
        held, session.held = session.held, []
        for scope, message in held:
            self._receive(session, scope, message)

    def lost(self, link: Link, text: str) -> None:
        """Our link is over, and so is the session that belongs to it."""
        session = self._paired.pop(link, None)
        if session is not None:
            self._fence(session, f"the other agent lost its link: {text}")

    def drop(self, agent: str, text: str) -> None:
        """End what ``agent`` has opened. The caller ends our link to it."""
        link, session = self._link_to(agent), self._sessions.get(agent)
        if link is not None:
            self._paired.pop(link, None)
        if session is not None:
            self._fence(session, text)

    def heard(self, agent: str, key: str, connection: bytes, envelope: Envelope | Malformed) -> None:
        """Handle a message on ``connection``, from the agent that the gate named."""
        session = self._sessions.get(agent)
        if session is not None and session.connection != connection:
            session = None
        if isinstance(envelope, Malformed):
            log.warning("dropped from agent %s: %s", agent, envelope)
            return self._break(agent, session, connection, f"you broke the protocol: {envelope}")
        match envelope:
            case Envelope(message=Hello()) if self.closing:
                self._answer(connection, Bye(text="the other agent is leaving"))
            case Envelope(message=Hello() as hello):
                self._greet(PeerSession(agent, key, connection, hello.losses))
            case _ if session is None:
                # Of a link that this agent has given up, or never greeted.
                self._answer(connection, Bye(text="this link is over"))
            case Envelope(message=Beat() as beat):
                came = 0 if trace.active is None else time.monotonic_ns()
                self._answer(connection, beat)
                if (tracer := trace.active) is not None and beat.number % TRACED_BEATS == 0:
                    tracer.beat_answered(agent, beat.number, came, time.monotonic_ns())
            case Envelope(message=Bye(text=text)):
                self._break(agent, session, connection, text)
            case Envelope(scope=Scope() as scope, message=message) if not isinstance(message, Control):
                session.received += 1
                self._receive(session, scope, message)
            case _:
                log.warning("dropped from agent %s: a Welcome that nobody asked for", agent)

    def _greet(self, session: PeerSession) -> None:
        agent = session.agent
        self._sessions[agent] = session
        self._lost_before(agent, session.key, session.losses)
        self._answer(session.connection, Welcome(version=__version__))
        link = self._link_to(agent)
        if link is None or link.state is not State.OPEN:
            return
        if session.key != link.public_key:
            return link.end("another life of it has come")
        if session.losses > link.losses:
            # It has lost us since. Then we have lost it, too, and both begin again.
            return link.end(RELINKED)
        if session.losses == link.losses:
            self._paired[link] = session

    def _receive(self, session: PeerSession, scope: Scope, message: Said) -> None:
        link = self._link_to(session.agent)
        if self.closing:
            log.debug("agent %s said %s too late: this agent is leaving", session.agent, type(message).__name__)
        elif link is not None and self._paired.get(link) is session:
            self._deliver(session, scope, message)
        elif len(session.held) < MAX_HELD:
            session.held.append((scope, message))
        else:
            log.warning("agent %s said %d messages before this one linked to it", session.agent, MAX_HELD)
            self._fence(session, f"{MAX_HELD} messages wait: the other agent opens no link")

    def _deliver(self, session: PeerSession, scope: Scope, message: Said) -> None:
        try:
            self._on_message(session.agent, scope, message)
        except ProtocolError as error:
            log.warning("dropped from agent %s: %s of %s: %s", session.agent, type(message).__name__, scope, error)
        except Exception:  # a mistake here must not lose the messages that follow
            log.exception("%s of %s from agent %s could not be handled", type(message).__name__, scope, session.agent)

    def _break(self, agent: str, session: PeerSession | None, connection: bytes, text: str) -> None:
        """The other agent leaves or sends nonsense: end everything between us."""
        if session is None:
            return self._answer(connection, Bye(text=text))
        self._fence(session, text)  # at once, because messages after a dropped one must not be delivered
        link = self._link_to(agent)
        if link is not None and self._paired.pop(link, None) is not None:
            link.end(text)

    def _fence(self, session: PeerSession, text: str) -> None:
        """Receive nothing more on ``session``, and tell its other end."""
        if self._sessions.get(session.agent) is session:
            del self._sessions[session.agent]
        self._answer(session.connection, Bye(text=text))
