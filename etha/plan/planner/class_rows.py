"""All rows of a class of equal tensors at once, without a loop over ranks: who sends how much to whom.

It is for code that sums bytes over all ranks. The rows of single ranks (``chunks.py``) come from the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from etha.plan.layouts import dtypes
from etha.plan.planner.carriers import carried
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.pieces import CellBlock, Pieces
from etha.plan.planner.rank_plan import CARRY, CONTRIBUTE, DELIVER, FORWARD, MOVE, RESULT
from etha.plan.planner.reduction import Reduction
from etha.plan.planner.senders import assign

Ints = npt.NDArray[np.int64]

#: (sender, receiver, bytes, number of tensors) of rows of one kind.
Columns = tuple[Ints, Ints, Ints, Ints]


def class_rows(klass: TensorClass, times: Ints) -> Iterator[tuple[int, Columns, int]]:
    """All rows of one class in parts, (kind, rows, most hops of them). ``times[w]`` tensors are on turn w."""
    if klass.reduction is not None:
        yield from _reduced(klass, klass.reduction, times)
        return
    for block in klass.blocks:
        width = klass.turns * klass.m2m.replicas * block.target.ranks.shape[2]
        for pieces in block.all(width):
            yield from _moves(klass, block, pieces, times)


def _moves(klass: TensorClass, block: CellBlock, pieces: Pieces, times: Ints) -> Iterator[tuple[int, Columns, int]]:
    ranks, _, count = klass.m2m.sources(pieces.cells)
    copies = block.target.ranks[pieces.copies, 0, :]
    wanted = block.target.count[pieces.copies]
    found = assign(
        ranks, count, block.target.ranks[:, 0, :], pieces.copies, wanted, pieces.ordinal, pieces.degree, pieces.number,
        pieces.crowd, pieces.extents, pieces.size * klass.itemsize, klass.turns, klass.m2m.topology, None, klass.chains,
    )  # fmt: skip
    w, m, s, q = np.nonzero(np.broadcast_to(found.valid, found.column.shape))
    size = pieces.size[m]
    if found.parts.max(initial=1) > 1:
        extent = pieces.extents[m, found.dim[m]]
        share = extent * (s + 1) // found.parts[m] - extent * s // found.parts[m]
        size = np.where(found.whole[m, q], size, size // np.maximum(extent, 1) * share)
    source, target, nbytes, times = ranks[m, found.column[w, m, s, q]], copies[m, q], size * klass.itemsize, times[w]
    via = np.full_like(m, -1) if found.via is None else found.via[w, m, s, q]
    hops = 0 if found.depth is None else int(found.depth[w, m, s, q].max(initial=0))
    if klass.carriers is not None:
        kind = np.where(via < 0, MOVE, FORWARD)
        x = carried(klass.carriers, klass.m2m.topology, pieces, found, (w, m, s, q), kind, source, target)
        if x is not None:
            nbytes = np.where(x.low >= 0, x.size * klass.itemsize, nbytes[x.row])
            for one in (CARRY, DELIVER):
                at = np.flatnonzero(x.kind == one)
                yield one, (x.source[at], x.target[at], nbytes[at], times[x.row[at]]), 1
            at = np.flatnonzero(x.carrier < 0)
            r = x.row[at]
            source, target, nbytes, times, via, m = source[r], target[r], nbytes[at], times[r], via[r], m[r]
    yield from _passed(MOVE, source, via, copies, m, (target, nbytes, times), hops)


def _passed(
    kind: int, source: Ints, via: Ints, copies: Ints, m: Ints, others: tuple[Ints, Ints, Ints], hops: int
) -> Iterator[tuple[int, Columns, int]]:
    """Separate the rows from the source from those that copy ``via`` of piece ``m`` forwards; ``others`` are the other
    columns."""
    first = via < 0
    target, nbytes, times = (c[first] for c in others)
    yield kind, (source[first], target, nbytes, times), 0
    if not first.all():
        target, nbytes, times = (c[~first] for c in others)
        yield FORWARD, (copies[m[~first], via[~first]], target, nbytes, times), hops


def _reduced(klass: TensorClass, r: Reduction, times: Ints) -> Iterator[tuple[int, Columns, int]]:
    slot, volume = r.volumes()
    cell, inside = r.split(slot)
    for w, number in enumerate(times.tolist()):
        turn = np.full(len(slot), w, dtype=np.int64)
        owner, _, row = r.owner(cell, inside, turn)
        keep = (owner >= 0) & (volume > 0)
        members = r.holding.ranks[cell[keep], :, row[keep]]  # (slots, K)
        each = np.broadcast_to(volume[keep, None] * dtypes.itemsize(r.dtype), members.shape)
        to = np.broadcast_to(owner[keep, None], members.shape)
        count = np.full(members.size, number, dtype=np.int64)
        yield CONTRIBUTE, (members.reshape(-1), to.reshape(-1), each.reshape(-1), count), 0
    for block in klass.blocks:
        for pieces in block.all(klass.turns * block.target.ranks.shape[2]):
            copies = block.target.ranks[pieces.copies, 0, :]
            owner, keep, via, hop, _ = r.results(klass, block, pieces, None)
            v, m, q = np.nonzero(keep)
            others = copies[m, q], pieces.size[m] * klass.itemsize, times[v]
            most = int(hop[v, m, q].max(initial=0))
            yield from _passed(RESULT, owner[v, m], via[v, m, q], copies, m, others, most)
