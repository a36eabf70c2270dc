"""Relays: what this agent passes on of what it receives, derived alone by both ends from the plan's FORWARD rows.

    stream --> a piece is laid down: at the rank that it is for, and at its fellows here ("laid")
               --> pieces to other agents that were waiting for it are read from that rank's tensor and sent

What one rank of an agent passes to another of the same agent is laid down twice as it comes in and never crosses.
A flow's passed pieces come after all else in it, ordered by (tensor, hop), and each waits for pieces of an earlier
hop of its tensor only. So of all pieces not yet sent anywhere the least one has its turn: nobody waits in a ring.
Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from etha.plan import Plan
from etha.plan.planner.pieces import joined
from etha.plan.planner.rank_plan import CARRY, DELIVER, FORWARD, Region
from etha.transport.geometry.bounds import Bounds
from etha.transport.wire.routing import Ways

#: Stages of passed pieces: behind every other, by tensor and hop (a hop is less than 1 << 16).
LAST = 1 << 48


class TensorPlace(NamedTuple):
    """Which elements of which rank's tensor: ``runs`` are those of its local tensor, per dim."""

    tensor: int
    rank: int
    runs: tuple[bytes, ...]


class Pass(NamedTuple):
    """A region of ``rank``'s tensor that another agent gets from it, and the target ranks there that want it.

    ``sinks`` is known where they are, ``origin``, what has to be laid down before, where it is passed on.
    """

    tensor: int
    hop: int
    rank: int
    region: Region
    sinks: tuple[tuple[int, Region], ...]
    origin: TensorPlace

    @property
    def stage(self) -> int:
        """Its pieces' place in the order of a flow."""
        return LAST + (self.tensor << 16) + self.hop


class Relays:
    """What agent ``ways.me`` passes on and is passed, by agent, in one order at both ends."""

    def __init__(self, plan: Plan, ways: Ways) -> None:
        self._plan, self._ways = plan, ways
        self._regions: list[Region] = []
        self._runs: dict[int, tuple[bytes, ...]] = {}
        self._inside: dict[TensorPlace, int] = {}
        self.given: dict[str, list[Pass]] = defaultdict(list)
        self.taken: dict[str, list[Pass]] = defaultdict(list)
        #: The first round of the plan in which anything goes to an agent.
        self.rounds: dict[str, int] = {}
        self._fellows: dict[TensorPlace, list[int]] = defaultdict(list)
        self._derive()
        #: What streams have to bring because something hangs on it, and of that what is passed on.
        self.origins: frozenset[TensorPlace] = frozenset(p.origin for some in self.given.values() for p in some)
        self.roots: frozenset[TensorPlace] = self.origins | self._fellows.keys()

    def fellows(self, tensor: int, rank: int, region: Region) -> tuple[tuple[int, Region], ...]:
        """Ranks of this agent that get what comes to ``rank`` from it, at the same places of their tensors."""
        if not self._fellows:
            return ()
        return tuple((other, region) for other in self._fellows.get(self.place(tensor, rank, region), ()))

    def place(self, tensor: int, rank: int, region: Region) -> TensorPlace:
        """Where a region of a row to ``rank`` lies there."""
        found = self._runs.get(id(region))
        if found is None:
            self._regions.append(region)  # its id is a key
            ends = (joined(runs[:, 1], runs[:, 2])[:, 1:] for runs in region.dims)
            found = self._runs[id(region)] = tuple(np.ascontiguousarray(end).tobytes() for end in ends)
        return TensorPlace(tensor, rank, found)

    def _derive(self) -> None:
        me, agent = self._ways.me, self._ways.target
        given: list[tuple[int, int, int, int, Region]] = []
        taken: list[tuple[int, int, int, int, Region]] = []
        for rank in self._ways.ranks("target", me):
            rp = self._plan.for_rank("target", rank)
            if ((rp.kind == CARRY) | (rp.kind == DELIVER)).any():
                raise ValueError("agents carry nothing for each other: plan with carry=False")
            rows = np.flatnonzero(rp.kind == FORWARD)
            columns = (rp.tensor, rp.phase, rp.source, rp.target, rp.round, rp.region_index)
            for tensor, hop, source, target, turn, number in zip(*(c[rows].tolist() for c in columns), strict=True):
                region = rp.region_at(number)
                if source == rank and agent[target] != me:
                    given.append((tensor, hop, source, target, region))
                    self.rounds[agent[target]] = min(turn, self.rounds.get(agent[target], turn))
                elif target == rank and agent[source] != me:
                    taken.append((tensor, hop, source, target, region))
                elif target == rank:
                    if any(not np.array_equal(runs[:, 0], runs[:, 1]) for runs in region.dims):
                        name = self._plan.names[tensor]
                        raise ValueError(f"{name!r}: ranks {source} and {target} hold what is passed on differently")
                    self._inside[self.place(tensor, rank, region)] = source
        for place in sorted(self._inside):
            self._fellows[self._root(place)].append(place.rank)
        # Stable: rows of one link stay in the plan's order, which is the same at both ends.
        for tensor, hop, source, target, region in sorted(given, key=lambda row: row[:4]):
            here = Region(dims=tuple(runs[:, (0, 0, 2)] for runs in region.dims))
            origin = self._root(self.place(tensor, source, here))
            self.given[agent[target]].append(Pass(tensor, hop, source, region, (), origin))
        for tensor, hop, source, target, region in sorted(taken, key=lambda row: row[:4]):
            place = self.place(tensor, target, region)
            sinks = ((target, region), *self.fellows(tensor, target, region))
            self.taken[agent[source]].append(Pass(tensor, hop, source, region, sinks, place))

    def _root(self, place: TensorPlace) -> TensorPlace:
        """What brings it to this agent."""
        while (rank := self._inside.get(place)) is not None:
            place = place._replace(rank=rank)
        return place


class Arrivals:
    """Numbers of the pieces that something hangs on: ``mark`` as they are laid out, ``before`` what waits for them."""

    def __init__(self, origins: Collection[TensorPlace]) -> None:
        self._origins = origins
        self._marks: dict[TensorPlace, list[tuple[Bounds, int]]] = defaultdict(list)
        self._count = 0
        self.seen: set[TensorPlace] = set()

    def mark(self, found: Iterable[tuple[TensorPlace, Bounds]]) -> int:
        """The number of a piece that brings these, each within bounds of its region packed; -1: nobody asks."""
        number = -1
        for place, bounds in found:
            self.seen.add(place)
            if place in self._origins:
                if number < 0:
                    number, self._count = self._count, self._count + 1
                self._marks[place].append((bounds, number))
        return number

    def before(self, origin: TensorPlace, bounds: Bounds) -> tuple[int, ...]:
        """The pieces that bring any of what lies within ``bounds`` of a region packed."""
        return tuple(sorted({n for box, n in self._marks[origin] if _meet(box, bounds)}))


def _meet(a: Bounds, b: Bounds) -> bool:
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True))


class ForwardingProgress:
    """Of one run: which pieces lie where they belong, and so what may be passed on."""

    def __init__(self) -> None:
        self._laid: set[int] = set()

    def lay(self, numbers: Iterable[int]) -> None:
        """These lie there now, every byte."""
        self._laid.update(numbers)

    def ready(self, after: Iterable[int]) -> bool:
        """Whether all of these do."""
        return self._laid.issuperset(after)


def hull(region: Region, bounds: Bounds) -> Bounds:
    """The least bounds in a region packed that hold what its source end has within ``bounds``."""
    found = []
    for runs, (first, last) in zip(region.dims, bounds, strict=True):
        at = np.cumsum(runs[:, 2]) - runs[:, 2]
        low, high = np.maximum(0, first - runs[:, 0]), np.minimum(runs[:, 2], last - runs[:, 0])
        kept = high > low
        found.append(
            (int((at + low)[kept].min(initial=at.sum() + runs[:, 2].sum())), int((at + high)[kept].max(initial=0)))
        )
    return tuple(found)
