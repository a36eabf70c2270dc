"""What a layout says that a rank holds, read off the layout itself: the proof asks this and nothing of the planner."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from etha.plan.layouts import cells
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.tensor_spec import TensorSpec

Ints = npt.NDArray[np.int64]


def owned(spec: TensorSpec, rank: int) -> list[tuple[Ints, Ints, int]] | None:
    """Per dim (local offsets, global starts, local size) of the runs of a rank; None where it holds nothing."""
    if spec.present is not None and rank not in spec.present:
        return None
    for layout in spec.layouts:
        where = layout.cell(len(spec.shape), rank)
        if where is not None:
            tables = [cells.table(n, s) for n, s in zip(spec.shape, layout.grid(len(spec.shape)).splits, strict=True)]
            rows = [t.rows_of(c) for t, c in zip(tables, where, strict=True)]
            return [(t.offset[r], t.start[r], int(t.sizes[c])) for t, r, c in zip(tables, rows, where, strict=True)]
    return None


def row_of(spec: TensorSpec, rank: int) -> list[int]:
    """The ranks whose contributions belong with those of ``rank``, by number: read off the mesh itself."""
    layout: Layout = next(part for part in spec.layouts if rank in part)
    place = tuple(np.argwhere(layout.ranks == rank)[0])
    index = tuple(slice(None) if axis.partial else at for axis, at in zip(layout.axes, place, strict=True))
    row: list[int] = layout.ranks[index].reshape(-1).tolist()
    return row
