"""What this agent carries for others of its host, and what they carry for it. Derived from the plan alone. Pure.

    source's agent --CARRY--> ring in the carrier agent's staging --DELIVER--> holder's agent: its tensor

A carrier takes pieces over one data port of the host and hands them on over another. It need not hold their tensor.

Its pieces have one order: by (tensor, source rank, carrier rank), then as in the carrier rank's plan. Each piece has a
fixed place in the ring. It is received there only when the pieces that had that place before, and all before those,
have been handed on. Both flows of a carrier have its pieces in this order, after everything else.

*A full ring cannot block for ever.* Nothing else waits for carried pieces, because nobody passes them on, and none of
them comes before other pieces in a flow. So all other pieces move as if nothing were carried. Take the least piece of
a carrier that has not been handed on. All before it have, so its place is free. It is the next one in the lane that
brings it, because the pieces before it in that lane are lesser ones, and the source waits for nothing of this run.
Once it is there, it is the next one in the lane to its holder, for the same reason, and the holder lays it down without
waiting for anything. So it is handed on. Carriers do not wait for each other: an agent carries from other hosts, and
hands on inside its own.

Streams take as many pieces at once as can go, and wait for the first of them only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etha.plan import Plan
from etha.plan.planner.rank_plan import CARRY, DELIVER, Region
from etha.transport.wire.routing import Routing

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
#: Stages of carried pieces, after all others (``forwarding.LAST`` and more): those to a carrier, and those from it.
CARRIED = 1 << 60
HANDED = CARRIED + 1
#: Most bytes of a ring, and the share of the staging memory that it may have. A ring has room for one piece at least.
RING = 16 << 20
RING_SHARE = 16


class Given(NamedTuple):
    """A region of a source rank's tensor that a carrier takes."""

    tensor: int
    source: int
    carrier: int
    region: Region


class Carriage(NamedTuple):
    """A region on its way from rank ``source`` through ``carrier`` to ``holder``.

    ``region`` has the offsets in the tensors of the source and of the holder, as for a row that is not carried. For the
    carrier's own agent, which needs only its shape, it is that of the CARRY row.
    """

    tensor: int
    source: int
    carrier: int
    holder: int
    region: Region


class RingPlace(NamedTuple):
    """Where a piece lies in its carrier's ring. ``number`` is its place in the order, ``at`` and ``nbytes`` are bytes.

    ``behind``: how many pieces, from the first on, must have been handed on before it may be received.
    """

    number: int
    at: int
    nbytes: int
    behind: int


def ring_bytes(sizes: Sequence[int], staging: int) -> int:
    """Bytes of a ring for pieces of these sizes: all of them if they are few, and at least the largest."""
    return min(sum(sizes), max(max(sizes, default=0), min(RING, staging // RING_SHARE)))


def places(sizes: Iterable[int], ring: int) -> Iterator[RingPlace]:
    """A place in a ring of so many bytes for each piece, in order. ValueError for a piece that is larger than it."""
    # Where the pieces of this turn and of the one before begin, the number of the first of the latter, and how many of
    # them this turn has overwritten. All pieces before those come before them in the order, too.
    turn: list[int] = []
    before: list[int] = []
    first = done = at = 0
    for number, nbytes in enumerate(sizes):
        if nbytes > ring:
            raise ValueError(f"a piece of {nbytes} bytes in a ring of {ring}")
        if at + nbytes > ring:
            first, before, turn, done, at = number - len(turn), turn, [], 0, 0
        while done < len(before) and before[done] < at + nbytes:
            done += 1
        turn.append(at)
        yield RingPlace(number, at, nbytes, first + done if done else 0)
        at += nbytes


class RingProgress:
    """For one run: which pieces are in the ring, and which have been handed on."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        self._gone: set[int] = set()
        #: How many pieces, from the first on, have been handed on.
        self._passed = 0

    def free(self, place: RingPlace) -> bool:
        """Whether the piece may be received."""
        return self._passed >= place.behind

    def came(self, places: Iterable[RingPlace]) -> None:
        """All of these pieces are in the ring."""
        self._there.update(place.number for place in places)

    def ready(self, place: RingPlace) -> bool:
        """Whether the piece may be handed on."""
        return place.number in self._there

    def went(self, places: Iterable[RingPlace]) -> bool:
        """These pieces have been handed on. Returns whether that may free a place."""
        numbers = {place.number for place in places}
        self._there -= numbers
        self._gone |= numbers
        before = self._passed
        while self._passed in self._gone:
            self._gone.discard(self._passed)
            self._passed += 1
        return self._passed > before


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is carried between this agent and others' ranks, from end to end: by the agent of the other end."""

    gives: Mapping[str, list[Carriage]]
    takes: Mapping[str, list[Carriage]]


class CarryingTable:
    """What agent ``routing.me`` gives to carriers, carries, and gets from carriers, in the order of the carrier's
    agent.

    ``given`` and ``handed`` are by that agent. ValueError for a plan that no planner makes: one in which an agent
    carries for itself.
    """

    def __init__(self, plan: Plan, routing: Routing) -> None:
        self._plan, self._routing = plan, routing
        #: For each agent, the first round of the plan in which anything goes to it.
        self.rounds: dict[str, int] = {}
        self.given: dict[str, list[Given]] = defaultdict(list)
        self.carried: list[Carriage] = []
        self.handed: dict[str, list[Carriage]] = defaultdict(list)
        #: Carriers of the rows of ranks here.
        self._carriers: set[int] = set()
        if plan.carries:
            self._derive()

    @property
    def empty(self) -> bool:
        """Whether this agent has no part in anything that is carried."""
        return not (self.given or self.carried or self.handed)

    def ends(self) -> Checked:
        """What goes from this agent's ranks to other ranks through carriers, and what comes from others so. It needs
        the plan of each of these carriers."""
        routing = self._routing
        here, there = _served(routing.source, routing.me), _served(routing.target, routing.me)
        gives: dict[str, list[Carriage]] = defaultdict(list)
        takes: dict[str, list[Carriage]] = defaultdict(list)
        for one in self._carriages(self._carriers, lambda source, holder: here[source] | there[holder]):
            if here[one.source]:
                gives[routing.target[one.holder]].append(one)
            else:
                takes[routing.source[one.source]].append(one)
        return Checked(gives=gives, takes=takes)

    def _derive(self) -> None:
        me, agents = self._routing.me, self._routing.target
        for rank in self._routing.ranks("source", me):
            rp = self._plan.for_rank("source", rank)
            rows = np.flatnonzero(rp.kind == CARRY)
            columns = (rp.tensor, rp.target, rp.region_index, rp.round)
            for tensor, carrier, number, turn in zip(*(c[rows].tolist() for c in columns), strict=True):
                self._carriers.add(carrier)
                self.given[agents[carrier]].append(Given(tensor, rank, carrier, rp.region_at(number)))
                self._begin(agents[carrier], turn)
        for some in self.given.values():
            some.sort(key=itemgetter(0, 1, 2))  # stable sort: rows of two ranks stay in the plan's order
        carriers: set[int] = set()
        mine = self._routing.ranks("target", me)
        for rank in mine:
            rp = self._plan.for_rank("target", rank)
            rows = np.flatnonzero(rp.kind == DELIVER)
            carriers |= set(np.unique(rp.source[rows]).tolist()) - set(mine)
            rows = rows[rp.source[rows] == rank]
            for holder in np.unique(rp.target[rows]).tolist():
                self._begin(agents[holder], int(rp.round[rows][rp.target[rows] == holder].min()))
        self.carried = self._carriages(mine, None)
        here, there = _served(self._routing.source, me), _served(agents, me)
        for one in self._carriages(carriers, lambda source, holder: there[holder]):
            self.handed[agents[one.carrier]].append(one)
        self._carriers |= carriers
        loops = any(here[one.source] or there[one.holder] for one in self.carried)
        if loops or not self.given.keys().isdisjoint({me, *(agents[one.holder] for one in self.carried)}):
            raise ValueError(f"agent {me} carries for itself, or to an agent to which it hands on")

    def _begin(self, peer: str, turn: int) -> None:
        self.rounds[peer] = min(turn, self.rounds.get(peer, turn))

    def _carriages(self, carriers: Iterable[int], wanted: Callable[[Ints, Ints], Bools] | None) -> list[Carriage]:
        """What these ranks carry of ``wanted(sources, holders)``, in the order of their agents.

        None: all of it, for the carriers' own agent.
        """
        found: list[Carriage] = []
        for carrier in sorted(carriers):
            rp = self._plan.for_rank("target", carrier)
            rows = np.flatnonzero((rp.kind == DELIVER) & (rp.source == carrier))
            if wanted is not None:
                rows = rows[wanted(rp.source[rp.depends[rows]], rp.target[rows])]
            rows = rows[np.argsort(rp.depends[rows], kind="stable")]
            before = rp.depends[rows]
            columns = (rp.tensor[rows], rp.source[before], rp.target[rows])
            keys = zip(rp.region_index[before].tolist(), rp.region_index[rows].tolist(), strict=True)
            known: dict[tuple[int, int], Region] = {}  # rows of equal tensors share a region
            for key, tensor, source, holder in zip(keys, *(c.tolist() for c in columns), strict=True):
                region = known.get(key)
                if region is None:
                    given = rp.region_at(key[0])
                    region = known[key] = given if wanted is None else _through(given, rp.region_at(key[1]))
                found.append(Carriage(tensor, source, carrier, holder, region))
        found.sort(key=itemgetter(0, 1, 2))
        return found


def _served(agents: Sequence[str], me: str) -> Bools:
    """Which ranks an agent serves."""
    return np.array([agent == me for agent in agents], np.bool_)


def _through(given: Region, handed: Region) -> Region:
    """The region of a CARRY row and of its DELIVER row, with both tensors' offsets."""
    dims = tuple(
        np.stack([here[:, 0], there[:, 1], here[:, 2]], axis=1)
        for here, there in zip(given.dims, handed.dims, strict=True)
    )
    return Region(dims=dims, product=given.product)
