"""Which hosts hold and which hosts need the same bytes: the basis of every bound and every balance.

Elements are told apart only by the hosts that hold them and the hosts that need them, so a model of 1,000 tensors on
1,000 ranks has only some hundred groups.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.plan.layouts import cells
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.m2m import Holding
from etha.plan.planner.plan import BasePlan

Ints = npt.NDArray[np.int64]
Hosts = frozenset[int]


@dataclass(frozen=True, slots=True)
class DemandGroup:
    """Elements with the same hosts. ``holders[k]`` are the hosts with contribution k (only one if not Partial).

    ``needs`` are the hosts with a target rank that wants them.
    """

    holders: tuple[Hosts, ...]
    needs: Hosts

    def complete(self) -> Hosts:
        """Hosts that hold every contribution."""
        return self.holders[0].intersection(*self.holders[1:])

    def apart(self) -> list[Hosts]:
        """A set of contributions whose holders are disjoint, chosen greedily. Each must leave one of its hosts.

        Contributions that the only host in need holds itself are left out.
        """
        found: list[Hosts] = []
        for holders in sorted(set(self.holders), key=lambda h: (len(h), sorted(h))):
            alone = len(self.needs) == 1 and self.needs <= holders
            if not alone and holders.isdisjoint(frozenset().union(*found)):
                found.append(holders)
        return found


def demand(plan: BasePlan) -> dict[DemandGroup, int]:
    """Bytes at the wire dtype of each group of elements of the whole plan."""
    members = np.bincount(plan.class_of[plan.class_of >= 0], minlength=len(plan.classes))
    sets = _HostSets(plan.topology.source_host, plan.topology.target_host)
    total: dict[DemandGroup, int] = defaultdict(int)
    for klass, count in zip(plan.classes, members.tolist(), strict=True):
        for key, elements in _of_class(klass, sets).items():
            total[sets.group(key, len(klass.m2m.target))] += elements * klass.itemsize * count
    return total


class _HostSets:
    """The hosts of each cell of a holding, as numbers of distinct sets; computed once per holding."""

    def __init__(self, source_host: Ints, target_host: Ints) -> None:
        self._hosts = (source_host, target_host)
        self._known: dict[tuple[Hosts, ...], int] = {}
        self._sets: list[tuple[Hosts, ...]] = []
        self._of: dict[int, tuple[Holding, Ints]] = {}
        #: Number of the empty set, because nobody keeps what lies in a gap.
        self.nobody = self._known[(frozenset(),)] = 0
        self._sets.append((frozenset(),))

    def of(self, holding: Holding, side: int) -> Ints:
        """Number of the set of each cell, (cells,)."""
        found = self._of.get(id(holding))
        if found is None:
            # Keep the holding, so that its id is not reused.
            found = self._of[id(holding)] = holding, self._number(holding.ranks, self._hosts[side])
        return found[1]

    def _number(self, ranks: Ints, host: Ints) -> Ints:
        where = np.where(ranks < 0, -1, host[ranks] if len(host) else -1)
        where = np.sort(where, axis=2)
        where[:, :, 1:][where[:, :, 1:] == where[:, :, :-1]] = -1
        where = np.sort(where, axis=2)
        distinct, at = np.unique(where.reshape(len(where), -1), axis=0, return_inverse=True)
        numbers = np.empty(len(distinct), dtype=np.int64)
        for i, row in enumerate(distinct.reshape(len(distinct), *where.shape[1:]).tolist()):
            key = tuple(frozenset(h for h in one if h >= 0) for one in row)
            numbers[i] = self._known.setdefault(key, len(self._sets))
            if numbers[i] == len(self._sets):
                self._sets.append(key)
        return numbers[at.reshape(-1)]

    def group(self, key: tuple[int, ...], targets: int) -> DemandGroup:
        """The group of the sets of all source grids followed by those of ``targets`` target grids."""
        sources = [self._sets[i] for i in key[: len(key) - targets]]
        needs = frozenset[int]().union(*(self._sets[i][0] for i in key[len(key) - targets :]))
        holders = sources[0] if len(sources) == 1 else (frozenset[int]().union(*(s[0] for s in sources)),)
        return DemandGroup(holders, needs)


def _of_class(klass: TensorClass, sets: _HostSets) -> dict[tuple[int, ...], int]:
    """Elements of one tensor by (set of each source grid, set of each target grid)."""
    origin = klass.m2m.source if klass.reduction is None else (klass.reduction.holding,)
    grids = [*origin, *klass.m2m.target]
    joints = [cells.joint(n, tuple(h.splits[d] for h in grids)) for d, n in enumerate(klass.shape)]
    sizes = np.ones(1, dtype=np.int64)
    for joint in joints:
        each = np.zeros(joint.cells, dtype=np.int64)
        np.add.at(each, joint.cell, joint.stop - joint.start)
        sizes = (sizes[:, None] * each).reshape(-1)
    columns = []
    for g, holding in enumerate(grids):
        flat, gap = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_)
        for d, (joint, count) in enumerate(zip(joints, holding.cells, strict=True)):
            part = joint.part[g]
            flat = (flat[:, None] * count + np.maximum(part, 0)).reshape(-1)
            gap = (gap[:, None] | (part < 0)).reshape(-1)
            assert len(part) == joint.cells, d
        found = sets.of(holding, int(g >= len(origin)))[flat]
        columns.append(np.where(gap, sets.nobody, found) if gap.any() else found)
    names, at = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    total = np.zeros(len(names), dtype=np.int64)
    np.add.at(total, at.reshape(-1), sizes)
    return {tuple(name): size for name, size in zip(names.tolist(), total.tolist(), strict=True) if size}
