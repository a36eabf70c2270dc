"""What crosses from one agent to another in one transfer, in order. Both ends derive it from the plan alone. Pure.

    stage 0  contributions, wave 0      stage 1  tensor to tensor      stage 2  results, wave 0
    stage 3  contributions, wave 1                                     stage 5  results, wave 1 ...

Data that several targets of one agent want, or that several replicas of one agent hold, crosses once. What targets
forward comes after all of that (``relays``), and what is carried comes last (``carrying``). Reductions run in waves
that fit the staging. No stage waits for a later one anywhere, so agents cannot wait for each other in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from etha.errors import ConfigError
from etha.plan import Plan
from etha.plan.planner.rank_plan import CONTRIBUTE, MOVE, RESULT, RankPlan, Region, Slot
from etha.transport.geometry.bounds import Bounds, parts
from etha.transport.geometry.boxes import Ints
from etha.transport.wire.carrying import CarryingTable
from etha.transport.wire.forwarding import ForwardingTable
from etha.transport.wire.routing import Routing

#: Bytes of the accumulator of one part of a slot, which is sent, reduced and released as a unit.
PART = 512 << 10
ALIGN = 64


class CrossingMove(NamedTuple):
    """A region of one tensor of a source rank, and the target ranks at the other agent that want it."""

    tensor: int
    source: int
    region: Region
    sinks: tuple[tuple[int, Region], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotPart:
    """A part of a slot that the owner's agent ``at`` reduces for others.

    ``far`` are the indices of the contributions that come over the wire. ``places`` are the offsets of each of them,
    and then of the result, in the wave's memory, which this part uses up to ``end``.
    """

    at: str
    number: int
    wave: int
    slot: Slot
    bounds: Bounds
    given: tuple[tuple[int, int, Region], ...]
    wanted: tuple[tuple[int, Region], ...]
    far: tuple[int, ...]
    takers: frozenset[str]
    places: tuple[int, ...]
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in self.bounds)

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Crossings:
    """Everything that crosses between this agent and the others in one direction of a batch."""

    def __init__(
        self, plan: Plan, routing: Routing, wave_bytes: int, part_bytes: int = PART, *, fit: bool = False
    ) -> None:
        # ``fit``: make parts smaller if a wave could not hold two otherwise.
        self._plan, self._routing, self._limit = plan, routing, wave_bytes
        self._part, self._fit = part_bytes, fit
        self._keys: dict[tuple[int, int, int], tuple[bytes, ...]] = {}
        self._regions: list[Region] = []
        self._parts: dict[str, list[SlotPart]] = {}
        self.relays = ForwardingTable(plan, routing)
        #: For each agent, the first round of the plan in which anything goes to it.
        self.rounds: dict[str, int] = dict(self.relays.rounds)
        self.carrying = CarryingTable(plan, routing)
        for peer, turn in self.carrying.rounds.items():
            self._begin(peer, turn)
        self.sent: dict[str, list[CrossingMove]] = self._moves("source")
        self.received: dict[str, list[CrossingMove]] = self._moves("target")
        #: Agents that own slots to which this agent gives or from which it takes; itself included if it owns any.
        self.owners: tuple[str, ...] = self._owners()

    def parts(self, agent: str) -> list[SlotPart]:
        """The parts that ``agent`` reduces for itself or others over the wire, in order."""
        found = self._parts.get(agent)
        if found is None:
            found = self._parts[agent] = self._waves(agent)
        return found

    def _moves(self, side: str) -> dict[str, list[CrossingMove]]:
        routing = self._routing
        others = routing.target if side == "source" else routing.source
        rows: list[tuple[int, int, int, Region]] = []
        for rank in routing.ranks(side, routing.me):
            rp = self._plan.for_rank(side, rank)
            far = np.array([not self._near(side, other) for other in others], bool)
            ends = rp.target if side == "source" else rp.source
            chosen = np.flatnonzero(rp.kind == MOVE)
            chosen = chosen[far[ends[chosen]]] if len(chosen) else chosen
            columns = (rp.tensor, rp.source, rp.target, rp.region_index, rp.round)
            for tensor, source, target, region, turn in zip(*(c[chosen].tolist() for c in columns), strict=True):
                rows.append((tensor, source, target, rp.region_at(region)))
                if side == "source":
                    self._begin(routing.target[target], turn)
        rows.sort(key=lambda row: row[:3])  # stable sort: rows of two ranks stay in the plan's order
        found: dict[str, dict[tuple[int, tuple[bytes, ...]], CrossingMove]] = defaultdict(dict)
        for tensor, source, target, region in rows:
            peer = routing.target[target] if side == "source" else routing.source[source]
            key = (tensor, self._content(tensor, source, region))
            move = found[peer].get(key)
            fellows = self.relays.fellows(tensor, target, region) if side == "target" else ()
            sinks = (*(() if move is None else move.sinks), (target, region), *fellows)
            found[peer][key] = (
                CrossingMove(tensor, source, region, sinks) if move is None else move._replace(sinks=sinks)
            )
        return {peer: list(moves.values()) for peer, moves in found.items()}

    def _begin(self, peer: str, turn: int) -> None:
        self.rounds[peer] = min(turn, self.rounds.get(peer, turn))

    def _near(self, side: str, other: str) -> bool:
        me = self._routing.me
        return self._routing.reach(other, me) if side == "source" else self._routing.reach(me, other)

    def _content(self, tensor: int, source: int, region: Region) -> tuple[bytes, ...]:
        """Which elements of the global tensor a region holds, in its order. Equal content gives equal keys."""
        key = (int(self._plan.class_of[tensor]), source, id(region))
        found = self._keys.get(key)
        if found is None:
            self._regions.append(region)  # keeps it alive, because its id is in the key
            spec = self._plan.source[self._plan.names[tensor]]
            held_in = spec.product(region.product).layouts
            owned = next(o for part in held_in if (o := part.owned(spec.shape, source)) is not None)
            found = self._keys[key] = tuple(
                global_runs(runs, held).tobytes() for runs, held in zip(region.dims, owned, strict=True)
            )
        return found

    def _owners(self) -> tuple[str, ...]:
        found: set[str] = set()
        for side in ("source", "target"):
            for rank in self._routing.ranks(side, self._routing.me):
                rp = self._plan.for_rank(side, rank)
                # A contribution's owner is its target, which is a source rank; a result's owner is its source.
                owners = np.concatenate([rp.target[rp.kind == CONTRIBUTE], rp.source[rp.kind == RESULT]])
                found |= {self._routing.source[o] for o in np.unique(owners).tolist()}
                given = np.flatnonzero((rp.kind == CONTRIBUTE) | (rp.kind == RESULT) if side == "source" else False)
                for kind, target, turn in zip(
                    *(c[given].tolist() for c in (rp.kind, rp.target, rp.round)), strict=True
                ):
                    self._begin((self._routing.source if kind == CONTRIBUTE else self._routing.target)[target], turn)
        return tuple(sorted(found))

    def _waves(self, agent: str) -> list[SlotPart]:
        slots = [
            slot
            for owner in self._routing.ranks("source", agent)
            for slot in _slots(self._plan.for_rank("source", owner), owner)
        ]
        slots.sort(key=lambda s: (s[0].tensor, s[0].number))
        found: list[SlotPart] = []
        wave = used = 0
        for slot, given, wanted in slots:
            givers = {source: self._routing.source[source] for _, source, _ in given}
            takers = {self._routing.target[target] for target, _ in wanted}
            served = self._routing.served(agent, set(givers.values()), takers)
            if not served:
                continue
            far = tuple(index for index, source, _ in given if not self._routing.reach(agent, givers[source]))
            here = tuple((t, r) for t, r in wanted if self._routing.target[t] in served)
            name = self._plan.names[slot.tensor]
            if sorted(index for index, _, _ in given) != list(range(slot.count)):
                raise ValueError(f"{name!r}: a slot has {len(given)} of its {slot.count} contributions")
            widths = [self._plan.source[name].dtype.itemsize] * len(far)
            widths += [self._plan.wire_dtype(slot.tensor).itemsize] * bool(served - {agent})
            most = self._part // slot.accumulate.itemsize
            if self._fit and widths:
                most = max(1, min(most, (self._limit // 2 - ALIGN * len(widths)) // sum(widths)))
            for bounds in parts(slot, most):
                numel = prod(last - first for first, last in bounds)
                sizes = [-(-numel * width // ALIGN) * ALIGN for width in widths]
                if sum(sizes) > self._limit:
                    raise ConfigError(
                        f"{name!r} needs {sum(sizes)} bytes of staging at once to be reduced, a wave has "
                        f"{self._limit}: give the agents more staging memory"
                    )
                if used + sum(sizes) > self._limit:
                    wave, used = wave + 1, 0
                places = tuple(used + sum(sizes[:i]) for i in range(len(sizes)))
                used += sum(sizes)
                found.append(
                    SlotPart(
                        at=agent, number=len(found), wave=wave, slot=slot, bounds=bounds, given=given, wanted=here,
                        far=far, takers=served, places=places, end=used,
                    )
                )  # fmt: skip
        return found


def _slots(
    rp: RankPlan, owner: int
) -> list[tuple[Slot, tuple[tuple[int, int, Region], ...], tuple[tuple[int, Region], ...]]]:
    """(slot, contributions, results) of the slots that a source rank owns."""
    given: dict[int, list[tuple[int, int, Region]]] = defaultdict(list)
    wanted: dict[int, list[tuple[int, Region]]] = defaultdict(list)
    for row in np.flatnonzero((rp.kind == CONTRIBUTE) & (rp.target == owner)).tolist():
        given[int(rp.slot[row])].append((int(rp.index[row]), int(rp.source[row]), rp.region(row)))
    for row in np.flatnonzero((rp.kind == RESULT) & (rp.source == owner)).tolist():
        wanted[int(rp.slot[row])].append((int(rp.target[row]), rp.region(row)))
    return [(rp.slots[i], tuple(given[i]), tuple(wanted[i])) for i in sorted(wanted)]


def global_runs(runs: Ints, held: Sequence[tuple[int, int]]) -> Ints:
    """Runs of local source offsets as (start, length) in the global dim; ``held`` are the ranges that the rank owns
    there."""
    starts = np.array([start for start, _ in held], np.int64)
    ends = np.cumsum(np.array([stop - start for start, stop in held], np.int64))
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(held) else ends
    found: list[list[int]] = []
    for offset, _, length in runs.tolist():
        i = int(np.searchsorted(ends, offset, "right"))
        while length > 0:
            n = min(length, int(ends[i]) - offset)
            start = int(starts[i]) + offset - int(begins[i])
            if found and found[-1][0] + found[-1][1] == start:
                found[-1][1] += n
            else:
                found.append([start, n])
            offset, length, i = offset + n, length - n, i + 1
    return np.array(found, np.int64).reshape(-1, 2)
