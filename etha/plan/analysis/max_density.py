"""The densest set of hosts: max over sets W of (bytes that only W holds) / (capacity of W).

It is the least time in which the hosts can send every item once, each item from any of its holders. It is computed by
Dinkelbach's iteration over minimum cuts, in integers. Hosts that hold the same items are one node.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from fractions import Fraction

Items = Mapping[frozenset[int], int]


def densest(items: Items, capacity: Mapping[int, int]) -> Fraction:
    """Max over W of sum(bytes of items whose holders are all in W) / sum(capacity in W); 0 without items."""
    best = Fraction(0)
    for part in _components({h: b for h, b in items.items() if b > 0 and h}):
        members: dict[int, list[frozenset[int]]] = defaultdict(list)
        for holders in part:
            for host in holders:
                members[host].append(holders)
        twins: dict[tuple[int, ...], list[int]] = defaultdict(list)
        number = {holders: i for i, holders in enumerate(part)}
        for host, mine in members.items():
            twins[tuple(sorted(number[h] for h in mine))].append(host)
        weights = [part[holders] for holders in part]
        nodes = [(sum(capacity[h] for h in group), of) for of, group in twins.items()]
        best = max(best, _densest(weights, nodes))
    return best


def _components(items: Items) -> list[dict[frozenset[int], int]]:
    """Partition items so that parts share no holder."""
    root: dict[int, int] = {}

    def find(host: int) -> int:
        while root.setdefault(host, host) != host:
            root[host] = root[root[host]]
            host = root[host]
        return host

    for holders in items:
        first = find(next(iter(holders)))
        for host in holders:
            root[find(host)] = first
    parts: dict[int, dict[frozenset[int], int]] = defaultdict(dict)
    for holders, nbytes in items.items():
        parts[find(next(iter(holders)))][holders] = nbytes
    return list(parts.values())


def _densest(weights: list[int], nodes: list[tuple[int, tuple[int, ...]]]) -> Fraction:
    """The maximum for one component; ``nodes`` are (capacity, the items that it holds)."""
    ratio = Fraction(sum(weights), sum(c for c, _ in nodes))
    while len(nodes) > 1:
        # Which items and nodes have weight above ratio x capacity? Those on the source side of a minimum cut.
        p, q = ratio.numerator, ratio.denominator
        graph = _Graph(2 + len(weights) + len(nodes))
        total = sum(weights) * q
        for i, weight in enumerate(weights):
            graph.edge(0, 2 + i, weight * q)
        for j, (cap, of) in enumerate(nodes):
            for i in of:
                graph.edge(2 + i, 2 + len(weights) + j, total)
            graph.edge(2 + len(weights) + j, 1, cap * p)
        if graph.flow() == total:
            break
        inside = graph.reached()
        chosen = sum(w for i, w in enumerate(weights) if 2 + i in inside)
        cost = sum(cap for j, (cap, _) in enumerate(nodes) if 2 + len(weights) + j in inside)
        ratio = Fraction(chosen, cost)
    return ratio


class _Graph:
    """Dinic's maximum flow from node 0 to node 1."""

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._left: list[int] = []

    def edge(self, a: int, b: int, capacity: int) -> None:
        for end, to, left in ((a, b, capacity), (b, a, 0)):
            self._out[end].append(len(self._to))
            self._to.append(to)
            self._left.append(left)

    def flow(self) -> int:
        total = 0
        while 1 in (level := self._levels()):
            at = [0] * len(self._out)
            while pushed := self._push(level, at):
                total += pushed
        return total

    def reached(self) -> set[int]:
        return set(self._levels())

    def _levels(self) -> dict[int, int]:
        level, queue = {0: 0}, deque([0])
        while queue:
            node = queue.popleft()
            for e in self._out[node]:
                if self._left[e] and self._to[e] not in level:
                    level[self._to[e]] = level[node] + 1
                    queue.append(self._to[e])
        return level

    def _push(self, level: dict[int, int], at: list[int]) -> int:
        """Push along one path of the level graph; returns the amount, 0 if no path is left."""
        path: list[int] = []
        node = 0
        while node != 1:
            while at[node] < len(self._out[node]):
                e = self._out[node][at[node]]
                if self._left[e] and level.get(self._to[e]) == level[node] + 1:
                    path.append(e)
                    node = self._to[e]
                    break
                at[node] += 1
            else:
                if not path:
                    return 0
                node = self._to[path.pop() ^ 1]
                at[node] += 1
        pushed = min(self._left[e] for e in path)
        for e in path:
            self._left[e] -= pushed
            self._left[e ^ 1] += pushed
        return pushed
