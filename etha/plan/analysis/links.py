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

from etha.plan.layouts import dtypes
from etha.plan.planner.carriers import carried
from etha.plan.planner.rank_plan import CARRY, CONTRIBUTE, DELIVER, FORWARD, MOVE, RESULT
from etha.plan.planner.senders import assign

if TYPE_CHECKING:
    from etha.plan.planner.chunks import TensorClass
    from etha.plan.planner.pieces import Block, Pieces
    from etha.plan.planner.plan import Plan
    from etha.plan.planner.reduction import Reduction

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
    are both of the source side, those of a FORWARD link both of the target side; ``sender`` and ``receiver`` are
    the ends with the ranks of the target numbered after those of the source. ``here`` and ``there`` are the hosts
    of the two ends, ``nic_out`` and ``nic_in`` their agents, each with a NIC of its own. ``hops`` is how often
    the bytes that come the longest way are passed on.
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
    sender: Ints
    receiver: Ints
    hops: int


def flows(plan: Plan) -> Flows:
    """Every link of ``plan``; O(links of each class)."""
    m, n = len(plan.topology.source_host), len(plan.topology.target_host)
    sums = {
        MOVE: _Links(m, n),
        CONTRIBUTE: _Links(m, m),
        RESULT: _Links(m, n),
        FORWARD: _Links(n, n),
        CARRY: _Links(m, n),
        DELIVER: _Links(n, n),
    }
    hops = 0
    for at, klass in enumerate(plan.classes):
        times = np.bincount(plan.turn_of[plan.class_of == at], minlength=klass.turns).astype(np.int64)
        for kind, rows, hop in class_rows(klass, times):
            sums[kind].add(*rows)
            hops = max(hops, hop)
    columns: list[tuple[Ints, ...]] = []
    for kind, links in sums.items():
        source, target, nbytes, rows_ = links.done()
        columns.append((np.full_like(source, kind), source, target, nbytes, rows_))
    kinds, source, target, nbytes, count = (np.concatenate(c) for c in zip(*columns, strict=True))
    t = plan.topology
    sender, receiver = plan.ends(kinds, source, target)
    hosts, agents = np.concatenate([t.source_host, t.target_host]), np.concatenate([t.source_agent, t.target_agent])
    here, there, nic_out, nic_in = hosts[sender], hosts[receiver], agents[sender], agents[receiver]
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
        sender=sender,
        receiver=receiver,
        hops=hops,
    )


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


def class_rows(klass: TensorClass, times: Ints) -> Iterator[tuple[int, _Rows, int]]:
    """All rows of one class in parts, (kind, rows, most hops of them); ``times[w]`` tensors are on turn w."""
    if klass.reduction is not None:
        yield from _reduced(klass, klass.reduction, times)
        return
    for block in klass.blocks:
        width = klass.turns * klass.m2m.replicas * block.target.ranks.shape[2]
        for pieces in all_pieces(block, width):
            yield from _moves(klass, block, pieces, times)


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


def _moves(klass: TensorClass, block: Block, pieces: Pieces, times: Ints) -> Iterator[tuple[int, _Rows, int]]:
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
) -> Iterator[tuple[int, _Rows, int]]:
    """Rows from the source apart from those that copy ``via`` of piece ``m`` passes on; others are the columns."""
    first = via < 0
    target, nbytes, times = (c[first] for c in others)
    yield kind, (source[first], target, nbytes, times), 0
    if not first.all():
        target, nbytes, times = (c[~first] for c in others)
        yield FORWARD, (copies[m[~first], via[~first]], target, nbytes, times), hops


def _reduced(klass: TensorClass, r: Reduction, times: Ints) -> Iterator[tuple[int, _Rows, int]]:
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
        for pieces in all_pieces(block, klass.turns * block.target.ranks.shape[2]):
            copies = block.target.ranks[pieces.copies, 0, :]
            owner, keep, via, hop, _ = r.results(klass, block, pieces, None)
            v, m, q = np.nonzero(keep)
            others = copies[m, q], pieces.size[m] * klass.itemsize, times[v]
            most = int(hop[v, m, q].max(initial=0))
            yield from _passed(RESULT, owner[v, m], via[v, m, q], copies, m, others, most)
