"""Carriers: ranks whose NIC receives for another rank of their host, whose own NIC is too busy.

A row from another host is split if the holder's NIC receives more than the mean of its host. A part of it goes to other
ranks of the host (CARRY), which keep it packed as it travels and hand it on (DELIVER). Which ranks, and what share, is
decided once per plan from what each NIC of the host is to receive (ingress_balance.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from etha.plan.planner.m2m import Topology
from etha.plan.planner.pieces import Pieces
from etha.plan.planner.rank_plan import CARRY, DELIVER, MOVE, Region
from etha.plan.planner.senders import Assignment

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
#: Shares are counted in this many parts of the split dim.
SHARES = 4096
#: The first dim with at least this many elements is split; if there is none, the longest.
_LONG = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carriers:
    """For each target rank its carriers ``takers`` (ranks, T), -1 for none, and ``upto`` (ranks, T).

    Carrier i takes the shares ``upto[i - 1]`` to ``upto[i]`` of SHARES. ``donors[t]`` are the ranks for which t
    carries.
    """

    takers: Ints
    upto: Ints
    donors: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def split(self, topology: Topology, source: Ints, target: Ints, may: Bools, extent: Ints) -> Split | None:
        """Split the rows ``source`` -> ``target`` that ``may`` be split, along ``extent``. None if no row is split."""
        source = np.where(may, source, 0)  # some rows that may not be split come from target ranks
        wire = (topology.source_host[source] != topology.target_host[target]) & (
            topology.source_agent[source] != topology.target_agent[target]
        )
        rows = np.flatnonzero(may & wire & (self.takers[target, 0] >= 0))
        if not len(rows):
            return None
        ends = extent[rows, None] * self.upto[target[rows]] // SHARES
        zero = np.zeros((len(rows), 1), dtype=np.int64)
        lo, hi = np.concatenate([zero, ends], axis=1), np.concatenate([ends, extent[rows, None]], axis=1)
        to = np.concatenate([self.takers[target[rows]], zero - 1], axis=1)
        r, i = np.nonzero(hi > lo)
        whole = np.ones(len(source), dtype=np.bool_)
        whole[rows] = False
        carrier = to[r, i]
        # Carried data makes two rows: to the carrier, and from it to the holder.
        twice = np.repeat(np.arange(len(r)), 1 + (carrier >= 0))
        second = np.append(False, twice[1:] == twice[:-1])[: len(twice)]
        rest = np.flatnonzero(whole)
        row = np.concatenate([rest, rows[r][twice]])
        carried = np.concatenate([np.full(len(rest), -1), carrier[twice]])
        deliver = np.concatenate([np.zeros(len(rest), dtype=np.bool_), second])
        low, high = (np.concatenate([np.full(len(rest), -1), bound[r, i][twice]]) for bound in (lo, hi))
        order = np.argsort(row, kind="stable")
        return Split(row=row[order], carrier=carried[order], deliver=deliver[order], low=low[order], high=high[order])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Rows after splitting.

    ``row`` is the row that each comes from, ``carrier`` its carrier or -1, and ``deliver`` whether it is the second row
    of a carried part. ``low`` to ``high`` are its elements of the split dim, -1 for a row that stayed whole.
    """

    row: Ints
    carrier: Ints
    deliver: Bools
    low: Ints
    high: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carried:
    """A Split with its rows' ends. ``low`` and ``high`` are in dim ``dim`` of piece ``piece``; ``size`` is in
    elements."""

    row: Ints
    carrier: Ints
    deliver: Bools
    kind: Ints
    source: Ints
    target: Ints
    piece: Ints
    dim: Ints
    low: Ints
    high: Ints
    size: Ints


def carried(
    carriers: Carriers,
    topology: Topology,
    pieces: Pieces,
    found: Assignment,
    picked: tuple[Ints, ...],
    kind: Ints,
    source: Ints,
    target: Ints,
) -> Carried | None:
    """How the rows ``picked`` of an assignment are split; None if none is."""
    _, m, s, q = picked
    if not pieces.extents.shape[1] or not len(m):
        return None
    long = pieces.extents >= _LONG
    dim = np.where(long.any(axis=1), long.argmax(axis=1), pieces.extents.argmax(axis=1))[m]
    cut = ~found.whole[m, q]
    dim = np.where(cut, found.dim[m], dim)
    extent, parts = pieces.extents[m, dim], found.parts[m]
    lo, hi = np.where(cut, extent * s // parts, 0), np.where(cut, extent * (s + 1) // parts, extent)
    may = kind == MOVE
    if found.ends is not None:
        may = may & found.ends[m, q]
    x = carriers.split(topology, source, target, may, hi - lo)
    if x is None:
        return None
    r = x.row
    passed = x.carrier >= 0
    each = pieces.size[m[r]] // np.maximum(extent[r], 1)
    return Carried(
        row=r,
        carrier=x.carrier,
        deliver=x.deliver,
        kind=np.where(passed, np.where(x.deliver, DELIVER, CARRY), kind[r]),
        source=np.where(x.deliver, x.carrier, source[r]),
        target=np.where(passed & ~x.deliver, x.carrier, target[r]),
        piece=m[r],
        dim=dim[r],
        low=np.where(x.low >= 0, x.low + lo[r], -1),
        high=np.where(x.low >= 0, x.high + lo[r], -1),
        size=np.where(x.low >= 0, each * (x.high - x.low), 0),
    )


def packed(region: Region, kind: int) -> Region:
    """The region with its packed end at dense offsets."""
    if kind not in (CARRY, DELIVER):
        return region
    dims = []
    for runs in region.dims:
        runs = runs.copy()
        runs[:, int(kind == CARRY)] = np.cumsum(runs[:, 2]) - runs[:, 2]
        dims.append(runs)
    return Region(dims=tuple(dims), product=region.product if kind == CARRY else 0)
