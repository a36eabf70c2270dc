"""How often the source itself sends each piece: to every host, or to the heads of some chains of hosts.

Sending directly to every host is best if no source NIC then needs longer than the targets need to receive. Otherwise
the classes that such a NIC sends are cut into fewer chains, as many as fit. This is decided once per plan, from the
volumes of cells and the hosts that hold them: O(classes x cells), in integers, equal at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from etha.plan.layouts import cells
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.m2m import Holding, Topology

Ints = npt.NDArray[np.int64]
#: The source sends smaller tensors to every rank itself, because a hop costs more than the wire saves (20 us are 1 MB
#: at 50 GB/s). A model's small tensors are a thousandth of its bytes.
RELAY_BYTES = 1 << 20
#: A source NIC may be busy for this many percent of what the targets need on average before chains are cut.
_SLACK = 102


def decide(classes: Sequence[TensorClass], topology: Topology, least: int) -> None:
    """Set ``chains`` of every class whose tensors have at least ``least`` bytes. The others stay direct."""
    if topology.one_agent or not classes:
        return
    agents = 1 + int(max(topology.source_agent.max(initial=0), topology.target_agent.max(initial=0)))
    once, fixed = np.zeros((len(classes), agents), dtype=np.int64), np.zeros(agents, dtype=np.int64)
    hosts = np.ones(len(classes), dtype=np.int64)
    needed = 0
    known: dict[int, Ints] = {}
    for at, klass in enumerate(classes):
        scale = klass.itemsize * klass.members
        copies = 0
        for block in klass.blocks:
            count = known.get(id(block.target))
            if count is None:
                count = known[id(block.target)] = _hosts(block.target, topology.target_host)
            copies += int((volumes(klass.shape, block.target) * count).sum())
            hosts[at] = max(hosts[at], int(count.max(initial=1)))
        needed += copies * scale
        _sends(klass, topology, once[at], fixed)
        if klass.passable and klass.nbytes >= least:
            klass.chains = int(hosts[at])
    _cut(classes, hosts, once, fixed, needed * _SLACK // (100 * max(len(np.unique(topology.target_agent)), 1)))
    for klass, most in zip(classes, hosts.tolist(), strict=True):
        if klass.chains == most and klass.entries == 1:
            klass.chains = None  # every copy comes from the source anyway


def _cut(classes: Sequence[TensorClass], hosts: Ints, once: Ints, fixed: Ints, limit: int) -> None:
    """Reduce ``chains`` of classes for which a NIC would send more than ``limit``."""
    load = fixed + (once * hosts[:, None]).sum(axis=0)
    if int(load.max()) <= limit:
        return
    for at, klass in enumerate(classes):
        mine = np.flatnonzero(once[at])
        if klass.chains is None or not len(mine):
            continue
        worst = int(mine[load[mine].argmax()])
        if load[worst] > limit:
            room = max(limit - int(fixed[worst]), 0)
            klass.chains = max(1, klass.chains * room // int(load[worst] - fixed[worst]))


def volumes(shape: tuple[int, ...], holding: Holding) -> Ints:
    """Number of elements of each flat cell."""
    volume = np.ones(1, dtype=np.int64)
    for n, splits in zip(shape, holding.splits, strict=True):
        volume = (volume[:, None] * cells.table(n, splits).sizes).reshape(-1)
    return volume


def _hosts(holding: Holding, host: Ints) -> Ints:
    """Number of hosts that hold each cell. Holders are sorted by host, absent ones last."""
    ranks = holding.ranks[:, 0, :]
    where = np.where(ranks < 0, -1, host[ranks])
    fresh = (where[:, 1:] != where[:, :-1]) & (where[:, 1:] >= 0)
    count: Ints = (where[:, :1] >= 0).sum(axis=1) + fresh.sum(axis=1)
    return count


def _sends(klass: TensorClass, topology: Topology, once: Ints, fixed: Ints) -> None:
    """Add what each NIC sends of the class to one host (``once``), and what it contributes to reductions
    (``fixed``)."""
    scale = klass.itemsize * klass.members
    if klass.reduction is not None:
        holding = klass.reduction.holding
        peers = klass.reduction.count * np.maximum(holding.count, 1)
        each = volumes(klass.shape, holding) * scale // peers
        shared = [(holding, each)]
    elif klass.m2m.gaps:
        _pieces_sent(klass, topology, once)
        shared = []
    else:
        shared = [(h, volumes(klass.shape, h) * scale // klass.m2m.replicas) for h in klass.m2m.source]
    for holding, each in shared:
        cell, k, p = np.nonzero(holding.ranks >= 0)
        agent = topology.source_agent[holding.ranks[cell, k, p]]
        np.add.at(once, agent, each[cell])
        if klass.reduction is not None:
            np.add.at(fixed, agent, each[cell] * (klass.reduction.count - 1))


def _pieces_sent(klass: TensorClass, topology: Topology, once: Ints) -> None:
    """``_sends`` of a source of regions, whose holders differ from piece to piece."""
    for block in klass.blocks:
        for pieces in block.all(klass.m2m.replicas):
            ranks, _, count = klass.m2m.sources(pieces.cells)
            each = pieces.size * klass.itemsize * klass.members // np.maximum(count, 1)
            m, p = np.nonzero(ranks >= 0)
            np.add.at(once, topology.source_agent[ranks[m, p]], each[m])
