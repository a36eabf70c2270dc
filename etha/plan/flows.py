"""Who sends how much to whom over a whole plan: one line for each link, summed class by class.

Every class is planned for all ranks at once and multiplied by how many tensors are of it, so the cost is
that of the links of each class and no loop runs over ranks or tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from etha.plan import dtypes
from etha.plan.m2m import assign
from etha.plan.program import CONTRIBUTE, MOVE, RESULT

if TYPE_CHECKING:
    from etha.plan.blocks import Block, Pieces
    from etha.plan.chunks import TensorClass
    from etha.plan.plan import Plan
    from etha.plan.reduction import Reduction

Ints = npt.NDArray[np.int64]
#: Rows that are looked at together; more are taken in parts.
_MOST_ROWS = 1 << 21
#: Links are summed in a table of all rank pairs where that has no more entries than this.
_MOST_PAIRS = 1 << 23

#: (sender, receiver, bytes, how many tensors do so) of rows of one kind.
_Rows = tuple[Ints, Ints, Ints, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """All links of a plan, each once: (kind, sender, receiver), their bytes, rows and distance.

    ``distance`` is 0 inside one agent, 1 inside one host, 2 between hosts. The ends of a CONTRIBUTE link
    are both of the source side. ``here`` and ``there`` are the hosts of the two ends, ``nic_out`` and
    ``nic_in`` their agents, each with a NIC of its own.
    """

    kind: Ints
    source: Ints
    target: Ints
    nbytes: Ints
    rows: Ints
    distance: Ints
    here: Ints
    there: Ints
    nic_out: Ints
    nic_in: Ints


def flows(plan: Plan) -> Flows:
    """Every link of ``plan``; O(links of each class)."""
    m, n = len(plan.topology.source_host), len(plan.topology.target_host)
    sums = {MOVE: _Links(m, n), CONTRIBUTE: _Links(m, m), RESULT: _Links(m, n)}
    for at, klass in enumerate(plan.classes):
        times = np.bincount(plan.turn_of[plan.class_of == at], minlength=klass.turns).astype(np.int64)
        for kind, rows in class_rows(klass, times):
            sums[kind].add(*rows)
    columns: list[tuple[Ints, ...]] = []
    for kind, links in sums.items():
        source, target, nbytes, rows_ = links.done()
        columns.append((np.full_like(source, kind), source, target, nbytes, rows_))
    kinds, source, target, nbytes, count = (np.concatenate(c) for c in zip(*columns, strict=True))
    t, inside = plan.topology, kinds == CONTRIBUTE
    there = _of_target(inside, target, t.source_host, t.target_host)
    nic_in = _of_target(inside, target, t.source_agent, t.target_agent)
    here, nic_out = t.source_host[source], t.source_agent[source]
    distance = np.where(nic_out == nic_in, 0, np.where(here == there, 1, 2)).astype(np.int64)
    return Flows(
        kind=kinds,
        source=source,
        target=target,
        nbytes=nbytes,
        rows=count,
        distance=distance,
        here=here,
        there=there,
        nic_out=nic_out,
        nic_in=nic_in,
    )


def _of_target(inside: npt.NDArray[np.bool_], target: Ints, source_side: Ints, target_side: Ints) -> Ints:
    found = np.empty_like(target)
    found[inside] = source_side[target[inside]]
    found[~inside] = target_side[target[~inside]]
    return found


class _Links:
    """Bytes and rows summed by (sender, receiver)."""

    def __init__(self, senders: int, receivers: int) -> None:
        self._receivers = max(receivers, 1)
        self._pairs = max(senders, 1) * self._receivers
        self._dense = self._pairs <= _MOST_PAIRS
        self._sums: tuple[Ints, Ints] | None = None
        self._parts: list[tuple[Ints, Ints, Ints]] = []

    def add(self, source: Ints, target: Ints, nbytes: Ints, times: Ints) -> None:
        key = source * self._receivers + target
        if not self._dense:
            self._parts.append(_summed(key, nbytes * times, times))
            return
        if self._sums is None:
            self._sums = np.zeros(self._pairs, dtype=np.int64), np.zeros(self._pairs, dtype=np.int64)
        np.add.at(self._sums[0], key, nbytes * times)
        np.add.at(self._sums[1], key, times)

    def done(self) -> _Rows:
        """(sender, receiver, bytes, rows), ascending."""
        if self._sums is not None:
            key = np.flatnonzero(self._sums[1]).astype(np.int64)
            nbytes, rows = self._sums[0][key], self._sums[1][key]
        elif self._parts:
            key, nbytes, rows = _summed(*(np.concatenate(c) for c in zip(*self._parts, strict=True)))
        else:
            key = nbytes = rows = np.zeros(0, dtype=np.int64)
        return key // self._receivers, key % self._receivers, nbytes, rows


def _summed(key: Ints, nbytes: Ints, rows: Ints) -> tuple[Ints, Ints, Ints]:
    keys, at = np.unique(key, return_inverse=True)
    sums = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums[0], at.reshape(-1), nbytes)
    np.add.at(sums[1], at.reshape(-1), rows)
    return keys, sums[0], sums[1]


def class_rows(klass: TensorClass, times: Ints) -> Iterator[tuple[int, _Rows]]:
    """All rows of one class in parts, (kind, rows); ``times[w]`` tensors are on turn w."""
    if klass.reduction is not None:
        yield from _reduced(klass, klass.reduction, times)
        return
    for block in klass.blocks:
        width = klass.turns * klass.m2m.replicas * block.target.ranks.shape[2]
        for pieces in all_pieces(block, width):
            yield MOVE, _moves(klass, block, pieces, times)


def all_pieces(block: Block, width: int) -> Iterator[Pieces]:
    """The pieces of every target cell, so many at a time that ``width`` rows each are few."""
    ranges = [np.arange(len(o.size), dtype=np.int64) for o in block.overlays]
    if not ranges:
        yield block.over([])
        return
    for r in ranges[1:]:
        width *= len(r)
    step = max(1, _MOST_ROWS // max(width, 1))
    for lo in range(0, len(ranges[0]), step):
        yield block.over([ranges[0][lo : lo + step], *ranges[1:]])


def _moves(klass: TensorClass, block: Block, pieces: Pieces, times: Ints) -> _Rows:
    ranks, _, count = klass.m2m.sources(pieces.cells)
    copies = block.target.ranks[pieces.copies, 0, :]
    wanted = block.target.count[pieces.copies]
    found = assign(
        ranks, count, block.target.ranks[:, 0, :], pieces.copies, wanted, pieces.ordinal, pieces.degree, pieces.extents,
        pieces.size * klass.itemsize, klass.turns, klass.m2m.topology,
    )  # fmt: skip
    w, m, s, q = np.nonzero(np.broadcast_to(found.valid, found.column.shape))
    size = pieces.size[m]
    if found.parts.max(initial=1) > 1:
        extent = pieces.extents[m, found.dim[m]]
        share = extent * (s + 1) // found.parts[m] - extent * s // found.parts[m]
        size = np.where(found.whole[m, q], size, size // np.maximum(extent, 1) * share)
    return ranks[m, found.column[w, m, s, q]], copies[m, q], size * klass.itemsize, times[w]


def _reduced(klass: TensorClass, r: Reduction, times: Ints) -> Iterator[tuple[int, _Rows]]:
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
        yield CONTRIBUTE, (members.reshape(-1), to.reshape(-1), each.reshape(-1), count)
    for block in klass.blocks:
        for pieces in all_pieces(block, block.target.ranks.shape[2]):
            copies = block.target.ranks[pieces.copies, 0, :]
            cell, inside = r.split(pieces.cells[0])
            for w, number in enumerate(times.tolist()):
                owner, _, _ = r.owner(cell, inside, np.full(len(cell), w, dtype=np.int64))
                m, q = np.nonzero((copies >= 0) & (owner >= 0)[:, None])
                count = np.full(len(m), number, dtype=np.int64)
                yield RESULT, (owner[m], copies[m, q], pieces.size[m] * klass.itemsize, count)
