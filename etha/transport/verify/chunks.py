"""Which chunks of a transfer are compared after it has moved, and between whom; from the plan alone. Pure.

    MOVE     tensor -> target tensors              GIVEN    a contribution -> the reduction at its owner's agent
    RESULT   that reduction -> target tensor       FOLDED   contributions -> targets of an agent that reduces alone

Both ends of a link derive the same courses, so checksums travel as bare numbers in this order. If the target's agent
reads a row's source itself, it compares that row alone, without a message.

Sums are of what the target shall hold: bits of the target's dtype. After a cast or a reduction all NaNs count as the
same, because vector and scalar code of one conversion differ in the bits of a NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from etha.plan import Plan
from etha.plan.planner.rank_plan import CONTRIBUTE, MOVE, RESULT, Region, Slot
from etha.transport.copy.program import Member
from etha.transport.copy.reduce import PART
from etha.transport.geometry.bounds import Bounds, blocks, clip, parts
from etha.transport.wire.crossings import Crossings, SlotPart
from etha.transport.wire.forwarding import ForwardingTable
from etha.transport.wire.routing import Routing

#: Most bytes of one chunk. Its copy stays in cache while it is cast and summed.
CHUNK = 1 << 20
#: A sample compares one of this many chunks, in turn, so that this many successive transfers compare every chunk.
SAMPLE = 16
#: Least bytes of a chunk of a sample. Rows are cut into SAMPLE chunks, but not below this size.
LEAST = 16 << 10
#: Most checksums between two agents in one transfer.
MAX_SUMS = 1 << 22

Wanted = tuple[tuple[int, Region], ...]


class Kind(IntEnum):
    """See the module."""

    MOVE = 0
    GIVEN = 1
    RESULT = 2
    FOLDED = 3


class Fold(NamedTuple):
    """A slot that one agent reduces for itself: contributions (index, source rank, region), and its targets."""

    slot: Slot
    given: tuple[tuple[int, int, Region], ...]
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """One row. ``sinks`` are the targets and their regions.

    ``part`` and ``number`` identify the sum that ``ReductionSums`` took: ``number`` is the contribution's index
    (GIVEN), or the result's place in ``part.wanted`` (RESULT).
    """

    kind: Kind
    tensor: int
    source: Member
    sinks: tuple[tuple[Member, Region], ...]
    cuts: tuple[Bounds, ...]
    part: SlotPart | None = None
    number: int = 0
    fold: Fold | None = None


class CheckChunk(NamedTuple):
    """A part of a row; ``bounds`` are in the dense region (MOVE) or in the slot."""

    subject: Subject
    bounds: Bounds

    @property
    def numel(self) -> int:
        return prod(last - first for first, last in self.bounds)


class Course:
    """Chunks in canonical order: by tensor, then in the order in which they were derived."""

    def __init__(self, subjects: Sequence[Subject], *, full: bool) -> None:
        self._full = full
        self._tensors: dict[int, list[Subject]] = defaultdict(list)
        for subject in sorted(subjects, key=lambda s: s.tensor):
            self._tensors[subject.tensor].append(subject)
        self._ends = {t: np.cumsum([len(s.cuts) for s in found]) for t, found in self._tensors.items()}

    def __len__(self) -> int:
        return sum(int(ends[-1]) for ends in self._ends.values())

    def choose(self, seq: int) -> list[CheckChunk]:
        """The chunks compared in transfer ``seq``: all, or every SAMPLE-th of each tensor from a start that shifts with
        ``seq``."""
        return [
            CheckChunk(subject, subject.cuts[at])
            for tensor, ends in self._ends.items()
            for subject, at in self._pick(tensor, ends, seq)
        ]

    def _pick(
        self, tensor: int, ends: np.ndarray[tuple[int], np.dtype[np.int64]], seq: int
    ) -> Iterator[tuple[Subject, int]]:
        total = int(ends[-1])
        found = range(total)
        if not self._full and total:
            first = (seq + tensor) % SAMPLE
            found = range(first, total, SAMPLE) if first < total else range(first % total, first % total + 1)
        for place in found:
            i = int(np.searchsorted(ends, place, "right"))
            subject = self._tensors[tensor][i]
            yield subject, place - (int(ends[i]) - len(subject.cuts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The courses of one agent: what it compares alone, and with each other agent as the source's or the target's
    agent."""

    near: Course
    gives: Mapping[str, Course]
    takes: Mapping[str, Course]


def derive(plan: Plan, routing: Routing, *, staging: int, full: bool) -> Scheme:
    """The courses of agent ``routing.me``. ``staging`` is the batch's, as for ``compile_wire``."""
    return _Deriver(plan, routing, full).scheme(staging)


@lru_cache(maxsize=4096)
def _cuts(shape: tuple[int, ...], itemsize: int, full: bool) -> tuple[Bounds, ...]:
    limit = CHUNK if full else max(LEAST, min(CHUNK, prod(shape) * itemsize // SAMPLE))
    return tuple(blocks(shape, max(1, limit // itemsize)))


class _Deriver:
    def __init__(self, plan: Plan, routing: Routing, full: bool) -> None:
        self._plan, self._routing, self._full = plan, routing, full
        self._relays: ForwardingTable | None = None

    def scheme(self, staging: int) -> Scheme:
        routing = self._routing
        near = [*self._near_moves(), *self._folds()]
        gives: dict[str, list[Subject]] = defaultdict(list)
        takes: dict[str, list[Subject]] = defaultdict(list)
        if any(agent != routing.me for agent in (*routing.source, *routing.target)):
            crossings = Crossings(self._plan, routing, staging // 8)
            for side, courses in ((crossings.sent, gives), (crossings.received, takes)):
                for peer, moves in side.items():
                    courses[peer] += [self._move(m.tensor, ("source", m.source), m.region, m.sinks) for m in moves]
            relays = crossings.relays
            for found, courses in ((relays.given, gives), (relays.taken, takes)):
                for peer, passes in found.items():
                    courses[peer] += [
                        self._move(p.tensor, ("target", p.rank), p.region, p.sinks or ((p.rank, p.region),))
                        for p in passes
                    ]
            if not crossings.carrying.empty:
                # A carrier keeps nothing, so the ends compare with each other.
                through = crossings.carrying.ends()
                for carriages, courses in ((through.gives, gives), (through.takes, takes)):
                    for peer, some in carriages.items():
                        courses[peer] += [
                            self._move(c.tensor, ("source", c.source), c.region, ((c.holder, c.region),)) for c in some
                        ]
            self._relays = relays
            for agent in crossings.owners:
                for giver, taker, subject in self._reduced(crossings.parts(agent)):
                    if giver == taker == routing.me:
                        near.append(subject)
                    elif giver == routing.me:
                        gives[taker].append(subject)
                    elif taker == routing.me:
                        takes[giver].append(subject)
        full = self._full
        return Scheme(
            near=Course(near, full=full),
            gives={peer: Course(found, full=full) for peer, found in sorted(gives.items()) if found},
            takes={peer: Course(found, full=full) for peer, found in sorted(takes.items()) if found},
        )

    def _move(self, tensor: int, source: Member, region: Region, sinks: Wanted) -> Subject:
        name = self._plan.names[tensor]
        width = max(self._plan.source[name].dtype.itemsize, self._plan.target[name].dtype.itemsize)
        return Subject(
            kind=Kind.MOVE,
            tensor=tensor,
            source=source,
            # The region at the source's end comes first; it is the same object if there is only one.
            sinks=tuple((("target", rank), there) for rank, there in sinks),
            cuts=_cuts(region.shape, width, self._full),
        )

    def _near_moves(self) -> Iterator[Subject]:
        routing = self._routing
        near = np.array([routing.reach(routing.me, agent) for agent in routing.source], bool)
        for rank in routing.ranks("target", routing.me):
            rp = self._plan.for_rank("target", rank)
            rows = np.flatnonzero(rp.kind == MOVE)
            rows = rows[near[rp.source[rows]]] if len(rows) else rows
            columns = (rp.tensor, rp.source, rp.region_index)
            for tensor, source, number in zip(*(c[rows].tolist() for c in columns), strict=True):
                region = rp.region_at(number)
                yield self._move(tensor, ("source", source), region, ((rank, region),))

    def _folds(self) -> Iterator[Subject]:
        routing, me = self._routing, self._routing.me
        owners: set[int] = set()
        for rank in routing.ranks("target", me):
            rp = self._plan.for_rank("target", rank)
            owners.update(np.unique(rp.source[rp.kind == RESULT]).tolist())
        for owner in sorted(owners):
            rp = self._plan.for_rank("source", owner)
            given: dict[int, list[tuple[int, int, Region]]] = defaultdict(list)
            wanted: dict[int, list[tuple[int, Region]]] = defaultdict(list)
            for row in np.flatnonzero((rp.kind == CONTRIBUTE) & (rp.target == owner)).tolist():
                given[int(rp.slot[row])].append((int(rp.index[row]), int(rp.source[row]), rp.region(row)))
            for row in np.flatnonzero((rp.kind == RESULT) & (rp.source == owner)).tolist():
                wanted[int(rp.slot[row])].append((int(rp.target[row]), rp.region(row)))
            for number in sorted(wanted):
                slot = rp.slots[number]
                givers = {routing.source[source] for _, source, _ in given[number]}
                takers = {routing.target[target] for target, _ in wanted[number]}
                if me not in takers or me in routing.served(routing.source[owner], givers, takers):
                    continue
                mine = tuple((t, r) for t, r in wanted[number] if routing.target[t] == me)
                yield Subject(
                    kind=Kind.FOLDED,
                    tensor=slot.tensor,
                    source=("source", owner),
                    sinks=tuple((("target", rank), region) for rank, region in mine),
                    cuts=tuple(parts(slot, PART // slot.accumulate.itemsize)),
                    fold=Fold(slot, tuple(given[number]), mine),
                )

    def _reduced(self, found: Sequence[SlotPart]) -> Iterator[tuple[str, str, Subject]]:
        """(the source's agent, the target's agent, row) of the inputs and outputs of reductions for others."""
        for part in found:
            tensor, owner = part.slot.tensor, ("source", part.slot.owner)
            for index, source, region in part.given:
                # An agent that may read the source compares alone, as it has copied alone.
                giver = self._routing.source[source] if index in part.far else part.at
                yield giver, part.at, Subject(
                    kind=Kind.GIVEN, tensor=tensor, source=("source", source), sinks=((owner, region),),
                    cuts=(part.bounds,), part=part, number=index,
                )  # fmt: skip
            for number, (target, region) in enumerate(part.wanted):
                dims = clip(region.dims, part.bounds, 0)
                if dims is not None and all(runs[:, 2].any() for runs in dims):
                    # Only where they are known, which is where they are compared.
                    fellows = self._relays.fellows(tensor, target, region) if self._relays is not None else ()
                    yield part.at, self._routing.target[target], Subject(
                        kind=Kind.RESULT, tensor=tensor, source=owner,
                        sinks=tuple((("target", rank), there) for rank, there in ((target, region), *fellows)),
                        cuts=(part.bounds,), part=part, number=number,
                    )  # fmt: skip
