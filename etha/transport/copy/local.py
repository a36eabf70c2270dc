"""compile_local: compile the rows of a plan whose both ends lie on this agent into a program of copies.

Rows of equal tensors share their region. Geometry is done once per class, so that a row costs a look-up and two
numbers. If a target overlaps memory that is also read, the reads are staged before the first write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from etha.cuda.select import driver
from etha.memory.views import View, view_of
from etha.plan import Plan
from etha.plan.planner.rank_plan import CONTRIBUTE, LOCAL, MOVE, RESULT, RankPlan, Region, Slot
from etha.transport.copy.device_memory import DeviceMemory, dense_on
from etha.transport.copy.layout import TileCache, check, scratch
from etha.transport.copy.program import PIECE, Columns, CopyPiece, Member, Program, ViewPair
from etha.transport.copy.reduce import PART, Reduced, TileStep, part_numel
from etha.transport.geometry.bounds import clip, parts
from etha.transport.geometry.overlap import Written, packed, same_place

Views = Mapping[int, Mapping[int, View]]
#: A slot's contributions (contribution, source rank, region), and its results (target rank, region).
Given = list[tuple[int, int, Region]]
Wanted = list[tuple[int, Region]]


def compile_local(plan: Plan, sources: Views, targets: Views) -> Program:
    """The program of all LOCAL rows, from ``sources[rank][tensor]`` to ``targets[rank][tensor]``.

    Both hold only this agent's ranks; tensors are indices into ``plan.names``, and for further products of a source
    ``plan.local_number``. Every row is checked against the views' shapes: ValueError if a view is missing or smaller
    than planned.
    """
    compiler = _Compiler(plan, sources, targets)
    owners: set[int] = set()
    for rank in sorted(targets):
        rp = plan.for_rank("target", rank)
        owners.update(np.unique(rp.source[(rp.role == LOCAL) & (rp.kind == RESULT)]).tolist())
        compiler.gather(rp, rank)
    compiler.moves()
    for owner in sorted(owners):
        compiler.reductions(plan.for_rank("source", owner), owner)
    return compiler.program()


class _Row(NamedTuple):
    """A MOVE row with its two views."""

    region: Region
    source: int
    rank: int
    tensor: int
    here: View
    there: View


class _Density:
    """How much of each private tensor this program reads, or writes from mapped memory.

    If it is nearly all, the gaps of one row are other rows' payload, and their segments join.
    """

    _NEARLY = 0.9

    def __init__(self) -> None:
        #: Local tensors of sources by (rank, tensor, product).
        self._seen: set[tuple[tuple[int, int, int], tuple[bytes, ...]]] = set()
        self._read: dict[tuple[int, int, int], int] = defaultdict(int)
        self._written: dict[tuple[int, int], int] = defaultdict(int)
        self._parts: dict[int, tuple[bytes, ...]] = {}

    def add(self, row: _Row, numel: int) -> None:
        """Count a row of ``numel`` elements. A part that several targets read counts once."""
        if row.here.private:
            part = self._parts.get(id(row.region))
            if part is None:
                part = self._parts[id(row.region)] = tuple(runs[:, (0, 2)].tobytes() for runs in row.region.dims)
            local = (row.source, row.tensor, row.region.product)
            if (local, part) not in self._seen:
                self._seen.add((local, part))
                self._read[local] += numel
        elif row.there.private:
            self._written[row.rank, row.tensor] += numel

    def joint(self, row: _Row) -> bool:
        """Whether the same program copies the row's neighbours in the private tensor."""
        if row.here.private:
            read = self._read[row.source, row.tensor, row.region.product]
            return read >= self._NEARLY * prod(row.here.shape)
        return row.there.private and self._written[row.rank, row.tensor] >= self._NEARLY * prod(row.there.shape)


class _Compiler:
    def __init__(self, plan: Plan, sources: Views, targets: Views) -> None:
        self._plan, self._sources, self._targets = plan, sources, targets
        self._columns = Columns()
        self._geometry = TileCache(self._columns)
        self._total = self._staged = 0
        members: list[Member] = [("source", r) for r in sources] + [("target", r) for r in targets]
        self._nbytes: dict[Member, int] = dict.fromkeys(members, 0)
        self._peers: dict[Member, set[Member]] = {member: set() for member in members}
        self._rows: list[_Row] = []
        self._density = _Density()
        self._pairs: dict[tuple[int, int, int, int], int] = {}
        self._written = Written(v for views in targets.values() for v in views.values())

    def program(self) -> Program:
        """The program of everything compiled so far."""
        return self._columns.program(nbytes=self._nbytes, peers=self._peers, total=self._total, staged=self._staged)

    def gather(self, rp: RankPlan, rank: int) -> None:
        """Collect the rows that move data to target rank ``rank``; ``moves`` compiles them."""
        rows = np.flatnonzero((rp.role == LOCAL) & (rp.kind == MOVE))
        columns = (rp.tensor, rp.source, rp.region_index, rp.nbytes)
        regions: dict[int, Region] = {}
        for tensor, source, number, nbytes in zip(*(c[rows].tolist() for c in columns), strict=True):
            region = regions.get(number)
            if region is None:
                region = regions[number] = rp.region_at(number)
            here, there = self._source(source, tensor, region.product), self._target(rank, tensor)
            row = _Row(region, source, rank, tensor, here, there)
            self._rows.append(row)
            self._density.add(row, nbytes // self._plan.wire_dtype(tensor).itemsize)
            self._total += nbytes
            self._nbytes["source", source] += nbytes
            self._nbytes["target", rank] += nbytes
            self._meet(source, rank)

    def moves(self) -> None:
        """Compile the collected rows."""
        for row in self._rows:
            region, source, rank, tensor, here, there = row
            if self._written.overlaps(here):
                self._staged_move(row)
                continue
            key = (source, rank, tensor, region.product)
            pair = self._pairs.get(key)
            if pair is None:
                pair = self._columns.add_pair(ViewPair(here, there, (("source", source), ("target", rank))))
                self._pairs[key] = pair
            for _, tile, at, to in self._geometry.region(region, here, there, self._density.joint(row)):
                self._columns.add(1, tile, pair, at, to)

    def _source(self, rank: int, tensor: int, product: int = 0) -> View:
        return self._view("source", self._sources, rank, tensor, product)

    def _target(self, rank: int, tensor: int) -> View:
        return self._view("target", self._targets, rank, tensor)

    def _view(self, side: str, views: Views, rank: int, tensor: int, product: int = 0) -> View:
        try:
            return views[rank][self._plan.local_number(tensor, product)]
        except KeyError:
            raise ValueError(f"{side} rank {rank} gave no memory for {self._plan.names[tensor]!r}") from None

    def _meet(self, source: int, target: int) -> None:
        self._peers["source", source].add(("target", target))
        self._peers["target", target].add(("source", source))

    def _staged_move(self, row: _Row) -> None:
        """Read in phase 0 and write in phase 1, because another row writes where this row reads."""
        region, source, rank, tensor, here, there = row
        if same_place(region, here, there):
            return
        check(region.dims, here, 0)
        check(region.dims, there, 1)
        stage = self._stage(region.shape, self._plan.wire_dtype(tensor), (here, there))
        into, out = packed(region)
        reads = self._columns.add_pair(ViewPair(here, stage, (("source", source),)))
        writes = self._columns.add_pair(ViewPair(stage, there, (("target", rank),)))
        for _, tile, at, to in self._geometry.dims(into, here, stage):
            self._columns.add(0, tile, reads, at, to)
        for _, tile, at, to in self._geometry.dims(out, stage, there):
            self._columns.add(1, tile, writes, at, to)

    def _stage(self, shape: tuple[int, ...], dtype: torch.dtype, near: Iterable[View]) -> View:
        """A staging buffer, on the device of the first of the views ``near`` that is on one, otherwise on the host."""
        uuid = next((v.device for v in near if v.device is not None), None)
        if uuid is None:
            stage = view_of(torch.empty(shape, dtype=dtype))
        else:
            stage = dense_on(DeviceMemory(driver(), uuid, prod(shape) * dtype.itemsize), shape, dtype)
        self._staged += stage.nbytes
        return stage

    def reductions(self, rp: RankPlan, owner: int) -> None:
        """Compile the slots that source rank ``owner`` owns: contributions and results."""
        given: dict[int, Given] = defaultdict(list)
        wanted: dict[int, Wanted] = defaultdict(list)
        collected = (rp.kind == CONTRIBUTE) & (rp.target == owner)
        for row in np.flatnonzero(collected | ((rp.kind == RESULT) & (rp.source == owner))).tolist():
            slot = int(rp.slot[row])
            if rp.role[row] != LOCAL:
                raise ValueError(f"{self._plan.names[int(rp.tensor[row])]!r} is reduced over several agents")
            source, target, nbytes = int(rp.source[row]), int(rp.target[row]), int(rp.nbytes[row])
            if rp.kind[row] == CONTRIBUTE:
                given[slot].append((int(rp.index[row]), source, rp.region(row)))
                self._nbytes["source", source] += nbytes
            else:
                wanted[slot].append((target, rp.region(row)))
                self._nbytes["target", target] += nbytes
                self._total += nbytes
        for number in sorted(wanted):
            self._slot(rp.slots[number], given[number], wanted[number])

    def _slot(self, slot: Slot, given: Given, wanted: Wanted) -> None:
        wire = self._plan.wire_dtype(slot.tensor)
        if {index for index, _, _ in given} != set(range(slot.count)):
            name = self._plan.names[slot.tensor]
            raise ValueError(f"{name!r}: a slot has {len(given)} of its {slot.count} contributions")
        sources = {rank: self._source(rank, slot.tensor) for _, rank, _ in given}
        targets = {rank: self._target(rank, slot.tensor) for rank, _ in wanted}
        for rank in targets:
            for source in sources:
                self._meet(source, rank)
        owners: set[Member] = {("source", rank) for rank in sources}
        if not any(self._written.overlaps(v) for v in sources.values()):
            owners |= {("target", rank) for rank in targets}
            self._reduce(slot, wire, given, sources, wanted, targets, 1, owners)
            return
        # Reduce into staging before anything is written. The rest is a move like any other.
        stage = self._stage(slot.shape, wire, (*sources.values(), *targets.values()))
        whole = Region(dims=tuple(np.array([[0, 0, n]], np.int64) for n in slot.shape))
        self._reduce(slot, wire, given, sources, [(-1, whole)], {-1: stage}, 0, owners)
        for rank, region in wanted:
            pair = self._columns.add_pair(ViewPair(stage, targets[rank], (("target", rank),)))
            for _, tile, at, to in self._geometry.region(region, stage, targets[rank]):
                self._columns.add(1, tile, pair, at, to)

    def _reduce(
        self,
        slot: Slot,
        wire: torch.dtype,
        given: Given,
        sources: Mapping[int, View],
        wanted: Wanted,
        targets: Mapping[int, View],
        phase: int,
        owners: set[Member],
    ) -> None:
        for _, rank, region in given:
            check(region.dims, sources[rank], 0)
        for rank, region in wanted:
            check(region.dims, targets[rank], 1)
        dtype = next(iter(sources.values())).dtype
        limit = PART // slot.accumulate.itemsize
        if any(view.device is not None for view in (*sources.values(), *targets.values())):
            limit = part_numel(slot.count, dtype, slot.accumulate)
            # Memory that the device cannot reach bounces, and a bounce is limited to one piece.
            if not all(view.reachable for view in (*sources.values(), *targets.values())):
                limit = max(1, min(limit, PIECE // (slot.count * dtype.itemsize)))
        for bounds in parts(slot, limit):
            shape = tuple(last - first for first, last in bounds)
            part, total = scratch(shape, dtype), scratch(shape, wire)
            terms: list[list[TileStep]] = [[] for _ in range(slot.count)]
            for index, rank, region in given:
                terms[index] += self._steps(clip(region.dims, bounds, 1), sources[rank], part, 1)
            results: list[TileStep] = []
            for rank, region in wanted:
                results += self._steps(clip(region.dims, bounds, 0), total, targets[rank], 0)
            if results:
                work = Reduced(
                    slot=slot,
                    source=dtype,
                    wire=wire,
                    numel=prod(shape),
                    contributions=tuple(tuple(steps) for steps in terms),
                    results=tuple(results),
                    nbytes=sum(step.tile.nbytes for step in results),
                )
                self._columns.others.append(
                    CopyPiece(phase=phase, nbytes=work.nbytes, owners=tuple(sorted(owners)), other=work)
                )

    def _steps(self, dims: Sequence[np.ndarray] | None, here: View, there: View, dense: int) -> list[TileStep]:
        """The clipped runs as steps; ``dense`` says which end (0: source, 1: target) is the scratch buffer."""
        if dims is None:
            return []
        view = there if dense == 0 else here
        found, source, target = self._geometry.block(dims, here, there)
        steps = []
        for tile, _, at, to in found:
            for a, b in zip((at + source).tolist(), (to + target).tolist(), strict=True):
                offset, place = (b, a) if dense == 0 else (a, b)
                steps.append(TileStep(tile=tile, view=view, offset=offset, at=place))
        return steps
