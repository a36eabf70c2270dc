"""The route from a source to a target layout: one exchange, or two if the source is Partial and two cost less.

Take K contributions of a target cell of B bytes that r ranks hold. With one exchange each of these ranks gets all
contributions and reduces for itself: K B bytes into a rank, less what it holds. With two, each reduces 1/r of the cell
and hands the result to the others: (K + r - 1) B / r bytes, in r - 1 messages more, of which each counts as ``MESSAGE``
bytes. One exchange never takes more if r = 1 (reduce-scatter), or if K = 2 and each rank holds a whole contribution.
On mesh axes that are Replicate on both sides the cell can also stay undivided: fewer messages, of more bytes.

Either way an element's contributions are combined 0 .. K-1, in C-order of the coordinates over the Partial axes, so the
bits do not depend on the route.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from etha.errors import LayoutError
from etha.plan import Layout, Slot
from etha.plan.layouts import dtypes
from etha.plan.layouts.placement import Axis
from etha.plan.planner.reduction import reduce_op
from etha.redistribute.stage import ExchangeStage, Layouts, make_stage

#: Bytes that take as long as one message more. Gloo on one host: 0.13 ms of processor time, 0.64 ms per MiB.
MESSAGE = 200 << 10


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
    middle = _cheapest(shape, dtype, contributions, middles(shape, source, target), target)
    if middle is None:
        return Route(stages=(make_stage(shape, dtype, contributions, target, rank),), reduction=reduction)
    first = make_stage(shape, dtype, contributions, middle, rank)
    return Route(stages=(first, make_stage(shape, dtype, (middle,), target, rank)), reduction=reduction)


def middles(shape: tuple[int, ...], source: Layouts, target: Layouts) -> list[Layouts]:
    """Who may reduce what in the first of two exchanges: all holders of a cell a part each, or those alone that differ
    on axes which are not Replicate on both sides."""
    found = [tuple(divided(layout, shape, ()) for layout in target)]
    if len(source) == len(target) == 1 and np.array_equal(source[0].ranks, target[0].ranks):
        axes = list(zip(source[0].axes, target[0].axes, strict=True))
        whole = tuple(i for i, (a, b) in enumerate(axes) if _replicates(a) and _replicates(b))
        if whole and any(_replicates(b) and not _replicates(a) for a, b in axes):
            found.append((divided(target[0], shape, whole),))
    return found


def _cuts(layout: Layout) -> int:
    """Number of parts into which the layout cuts a tensor."""
    return math.prod(n for n, axis in zip(layout.mesh_shape, layout.axes, strict=True) if axis.sharded)


def _replicates(axis: Axis) -> bool:
    return not axis.sharded and not axis.partial


def _cheapest(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    contributions: Sequence[Layouts],
    middles: Sequence[Layouts],
    target: Layouts,
) -> Layouts | None:
    """The middle that costs least in the busiest rank; None if contributions go to all holders of their element."""
    own = {r: layout for layouts in contributions for layout in layouts for r in layout.ranks.reshape(-1).tolist()}
    count, size = len(contributions), dtypes.itemsize(dtype)
    costs = [0] * (1 + len(middles))
    for i, cells in enumerate(target):
        for rank in cells.ranks.reshape(-1).tolist():
            cell = cells.owned(shape, rank)
            held = own[rank].owned(shape, rank) if rank in own else None
            whole = _common(cell, cell)
            costs[0] = max(costs[0], (count * whole - _common(cell, held)) * size)
            for k, middle in enumerate(middles, 1):
                part = middle[i].owned(shape, rank)
                mine = _common(part, part)
                nbytes = (count * mine - _common(part, held) + whole - mine) * size
                costs[k] = max(costs[k], nbytes + (_cuts(middle[i]) // _cuts(cells) - 1) * MESSAGE)
    best = costs.index(min(costs))
    return middles[best - 1] if best else None


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


def divided(layout: Layout, shape: Sequence[int], whole: Sequence[int] = ()) -> Layout:
    """``layout`` with each cell divided among its replicas: who reduces what before all replicas get it. Ranks that
    differ on the axes ``whole`` reduce the same."""
    sharded = [i for i, axis in enumerate(layout.axes) if axis.sharded]
    rest = [i for i in range(len(layout.axes)) if i not in sharded and i not in whole]
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
    return Layout(layout.ranks.transpose(sharded + rest + list(whole)), placements, strided=layout.strided)
