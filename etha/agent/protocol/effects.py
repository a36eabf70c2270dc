"""What the state machines ask the shell to do, as data. The shell performs each effect and feeds back events.

A ``CallKey`` names one request of one worker: (session key, request id).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from etha.errors import EthaError
from etha.peer.messages import Message, Ticket, Version

CallKey = tuple[str, int]
Member = tuple[str, int]  # (side, rank)


def name_ranks(ranks: Mapping[str, Collection[int]]) -> str:
    """ "trainer ranks 0, 2-7; inference rank 1", for messages; "nobody" if there are none."""
    sides = []
    for side, members in sorted(ranks.items()):
        runs: list[list[int]] = []
        for rank in sorted(members):
            if runs and runs[-1][-1] == rank - 1:
                runs[-1] = [runs[-1][0], rank]
            else:
                runs.append([rank])
        listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[1]}" for run in runs[:20])
        sides.append(f"{side} rank{'s' if len(members) > 1 else ''} {listed}{', ...' if len(runs) > 20 else ''}")
    return "; ".join(sides) or "nobody"


def name_members(members: Iterable[Member]) -> str:
    """``name_ranks`` of (side, rank) pairs."""
    ranks: dict[str, set[int]] = {}
    for side, rank in members:
        ranks.setdefault(side, set()).add(rank)
    return name_ranks(ranks)


def name_agents(agents: Mapping[str, tuple[str, ...]], which: Collection[str]) -> str:
    """ "the agent of trainer ranks 0-1 is", "the agents of ... are"; ``agents`` maps a side to the agent of each
    rank."""
    ranks = {side: [rank for rank, agent in enumerate(members) if agent in which] for side, members in agents.items()}
    named = name_ranks({side: members for side, members in ranks.items() if members})
    return f"the agents of {named} are" if len(which) > 1 else f"the agent of {named} is"


def members_of(agents: Mapping[str, tuple[str, ...]], which: Collection[str]) -> tuple[Member, ...]:
    """The (side, rank) whose agent is one of ``which``."""
    return tuple((side, rank) for side, all_of in agents.items() for rank, a in enumerate(all_of) if a in which)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Reply to a worker's call."""

    call: CallKey
    message: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Refuse or end a worker's call with an error.

    ``seq``: that of its transfer, if GO was said. ``superseded``: its worker takes a newer snapshot.
    """

    call: CallKey
    error: EthaError
    seq: int | None = None
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a message to another agent of the batch."""

    agent: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMove:
    """Run this agent's program of transfer ``seq`` from side ``source`` for these calls.

    ``snapshot``: read the snapshots of the source ranks instead of their tensors. ``booking``: seconds for which the
    coordinator booked.
    """

    seq: int
    source: str
    snapshot: bool
    calls: Mapping[Member, CallKey]
    booking: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMove:
    """Stop the program of ``seq``. ``moved()`` is fed back once nothing touches memory any more."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Transfer ``seq``, which a StartMove began, is over here: committed (``error`` None), aborted or unknown.

    ``torn``: targets of this agent's workers may be half-written.
    """

    seq: int
    source: str
    version: Version
    error: EthaError | None
    calls: Mapping[Member, CallKey]
    torn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferChanged:
    """The other side's offer to ``side`` (a receiver) came or went."""

    source: str
    standing: bool
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """Survivors of ``seq``'s coordinator are being asked: feed back ``undecided(seq)`` after a second."""

    seq: int


@dataclass(frozen=True, slots=True)
class HoldLane:
    """Book what a transfer from side ``source`` needs of this agent; ``can_hold`` has said that it is free.

    It is always the first effect of an event, so that nobody else books in between.
    """

    source: str


@dataclass(frozen=True, slots=True)
class WantLane:
    """Book what a transfer from side ``source`` needs of this agent. ``granted()`` and ``recalled()`` are fed back."""

    ticket: Ticket
    source: str


@dataclass(frozen=True, slots=True)
class BeginLane:
    """GO was said: what is booked must not be recalled from now on."""


@dataclass(frozen=True, slots=True)
class FreeLane:
    """What was booked or wanted is no longer needed."""
