"""Finds the elements of a contiguous tensor that a strided view of it touches, as a product of one index set per dim.

Computes. A loader takes what it keeps of a checkpoint tensor by views (narrow, chunk, transpose, view, select). Each is
an offset, sizes and strides over the contiguous original, and walks every dim of it in even steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
#: For each dim the ascending, disjoint (start, stop) runs that are kept; their product is the region.
Region = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A view of a contiguous tensor of ``shape``: axis k has ``counts[k]`` elements, ``walks[k]`` apart.

    ``walks[k]`` is (dim, step): the axis moves along ``dim`` of the original by ``step`` indices; (-1, 0) does not
    move. ``start`` is the index of the view's first element. ``sizes`` are the view's own. A view's axis that moves
    along several dims has several ``counts``, in the same order.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    counts: tuple[int, ...]
    walks: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Trace | None:
        """The trace of a view, ``offset`` and ``strides`` in elements; None if it is not a product of index sets."""
        shape = tuple(shape)
        if 0 in sizes or 0 in shape:
            still = ((-1, 0),) * len(sizes)
            return cls(shape=shape, start=(0,) * len(shape), counts=tuple(sizes), walks=still, sizes=tuple(sizes))
        full = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        start = []
        for n, stride in zip(shape, full, strict=True):
            start.append(offset // stride % n)
        axes: list[tuple[int, int, int]] = []
        for count, stride in zip(sizes, strides, strict=True):
            found = _laps(shape, full, count, stride)
            if found is None:
                return None
            axes.extend(found)
        for dim, n in enumerate(shape):
            if start[dim] + sum((count - 1) * step for count, at, step in axes if at == dim) >= n:
                return None  # it runs beyond the end of a row and continues in the next
        return cls(
            shape=shape,
            start=tuple(start),
            counts=tuple(count for count, _, _ in axes),
            walks=tuple((dim, step) for _, dim, step in axes),
            sizes=tuple(sizes),
        )

    def lattice(self, dim: int) -> Ints:
        """The indices of ``dim`` that the view touches, with one axis for each of the view's axes that move along
        it."""
        steps = [(count, step) for count, (at, step) in zip(self.counts, self.walks, strict=True) if at == dim]
        found = np.array(self.start[dim], dtype=np.int64)
        for count, step in steps:
            found = found[..., None] + np.arange(count, dtype=np.int64) * step
        return found

    def region(self) -> Region:
        """The product of runs that the view reads; dims have no runs if it has no element."""
        if 0 in self.counts:
            return ((),) * len(self.shape)
        return tuple(_runs(self.lattice(dim)) for dim in range(len(self.shape)))


def _laps(shape: tuple[int, ...], full: list[int], count: int, stride: int) -> list[tuple[int, int, int]] | None:
    """One axis of a view as (count, dim, step), outermost first; several if it continues into the dim before."""
    if count == 1 or stride == 0:
        return [(count, -1, 0)]
    for dim in range(len(shape) - 1, -1, -1):
        outer = full[dim] * shape[dim]
        if shape[dim] == 1 or not full[dim] <= stride < outer:
            continue
        step, rest = divmod(stride, full[dim])
        if rest:
            return None
        if (count - 1) * step < shape[dim]:
            return [(count, dim, step)]
        lap, rest = divmod(shape[dim], step)
        if rest or count % lap:
            return None
        before = _laps(shape, full, count // lap, outer)
        return None if before is None else [*before, (lap, dim, step)]
    return None


def _runs(indices: Ints) -> tuple[tuple[int, int], ...]:
    flat = np.unique(indices)
    edges = np.flatnonzero(np.diff(flat) != 1)
    starts = flat[np.append(0, edges + 1)]
    stops = flat[np.append(edges, len(flat) - 1)] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def whole(shape: Sequence[int]) -> Region:
    """The region of all of a tensor."""
    return tuple(((0, n),) if n else () for n in shape)


def union(one: Region | None, other: Region) -> Region:
    """The smallest product of runs that holds both. It is their exact union if they differ in at most one dim."""
    if one is None or empty(one):
        return other
    if empty(other):
        return one
    return tuple(_merge(a, b) for a, b in zip(one, other, strict=True))


def _merge(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if one == other:
        return one
    merged: list[list[int]] = []
    for start, stop in sorted((*one, *other)):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return tuple((start, stop) for start, stop in merged)


def empty(region: Region) -> bool:
    """Whether the region has no element (that of a tensor without dims has one)."""
    return any(not runs for runs in region)


def shape_of(region: Region) -> tuple[int, ...]:
    """Shape of a tensor that holds the region densely."""
    return tuple(sum(stop - start for start, stop in runs) for runs in region)


def area(regions: Iterable[Region]) -> int:
    """How many elements lie in at least one of the regions."""
    rest: dict[tuple[tuple[int, int], ...], set[Region]] = {}
    for region in regions:
        if not region:
            return 1
        rest.setdefault(region[0], set()).add(region[1:])
    if not rest:
        return 0
    runs = sorted((start, stop, key) for key in rest for start, stop in key)
    total, open_, at = 0, [], 0
    edges = sorted({edge for start, stop, _ in runs for edge in (start, stop)})
    known: dict[frozenset[Region], int] = {}
    for low, high in pairwise(edges):
        while at < len(runs) and runs[at][0] <= low:
            open_.append(runs[at])
            at += 1
        open_ = [run for run in open_ if run[1] > low]
        inner = frozenset(region for _, _, key in open_ for region in rest[key])
        if inner not in known:
            known[inner] = area(inner)
        total += (high - low) * known[inner]
    return total
