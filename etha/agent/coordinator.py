"""The coordinator of one direction of one batch: collects READY, says GO, collects votes, decides.

Pure. It lives in the agent of source rank 0 and speaks only ``peer.messages``; the agent itself is
one of its participants and is told by the same messages.

    COLLECTING --all ready--> MOVING --all done--> COMMITTING --all acknowledged--> COLLECTING
                                 \\--failed, agent gone--> COLLECTING (Abort said)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from etha.agent.machine import Machine
from etha.errors import EthaError, PeerLostError, ProtocolError, TransferError
from etha.peer.messages import (
    Abort,
    Commit,
    Committed,
    Done,
    Failed,
    Go,
    Message,
    Offer,
    Ready,
    Refused,
    Stood,
    Unready,
    Version,
)


class Phase(Enum):
    """Where the coordinator stands."""

    COLLECTING = 1
    MOVING = 2
    COMMITTING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """To the coordinator's own agent only: every living peer knows the commit, answer your workers."""

    seq: int


class Coordinator(Machine[Phase]):
    """``agents`` maps each side to the agent of each of its ranks, by rank; ``source`` is the sender."""

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]] = {
        Phase.COLLECTING: frozenset({Phase.MOVING}),
        Phase.MOVING: frozenset({Phase.COMMITTING, Phase.COLLECTING}),
        Phase.COMMITTING: frozenset({Phase.COLLECTING}),
    }

    def __init__(self, name: str, *, source: str, target: str, agents: Mapping[str, tuple[str, ...]], seq: int) -> None:
        super().__init__(f"coordinator {name} from {source}", Phase.COLLECTING)
        self.source, self.target, self.agents = source, target, agents
        self.seq = seq
        self.me = agents[source][0]
        self.wanted = {(agent, side) for side in (source, target) for agent in agents[side]}
        self.peers = tuple(sorted({agent for agent, _ in self.wanted}))
        self.ready: dict[tuple[str, str], Ready] = {}
        self.votes: set[str] = set()
        self.gone: set[str] = set()
        self.offered = False

    def hear(self, agent: str, message: Message) -> list[tuple[str, Message | Settle]]:
        """Take one participant's message; returns (agent, message) to send, in order."""
        match message:
            case Ready():
                return self._ready(agent, message)
            case Unready():
                return self._unready(agent, message)
            case Done(seq=seq) if self._current(seq, Phase.MOVING):
                self.votes.add(agent)
                return self._decide()
            case Failed(seq=seq, cause=cause) if self._current(seq, Phase.MOVING):
                return self._abort(cause)
            case Committed(seq=seq) if self._current(seq, Phase.COMMITTING):
                self.votes.add(agent)
                return self._settle()
        return []  # of a transfer that is over: the sender has been told its end already

    def lose(self, agent: str) -> list[tuple[str, Message | Settle]]:
        """An agent's link closed: a transfer in motion ends, a decided one goes on without it."""
        self.gone.add(agent)
        self.ready = {key: value for key, value in self.ready.items() if key[0] != agent}
        if self.state is Phase.MOVING:
            ranks = ", ".join(f"{s} rank {r}" for s, a in self.agents.items() for r, x in enumerate(a) if x == agent)
            return self._abort(PeerLostError(f"the agent of {ranks} is gone", reason="died"))
        if self.state is Phase.COMMITTING:
            return self._settle()
        return self._offer()

    def missing(self) -> tuple[tuple[str, int], ...]:
        """Ranks whose agent has not said READY with the verb that this direction needs."""
        verb = {self.source: "send", self.target: "recv"}
        return tuple(
            (side, rank)
            for side in (self.source, self.target)
            for rank, agent in enumerate(self.agents[side])
            if (found := self.ready.get((agent, side))) is None or found.verb != verb[side]
        )

    def observe(self, go: Go) -> None:
        """A transfer began, in either direction: its number is taken, its READYs are used up."""
        self.seq = max(self.seq, go.seq)
        for agent, side, attempt in go.attempts:
            found = self.ready.get((agent, side))
            if found is not None and found.attempt <= attempt:
                del self.ready[agent, side]

    def _current(self, seq: int, phase: Phase) -> bool:
        return self.state is phase and seq == self.seq

    def _ready(self, agent: str, message: Ready) -> list[tuple[str, Message | Settle]]:
        if (agent, message.side) not in self.wanted:
            return []
        self.ready[agent, message.side] = message
        if error := self._conflict():
            refused = [(a, Refused(side=s, attempt=m.attempt, error=error)) for (a, s), m in self.ready.items()]
            self.ready.clear()
            return [*refused, *self._offer()]
        return self._go() or self._offer()

    def _unready(self, agent: str, message: Unready) -> list[tuple[str, Message | Settle]]:
        found = self.ready.get((agent, message.side))
        if found is None or found.attempt != message.attempt:
            return []  # GO or a refusal has overtaken it
        missing = self.missing()
        del self.ready[agent, message.side]
        stood = Stood(side=message.side, attempt=message.attempt, missing=missing)
        return [(agent, stood), *self._offer()]

    def _conflict(self) -> EthaError | None:
        if self.wanted <= self.ready.keys() and all(m.verb == "send" for m in self.ready.values()):
            a, b = sorted(self.agents)
            return TransferError(
                f"{self.name}: both sides send, {a} and {b}; one of them has to call transfer(..., 'recv')",
                outcome="withdrawn",
            )
        labels = {str(m.version): m.version for m in self.ready.values() if m.verb == "send" and m.version is not None}
        if len(labels) > 1:
            return TransferError(
                f"{self.name}: the ranks of {self.source} send under different versions, {', '.join(sorted(labels))}; "
                f"give the same version on every rank, or on one only",
                outcome="withdrawn",
            )
        digests = {m.digest for m in self.ready.values() if m.verb == ("send" if m.side == self.source else "recv")}
        if len(digests) > 1:
            return ProtocolError(f"{self.name}: the agents hold different plans ({', '.join(sorted(digests))})")
        return None

    def _label(self) -> Version:
        found = [m.version for _, m in sorted(self.ready.items()) if m.verb == "send" and m.version is not None]
        return found[0] if found else None

    def _go(self) -> list[tuple[str, Message | Settle]]:
        if self.state is not Phase.COLLECTING or self.gone or self.missing():
            return []
        self.seq += 1
        attempts = tuple(sorted((agent, side, m.attempt) for (agent, side), m in self.ready.items()))
        go = Go(seq=self.seq, side=self.source, version=self._label(), attempts=attempts)
        self.ready.clear()
        self.votes.clear()
        self.move(Phase.MOVING)
        return [*self._offer(), *((peer, go) for peer in self.peers)]

    def _offer(self) -> list[tuple[str, Message | Settle]]:
        """Tell the receivers' agents when the whole source side began or ceased to wait."""
        keys = {(agent, self.source) for agent in self.agents[self.source]}
        standing = all((found := self.ready.get(key)) is not None and found.verb == "send" for key in keys)
        if standing == self.offered:
            return []
        self.offered = standing
        offer = Offer(side=self.source, standing=standing, version=self._label() if standing else None)
        return [(agent, offer) for agent in sorted(set(self.agents[self.target]) - self.gone)]

    def _decide(self) -> list[tuple[str, Message | Settle]]:
        if self.votes < set(self.peers):
            return []
        self.votes.clear()
        self.move(Phase.COMMITTING)
        return [(peer, Commit(seq=self.seq)) for peer in self.peers]

    def _settle(self) -> list[tuple[str, Message | Settle]]:
        if self.votes < set(self.peers) - self.gone:
            return []
        self.move(Phase.COLLECTING)
        return [(self.me, Settle(seq=self.seq)), *(self._go() or self._offer())]

    def _abort(self, cause: EthaError) -> list[tuple[str, Message | Settle]]:
        self.move(Phase.COLLECTING)
        abort = Abort(seq=self.seq, cause=cause)
        out: list[tuple[str, Message | Settle]] = [(peer, abort) for peer in self.peers if peer not in self.gone]
        return [*out, *(self._go() or self._offer())]
