"""What a picture of a plan shows: ranks, hosts or groups of hosts, the arrows between them, the busiest NICs.

Small plans are shown rank by rank. Where that would be more than a reader can follow, the ranks of one host are one
node, and of many hosts some hosts together; then a map shows who sends how much to whom rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from etha.picture import PictureArrow, PictureNic, PictureNode, PlanPicture
from etha.plan.analysis.bounds import Survey
from etha.plan.analysis.links import LinkTable
from etha.plan.planner.plan import BasePlan
from etha.plan.planner.rank_plan import CONTRIBUTE, inside_target
from etha.units import counted, size

Ints = npt.NDArray[np.int64]
#: Most ranks, hosts, or groups of hosts of one side that are shown as nodes, and most arrows between them.
_MOST_RANKS, _MOST_HOSTS, _MOST_GROUPS, _MOST_ARROWS = 16, 12, (6, 4, 2, 1), 48
#: Most cells of the map along one side; more ranks are shown in groups.
_MOST_CELLS = 64
#: Most NICs whose loads are shown.
_MOST_NICS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureNames:
    """How a picture calls things: its title, the two sides, and hosts and agents by the names that the plan has."""

    title: str = ""
    sides: tuple[str, str] = ("source", "target")
    hosts: Mapping[str, str] | None = None
    agents: Mapping[str, str] | None = None


def picture_of(plan: BasePlan, seen: Survey, names: PictureNames | None = None) -> PlanPicture:
    """The picture of ``plan``; its size does not depend on the number of ranks."""
    names = names or PictureNames()
    found, s, t = seen.flows, seen.stats, plan.topology
    ranks = len(t.source_host), len(t.target_host)
    title = names.title or f"one transfer of {counted(len(plan.names), 'tensor')}: {size(s.total_bytes)}"
    places = _Places(plan, names)
    nodes = _nodes(places, found)
    start, end = nodes.of[found.sender], nodes.of[found.receiver]
    sums = _sums(start, end, found.distance, found.nbytes)
    inside = dict.fromkeys(range(len(nodes.labels)), 0)
    arrows = []
    for a, b, distance, nbytes in sums:
        if a == b:
            inside[a] += nbytes
        else:
            arrows.append(PictureArrow(start=a, end=b, nbytes=nbytes, distance=distance))
    rows, columns = (min(max(count, 1), _MOST_CELLS) for count in ranks)
    nics, alike, mean, count = _nics(places, seen, nodes)
    return PlanPicture(
        title=title,
        sides=names.sides,
        ranks=ranks,
        nbytes=(s.local_bytes, s.host_bytes, s.wire_bytes),
        hosts=nodes.hosts,
        nodes=tuple(
            PictureNode(side=side, host=host, label=label, inside=inside[number])
            for number, (side, host, label) in enumerate(nodes.labels)
        ),
        arrows=tuple(arrows),
        nics=nics,
        nics_in_all=count,
        nic_mean=mean,
        alike=alike,
        bound=s.bound_nic,
        quality=s.quality,
        map=() if nodes.by_rank else _map(found, ranks, rows, columns),
        map_size=(rows, columns),
    )


class _Places:
    """Hosts and agents of all ranks (source ranks, then target ranks), and what they are called."""

    def __init__(self, plan: BasePlan, names: PictureNames) -> None:
        t = plan.topology
        self.ranks = len(t.source_host), len(t.target_host)
        self.host = np.concatenate([t.source_host, t.target_host])
        self.agent = np.concatenate([t.source_agent, t.target_agent])
        self._hosts, self._agents, self._names = t.host_names, t.agent_names, names

    def members(self, side: int) -> range:
        """The numbers of a side's ranks."""
        return range(self.ranks[0]) if not side else range(self.ranks[0], sum(self.ranks))

    def host_name(self, host: int) -> str:
        """What a host is called; "" if it has no name."""
        if host >= len(self._hosts):
            return ""
        return (self._names.hosts or {}).get(self._hosts[host], self._hosts[host])

    def rank_name(self, number: int) -> str:
        """ "source rank 3"."""
        side = int(number >= self.ranks[0])
        return f"{self._names.sides[side]} rank {number - side * self.ranks[0]}"

    def nic_name(self, agent: int) -> str:
        """An agent by its host, and by its own name or its ranks where the host has several agents."""
        mine = np.flatnonzero(self.agent == agent)
        host = int(self.host[mine[0]])
        name, alone = self.host_name(host), len(np.unique(self.agent[self.host == host])) == 1
        if name and alone:
            return name
        if agent < len(self._agents):
            own = (self._names.agents or {}).get(self._agents[agent], self._agents[agent])
        else:
            own = self.rank_name(int(mine[0])) + (f" and {len(mine) - 1} more" if len(mine) > 1 else "")
        return f"{name}, {own}" if name else own


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Nodes:
    """The node ``of`` each rank (source ranks, then target ranks); (side, host, label) of each; names of hosts."""

    of: Ints
    labels: list[tuple[int, int, str]]
    hosts: tuple[str, ...]
    by_rank: bool


def _nodes(places: _Places, found: LinkTable) -> _Nodes:
    """Ranks, hosts, or groups of hosts, the first of these that a reader can still follow."""
    hosts = [_hosts_of(places, side) for side in (0, 1)]
    most = max(places.ranks)
    if most <= _MOST_RANKS:
        ranks = [[[number] for number in places.members(side)] for side in (0, 1)]
        nodes = _grouped(places, ranks, by_rank=True)
        if _followed(nodes, found):
            return nodes
    if max(map(len, hosts)) <= _MOST_HOSTS:
        nodes = _grouped(places, hosts, by_rank=False)
        if _followed(nodes, found):
            return nodes
    for groups in _MOST_GROUPS:
        nodes = _grouped(places, [_together(some, groups) for some in hosts], by_rank=False)
        if _followed(nodes, found):
            break
    return nodes


def _followed(nodes: _Nodes, found: LinkTable) -> bool:
    sums = _sums(nodes.of[found.sender], nodes.of[found.receiver], found.distance, found.nbytes)
    return sum(start != end for start, end, _, _ in sums) <= _MOST_ARROWS


def _hosts_of(places: _Places, side: int) -> list[list[int]]:
    """The numbers of a side's ranks on each host, in the order of the ranks."""
    found: dict[int, list[int]] = {}
    for number in places.members(side):
        found.setdefault(int(places.host[number]), []).append(number)
    return list(found.values())


def _together(hosts: list[list[int]], groups: int) -> list[list[int]]:
    """Consecutive hosts joined to at most ``groups``."""
    each = max(-(-len(hosts) // groups), 1)
    return [list(chain(*hosts[at : at + each])) for at in range(0, len(hosts), each)]


def _grouped(places: _Places, groups: Sequence[list[list[int]]], *, by_rank: bool) -> _Nodes:
    of = np.zeros(sum(places.ranks), dtype=np.int64)
    labels: list[tuple[int, int, str]] = []
    boxes: dict[object, int] = {}
    names: list[str] = []
    for side in (0, 1):
        for group in groups[side]:
            hosts = list(dict.fromkeys(places.host[group].tolist()))
            # Ranks of one host share a box, on both sides; a group of hosts has a box of its own.
            key: object = hosts[0] if len(hosts) == 1 else (side, len(labels))
            box = boxes.setdefault(key, len(boxes))
            if box == len(names):
                names.append(_box_name(places, hosts))
            of[group] = len(labels)
            first = side * places.ranks[0]
            labels.append((side, box, _ranks([number - first for number in group])))
    return _Nodes(of=of, labels=labels, hosts=tuple(names), by_rank=by_rank)


def _box_name(places: _Places, hosts: Sequence[int]) -> str:
    names = [places.host_name(host) for host in hosts]
    if len(names) == 1:
        return names[0]
    return f"{names[0]} to {_last(names[0], names[-1])}" if all(names) else f"{len(names)} hosts"


def _last(first: str, last: str) -> str:
    """The last of several names without what the first says already: "train-12", "train-17" -> "-17".

    A box is too narrow for two names, which would be cut in the middle.
    """
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    common = first[:same].rstrip("0123456789")
    if not last.removeprefix(common).isdecimal():
        return last
    return last[len(common) - (not common[-1:].isalnum()) :]


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2] -> "ranks 0-2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
    return f"ranks {', '.join(map(str, ranks[:3]))}{more}"


def _sums(start: Ints, end: Ints, distance: Ints, nbytes: Ints) -> list[tuple[int, int, int, int]]:
    """(start, end, distance, bytes), each once, where any byte moves."""
    if not len(start):
        return []
    most = int(max(start.max(), end.max())) + 1
    keys, at = np.unique((start * most + end) * 3 + distance, return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, at.reshape(-1), nbytes)
    ends, far = np.divmod(keys, 3)
    rows = zip((ends // most).tolist(), (ends % most).tolist(), far.tolist(), total.tolist(), strict=True)
    return [row for row in rows if row[3]]


def _nics(places: _Places, seen: Survey, nodes: _Nodes) -> tuple[tuple[PictureNic, ...], int, float, int]:
    """The busiest NICs, how many others are as busy as the first, the mean load, and the number with any load."""
    sent, received = seen.loads.nic_out, seen.loads.nic_in
    load = np.maximum(sent, received)
    used = np.flatnonzero(load)
    if not len(used):
        return (), 0, 0.0, 0
    order = used[np.argsort(-load[used], kind="stable")]
    nics = tuple(
        PictureNic(
            label=places.nic_name(agent),
            sent=int(sent[agent]),
            received=int(received[agent]),
            nodes=tuple(np.unique(nodes.of[places.agent == agent]).tolist()),
        )
        for agent in order[:_MOST_NICS].tolist()
    )
    alike = int((load[used] == load[order[0]]).sum()) - 1
    return nics, alike, float(load[used].mean()), len(used)


def _map(found: LinkTable, ranks: tuple[int, int], rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """From source ranks to target ranks; what one side passes on to itself is not on it."""
    m, n = (max(count, 1) for count in ranks)
    keep = ~inside_target(found.kind) & (found.kind != CONTRIBUTE)
    moved = np.zeros((rows, columns), dtype=np.int64)
    np.add.at(moved, (found.source[keep] * rows // m, found.target[keep] * columns // n), found.nbytes[keep])
    at = np.nonzero(moved)
    return tuple(zip(at[0].tolist(), at[1].tolist(), moved[at].tolist(), strict=True))
