"""From what each rank registered to one description of a tensor: merge, infer, resolve, compare. Pure.

Each rank describes a name by itself: a layout (with FSDP2 and TP, norms lie on ``mesh["dp"]``, another mesh for each
row of workers) and its real local shape. The functions list what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from etha.errors import LayoutError, Violation
from etha.plan.layouts import cells
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.mesh import check_shape
from etha.plan.layouts.placement import Splits
from etha.plan.layouts.region import DimRuns, Product
from etha.plan.layouts.tensor_spec import TensorSpec

#: Sizes tried for one dim before the user is asked for ``shapes=``.
_MAX_CANDIDATES = 1 << 20


def merge_layouts(name: str, side: str, by_rank: Mapping[int, Layout]) -> tuple[tuple[Layout, ...], list[Violation]]:
    """The layouts of one name, from the layout that each rank described, and what disagrees.

    Equal descriptions are one layout. Different ones must be over disjoint ranks; each then holds the whole tensor, or
    a region of it. Equal regions of single ranks become one. The result is sorted by lowest rank, so that every rank
    derives the same.
    """
    by_rank = _equal_regions(by_rank)
    described: dict[Layout, list[int]] = {}
    for rank in sorted(by_rank):
        described.setdefault(by_rank[rank], []).append(rank)
    layouts = sorted(described, key=lambda part: (int(part.ranks.min()), part.digest()))
    found = []
    for layout in layouts:
        for rank in described[layout]:
            if rank not in layout:
                text = (
                    f"rank {rank} is not in its own layout {layout}. A mesh names all ranks of the side, not one "
                    f"process's: write device_mesh=(N,) for N ranks. Meshes of torch are in ranks of its world: where "
                    f"those differ from ranks of the side, write init_pair(..., ranks={{torch rank: rank of the side}})"
                )
                found.append(_layout(name, side, rank, text))
    for i, layout in enumerate(layouts):
        for other in layouts[i + 1 :]:
            shared = np.intersect1d(layout.ranks, other.ranks)
            if len(shared):
                text = (
                    f"rank {described[layout][0]} says {layout}, rank {described[other][0]} says {other}: both "
                    f"are over ranks {shared.tolist()[:8]}; layouts of one name must be equal or over disjoint ranks"
                )
                found.append(_layout(name, side, described[other][0], text))
    return tuple(layouts), found


def _equal_regions(by_rank: Mapping[int, Layout]) -> Mapping[int, Layout]:
    """Give ranks that keep the same region one common layout, because each rank describes only its own."""
    ranks: dict[Product, list[int]] = {}
    for rank, layout in sorted(by_rank.items()):
        if layout.kept is not None and layout.mesh_shape == (1,) and rank in layout:
            ranks.setdefault(layout.kept, []).append(rank)
    if all(len(same) == 1 for same in ranks.values()):
        return by_rank
    merged = {r: one for same in ranks.values() for one in [by_rank[same[0]].held_by(same)] for r in same}
    return {**by_rank, **merged}


def _layout(name: str, side: str, rank: int | None, text: str) -> Violation:
    return Violation(code="layout", name=name, side=side, rank=rank, text=text)


def infer_global_shape(
    layout: Layout, local_shapes: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, ...] | None, str | None]:
    """(the only global shape with these local shapes, None), or (None, why there is none or more than one).

    ``local_shapes`` are those of the ranks that hold the tensor. A mesh rank that is missing constrains nothing.
    """
    shapes = {rank: check_shape(shape) for rank, shape in sorted(local_shapes.items())}
    if not shapes:
        return None, "no rank holds it"
    ranks = list(shapes)
    ndim = len(shapes[ranks[0]])
    for rank in ranks:
        if len(shapes[rank]) != ndim:
            return (
                None,
                f"rank {ranks[0]} holds {shapes[ranks[0]]}, rank {rank} {shapes[rank]}: different ranks of tensor",
            )
    outside = [rank for rank in ranks if rank not in layout]
    if outside:
        return None, f"ranks {outside[:8]} hold it but are not in the mesh of {layout}"
    if layout.kept is not None:
        return None, f"{layout} does not tell it; give the global shape in shapes="
    readings = [layout]
    if layout.has_strided and layout.strided == "auto":
        readings.append(layout.with_reading("literal"))
    reason = ""
    for reading in readings:
        try:
            sizes, why = _infer(reading, ndim, shapes)
        except LayoutError as error:
            return None, error.message
        if sizes is not None:
            return sizes, None
        reason = reason or why
    return None, reason


def _infer(layout: Layout, ndim: int, shapes: Mapping[int, tuple[int, ...]]) -> tuple[tuple[int, ...] | None, str]:
    grid = layout.grid(ndim)
    sizes = []
    for dim, splits in enumerate(grid.splits):
        assert not isinstance(splits, DimRuns)
        seen: dict[int, tuple[int, int]] = {}  # cell -> (local size, a rank that has it)
        for rank, shape in shapes.items():
            where = layout.cell(ndim, rank)
            assert where is not None
            size, other = seen.setdefault(where[dim], (shape[dim], rank))
            if size != shape[dim]:
                text = f"dim {dim}: rank {other} holds {size} and rank {rank} {shape[dim]}"
                return None, f"{text}, where {layout} gives them the same part"
        candidates, why = _candidates(splits, {cell: size for cell, (size, _) in seen.items()})
        if len(candidates) != 1:
            got = ", ".join(f"rank {rank}: {size}" for size, rank in list(seen.values())[:8])
            if candidates:
                why = f"sizes {', '.join(map(str, candidates[:3]))}{' ...' if len(candidates) > 3 else ''} all fit"
            return None, f"dim {dim} ({got}): {why}; give the global shape in shapes="
        sizes.append(candidates[0])
    return tuple(sizes), ""


def _candidates(splits: Splits, seen: Mapping[int, int]) -> tuple[list[int], str]:
    """Sizes of one dim that give each of these cells these sizes; ascending. If there are too many to try, none, and
    why."""
    counts = [size for _, size in sorted((cut[2], cut[0]) for cut in splits)]
    total = math.prod(counts)
    if len(seen) == total:
        # The cells of a dim tile it.
        options = np.array([sum(seen.values())], dtype=np.int64)
    else:
        # Every cut keeps at most ceil(l / parts), and its first cell exactly that.
        first = seen.get(0)
        plain = all(cut[1] == 1 for cut in splits)
        if first is not None and plain:
            options = np.arange(max(0, (first - 1) * total - total), first * total + 1, dtype=np.int64)
        else:
            options = np.arange(0, 2 * (max(seen.values()) + 1) * total + 1, dtype=np.int64)
        if len(options) > _MAX_CANDIDATES:
            return [], f"only {len(seen)} of {total} parts are held, which leaves too many sizes to try"
    for cell, size in sorted(seen.items()):
        place = tuple(int(i) for i in np.unravel_index(cell, counts)) if counts else ()
        options = options[cells.cell_size(options, splits, place) == size]
    return options.tolist(), "no size gives these parts"


def resolve_strided(layout: Layout, global_shape: Sequence[int], local_shapes: Mapping[int, Sequence[int]]) -> Layout:
    """``layout`` with "auto" decided by real local shapes: the literal reading only if they show it.

    A layout whose readings cannot differ, or that names its reading already, is returned unchanged.
    """
    if layout.strided != "auto" or not layout.has_strided:
        return layout
    literal = layout.with_reading("literal")
    if not _fits(layout, global_shape, local_shapes) and _fits(literal, global_shape, local_shapes):
        return literal
    return layout.with_reading("order")


def _fits(layout: Layout, shape: Sequence[int], local_shapes: Mapping[int, Sequence[int]]) -> bool:
    return all(
        rank in layout and layout.local_shape(shape, rank) == tuple(local) for rank, local in local_shapes.items()
    )


def shape_violations(
    name: str, side: str, spec: TensorSpec, local_shapes: Mapping[int, Sequence[int]]
) -> list[Violation]:
    """A violation for each rank whose real local shape is not the one that its layout gives it."""
    found = []
    for rank, shape in sorted(local_shapes.items()):
        planned = spec.local_shape(rank)
        if planned is None:
            found.append(_layout(name, side, rank, "it holds the tensor, but no layout of it names this rank"))
        elif planned != tuple(shape):
            text = f"its local shape is {tuple(shape)}, but its layout gives it {planned} of {spec.shape}"
            found.append(Violation(code="shape_mismatch", name=name, side=side, rank=rank, text=text))
    return found
