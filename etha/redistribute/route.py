"""The route from a source to a target layout: one exchange, or two if the source is Partial and two send less.

Take K contributions of a target cell of B bytes that r ranks hold. With one exchange each of these ranks gets all
contributions and reduces for itself: K B bytes into a rank, less what it holds. With two, each reduces 1/r of the cell
and hands the result to the others: (K + r - 1) B / r bytes. One exchange never takes more if r = 1 (reduce-scatter), or
if K = 2 and each rank holds a whole contribution. Otherwise it saves a round of latency at the price of bytes, and is
used up to ``ONE_EXCHANGE`` bytes into a rank.

Either way an element's contributions are combined 0 .. K-1, in C-order of the coordinates over the Partial axes, so the
bits do not depend on the route.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from etha.errors import LayoutError
from etha.plan import Layout, Slot
from etha.plan.layouts import dtypes
from etha.plan.planner.reduction import reduce_op
from etha.redistribute.stage import ExchangeStage, Layouts, make_stage

#: Bytes into a rank up to which contributions go to all holders of their element at once.
ONE_EXCHANGE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The exchanges of one rank, in order. ``reduction`` combines the parts of the first one."""

    stages: tuple[ExchangeStage, ...]
    reduction: Slot | None


@lru_cache(maxsize=512)
def make_route(shape: tuple[int, ...], dtype: torch.dtype, source: Layouts, target: Layouts, rank: int) -> Route:
    """Plan one tensor. LayoutError for what cannot be reduced or moved. Cached, because training steps repeat."""
    if not any(axis.partial for axis in source[0].axes):
        return Route(stages=(make_stage(shape, dtype, (source,), target, rank),), reduction=None)
    reduction = _reduction(shape, dtype, source[0])
    each = [contributions_of(layout) for layout in source]
    contributions = tuple(tuple(layouts) for layouts in zip(*each, strict=True))
    middle = tuple(divided(layout, shape) for layout in target)
    if in_one(shape, dtype, contributions, middle, target):
        return Route(stages=(make_stage(shape, dtype, contributions, target, rank),), reduction=reduction)
    first = make_stage(shape, dtype, contributions, middle, rank)
    return Route(stages=(first, make_stage(shape, dtype, (middle,), target, rank)), reduction=reduction)


def in_one(
    shape: tuple[int, ...], dtype: torch.dtype, contributions: Sequence[Layouts], middle: Layouts, target: Layouts
) -> bool:
    """Whether contributions go to all holders of their element at once, judged by the bytes into the busiest rank."""
    own = {r: layout for layouts in contributions for layout in layouts for r in layout.ranks.reshape(-1).tolist()}
    count, one, two = len(contributions), 0, 0
    for cells, parts in zip(target, middle, strict=True):
        for rank in cells.ranks.reshape(-1).tolist():
            cell, part = cells.owned(shape, rank), parts.owned(shape, rank)
            held = own[rank].owned(shape, rank) if rank in own else None
            whole, mine = _common(cell, cell), _common(part, part)
            one = max(one, count * whole - _common(cell, held))
            two = max(two, count * mine - _common(part, held) + whole - mine)
    return one * dtypes.itemsize(dtype) <= ONE_EXCHANGE or one <= two


#: What a rank owns: ascending (start, stop) runs per dim; None if nothing.
Owned = list[list[tuple[int, int]]] | None


def _common(a: Owned, b: Owned) -> int:
    """Number of elements that are in both."""
    if a is None or b is None:
        return 0
    return math.prod(_overlap(left, right) for left, right in zip(a, b, strict=True))


def _overlap(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    total, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total


def _reduction(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> Slot:
    partial = layout.grid(len(shape)).partial
    how = reduce_op(partial)
    why = how if isinstance(how, str) else dtypes.reducible(dtype, how[0])
    if isinstance(how, str) or why is not None:
        raise LayoutError(f"cannot reduce {layout}: {why}")
    op, p, divisor = how
    return Slot(
        tensor=0,
        number=0,
        shape=(),
        count=math.prod(size for _, size in partial),
        op=op,
        p=p,
        divisor=divisor,
        accumulate=dtypes.accumulate_dtype(dtype),
        owner=0,
    )


def contributions_of(layout: Layout) -> list[Layout]:
    """The layout of each contribution, in order, over the ranks that hold it."""
    partial = [i for i, axis in enumerate(layout.axes) if axis.partial]
    return [
        at_coordinates(layout, dict(zip(partial, place, strict=True)))
        for place in itertools.product(*(range(layout.mesh_shape[i]) for i in partial))
    ]


def at_coordinates(layout: Layout, where: dict[int, int]) -> Layout:
    """The layout over the ranks with coordinate ``where[axis]`` on these axes, whose size becomes 1."""
    table = layout.ranks[
        tuple(slice(where[i], where[i] + 1) if i in where else slice(None) for i in range(len(layout.axes)))
    ]
    placements = [Replicate() if i in where else axis.to_placement() for i, axis in enumerate(layout.axes)]
    return Layout(table, placements, strided=layout.strided)


def divided(layout: Layout, shape: Sequence[int]) -> Layout:
    """``layout`` with each cell divided among its replicas: who reduces what before all replicas get it."""
    sharded = [i for i, axis in enumerate(layout.axes) if axis.sharded]
    rest = [i for i in range(len(layout.axes)) if i not in sharded]
    placements: list[Placement] = [layout.axes[i].to_placement() for i in sharded]
    # The rank at the origin, because no cell is larger than its cell.
    extent = list(layout.local_shape(shape, int(layout.ranks.reshape(-1)[0])))
    for i in rest if extent else ():
        size = layout.mesh_shape[i]
        # The first dim that gives each rank a fair share keeps rows whole; if there is none, the longest dim.
        long = [d for d, n in enumerate(extent) if n >= 8 * size]
        dim = long[0] if long else max(range(len(extent)), key=extent.__getitem__)
        placements.append(Shard(dim))
        extent[dim] = -(-extent[dim] // size)
    # Replicated axes come last: plain shards apply in order, so they cut what the other axes have left.
    placements += [Replicate()] * (len(layout.axes) - len(placements))  # a scalar is not divided
    return Layout(layout.ranks.transpose(sharded + rest), placements, strided=layout.strided)
