"""What a plan moves, how evenly, and lower bounds for any plan: bytes by distance, busiest ranks and hosts.

docs/planning.md derives the bounds: what a host must receive, what a set of hosts must send once, and what all hosts
together must carry. The second covers Partial sources: every host with a contribution that no other host has must send
its share, reduced or not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from etha.plan.analysis.demand import DemandGroup, demand
from etha.plan.analysis.links import LinkTable, flows
from etha.plan.analysis.max_density import densest
from etha.plan.planner.plan import BasePlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """Figures of a plan, in bytes at the wire dtype. ``wire`` is between hosts; ``max_*`` are of the busiest one, wire
    only.

    A NIC belongs to an agent, so to one device. ``bound_host_ingress``: what some host needs and does not hold.
    ``bound_host_egress_once``: what some hosts alone hold, per host, if everything leaves its hosts once.
    ``bound_host_egress_direct``: the same, once for each host that needs it, which relays avoid. ``bound_nic``: the
    largest bound, per NIC. ``quality``: the busiest NIC, out or in, over ``bound_nic``; 1.0 if nothing crosses.
    """

    local_bytes: int
    host_bytes: int
    wire_bytes: int
    max_rank_egress: int
    max_rank_ingress: int
    max_host_egress: int
    max_host_ingress: int
    max_nic_egress: int
    max_nic_ingress: int
    bound_host_ingress: int
    bound_host_egress_once: int
    bound_host_egress_direct: int
    bound_nic: float
    quality: float
    ops: int
    rounds: int

    @property
    def total_bytes(self) -> int:
        return self.local_bytes + self.host_bytes + self.wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowerBounds:
    """What any plan needs, in bytes: ``ingress`` by host, the others per host or per NIC.

    ``nic_*`` divide by the NICs through which the bytes can come in or go out. ``nic_aggregate`` is all ingress over
    all NICs.
    """

    ingress: dict[int, int]
    egress_once: Fraction
    egress_direct: Fraction
    nic_ingress: Fraction
    nic_egress: Fraction
    nic_aggregate: Fraction

    @property
    def nic(self) -> Fraction:
        """The largest bound per NIC."""
        return max(self.nic_ingress, self.nic_egress, self.nic_aggregate)

    @property
    def reason(self) -> str:
        """Which bound is the largest, in words."""
        named = {
            "what a host must take in": self.nic_ingress,
            "what its holders must give out once": self.nic_egress,
            "all that crosses over all NICs": self.nic_aggregate,
        }
        return max(named, key=lambda name: named[name])


def bounds(plan: BasePlan) -> LowerBounds:
    """The lower bounds for ``plan``; O(groups of its demand)."""
    groups = demand(plan)
    nics = nics_of_hosts(plan)
    ingress: dict[int, int] = defaultdict(int)
    needed: dict[frozenset[int], int] = defaultdict(int)
    once: dict[frozenset[int], int] = defaultdict(int)
    direct: dict[frozenset[int], int] = defaultdict(int)
    for group, nbytes in groups.items():
        if not group.needs or not any(group.holders):
            continue
        there = group.needs & group.complete()
        needed[group.needs] += nbytes
        for host in there:
            ingress[host] -= nbytes
        crossings = len(group.needs) - len(there)
        if crossings:
            _egress(group, nbytes, crossings, once, direct)
    for hosts, nbytes in needed.items():
        for host in hosts:
            ingress[host] += nbytes
    one = dict.fromkeys(nics.every, 1)
    total = sum(ingress.values())
    egress_once = densest(once, one)
    return LowerBounds(
        ingress=dict(ingress),
        egress_once=egress_once,
        egress_direct=max(densest(direct, one), egress_once),
        nic_ingress=max((Fraction(u, nics.into[h]) for h, u in ingress.items()), default=Fraction(0)),
        nic_egress=densest(once, nics.out),
        nic_aggregate=Fraction(total, max(sum(nics.every.values()), 1)),
    )


def _egress(
    group: DemandGroup, nbytes: int, crossings: int, once: dict[frozenset[int], int], direct: dict[frozenset[int], int]
) -> None:
    apart = group.apart()
    for holders in apart:
        once[holders] += nbytes
    everybody = frozenset[int]().union(*group.holders)
    if len(group.holders) > 1:
        # A contribution from each holder but the owner, and the result to every host; one less if the owner is among
        # these.
        crossings += len(apart) - 1 - bool(everybody & group.needs)
    direct[everybody] += nbytes * max(crossings, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nics:
    """Number of NICs of each host, one per agent: ``every`` NIC, those that bytes go ``out`` by, those they come
    ``into``.

    What a host holds leaves it from the agents of its source ranks. What it needs comes to those of its target ranks
    and, in a plan that reduces, also to those of its source ranks: contributions that it lacks.
    """

    every: Mapping[int, int]
    out: Mapping[int, int]
    into: Mapping[int, int]


def nics_of_hosts(plan: BasePlan) -> Nics:
    """The NICs of the hosts of both sides, by host."""
    t = plan.topology
    source, target = (t.source_host, t.source_agent), (t.target_host, t.target_agent)
    every = _agents(source, target)
    reduces = any(klass.reduction is not None for klass in plan.classes)
    return Nics(every=every, out=_agents(source), into=every if reduces else _agents(target))


def _agents(*sides: tuple[Ints, Ints]) -> dict[int, int]:
    """Number of agents of each host, from the (host, agent) of ranks."""
    pairs = np.unique(np.concatenate([np.stack(side, axis=1) for side in sides]), axis=0)
    hosts, count = np.unique(pairs[:, 0], return_counts=True)
    return dict(zip(hosts.tolist(), count.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """Bytes between hosts, out and in, by rank (source ranks, then target ranks), host and NIC."""

    rank_out: Ints
    rank_in: Ints
    host_out: Ints
    host_in: Ints
    nic_out: Ints
    nic_in: Ints


def loads(plan: BasePlan, found: LinkTable) -> Loads:
    """Bytes that every rank, host and NIC carries between hosts."""
    t, wire = plan.topology, found.distance == 2
    m, n = len(t.source_host), len(t.target_host)
    nbytes = found.nbytes[wire]
    hosts = 1 + int(max(t.source_host.max(initial=-1), t.target_host.max(initial=-1)))
    nics = 1 + int(max(t.source_agent.max(initial=-1), t.target_agent.max(initial=-1)))

    def by(who: Ints, count: int) -> Ints:
        total = np.zeros(max(count, 1), dtype=np.int64)
        np.add.at(total, who, nbytes)
        return total

    return Loads(
        rank_out=by(found.sender[wire], m + n),
        rank_in=by(found.receiver[wire], m + n),
        host_out=by(found.here[wire], hosts),
        host_in=by(found.there[wire], hosts),
        nic_out=by(found.nic_out[wire], nics),
        nic_in=by(found.nic_in[wire], nics),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Everything counted about a plan: its links, loads, bounds and figures."""

    flows: LinkTable
    loads: Loads
    bounds: LowerBounds
    stats: PlanStats


def survey(plan: BasePlan) -> Survey:
    """Count all of it; O(links of each class)."""
    found, limit = flows(plan), bounds(plan)
    load = loads(plan, found)
    return Survey(flows=found, loads=load, bounds=limit, stats=_stats(plan, found, load, limit))


def _stats(plan: BasePlan, found: LinkTable, load: Loads, limit: LowerBounds) -> PlanStats:
    busiest = max(int(load.nic_out.max()), int(load.nic_in.max()))
    far = found.distance > 0
    rounds = plan.rounds(found.kind[far], found.source[far], found.target[far])
    return PlanStats(
        local_bytes=int(found.nbytes[found.distance == 0].sum()),
        host_bytes=int(found.nbytes[found.distance == 1].sum()),
        wire_bytes=int(found.nbytes[found.distance == 2].sum()),
        max_rank_egress=int(load.rank_out.max()),
        max_rank_ingress=int(load.rank_in.max()),
        max_host_egress=int(load.host_out.max()),
        max_host_ingress=int(load.host_in.max()),
        max_nic_egress=int(load.nic_out.max()),
        max_nic_ingress=int(load.nic_in.max()),
        bound_host_ingress=max(limit.ingress.values(), default=0),
        bound_host_egress_once=math.ceil(limit.egress_once),
        bound_host_egress_direct=math.ceil(limit.egress_direct),
        bound_nic=float(limit.nic),
        quality=quality(busiest, limit),
        ops=int(found.rows.sum()),
        rounds=len(np.unique(found.kind[far] * (1 << 40) + rounds)),
    )


def quality(busiest: int, limit: LowerBounds) -> float:
    """Bytes of the busiest NIC over the largest bound; 1.0 if nothing crosses."""
    if not busiest:
        return 1.0
    return float(busiest / limit.nic) if limit.nic else math.inf
