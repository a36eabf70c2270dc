"""The calls of an agent's own ranks that wait for GO, and what each is told when its transfer fails; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from etha.agent.protocol.effects import CallKey, Member, name_members
from etha.agent.protocol.termination import Inquiry
from etha.errors import (
    EthaError,
    PeerLostError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
    with_again,
)
from etha.peer.messages import Verb, Version


@dataclass(slots=True, kw_only=True)
class Call:
    """A worker's waiting call; ``cause`` is set once it wants to end, ``yields`` if GO goes before that.

    ``edition`` names the snapshot that it sends, "" what its tensors hold.
    """

    key: CallKey
    member: Member
    verb: Verb
    version: Version = None
    edition: str = ""
    cause: EthaError | None = None
    yields: bool = False


@dataclass(slots=True)
class Side:
    """READY of one side: ``standing`` while it is with the coordinators."""

    attempt: int = 0
    standing: Verb | None = None
    withdrawing: bool = False


@dataclass(slots=True, kw_only=True)
class Current:
    """A transfer after GO; ``causes`` are what its own workers want it ended for, ``abort`` the decision.

    ``begun``: StartMove was said; ``inquiry``: the questions to others once the coordinator is lost. ``told``
    are those whose calls have been answered before the decision.
    """

    seq: int
    source: str
    version: Version
    coordinator: str
    calls: dict[Member, Call]
    causes: dict[Member, EthaError] = field(default_factory=dict)
    told: set[Member] = field(default_factory=set)
    abort: EthaError | None = None
    begun: bool = False
    touched: bool = False
    inquiry: Inquiry | None = None


@dataclass(slots=True, kw_only=True)
class Booking:
    """What ``agent``, coordinator of the direction from ``side``, has booked here under ``number``.

    ``ready``: the side with whose READY it was held, None where the coordinator asked for it.
    """

    agent: str
    side: str
    number: int
    ready: str | None = None
    granted: bool = False
    begun: bool = False


class Queues:
    """Per local rank its waiting calls, oldest first; per side with local ranks its READY."""

    def __init__(self, me: str, agents: Mapping[str, tuple[str, ...]]) -> None:
        self.me, self.agents = me, agents
        self.calls: dict[Member, deque[Call]] = {
            (side, rank): deque() for side in agents for rank, agent in enumerate(agents[side]) if agent == me
        }
        self.sides = {side: Side() for side, _ in self.calls}

    def __iter__(self) -> Iterator[Call]:
        for queue in self.calls.values():
            yield from queue

    def of(self, side: str) -> list[Call]:
        """All waiting calls of a side."""
        return [call for call in self if call.member[0] == side]

    def heads(self, side: str) -> list[Call] | None:
        """Each local rank's oldest call, None while one has none."""
        queues = [queue for (s, _), queue in self.calls.items() if s == side]
        return [queue[0] for queue in queues] if all(queues) else None

    def waits(self, member: Member, verb: Verb) -> bool:
        """Whether a local rank's oldest call is a ``verb``."""
        queue = self.calls.get(member)
        return bool(queue) and queue is not None and queue[0].verb == verb

    def missing(self, call: Call, told: tuple[Member, ...]) -> tuple[Member, ...]:
        """Of this agent's ranks those without a call that fits ``call``; of the others' those that we are told."""
        return tuple(
            (side, rank)
            for side, agents in self.agents.items()
            for rank, agent in enumerate(agents)
            if (not self.waits((side, rank), _fitting(call, side)) if agent == self.me else (side, rank) in told)
        )

    def named(self, call: Call, cause: EthaError, told: tuple[Member, ...]) -> EthaError:
        """``cause`` with who was not ready, for a call that is still in its queue."""
        missing = self.missing(call, told)
        if not missing or not isinstance(cause, TransferTimeoutError):
            return cause
        text = f"{cause.message}; not ready: {name_members(missing)}"
        same = [m for m in missing if m[0] != call.member[0] and self.waits(m, call.verb)]
        text += f" ({name_members(same)} wait to {call.verb}, too)" if same else ""
        return TransferTimeoutError(text, **cause.data())

    def take(self) -> dict[Member, Call]:
        """GO: each rank's oldest call leaves its queue, and every READY is used up."""
        self.rest()
        taken = {member: queue.popleft() for member, queue in self.calls.items()}
        for call in taken.values():
            if call.yields:
                call.cause, call.yields = None, False
        return taken

    def rest(self) -> None:
        """No READY stands any more."""
        for side in self.sides.values():
            side.standing, side.withdrawing = None, False


def _fitting(call: Call, side: str) -> Verb:
    """What the ranks of ``side`` have to call for ``call`` to begin."""
    if side == call.member[0]:
        return call.verb
    return "recv" if call.verb == "send" else "send"


def verdict(name: str, seq: int, own: EthaError | None, first: EthaError, torn: bool) -> EthaError:
    """What one worker is told about an aborted transfer: its own cause, else the first one."""
    error = own or first
    data = error.data() if isinstance(error, TransferError) else {}
    data |= {"outcome": "aborted", "torn": torn}
    text = f"{name} seq {seq} aborted: {error.message}"
    text = with_again(text) if isinstance(error, PeerLostError) else text
    if isinstance(error, PeerLostError) or own is not None:
        return (type(error) if isinstance(error, TransferError) else TransferAbortedError)(text, **data)
    return TransferAbortedError(text, outcome="aborted", torn=torn)


def unknown(name: str, seq: int, cause: EthaError, torn: bool) -> PeerLostError:
    """What every worker here is told about a transfer whose end nobody that this agent can reach knows."""
    text = f"{name} seq {seq} was committed or aborted, which of them is unknown here: {cause.message}"
    return PeerLostError(with_again(text), reason="died", outcome="unknown", torn=torn)
