"""How much can move without packing: pieces that are one long run of memory at both ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etha.plan.layouts import cells
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.plan import BasePlan

#: Shorter pieces are packed with others.
ZERO_COPY = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Bytes of the whole plan, all copies: without packing, and through a buffer, in ``segments`` runs of memory."""

    zero_copy: int
    packed: int
    segments: int


def packing(plan: BasePlan) -> Packing:
    """Count for contiguous local tensors. Trailing dims that both ends hold whole merge; casts and reductions pack."""
    members = np.bincount(plan.class_of[plan.class_of >= 0], minlength=len(plan.classes))
    zero = packed = segments = 0
    for at, (klass, count) in enumerate(zip(plan.classes, members.tolist(), strict=True)):
        name = plan.names[int(np.flatnonzero(plan.class_of == at)[0])]
        cast = plan.source[name].dtype is not plan.target[name].dtype
        here, there, runs = _of_class(klass, must_pack=cast or klass.reduction is not None)
        zero, packed, segments = zero + here * count, packed + there * count, segments + runs * count
    return Packing(zero_copy=zero, packed=packed, segments=segments)


def _of_class(klass: TensorClass, *, must_pack: bool) -> tuple[int, int, int]:
    zero = packed = segments = 0
    grids = klass.m2m.source if klass.reduction is None else (klass.reduction.slots,)
    grids = grids if klass.m2m.gaps else grids[:1]
    for block in klass.blocks:
        whole, counts = [], []
        for d, (o, n) in enumerate(zip(block.overlays, klass.shape, strict=True)):
            here = np.stack(
                [
                    cells.table(n, h.splits[d]).sizes[part[o.source]]
                    for h, part in zip(grids, block.parts[d], strict=False)
                ]
            )
            there = cells.table(n, block.target.splits[d]).sizes[o.target]
            counts.append(np.diff(o.ptr))
            whole.append((o.size == here) & (o.size == there) & (counts[-1] == 1))
        for pieces in block.all(1):
            runs = np.ones(len(pieces.size), dtype=np.int64)
            open_ = np.ones(len(pieces.size), dtype=bool)  # all later dims are held whole
            grid = (np.stack(pieces.cells[: len(grids)]) >= 0).argmax(axis=0)  # the first that holds each piece
            for d in reversed(range(len(counts))):
                p = pieces.pairs[d]
                runs *= np.where(open_, counts[d][p], pieces.extents[:, d])
                open_ = open_ & whole[d][grid, p]
            nbytes = pieces.size * klass.itemsize
            copies = block.target.count[pieces.copies]
            long = (runs == 1) & (nbytes >= ZERO_COPY) & (not must_pack)
            zero += int((nbytes * copies)[long].sum())
            packed += int((nbytes * copies)[~long].sum())
            segments += int((runs * copies)[~long].sum())
    return zero, packed, segments
