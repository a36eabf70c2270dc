"""A layout over a tensor of known rank: the cuts of its dims, and who holds each cell."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.errors import LayoutError
from etha.plan.layouts.placement import Axis, Cut, splits_of
from etha.plan.layouts.region import DimRuns

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """A layout over a tensor of known rank: the cuts of each dim, and who holds each cell.

    ``ranks`` has shape (cells, K, P): cells in C-order over the dims' cells, K contributions in C-order over the
    Partial axes, P replicas in C-order over the Replicate axes.
    """

    splits: tuple[Cut, ...]
    ranks: Ints
    partial: tuple[tuple[Axis, int], ...]


def grid_of(axes: tuple[Axis, ...], ranks: Ints, ndim: int, *, literal: bool) -> Grid:
    """The grid of one placement per axis of ``ranks``. LayoutError if a placement shards a dim that the tensor
    lacks."""
    by_dim: list[list[int]] = [[] for _ in range(ndim)]
    partial: list[int] = []
    replicate: list[int] = []
    for place, axis in enumerate(axes):
        if axis.sharded:
            if not -ndim <= axis.dim < ndim:
                raise LayoutError(f"placement {axis} shards dim {axis.dim} of a tensor of {ndim} dims")
            by_dim[axis.dim % ndim].append(place)
        else:
            (partial if axis.partial else replicate).append(place)
    splits = tuple(splits_of([(ranks.shape[a], axes[a].factor) for a in places], literal=literal) for places in by_dim)
    order = [a for places in by_dim for a in places] + partial + replicate
    k = math.prod(ranks.shape[a] for a in partial)
    p = math.prod(ranks.shape[a] for a in replicate)
    table = np.ascontiguousarray(ranks.transpose(order)).reshape(-1, k, p)
    table.flags.writeable = False
    return Grid(splits=splits, ranks=table, partial=tuple((axes[a], ranks.shape[a]) for a in partial))


def grid_of_region(product: tuple[DimRuns, ...], ranks: Ints, ndim: int) -> Grid:
    """A grid of one cell that all of ``ranks`` hold as replicas. LayoutError if ``product`` has another number of
    dims."""
    if len(product) != ndim:
        raise LayoutError(f"a region of {len(product)} dims of a tensor of {ndim} dims")
    table = np.ascontiguousarray(ranks).reshape(1, 1, -1)
    table.flags.writeable = False
    return Grid(splits=product, ranks=table, partial=())
