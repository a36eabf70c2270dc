"""Which ranks of a host carry for which, so that its NICs receive equal shares from other hosts.

Bytes are summed over the whole model, class by class from the volumes of cells (or link by link, if the two sides share
hosts). So tensors that load different NICs balance each other, and only what remains uneven is carried. O(classes x
holders), in integers, equal at both ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from etha.plan.planner.carriers import SHARES, Carriers
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.class_rows import class_rows
from etha.plan.planner.fanout import volumes
from etha.plan.planner.m2m import Topology
from etha.plan.planner.rank_plan import MOVE, RESULT

Ints = npt.NDArray[np.int64]
#: A host stays as it is if its busiest NIC receives at most this many percent of the mean.
_UNEVEN = 102
#: If both sides share hosts, links are counted one by one up to this many pieces and copies of all classes.
_MOST_LINKS = 1 << 20


def carriers(classes: Sequence[TensorClass], topology: Topology) -> Carriers | None:
    """Who carries for whom; None if no host has both a busy and an idle NIC."""
    ranks = len(topology.target_host)
    if topology.one_agent or not classes or not ranks:
        return None
    hosts, nic = _nics(topology)
    if len(hosts) == len(np.unique(hosts)):  # a NIC for each host, as where one agent serves a host
        return None
    # By rank: what it receives from other hosts, what of that may be carried, and whether it holds anything.
    found = np.zeros((3, ranks), dtype=np.int64)
    if topology.apart:
        for klass in classes:
            _by_cells(klass, topology, found)
    elif sum(_links(klass) for klass in classes) <= _MOST_LINKS:
        for klass in classes:
            _by_links(klass, topology, found)
    taken, movable, held = found
    shares: dict[int, list[tuple[int, int]]] = {}
    load, here = np.zeros(int(nic.max()) + 1, dtype=np.int64), np.zeros(int(nic.max()) + 1, dtype=np.int64)
    np.add.at(load, nic, taken)
    np.maximum.at(here, nic, held)
    total, count, most = (np.zeros(int(hosts.max()) + 1, dtype=np.int64) for _ in range(3))
    np.add.at(total, hosts, load)
    np.add.at(count, hosts, here)  # only NICs of ranks that hold anything count
    np.maximum.at(most, hosts, load)
    for one in np.flatnonzero(most * count * 100 > total * _UNEVEN).tolist():
        nics = np.flatnonzero((hosts == one) & (here > 0))
        _level(nics, load, int(total[one] // count[one]), nic, held, movable, shares)
    if not shares:
        return None
    width = max(len(s) for s in shares.values())
    takers, upto = np.full((ranks, width), -1, dtype=np.int64), np.zeros((ranks, width), dtype=np.int64)
    donors: dict[int, list[int]] = defaultdict(list)
    for rank, some in sorted(shares.items()):
        sum_ = np.cumsum([share for _, share in some])
        upto[rank] = sum_[-1]
        for i, (taker, _) in enumerate(some):
            takers[rank, i], upto[rank, i] = taker, sum_[i]
            donors[taker].append(rank)
    return Carriers(takers=takers, upto=upto, donors={t: tuple(d) for t, d in donors.items()})


def _nics(topology: Topology) -> tuple[Ints, Ints]:
    """The host of each NIC of the target side, and the NIC of each rank; NICs are numbered host by host."""
    pairs = np.stack([topology.target_host, topology.target_agent])
    found, nic = np.unique(pairs, axis=1, return_inverse=True)
    return found[0], nic.reshape(-1)


def _level(
    nics: Ints, load: Ints, mean: int, nic: Ints, held: Ints, movable: Ints, shares: dict[int, list[tuple[int, int]]]
) -> None:
    """Move what the NICs of one host receive above the mean to those below it."""
    room = [(int(a), mean - int(load[a])) for a in nics if load[a] < mean]
    for busy in nics[load[nics] > mean].tolist():
        ranks = np.flatnonzero((nic == busy) & (movable > 0))
        excess = int(load[busy]) - mean
        for rank in ranks.tolist():
            left = min(excess, int(movable[rank]))
            excess -= left
            while left > 0 and room:
                other, space = room.pop()
                part = min(left, space)
                share = part * SHARES // int(movable[rank])
                if share:
                    taker = int(np.flatnonzero((nic == other) & (held > 0))[0])
                    shares.setdefault(rank, []).append((taker, share))
                left -= part
                if space > part:
                    room.append((other, space - part))


def _by_cells(klass: TensorClass, topology: Topology, found: Ints) -> None:
    """Add what the holders of each cell receive if all of it comes from other hosts."""
    scale = klass.itemsize * klass.members
    for block in klass.blocks:
        ranks = block.target.ranks[:, 0, :]
        nbytes = np.broadcast_to((volumes(klass.shape, block.target) * scale)[:, None], ranks.shape)
        host = np.where(ranks < 0, -1, topology.target_host[ranks])
        first = np.append(np.ones((len(ranks), 1), dtype=np.bool_), host[:, 1:] != host[:, :-1], axis=1)
        group = np.cumsum(first, axis=1) - 1 + np.arange(len(ranks))[:, None] * ranks.shape[1]
        members = np.bincount(group.reshape(-1), minlength=ranks.size)[group]
        groups = (first & (ranks >= 0)).sum(axis=1)
        c, q = np.nonzero(ranks >= 0)
        each = nbytes[c, q] // (members[c, q] if klass.chains is not None else 1)
        last = (members[c, q] == 1) & ((groups[c] <= klass.chains) if klass.chains is not None else klass.entries == 1)
        np.add.at(found[0], ranks[c, q], each)
        np.add.at(found[1], ranks[c, q], np.where(last & (klass.reduction is None), each, 0))
        found[2, ranks[c, q]] = 1


def _links(klass: TensorClass) -> int:
    """Approximate number of links of one class."""
    total = 0
    for block in klass.blocks:
        pieces = int(np.prod([len(o.size) for o in block.overlays], dtype=np.int64))
        total += pieces * block.target.ranks.shape[2] * klass.turns * klass.m2m.replicas
    return total


def _by_links(klass: TensorClass, topology: Topology, found: Ints) -> None:
    """Add what every link between hosts brings. All of a class in which nobody forwards may be carried."""
    times = np.full(klass.turns, -(-klass.members // klass.turns), dtype=np.int64)
    last = klass.entries == 1 and klass.chains is None and klass.reduction is None
    for kind, (source, target, nbytes, count), _ in class_rows(klass, times):
        if kind not in (MOVE, RESULT):
            continue
        wire = (topology.source_host[source] != topology.target_host[target]) & (
            topology.source_agent[source] != topology.target_agent[target]
        )
        np.add.at(found[0], target[wire], (nbytes * count)[wire])
        np.add.at(found[1], target[wire], (nbytes * count)[wire] * last)
    for block in klass.blocks:
        ranks = block.target.ranks
        found[2, ranks[ranks >= 0]] = 1
