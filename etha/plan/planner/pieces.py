"""The pieces of a class: where two cuts of a tensor meet, products of one pair of cells per dim.

A *piece* is the overlap of a source cell and a target cell. A rank's pieces are the product of its own cell's pairs;
nothing else is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.plan.layouts import cells
from etha.plan.layouts.cells import Overlay
from etha.plan.layouts.region import DimRuns
from etha.plan.planner.m2m import Holding
from etha.plan.planner.rank_plan import Region

Ints = npt.NDArray[np.int64]
#: Rows that are computed together; more are computed in parts.
_MOST_ROWS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """M pieces of one block in canonical order: (target cell, source cell)."""

    pairs: tuple[Ints, ...]  # per dim (M,): index of the pair in the dim's overlay
    cells: tuple[Ints, ...]  # per source grid (M,): flat cell, -1 where the grid does not hold the piece
    copies: Ints  # (M,): flat cell of the target grid
    ordinal: Ints
    degree: Ints
    number: Ints  # (M,) number of the piece among those of its target cell
    crowd: Ints  # (M,) how many there are
    extents: Ints  # (M, d)
    size: Ints  # (M,) elements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellBlock:
    """One target grid of a class laid over its source grids."""

    shape: tuple[int, ...]
    overlays: tuple[Overlay, ...]
    parts: tuple[tuple[Ints, ...], ...]  # per dim, per source grid: its cell of a joint cell
    joint_cells: tuple[int, ...]
    source_cells: tuple[tuple[int, ...], ...]  # per source grid: cells of each dim
    target_cells: tuple[int, ...]
    target: Holding
    gaps: bool  # whether a source grid may lack a piece
    products: tuple[int, ...]  # per source grid

    @classmethod
    def of(cls, shape: tuple[int, ...], source: Sequence[Holding], target: Holding) -> CellBlock:
        """Overlay the cuts of every dim of ``shape``."""
        grids = [tuple(h.splits[d] for h in source) for d in range(len(shape))]
        joints = [cells.joint(n, g) for n, g in zip(shape, grids, strict=True)]
        return cls(
            shape=shape,
            overlays=tuple(cells.overlay(n, g, t) for n, g, t in zip(shape, grids, target.splits, strict=True)),
            parts=tuple(j.part for j in joints),
            joint_cells=tuple(max(j.cells, 1) for j in joints),
            source_cells=tuple(h.cells for h in source),
            target_cells=target.cells,
            target=target,
            gaps=any(h.gaps for h in source),
            products=tuple(h.product for h in source),
        )

    @property
    def pieces(self) -> int:
        """How many pieces there are for all target cells."""
        return math.prod(len(o.size) for o in self.overlays)

    def of_target(self, cell: int) -> Pieces:
        place = cells.coordinate(cell, self.target_cells)
        return self.over(
            [np.arange(o.by_target[c], o.by_target[c + 1]) for o, c in zip(self.overlays, place, strict=True)]
        )

    def of_source(self, held: Sequence[tuple[int, int]]) -> Pieces:
        """The pieces of which a rank that holds these (grid, cell) has any."""
        found = []
        for grid, cell in held:
            ranges = []
            for o, c in zip(self.overlays, cells.coordinate(cell, self.source_cells[grid]), strict=True):
                order, ptr = o.by_source[grid]
                ranges.append(order[ptr[c] : ptr[c + 1]])
            if len(held) == 1:
                return self.over(ranges)
            found.append(_product(ranges, int(np.prod([len(r) for r in ranges], dtype=np.int64))))
        if not self.overlays:
            return self.over([])
        pairs = np.unique(np.concatenate([np.stack(some, axis=1) for some in found]), axis=0)
        return self._pieces([np.ascontiguousarray(p) for p in pairs.T], len(pairs))

    def over(self, ranges: list[Ints]) -> Pieces:
        """The product of some pairs of each dim."""
        count = int(np.prod([len(r) for r in ranges], dtype=np.int64))
        return self._pieces(_product(ranges, count), count)

    def all(self, width: int) -> Iterator[Pieces]:
        """The pieces of every target cell, in parts of limited size if each piece has ``width`` rows."""
        ranges = [np.arange(len(o.size), dtype=np.int64) for o in self.overlays]
        if not ranges:
            yield self.over([])
            return
        for r in ranges[1:]:
            width *= len(r)
        step = max(1, _MOST_ROWS // max(width, 1))
        for lo in range(0, len(ranges[0]), step):
            yield self.over([ranges[0][lo : lo + step], *ranges[1:]])

    def _pieces(self, pairs: list[Ints], count: int) -> Pieces:
        zero = np.zeros(count, dtype=np.int64)
        if len(self.source_cells) > 1 and count > 1:
            copies, joint = zero, zero
            for d, (p, o) in enumerate(zip(pairs, self.overlays, strict=True)):
                copies = copies * self.target_cells[d] + o.target[p]
                joint = joint * self.joint_cells[d] + o.source[p]
            order = np.lexsort((joint, copies))
            pairs = [p[order] for p in pairs]
        flat = [zero] * len(self.source_cells)
        held = [np.ones(count, dtype=np.bool_)] * len(self.source_cells) if self.gaps else None
        copies, ordinal, degree, size = zero, zero, zero + 1, zero + 1
        number, crowd = zero, zero + 1
        extents = np.empty((count, len(pairs)), dtype=np.int64)
        for d, (p, o) in enumerate(zip(pairs, self.overlays, strict=True)):
            joint = o.source[p]
            for g, sizes in enumerate(self.source_cells):
                part = self.parts[d][g][joint]
                if held is not None:
                    held[g] = held[g] & (part >= 0)
                flat[g] = flat[g] * sizes[d] + part
            copies = copies * self.target_cells[d] + o.target[p]
            ordinal = ordinal * o.degree[p] + o.ordinal[p]
            degree = degree * o.degree[p]
            there = o.target[p]
            each = o.by_target[there + 1] - o.by_target[there]
            number = number * each + p - o.by_target[there]
            crowd = crowd * each
            extents[:, d] = o.size[p]
            size = size * o.size[p]
        if held is not None:
            flat = [np.where(here, cell, -1) for here, cell in zip(held, flat, strict=True)]
        return Pieces(
            pairs=tuple(pairs),
            cells=tuple(flat),
            copies=copies,
            ordinal=ordinal,
            degree=degree,
            number=number,
            crowd=crowd,
            extents=extents,
            size=size,
        )

    def region(self, pieces: Pieces, piece: int, grid: int, cut: tuple[int, int, int] | None) -> Region:
        """The region of one piece as grid ``grid`` holds it; ``cut`` (dim, lo, hi) keeps a slice of it.

        The grid after the last one stands for the target's own: both ends are its offsets.
        """
        dims = []
        passed = grid == len(self.source_cells)
        for d, (p, o) in enumerate(zip(pieces.pairs, self.overlays, strict=True)):
            pair = int(p[piece])
            runs = o.runs[0 if passed else grid][o.ptr[pair] : o.ptr[pair + 1]]
            if passed:
                runs = joined(runs[:, 1], runs[:, 2])
            dims.append(runs if cut is None or cut[0] != d else cut_runs(runs, cut[1], cut[2]))
        return Region(dims=tuple(dims), product=0 if passed else self.products[grid])

    def bounds(self, pieces: Pieces, piece: int) -> tuple[DimRuns, ...]:
        """The global runs of one piece in each dim."""
        place = cells.coordinate(int(pieces.copies[piece]), self.target_cells)
        found = []
        for n, (p, o, c, cut) in zip(
            self.shape, zip(pieces.pairs, self.overlays, place, self.target.splits, strict=True), strict=True
        ):
            table = cells.table(n, cut)
            rows = table.rows_of(c)
            runs = []
            for _, offset, length in o.runs[0][o.ptr[p[piece]] : o.ptr[p[piece] + 1]].tolist():
                for start, stop, first in zip(
                    *(x[rows].tolist() for x in (table.start, table.stop, table.offset)), strict=True
                ):
                    lo, hi = max(offset, first), min(offset + length, first + stop - start)
                    if lo < hi:
                        runs.append((start + lo - first, start + hi - first))
            found.append(DimRuns(tuple(runs)))
        return tuple(found)


def _product(ranges: list[Ints], count: int) -> list[Ints]:
    """The product of the ranges in C-order: one column of ``count`` values for each. Not by np.meshgrid, whose arrays
    have a dim for each range, of which numpy takes 32."""
    columns, before, after = [], 1, count
    for values in ranges:
        after //= max(len(values), 1)
        columns.append(np.tile(np.repeat(values, after), before))
        before *= len(values)
    return columns


def joined(offset: Ints, length: Ints) -> Ints:
    """Runs with both ends at ``offset``, in which runs that touch are joined."""
    head = np.append(True, offset[1:] != (offset + length)[:-1])[: len(offset)]
    first = np.flatnonzero(head)
    total = np.add.reduceat(length, first) if len(first) else length
    return np.stack([offset[first], offset[first], total], axis=1)


def cut_runs(runs: Ints, lo: int, hi: int) -> Ints:
    """The runs of the elements lo..hi-1, counted along the runs."""
    ends = np.cumsum(runs[:, 2])
    begins = ends - runs[:, 2]
    first, last = np.maximum(begins, lo), np.minimum(ends, hi)
    keep = last > first
    shift = (first - begins)[keep]
    return np.stack([runs[keep, 0] + shift, runs[keep, 1] + shift, (last - first)[keep]], axis=1)
