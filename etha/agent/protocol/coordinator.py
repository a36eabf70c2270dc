"""The coordinator of one direction of one batch: collects READY, books, says GO, collects votes, decides.

Pure. It lives in the agent of source rank 0 and sends only ``peer.messages``. Its own agent is one of its participants
and gets the same messages. A batch on one agent books nothing.

    COLLECTING --all ready--> BOOKING --all booked--> MOVING --all done--> COMMITTING --settled--> COLLECTING
         ^--READY taken back, agent lost--/               \\--failed, agent lost--> COLLECTING (Abort said)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import msgspec

from etha.agent.protocol.effects import members_of, name_agents
from etha.agent.protocol.machine import Machine, MachineState
from etha.agent.protocol.termination import Outcome
from etha.errors import EthaError, PeerLostError, ProtocolError, TransferError
from etha.peer.messages import (
    Abort,
    Book,
    Booked,
    Commit,
    Committed,
    Declined,
    Done,
    Failed,
    Go,
    Message,
    PeerOffer,
    Ready,
    Recall,
    Refused,
    Ticket,
    Unbook,
    Unready,
    Version,
    WithdrawAcknowledged,
)

Key = tuple[str, str]  # (agent, side)
T = TypeVar("T")

#: Nanoseconds within which ranks of one side whose calls end count as having given up together: they call at about the
#: same time, with the same timeout.
TOGETHER = 1_000_000_000


class Readiness:
    """READY of each agent and side, in the order in which they came, for the direction from ``source`` to ``target``.

    ``agents``: side -> agent of each rank. Only READYs of these agents and sides are kept. Every READY changes a few
    counts, so what is asked after each of them costs as much with a thousand agents as with two. All of them are looked
    at only once a transfer, and for what an error tells.
    """

    def __init__(self, name: str, source: str, target: str, agents: Mapping[str, tuple[str, ...]]) -> None:
        self.name, self.source, self.target, self.agents = name, source, target, agents
        self.wanted = frozenset((agent, side) for side in (source, target) for agent in agents[side])
        self._of_source = len(set(agents[source]))
        self._all: dict[Key, Ready] = {}
        #: Those that fit the direction: sends of the source, receives of the target.
        self._sends: dict[Key, Ready] = {}
        self._receives: dict[Key, Ready] = {}
        #: How many of all say that they send.
        self._sending = 0
        #: How many of those that fit say what. A number of zero is not kept.
        self._editions: dict[str, int] = {}
        self._versions: dict[Version, int] = {}
        self._expected: dict[int | None, int] = {}
        self._digests: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[Key, Ready]]:
        return iter(self._all.items())

    def get(self, key: Key) -> Ready | None:
        """What an agent says of a side; None if it has said nothing, or has taken it back."""
        return self._all.get(key)

    def add(self, agent: str, message: Ready) -> None:
        """An agent says READY, instead of what it said of this side before."""
        key = (agent, message.side)
        self.remove(key)
        self._all[key] = message
        self._count(key, message, 1)

    def remove(self, key: Key) -> None:
        """An agent's READY of a side is taken back or used up. Does nothing if there is none."""
        message = self._all.pop(key, None)
        if message is not None:
            self._count(key, message, -1)

    def remove_agent(self, agent: str) -> None:
        """An agent is lost."""
        for side in (self.source, self.target):
            self.remove((agent, side))

    def clear(self) -> None:
        """All READYs are used up."""
        for counted in (self._all, self._sends, self._receives):
            counted.clear()
        for counts in (self._editions, self._versions, self._expected, self._digests):
            counts.clear()
        self._sending = 0

    def without_booking(self, agent: str, number: int) -> bool:
        """Give back what an agent booked as ``number`` when it said READY. Returns whether it had."""
        for side in (self.source, self.target):
            found = self._all.get((agent, side))
            if found is not None and found.lane and found.held_number == number:
                self._all[agent, side] = msgspec.structs.replace(found, lane=False)
                return True
        return False

    def without_bookings(self) -> None:
        """Give back what was booked with any READY."""
        self._all = {key: msgspec.structs.replace(message, lane=False) for key, message in self._all.items()}

    @property
    def complete(self) -> bool:
        """Whether everybody is ready for this direction, with what fits together."""
        if len(self._sends) + len(self._receives) < len(self.wanted) or not self.offered:
            return False
        expected = self.expected
        return expected is None or (self._versions.keys() == {expected} and self._expected.keys() == {expected})

    @property
    def offered(self) -> bool:
        """Whether all of the source wait to send, their tensors or the newest snapshot."""
        return len(self._sends) == self._of_source and len(self._editions) == 1

    @property
    def edition(self) -> str:
        """The edition of the snapshot that was offered last; "" if tensors are sent."""
        return next(reversed(self._sends.values())).edition if self._sends else ""

    @property
    def expected(self) -> int | None:
        """The newest version that a receiving rank expects; None if all take whatever is sent."""
        return max((each for each in self._expected if each is not None), default=None)

    def label(self) -> Version:
        """The version under which it is sent: that of the first agent, by name, which gives one."""
        found = [(key, m.version) for key, m in self._all.items() if m.verb == "send" and m.version is not None]
        return min(found, key=lambda each: each[0])[1] if found else None

    def missing(self) -> tuple[tuple[str, int], ...]:
        """Ranks whose agent has not said READY with the verb that this direction needs, or only with an older
        snapshot, or with another version than is expected: a send that is left over from an earlier claim ends soon."""
        verb = {self.source: "send", self.target: "recv"}
        newest, expected = self.edition, self.expected
        return tuple(
            (side, rank)
            for side in (self.source, self.target)
            for rank, agent in enumerate(self.agents[side])
            if (found := self._all.get((agent, side))) is None
            or found.verb != verb[side]
            or (found.verb == "send" and found.edition != newest)
            or (expected is not None and expected != (found.version if found.verb == "send" else found.expects))
        )

    def conflict(self) -> EthaError | None:
        """Why these calls can never meet; None if they can, or if one more READY decides."""
        if self._sending == len(self._all) == len(self.wanted):
            a, b = sorted({side for _, side in self.wanted})
            return TransferError(
                f"{self.name}: both sides send, {a} and {b}; one of them has to call transfer(..., 'recv')",
                outcome="withdrawn",
            )
        # Only of this direction, because READYs of the other one may belong to a transfer whose GO has not come yet.
        if len(self._editions) > 1 and "" in self._editions:
            return TransferError(
                f"{self.name}: some ranks of {self.source} send a snapshot, others what their tensors hold; "
                f"give the same snapshot= on every rank",
                outcome="withdrawn",
            )
        if len(self._versions) > 1 and len(self._editions) <= 1:  # with snapshots, a rank may be one ahead
            labels = {str(version) for version in self._versions if version is not None}
            if len(labels) > 1:
                return TransferError(
                    f"{self.name}: the ranks of {self.source} send under different versions, "
                    f"{', '.join(sorted(labels))}; give the same version on every rank, or on one only",
                    outcome="withdrawn",
                )
        if len(self._digests) > 1:
            held = ", ".join(sorted(self._digests))
            return ProtocolError(f"{self.name}: the agents hold different plans ({held})")
        return None

    def _count(self, key: Key, message: Ready, change: int) -> None:
        """Add what a READY says to the counts, or take it away."""
        sends = message.verb == "send"
        if sends:
            self._sending += change
        if message.side != (self.source if sends else self.target):
            return  # it does not fit the direction
        fitting = self._sends if sends else self._receives
        if change > 0:
            fitting[key] = message
        else:
            del fitting[key]
        _add(self._digests, message.digest, change)
        if sends:
            _add(self._editions, message.edition, change)
            _add(self._versions, message.version, change)
        else:
            _add(self._expected, message.expects, change)


def _add(counts: dict[T, int], what: T, change: int) -> None:
    count = counts.get(what, 0) + change
    if count:
        counts[what] = count
    else:
        del counts[what]


_NOBODY: Mapping[str, int] = MappingProxyType({})


class BookingRound:
    """A coordinator's bookings at every agent of its batch, from all READY to GO.

    READY with a booking, or Book --> Booked    all booked: GO
    Recall --> Unbook, Book (same ticket)       an older transfer goes first on that agent

    ``side`` is the coordinator's source side. A number names one Book, so that a late message is recognised.
    """

    def __init__(self, side: str) -> None:
        self.side = side
        self.ticket: Ticket | None = None
        self._last = 0
        self._numbers: dict[str, int] = {}
        self._booked: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every agent that was asked has granted its booking."""
        return bool(self._numbers) and len(self._booked) == len(self._numbers)  # only who was asked is in it

    def ask(
        self, agents: Iterable[str], ticket: Ticket, held: Mapping[str, int] = _NOBODY
    ) -> list[tuple[str, Book | Unbook]]:
        """Book at ``agents`` under ``ticket``. Those ``held`` (agent -> number) came with READY."""
        self.ticket = ticket
        self._numbers |= held
        self._booked |= held.keys()
        return [(agent, self._book(agent, ticket)) for agent in agents if agent not in held]

    def booked(self, agent: str, message: Booked) -> None:
        """An agent granted its booking, if it is the one that was last asked for."""
        if self._numbers.get(agent) == message.number:
            self._booked.add(agent)

    def recall(self, agent: str, message: Recall) -> list[tuple[str, Book | Unbook]]:
        """An agent wants the booking back for an older transfer: book again, behind that one, with the same ticket."""
        if self.ticket is None or self._numbers.get(agent) != message.number:
            return []
        self._booked.discard(agent)
        back = Unbook(side=self.side, number=message.number)
        return [(agent, back), (agent, self._book(agent, self.ticket))]

    def cancel(self) -> list[tuple[str, Book | Unbook]]:
        """Give everything back."""
        out: list[tuple[str, Book | Unbook]] = [
            (agent, Unbook(side=self.side, number=number)) for agent, number in self._numbers.items()
        ]
        self.close()
        return out

    def close(self) -> None:
        """GO is said, so the transfer owns what was booked."""
        self.ticket = None
        self._numbers.clear()
        self._booked.clear()

    def _book(self, agent: str, ticket: Ticket) -> Book:
        self._last += 1
        self._numbers[agent] = self._last
        return Book(side=self.side, number=self._last, ticket=ticket)


class Phase(MachineState):
    """What the coordinator is doing."""

    COLLECTING = 1
    BOOKING = 2
    MOVING = 3
    COMMITTING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """To the coordinator's own agent only: answer your workers, because every peer has acknowledged, declined or is
    lost.

    ``cause`` is None exactly when ``outcome`` is "committed".
    """

    seq: int
    outcome: Outcome
    cause: EthaError | None


Outbox = list[tuple[str, Message | Settle]]


class Coordinator(Machine[Phase]):
    """``agents`` maps each side to the agent of each of its ranks, by rank. ``source`` is the side that sends."""

    LOGGED = False
    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        Phase.COLLECTING: frozenset({Phase.BOOKING, Phase.MOVING}),
        Phase.BOOKING: frozenset({Phase.MOVING, Phase.COLLECTING}),
        Phase.MOVING: frozenset({Phase.COMMITTING, Phase.COLLECTING}),
        Phase.COMMITTING: frozenset({Phase.COLLECTING}),
    }

    def __init__(
        self,
        name: str,
        *,
        source: str,
        target: str,
        agents: Mapping[str, tuple[str, ...]],
        seq: int,
        now: Callable[[], int],
    ) -> None:
        super().__init__(f"coordinator {name} from {source}", Phase.COLLECTING)
        self.batch, self.source, self.target, self.agents = name, source, target, agents
        self.seq, self.now = seq, now
        self.me = agents[source][0]
        self.peers = tuple(sorted({agent for side in (source, target) for agent in agents[side]}))
        self._coordinators = frozenset((agents[source][0], agents[target][0]))
        self._others = frozenset(self.peers) - {self.me}
        self.ready = Readiness(name, source, target, agents)
        self.reservation = BookingRound(source)
        self.votes: set[str] = set()
        #: Of whom it is not known yet whether they have taken the COMMIT.
        self._awaited: set[str] = set()
        self.declined: dict[str, EthaError] = {}
        self.lost_agents: set[str] = set()
        self.offered = False
        #: When the READY of an agent's side came, and when it was last taken back.
        self._came: dict[tuple[str, str], int] = {}
        self._withdrew: dict[tuple[str, str], int] = {}

    def hear(self, agent: str, message: Message) -> Outbox:
        """Handle one participant's message. Returns (agent, message) to send, in order."""
        match message:
            case Ready():
                return self._ready(agent, message)
            case Done(seq=seq) if self.state is Phase.MOVING and seq == self.seq:
                self.votes.add(agent)
                return self._decide()
            case Committed(seq=seq) if self.state is Phase.COMMITTING and seq == self.seq:
                self.votes.add(agent)
                return self._settle(agent)
            case Unready():
                return self._unready(agent, message)
            case Booked(side=self.source) if self.state is Phase.BOOKING:
                self.reservation.booked(agent, message)
                return self._go() if self.reservation.complete else []
            case Recall(side=self.source) if self.state is Phase.BOOKING:
                return [*self.reservation.recall(agent, message)]
            case Recall(side=self.source):
                # READY for the next transfer, and its recall, may come while this one still moves or commits.
                return self._give_way(agent, message)
            case Failed(seq=seq, cause=cause) if self.state is Phase.MOVING and seq == self.seq:
                return self._abort(cause)
            case Declined(seq=seq, cause=cause) if self.state is Phase.COMMITTING and seq == self.seq:
                self.declined.setdefault(agent, cause)
                return self._settle(agent)
        return []  # of a transfer that is over, whose end the sender knows already

    def on_agent_lost(self, agent: str) -> Outbox:
        """An agent's link closed: a moving transfer is aborted, a decided one goes on without it, and none begins."""
        self.lost_agents.add(agent)
        self.ready.remove_agent(agent)
        match self.state:
            case Phase.MOVING:
                return self._abort(self._agent_lost_error({agent}))
            case Phase.COMMITTING:
                return self._settle(agent)
        return [*self._collect(), *self._offer()]

    def missing(self) -> tuple[tuple[str, int], ...]:
        """Ranks whose agent has not said READY with what this direction needs."""
        return self.ready.missing()

    def not_ready(self, side: str, agent: str) -> tuple[tuple[str, int], ...]:
        """``missing`` for calls of ``agent``'s ranks of ``side`` that end now. The others of this side that have waited
        beside them and have just given up are not named, because they have waited for the same ranks."""
        since = max(self._came.get((agent, side), 0), self.now() - TOGETHER)
        together = {key for key, at in self._withdrew.items() if at >= since}
        return tuple(m for m in self.missing() if m[0] != side or (self.agents[side][m[1]], side) not in together)

    def observe(self, go: Go) -> Outbox:
        """A transfer began, in either direction: its number is taken, and its READYs are used up."""
        self.skip(go.seq)
        for agent, side, attempt in go.attempts:
            found = self.ready.get((agent, side))
            if found is not None and found.attempt <= attempt:
                self.ready.remove((agent, side))
        return [] if self.state is not Phase.BOOKING or self.ready.complete else self._collect()

    def skip(self, seq: int) -> None:
        """Note that ``seq`` has been given to a transfer."""
        self.seq = max(self.seq, seq)

    def _ready(self, agent: str, message: Ready) -> Outbox:
        key = (agent, message.side)
        if key not in self.ready.wanted:
            return []
        self.ready.add(agent, message)
        self._came[key] = self.now()
        self._withdrew.pop(key, None)
        if error := self.ready.conflict():
            refused = [(a, Refused(side=s, attempt=m.attempt, error=error)) for (a, s), m in self.ready]
            self.ready.clear()
            return [*self._collect(), *refused, *self._offer()]
        return self._next()

    def _unready(self, agent: str, message: Unready) -> Outbox:
        found = self.ready.get((agent, message.side))
        if found is None or found.attempt != message.attempt:
            return []  # GO or a refusal has overtaken it
        missing = self.not_ready(message.side, agent)
        self._withdrew[agent, message.side] = self.now()
        self.ready.remove((agent, message.side))
        stood = WithdrawAcknowledged(side=message.side, attempt=message.attempt, missing=missing)
        return [*self._collect(), (agent, stood), *self._offer()]

    def _collect(self) -> Outbox:
        """Go back from BOOKING. Nothing stays booked for calls that may not come again."""
        if self.state is not Phase.BOOKING:
            return []
        self.move(Phase.COLLECTING)
        self.ready.without_bookings()
        return [(agent, message) for agent, message in self.reservation.cancel() if agent not in self.lost_agents]

    def _give_way(self, agent: str, message: Recall) -> Outbox:
        """An agent wants back what came with its READY, because another transfer can begin before this one."""
        if self.ready.without_booking(agent, message.number):
            return [(agent, Unbook(side=self.source, number=message.number))]
        return []

    def _next(self) -> Outbox:
        """Begin if all are ready: book at their agents first, or begin at once if there is only one agent."""
        if self.state is not Phase.COLLECTING or self.lost_agents or not self.ready.complete:
            return self._offer()
        if len(self.peers) == 1:
            return self._go()
        self.move(Phase.BOOKING)
        held = {agent: message.held_number for (agent, _), message in self.ready if message.lane}
        letters = self.reservation.ask(self.peers, (self.now(), self.me, self.batch), held)
        return self._go() if self.reservation.complete else [*self._offer(), *letters]

    def _go(self) -> Outbox:
        self.seq += 1
        attempts = tuple(sorted([(agent, side, m.attempt) for (agent, side), m in self.ready]))
        snapshot = bool(self.ready.edition)
        ticket = self.reservation.ticket
        go = Go(
            seq=self.seq,
            side=self.source,
            version=self.ready.label(),
            snapshot=snapshot,
            attempts=attempts,
            booking=0.0 if ticket is None else max(0, self.now() - ticket[0]) / 1e9,
        )
        self.ready.clear()
        self.votes.clear()
        self.declined.clear()
        self.reservation.close()
        self.move(Phase.MOVING)
        letters = self._offer()
        if len(self.peers) == len(self._coordinators):
            letters += [(peer, go) for peer in self.peers]
        else:
            # Only a coordinator forgets READYs by it, and to a thousand agents a thousand attempts are a million.
            short = msgspec.structs.replace(go, attempts=())
            letters += [(peer, go if peer in self._coordinators else short) for peer in self.peers]
        return letters

    def _offer(self) -> Outbox:
        """Tell the receivers' agents when the whole source side began or ceased to wait."""
        standing = self.ready.offered
        if standing == self.offered:
            return []
        self.offered = standing
        offer = PeerOffer(side=self.source, standing=standing, version=self.ready.label() if standing else None)
        return [(agent, offer) for agent in sorted(set(self.agents[self.target]) - self.lost_agents)]

    def _decide(self) -> Outbox:
        if len(self.votes) < len(self.peers):
            return []
        self.votes.clear()
        self._awaited = set(self.peers) - self.lost_agents
        self.move(Phase.COMMITTING)
        return [(peer, Commit(seq=self.seq)) for peer in self.peers]

    def _settle(self, agent: str) -> Outbox:
        """``agent`` has acknowledged, declined or is lost; once every peer has, settle: one acknowledgement makes the
        commit valid.

        Survivors that lost this coordinator have aborted if none of them knew the commit. So without an acknowledgement
        a result may never be given out. And only if all have declined is it certain that none was.
        """
        self._awaited.discard(agent)
        if self._awaited:
            return []
        others = self._others
        self.move(Phase.COLLECTING)
        if not others or self.votes & others:
            return [(self.me, Settle(seq=self.seq, outcome="committed", cause=None)), *self._next()]
        if silent := others - self.votes - self.declined.keys():
            settle = Settle(seq=self.seq, outcome="unknown", cause=self._agent_lost_error(silent))
            return [(self.me, settle), *self._next()]
        cause = self.declined[min(self.declined)]
        abort = Abort(seq=self.seq, cause=cause)
        letters: Outbox = [(peer, abort) for peer in sorted(others - self.lost_agents)]
        return [*letters, (self.me, Settle(seq=self.seq, outcome="aborted", cause=cause)), *self._next()]

    def _abort(self, cause: EthaError) -> Outbox:
        self.move(Phase.COLLECTING)
        abort = Abort(seq=self.seq, cause=cause)
        letters: Outbox = [(peer, abort) for peer in self.peers if peer not in self.lost_agents]
        return [*letters, *self._next()]

    def _agent_lost_error(self, agents: Collection[str]) -> PeerLostError:
        text = f"{name_agents(self.agents, agents)} gone"
        return PeerLostError(text, reason="died", culprits=members_of(self.agents, agents))
