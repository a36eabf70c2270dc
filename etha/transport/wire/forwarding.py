"""What this agent forwards of what it receives. Both ends derive it from the plan's FORWARD rows alone. Pure.

    stream --> a piece is laid down: at the rank that it is for, and at its fellows here
               --> pieces to other agents that waited for it are read from that rank's tensor and sent

If one rank of an agent forwards to another rank of the same agent, the data is written twice when it arrives, and never
crosses. The forwarded pieces of a flow come after all its other pieces, ordered by (tensor, hop). Each waits only for
pieces of an earlier hop of its tensor. So the least of all unsent pieces can always be sent, and agents cannot wait for
each other in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from etha.plan import Plan
from etha.plan.planner.pieces import joined
from etha.plan.planner.rank_plan import FORWARD, Region
from etha.transport.geometry.bounds import Bounds
from etha.transport.wire.routing import Routing

#: First stage of forwarded pieces, after all other stages; then by tensor and hop (a hop is less than 1 << 16).
LAST = 1 << 48


class TensorPlace(NamedTuple):
    """Which elements of which rank's tensor; ``runs`` are those in its local tensor, per dim."""

    tensor: int
    rank: int
    runs: tuple[bytes, ...]


class Pass(NamedTuple):
    """A region of ``rank``'s tensor that another agent gets from it, and the target ranks there that want it.

    ``sinks`` is known at the agent of those ranks. ``origin``, which has to be laid down before, is known at the agent
    that forwards it.
    """

    tensor: int
    hop: int
    rank: int
    region: Region
    sinks: tuple[tuple[int, Region], ...]
    origin: TensorPlace

    @property
    def stage(self) -> int:
        """The place of its pieces in the order of a flow."""
        return LAST + (self.tensor << 16) + self.hop


class ForwardingTable:
    """What agent ``routing.me`` forwards and what is forwarded to it, by agent, in the same order at both ends."""

    def __init__(self, plan: Plan, routing: Routing) -> None:
        self._plan, self._routing = plan, routing
        self._regions: list[Region] = []
        self._runs: dict[int, tuple[bytes, ...]] = {}
        self._inside: dict[TensorPlace, int] = {}
        self.given: dict[str, list[Pass]] = defaultdict(list)
        self.taken: dict[str, list[Pass]] = defaultdict(list)
        #: For each agent, the first round of the plan in which anything goes to it.
        self.rounds: dict[str, int] = {}
        self._fellows: dict[TensorPlace, list[int]] = defaultdict(list)
        self._derive()
        #: What streams must bring because other pieces depend on it (``roots``), and the part of it that is forwarded
        #: (``origins``).
        self.origins: frozenset[TensorPlace] = frozenset(p.origin for some in self.given.values() for p in some)
        self.roots: frozenset[TensorPlace] = self.origins | self._fellows.keys()

    def fellows(self, tensor: int, rank: int, region: Region) -> tuple[tuple[int, Region], ...]:
        """Ranks of this agent to which ``rank`` forwards a region, at the same places of their tensors."""
        if not self._fellows:
            return ()
        return tuple((other, region) for other in self._fellows.get(self.place(tensor, rank, region), ()))

    def place(self, tensor: int, rank: int, region: Region) -> TensorPlace:
        """Where a region of a row to ``rank`` lies in that rank's tensor."""
        found = self._runs.get(id(region))
        if found is None:
            self._regions.append(region)  # keeps it alive, because its id is a key
            ends = (joined(runs[:, 1], runs[:, 2])[:, 1:] for runs in region.dims)
            found = self._runs[id(region)] = tuple(np.ascontiguousarray(end).tobytes() for end in ends)
        return TensorPlace(tensor, rank, found)

    def _derive(self) -> None:
        me, agent = self._routing.me, self._routing.target
        given: list[tuple[int, int, int, int, Region]] = []
        taken: list[tuple[int, int, int, int, Region]] = []
        for rank in self._routing.ranks("target", me):
            rp = self._plan.for_rank("target", rank)
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
        # Stable sort: rows of one link stay in the plan's order, which is the same at both ends.
        for tensor, hop, source, target, region in sorted(given, key=lambda row: row[:4]):
            here = Region(dims=tuple(runs[:, (0, 0, 2)] for runs in region.dims))
            origin = self._root(self.place(tensor, source, here))
            self.given[agent[target]].append(Pass(tensor, hop, source, region, (), origin))
        for tensor, hop, source, target, region in sorted(taken, key=lambda row: row[:4]):
            place = self.place(tensor, target, region)
            sinks = ((target, region), *self.fellows(tensor, target, region))
            self.taken[agent[source]].append(Pass(tensor, hop, source, region, sinks, place))

    def _root(self, place: TensorPlace) -> TensorPlace:
        """The place whose piece brings this one to the agent."""
        while (rank := self._inside.get(place)) is not None:
            place = place._replace(rank=rank)
        return place


class Arrivals:
    """Arrival numbers of pieces that other pieces depend on.

    ``mark`` numbers pieces as they are compiled; ``before`` returns the numbers that a forwarded piece waits for.
    """

    def __init__(self, origins: Collection[TensorPlace]) -> None:
        self._origins = origins
        self._marks: dict[TensorPlace, list[tuple[Bounds, int]]] = defaultdict(list)
        self._count = 0
        self.seen: set[TensorPlace] = set()

    def mark(self, found: Iterable[tuple[TensorPlace, Bounds]]) -> int:
        """The number of a piece that brings these places, each within bounds of its packed region; -1 if none is
        forwarded."""
        number = -1
        for place, bounds in found:
            self.seen.add(place)
            if place in self._origins:
                if number < 0:
                    number, self._count = self._count, self._count + 1
                self._marks[place].append((bounds, number))
        return number

    def before(self, origin: TensorPlace, bounds: Bounds) -> tuple[int, ...]:
        """Numbers of the pieces that bring anything within ``bounds`` of a packed region."""
        return tuple(sorted({n for box, n in self._marks[origin] if _meet(box, bounds)}))


def _meet(a: Bounds, b: Bounds) -> bool:
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True))


class ForwardingProgress:
    """For one run: which pieces have been laid down, and so what may be forwarded."""

    def __init__(self) -> None:
        self._laid: set[int] = set()

    def lay(self, numbers: Iterable[int]) -> None:
        """Record that every byte of these pieces is in place."""
        self._laid.update(numbers)

    def ready(self, after: Iterable[int]) -> bool:
        """Whether all of these pieces are in place."""
        return self._laid.issuperset(after)


def hull(region: Region, bounds: Bounds) -> Bounds:
    """The smallest bounds in a packed region that hold what its source end has within ``bounds``."""
    found = []
    for runs, (first, last) in zip(region.dims, bounds, strict=True):
        at = np.cumsum(runs[:, 2]) - runs[:, 2]
        low, high = np.maximum(0, first - runs[:, 0]), np.minimum(runs[:, 2], last - runs[:, 0])
        kept = high > low
        found.append(
            (int((at + low)[kept].min(initial=at.sum() + runs[:, 2].sum())), int((at + high)[kept].max(initial=0)))
        )
    return tuple(found)
