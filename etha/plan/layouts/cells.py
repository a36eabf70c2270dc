"""Which index runs of each tensor dim a rank owns, and how two cuts of one dim overlap.

A *cell* is what one coordinate of a dim's sharding axes keeps; all ranks with that coordinate own it. Everything is
arrays of runs over one dim; nothing has the tensor's size. A cell's list of runs is always ascending, so an element's
local index is its place in that list. The cells of splits tile the dim. A region has one cell, which may leave gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from etha.errors import LayoutError
from etha.plan.layouts.placement import Cut, Splits
from etha.plan.layouts.region import DimRuns

Ints = npt.NDArray[np.int64]
#: More runs than this in one dim are a mistake or an attack.
MAX_RUNS = 1 << 24


def coordinate(flat: int, counts: Sequence[int]) -> tuple[int, ...]:
    """The coordinate, in C-order, of number ``flat`` in a grid. np.unravel_index takes fewer dims than a tensor may
    have: 32 before numpy 2."""
    found = []
    for count in reversed(counts):
        flat, at = divmod(int(flat), count)
        found.append(at)
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DimTable:
    """All cells of one dim: runs sorted by ``start``; ``offset`` is the run's place in its cell's list."""

    start: Ints
    stop: Ints
    cell: Ints
    offset: Ints
    sizes: Ints  # elements of each cell, (cells,)

    def rows_of(self, cell: int) -> Ints:
        """Indices of the runs of ``cell``, ascending."""
        return np.flatnonzero(self.cell == cell)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joint:
    """Several cuts of one dim laid over each other. ``cell`` numbers the combinations of their cells.

    ``offset[g]`` is the run's place in the list of grid g's cell, and means nothing in a gap of it. ``part[g][cell]``
    is that cell, -1 in a gap. The runs tile the dim, gaps of all grids included.
    """

    start: Ints
    stop: Ints
    cell: Ints
    offset: tuple[Ints, ...]
    part: tuple[Ints, ...]
    cells: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Overlay:
    """The overlap of a joint source cut and a target cut of one dim, as pairs sorted by (target, source).

    Pair p is source cell ``source[p]`` and target cell ``target[p]``, with ``size[p]`` elements. Its runs of (source
    offset, target offset, length) for source grid g are ``runs[g][ptr[p]:ptr[p+1]]``. It is number ``ordinal[p]`` of
    the ``degree[p]`` pairs of its source cell. ``by_target`` points into the pairs; ``by_source[g]`` is (pairs sorted
    by grid g's cell, pointers).
    """

    source: Ints
    target: Ints
    size: Ints
    ptr: Ints
    runs: tuple[Ints, ...]
    ordinal: Ints
    degree: Ints
    degrees: Ints
    by_target: Ints
    by_source: tuple[tuple[Ints, Ints], ...]


def _cut(sizes: Ints, parts: int, factor: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut every cell's list: (cell, lo, hi, offset in the new cell), in order of (cell, position).

    The new cell of coordinate c is ``cell * parts + c``. Factor 1 cuts as torch.chunk does, 0 as torch.tensor_split.
    """
    c = np.arange(parts, dtype=np.int64)
    length = sizes[:, None]
    if factor == 0:
        lo, hi = length * c // parts, length * (c + 1) // parts
        offset = np.zeros_like(lo)
        new = np.arange(len(sizes), dtype=np.int64)[:, None] * parts + c
    elif factor == 1:
        k = -(-length // parts)
        lo, hi = np.minimum(length, c * k), np.minimum(length, (c + 1) * k)
        offset = np.zeros_like(lo)
        new = np.arange(len(sizes), dtype=np.int64)[:, None] * parts + c
    else:
        block = -(-length[..., None] // factor)  # K, (cells, 1, 1)
        blocks = int((-(-sizes // np.maximum(block[:, 0, 0], 1))).max(initial=0))
        if len(sizes) * blocks * parts > MAX_RUNS:
            raise LayoutError(f"a strided shard of factor {factor} has {len(sizes) * blocks * parts} runs in one dim")
        base = np.arange(blocks, dtype=np.int64)[None, :, None] * block  # (cells, blocks, 1)
        inside = np.clip(length[..., None] - base, 0, block)
        k = -(-inside // parts)
        lo, hi = base + np.minimum(inside, c * k), base + np.minimum(inside, (c + 1) * k)
        offset = np.cumsum(hi - lo, axis=1) - (hi - lo)
        new = np.broadcast_to(np.arange(len(sizes), dtype=np.int64)[:, None, None] * parts + c, lo.shape)
    keep = hi > lo
    return new[keep], lo[keep], hi[keep], offset[keep]


def count(splits: Cut) -> int:
    """Number of cells of a dim that is cut like this."""
    return 1 if isinstance(splits, DimRuns) else math.prod(cut[0] for cut in splits)


@lru_cache(maxsize=16384)
def table(n: int, splits: Cut) -> DimTable:
    """The runs of all cells of a dim of ``n`` elements. Cells are in C-order of their axes in mesh order."""
    if isinstance(splits, DimRuns):
        return _kept(n, splits)
    total = count(splits)
    if total > MAX_RUNS:
        raise LayoutError(f"one dim is cut into {total} cells")
    zero = np.zeros(1 if n else 0, dtype=np.int64)
    start, cell, offset, sizes = zero, zero, zero, np.array([n], dtype=np.int64)
    for parts, factor, _ in splits:
        new, lo, hi, at = _cut(sizes, parts, factor)
        # All cells' lists in a row make one line of n positions; runs and cuts are both points on it.
        base = np.cumsum(sizes) - sizes
        line, knife = base[cell] + offset, base[new // parts] + lo
        points = np.union1d(line, knife)
        run, piece = np.searchsorted(line, points, "right") - 1, np.searchsorted(knife, points, "right") - 1
        start = start[run] + points - line[run]
        offset = at[piece] + points - knife[piece]
        cell = new[piece]
        fresh = np.zeros(len(sizes) * parts, dtype=np.int64)
        np.add.at(fresh, new, hi - lo)
        sizes = fresh
        order = np.lexsort((offset, cell))
        start, cell, offset = start[order], cell[order], offset[order]
    start, stop, cell, offset = _merge(start, cell, offset, sizes)
    if splits:
        # From the order in which cuts apply to mesh order.
        by_place = sorted(range(len(splits)), key=lambda i: splits[i][2])
        mesh = np.arange(total, dtype=np.int64).reshape([splits[i][0] for i in by_place])
        name = mesh.transpose([splits[i][2] for i in range(len(splits))]).reshape(-1)
        cell = name[cell]
        renamed = np.empty_like(sizes)
        renamed[name] = sizes
        sizes = renamed
    order = np.argsort(start, kind="stable")
    return _frozen(DimTable(start=start[order], stop=stop[order], cell=cell[order], offset=offset[order], sizes=sizes))


def _kept(n: int, kept: DimRuns) -> DimTable:
    if kept.end > n:
        raise LayoutError(f"a region reaches to {kept.end} in a dim of {n} elements")
    start, stop = np.array(kept.runs, dtype=np.int64).reshape(-1, 2).T.copy()
    offset = np.cumsum(stop - start) - (stop - start)
    sizes = np.array([kept.size], dtype=np.int64)
    return _frozen(DimTable(start=start, stop=stop, cell=np.zeros_like(start), offset=offset, sizes=sizes))


def _merge(start: Ints, cell: Ints, offset: Ints, sizes: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Join runs of a cell that touch. The input is in order of (cell, offset); lengths follow from the offsets."""
    if not len(start):
        return start, start, cell, offset
    last = np.append(cell[1:] != cell[:-1], True)
    end = np.where(last, sizes[cell], np.append(offset[1:], 0))
    stop = start + end - offset
    head = np.append(True, (cell[1:] != cell[:-1]) | (start[1:] != stop[:-1]))
    tail = np.append(head[1:], True)
    return start[head], stop[tail], cell[head], offset[head]


def _frozen(found: DimTable) -> DimTable:
    for column in (found.start, found.stop, found.cell, found.offset, found.sizes):
        column.flags.writeable = False
    return found


@lru_cache(maxsize=16384)
def joint(n: int, grids: tuple[Cut, ...]) -> Joint:
    """Lay the cuts of several grids over each other. With one grid without gaps, this is its own table."""
    tables = [table(n, splits) for splits in grids]
    if len(tables) == 1 and not isinstance(grids[0], DimRuns):
        only = tables[0]
        cells = len(only.sizes)
        whole = np.arange(cells, dtype=np.int64)
        return Joint(
            start=only.start, stop=only.stop, cell=only.cell, offset=(only.offset,), part=(whole,), cells=cells
        )
    points = _points(n, *tables)
    rows = [np.searchsorted(t.start, points, "right") - 1 for t in tables]
    stack = np.stack([_cells_at(t, r, points) for t, r in zip(tables, rows, strict=True)], axis=1)
    names, cell = np.unique(stack, axis=0, return_inverse=True)
    offset = tuple(
        t.offset[r] + points - t.start[r] if len(t.start) else np.zeros_like(points)
        for t, r in zip(tables, rows, strict=True)
    )
    return Joint(
        start=points,
        stop=np.append(points[1:], n).astype(np.int64)[: len(points)],
        cell=cell.reshape(-1).astype(np.int64),
        offset=offset,
        part=tuple(np.ascontiguousarray(names[:, g]) for g in range(len(tables))),
        cells=len(names),
    )


def _points(n: int, *tables: DimTable | Joint) -> Ints:
    """The points at which a run of any of the tables, or a gap, begins."""
    found = np.unique(np.concatenate([[0], *(t.start for t in tables), *(t.stop for t in tables)]))
    return found[found < n].astype(np.int64)


def _cells_at(held: DimTable, row: Ints, points: Ints) -> Ints:
    """The cell of each point, -1 in a gap. ``row`` is the last run that begins at or before the point."""
    if not len(held.start):
        return np.full(len(points), -1, dtype=np.int64)
    return np.where((row >= 0) & (points < held.stop[row]), held.cell[row], -1)


@lru_cache(maxsize=16384)
def overlay(n: int, source: tuple[Cut, ...], target: Cut) -> Overlay:
    """All pairs of one joint source cell and one target cell of a dim, with their runs.

    Elements in gaps of the source belong to joint cells of their own. Runs of a grid that has a gap there have the
    target's offsets at both ends, so that they break nowhere else than the target's.
    """
    left, right = joint(n, source), table(n, target)
    some = isinstance(target, DimRuns)
    points = _points(n, left, right) if some else np.union1d(left.start, right.start)
    length = np.append(points[1:], n)[: len(points)] - points
    b = np.searchsorted(right.start, points, "right") - 1
    if some:
        inside = _cells_at(right, b, points) >= 0
        points, length, b = points[inside], length[inside], b[inside]
    a = np.searchsorted(left.start, points, "right") - 1
    key = right.cell[b] * max(left.cells, 1) + left.cell[a]
    order = np.argsort(key, kind="stable")
    key, length = key[order], length[order]
    there = (right.offset[b] + points - right.start[b])[order]
    here = [(offset[a] + points - left.start[a])[order] for offset in left.offset]
    if any(isinstance(splits, DimRuns) for splits in source):
        at = left.cell[a][order]
        here = [np.where(part[at] < 0, there, offset) for part, offset in zip(left.part, here, strict=True)]
    # A run ends where its pair ends, or where either local tensor jumps.
    edge = key[1:] != key[:-1]
    first_of_pair = np.append(True, edge)[: len(key)]
    broken = edge | (there[1:] != there[:-1] + length[:-1])
    for offset in here:
        broken = broken | (offset[1:] != offset[:-1] + length[:-1])
    head = np.flatnonzero(np.append(True, broken)[: len(key)])
    lengths = np.add.reduceat(length, head) if len(head) else length
    runs = tuple(np.stack([offset[head], there[head], lengths], axis=1) for offset in here)
    for run in runs:
        run.flags.writeable = False
    first = np.flatnonzero(first_of_pair)
    pairs = key[first]
    source_cell, target_cell = pairs % max(left.cells, 1), pairs // max(left.cells, 1)
    degrees = np.bincount(source_cell, minlength=left.cells).astype(np.int64)
    by_cell = np.argsort(source_cell, kind="stable")
    ordinal = np.empty_like(by_cell)
    ordinal[by_cell] = np.arange(len(by_cell)) - np.repeat(np.cumsum(degrees) - degrees, degrees)
    by_source = []
    for g, splits in enumerate(source):
        cell = left.part[g][source_cell]
        gaps = int((cell < 0).sum())  # these pairs come first
        by_source.append((np.argsort(cell, kind="stable"), _pointers(cell[cell >= 0], count(splits)) + gaps))
    return Overlay(
        source=source_cell,
        target=target_cell,
        size=np.add.reduceat(length, first) if len(first) else length,
        ptr=np.append(np.searchsorted(head, first), len(head)),
        runs=runs,
        ordinal=ordinal,
        degree=degrees[source_cell],
        degrees=degrees,
        by_target=_pointers(target_cell, len(right.sizes)),
        by_source=tuple(by_source),
    )


def _pointers(cell: Ints, cells: int) -> Ints:
    return np.append(0, np.cumsum(np.bincount(cell, minlength=cells))).astype(np.int64)


def cell_size(n: Ints, splits: Splits, place: tuple[int, ...]) -> Ints:
    """Size of one cell for many values of ``n`` at once. ``place`` is its coordinate per axis, in mesh order."""
    size = n
    for parts, factor, at in splits:
        c = place[at]
        if factor <= 1:
            k = -(-size // parts)
            size = np.clip(size - c * k, 0, k)
            continue
        block = -(-size // factor)
        blocks = int((-(-size // np.maximum(block, 1))).max(initial=0))
        total = np.zeros_like(size)
        for j in range(blocks):
            inside = np.clip(size - j * block, 0, block)
            k = -(-inside // parts)
            total += np.clip(inside - c * k, 0, k)
        size = total
    return size
