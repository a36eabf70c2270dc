"""The coordinator of one direction of one batch: collects READY, books, says GO, collects votes, decides.

Pure. It lives in the agent of source rank 0 and speaks only ``peer.messages``; the agent itself is
one of its participants and is told by the same messages. A batch on one agent books nothing.

    COLLECTING --all ready--> BOOKING --all booked--> MOVING --all done--> COMMITTING --settled--> COLLECTING
         ^--READY taken back, agent gone--/               \\--failed, agent gone--> COLLECTING (Abort said)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import msgspec

from etha.agent.protocol.conflict import conflict
from etha.agent.protocol.effects import name_agents
from etha.agent.protocol.machine import Machine
from etha.agent.protocol.reservation import Reservation
from etha.agent.protocol.termination import Outcome
from etha.errors import EthaError, PeerLostError
from etha.peer.messages import (
    Abort,
    Booked,
    Commit,
    Committed,
    Declined,
    Done,
    Failed,
    Go,
    Message,
    Offer,
    Ready,
    Recall,
    Refused,
    Stood,
    Unbook,
    Unready,
    Version,
)


class Phase(Enum):
    """Where the coordinator stands."""

    COLLECTING = 1
    BOOKING = 2
    MOVING = 3
    COMMITTING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """To the coordinator's own agent only: answer your workers, for every peer has acknowledged, declined or gone.

    ``cause`` is None exactly when ``outcome`` is "committed".
    """

    seq: int
    outcome: Outcome
    cause: EthaError | None


Letters = list[tuple[str, Message | Settle]]


class Coordinator(Machine[Phase]):
    """``agents`` maps each side to the agent of each of its ranks, by rank; ``source`` is the sender."""

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
        self.wanted = {(agent, side) for side in (source, target) for agent in agents[side]}
        self.peers = tuple(sorted({agent for agent, _ in self.wanted}))
        self.ready: dict[tuple[str, str], Ready] = {}
        self.reservation = Reservation(source)
        self.votes: set[str] = set()
        self.declined: dict[str, EthaError] = {}
        self.gone: set[str] = set()
        self.offered = False

    def hear(self, agent: str, message: Message) -> Letters:
        """Take one participant's message; returns (agent, message) to send, in order."""
        match message:
            case Ready():
                return self._ready(agent, message)
            case Unready():
                return self._unready(agent, message)
            case Booked(side=self.source) if self.state is Phase.BOOKING:
                self.reservation.booked(agent, message)
                return self._go() if self.reservation.complete else []
            case Recall(side=self.source) if self.state is Phase.BOOKING:
                return [*self.reservation.recall(agent, message)]
            case Recall(side=self.source) if self.state is Phase.COLLECTING:
                return self._give_way(agent, message)
            case Done(seq=seq) if self._current(seq, Phase.MOVING):
                self.votes.add(agent)
                return self._decide()
            case Failed(seq=seq, cause=cause) if self._current(seq, Phase.MOVING):
                return self._abort(cause)
            case Committed(seq=seq) if self._current(seq, Phase.COMMITTING):
                self.votes.add(agent)
                return self._settle()
            case Declined(seq=seq, cause=cause) if self._current(seq, Phase.COMMITTING):
                self.declined.setdefault(agent, cause)
                return self._settle()
        return []  # of a transfer that is over: the sender has been told its end already

    def lose(self, agent: str) -> Letters:
        """An agent's link closed: a transfer in motion ends, a decided one goes on without it, none begins."""
        self.gone.add(agent)
        self.ready = {key: value for key, value in self.ready.items() if key[0] != agent}
        match self.state:
            case Phase.MOVING:
                return self._abort(self._lost({agent}))
            case Phase.COMMITTING:
                return self._settle()
        return [*self._collect(), *self._offer()]

    def missing(self) -> tuple[tuple[str, int], ...]:
        """Ranks whose agent has not said READY with the verb that this direction needs, or with an older snapshot."""
        verb = {self.source: "send", self.target: "recv"}
        newest = self._edition()
        return tuple(
            (side, rank)
            for side in (self.source, self.target)
            for rank, agent in enumerate(self.agents[side])
            if (found := self.ready.get((agent, side))) is None
            or found.verb != verb[side]
            or (found.verb == "send" and found.edition != newest)
        )

    def observe(self, go: Go) -> Letters:
        """A transfer began, in either direction: its number is taken, its READYs are used up."""
        self.skip(go.seq)
        for agent, side, attempt in go.attempts:
            found = self.ready.get((agent, side))
            if found is not None and found.attempt <= attempt:
                del self.ready[agent, side]
        return self._collect() if self.missing() else []

    def skip(self, seq: int) -> None:
        """``seq`` has been given to a transfer."""
        self.seq = max(self.seq, seq)

    def _current(self, seq: int, phase: Phase) -> bool:
        return self.state is phase and seq == self.seq

    def _ready(self, agent: str, message: Ready) -> Letters:
        if (agent, message.side) not in self.wanted:
            return []
        self.ready.pop((agent, message.side), None)  # the newest comes last
        self.ready[agent, message.side] = message
        if error := conflict(self.batch, self.source, self.wanted, self.ready):
            refused = [(a, Refused(side=s, attempt=m.attempt, error=error)) for (a, s), m in self.ready.items()]
            self.ready.clear()
            return [*self._collect(), *refused, *self._offer()]
        return self._next()

    def _unready(self, agent: str, message: Unready) -> Letters:
        found = self.ready.get((agent, message.side))
        if found is None or found.attempt != message.attempt:
            return []  # GO or a refusal has overtaken it
        missing = self.missing()
        del self.ready[agent, message.side]
        stood = Stood(side=message.side, attempt=message.attempt, missing=missing)
        return [*self._collect(), (agent, stood), *self._offer()]

    def _collect(self) -> Letters:
        """Back from BOOKING: nothing is held for calls that may not come again."""
        if self.state is not Phase.BOOKING:
            return []
        self.move(Phase.COLLECTING)
        self.ready = {key: msgspec.structs.replace(message, lane=False) for key, message in self.ready.items()}
        return [(agent, message) for agent, message in self.reservation.cancel() if agent not in self.gone]

    def _give_way(self, agent: str, message: Recall) -> Letters:
        """An agent wants back what came with its READY: another transfer can begin before this one."""
        for key, found in self.ready.items():
            if key[0] == agent and found.lane and found.held_number == message.number:
                self.ready[key] = msgspec.structs.replace(found, lane=False)
                return [(agent, Unbook(side=self.source, number=message.number))]
        return []

    def _edition(self) -> str:
        """Of the snapshots that are offered the one that came last; "" where tensors are sent as they are."""
        sends = self._sends()
        return sends[-1].edition if sends else ""

    def _sends(self) -> list[Ready]:
        """Of the source ranks, in the order in which they came."""
        return [m for (_, side), m in self.ready.items() if side == self.source and m.verb == "send"]

    def _label(self) -> Version:
        found = [m.version for _, m in sorted(self.ready.items()) if m.verb == "send" and m.version is not None]
        return found[0] if found else None

    def _next(self) -> Letters:
        """Begin if all are ready: by booking at their agents, or at once where there is one agent only."""
        if self.state is not Phase.COLLECTING or self.gone or self.missing():
            return self._offer()
        if len(self.peers) == 1:
            return self._go()
        self.move(Phase.BOOKING)
        held = {agent: message.held_number for (agent, _), message in self.ready.items() if message.lane}
        letters = self.reservation.ask(self.peers, (self.now(), self.me, self.batch), held)
        return self._go() if self.reservation.complete else [*self._offer(), *letters]

    def _go(self) -> Letters:
        self.seq += 1
        attempts = tuple(sorted((agent, side, m.attempt) for (agent, side), m in self.ready.items()))
        snapshot = bool(self._edition())
        go = Go(seq=self.seq, side=self.source, version=self._label(), snapshot=snapshot, attempts=attempts)
        self.ready.clear()
        self.votes.clear()
        self.declined.clear()
        self.reservation.close()
        self.move(Phase.MOVING)
        return [*self._offer(), *((peer, go) for peer in self.peers)]

    def _offer(self) -> Letters:
        """Tell the receivers' agents when the whole source side began or ceased to wait."""
        keys = {(agent, self.source) for agent in self.agents[self.source]}
        newest = self._edition()
        standing = all(
            (found := self.ready.get(key)) is not None and found.verb == "send" and found.edition == newest
            for key in keys
        )
        if standing == self.offered:
            return []
        self.offered = standing
        offer = Offer(side=self.source, standing=standing, version=self._label() if standing else None)
        return [(agent, offer) for agent in sorted(set(self.agents[self.target]) - self.gone)]

    def _decide(self) -> Letters:
        if not self.votes >= set(self.peers):
            return []
        self.votes.clear()
        self.move(Phase.COMMITTING)
        return [(peer, Commit(seq=self.seq)) for peer in self.peers]

    def _settle(self) -> Letters:
        """Every peer has acknowledged, declined or gone: one acknowledgement makes the commit stand.

        Survivors that lost this coordinator have aborted if none of them knew the commit. So without one
        acknowledgement a result may never be given; and only when all declined is it sure that none was.
        """
        others = {peer for peer in self.peers if peer != self.me}
        known = self.votes | self.declined.keys()
        if not known | self.gone >= set(self.peers):
            return []
        self.move(Phase.COLLECTING)
        if not others or self.votes & others:
            return [(self.me, Settle(seq=self.seq, outcome="committed", cause=None)), *self._next()]
        if silent := others - known:
            settle = Settle(seq=self.seq, outcome="unknown", cause=self._lost(silent))
            return [(self.me, settle), *self._next()]
        cause = self.declined[min(self.declined)]
        abort = Abort(seq=self.seq, cause=cause)
        letters: Letters = [(peer, abort) for peer in sorted(others - self.gone)]
        return [*letters, (self.me, Settle(seq=self.seq, outcome="aborted", cause=cause)), *self._next()]

    def _abort(self, cause: EthaError) -> Letters:
        self.move(Phase.COLLECTING)
        abort = Abort(seq=self.seq, cause=cause)
        letters: Letters = [(peer, abort) for peer in self.peers if peer not in self.gone]
        return [*letters, *self._next()]

    def _lost(self, agents: set[str]) -> PeerLostError:
        return PeerLostError(f"{name_agents(self.agents, agents)} gone", reason="died")
