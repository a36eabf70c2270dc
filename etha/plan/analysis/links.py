"""Who sends how much to whom over a whole plan: one entry for each link, summed class by class.

Every class is planned for all ranks at once and multiplied by its number of tensors. So the cost is that of the links
of each class, and no loop runs over ranks or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.plan.planner.class_rows import Columns, class_rows
from etha.plan.planner.plan import BasePlan
from etha.plan.planner.rank_plan import CARRY, CONTRIBUTE, DELIVER, FORWARD, MOVE, RESULT

Ints = npt.NDArray[np.int64]
#: Links are summed in a table of all rank pairs if it has at most this many entries.
_MOST_PAIRS = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkTable:
    """All links of a plan, each once: (kind, sender, receiver), with bytes, rows and distance.

    ``distance`` is 0 inside one agent, 1 inside one host, 2 between hosts. Both ends of a CONTRIBUTE link are on the
    source side, both ends of a FORWARD link on the target side. ``sender`` and ``receiver`` are the ends in a numbering
    in which target ranks follow source ranks. ``here`` and ``there`` are the hosts of the two ends, ``nic_out`` and
    ``nic_in`` their agents, each with its own NIC. ``hops`` is the largest number of times that any bytes are
    forwarded.
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


def flows(plan: BasePlan) -> LinkTable:
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
    return LinkTable(
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
    """Sums bytes and rows by (sender, receiver)."""

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

    def done(self) -> Columns:
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
