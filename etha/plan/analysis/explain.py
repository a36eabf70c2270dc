"""A plan as readable text: what moves how far, who is busiest and why, the bounds, the time on given links."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from etha.plan.analysis.bounds import Loads, LowerBounds, PlanStats, Survey, nics_of_hosts
from etha.plan.analysis.links import LinkTable
from etha.plan.analysis.packing import ZERO_COPY, packing
from etha.plan.analysis.predict import Links, predict
from etha.plan.layouts import dtypes
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.plan import BasePlan
from etha.plan.planner.rank_plan import CONTRIBUTE, DELIVER, FORWARD, inside_target
from etha.units import counted, seconds, size

Ints = npt.NDArray[np.int64]
_DISTANCE = ("local", "host", "wire")
_LINKS = 6
_CLASSES = 24
#: Most layouts of one tensor, and most characters of a region's runs, that are shown.
_PARTS = 4
_RUNS = 60


def explain(plan: BasePlan, seen: Survey, links: Links | None = None) -> str:
    """Text of about 30 to 50 lines; violations come first. Seconds are those of ``links``."""
    return "\n".join(_lines(plan, seen, links or Links())) + "\n"


def _lines(plan: BasePlan, seen: Survey, links: Links) -> Iterator[str]:
    found, limit, load, s = seen.flows, seen.bounds, seen.loads, seen.stats
    m, n = len(plan.topology.source_host), len(plan.topology.target_host)
    yield f"plan {plan.digest()[:16]}: {counted(len(plan.names), 'tensor')} in " + (
        f"{counted(len(plan.classes), 'class')}, {m} -> {counted(n, 'rank')}"
    )
    for violation in plan.violations:
        yield f"  ! {violation}"
    yield f"  bytes      {size(s.total_bytes)} in {counted(s.ops, 'operation')}, {counted(s.rounds, 'round')}"
    for distance, (name, what) in enumerate(
        (("local", "inside one agent"), ("host", "inside one host"), ("wire", "between hosts"))
    ):
        at = found.distance == distance
        each = f"{size(int(found.nbytes[at].sum()))} over {counted(int(at.sum()), 'link')}"
        yield f"    {name:8} {each}, {what}"
    passed = found.kind == FORWARD
    if passed.any():
        between, inside = (int(found.nbytes[passed & (found.distance == d)].sum()) for d in (2, 1))
        yield f"    passed on by targets: {size(between)} between hosts, {size(inside)} inside hosts; " + (
            f"{counted(found.hops, 'hop')} at most"
        )
    if (carried := found.kind == DELIVER).any():
        nbytes = int(found.nbytes[carried].sum())
        yield f"    carried for neighbours with busier NICs: {size(nbytes)} inside hosts; " + (
            "over NCCL nothing is carried (Plan.uncarried)"
        )
    yield from _busiest(plan, s, load, limit, found)
    yield from _limits(plan, s, limit)
    yield from _time(found, load, limit, links)
    done = packing(plan)
    yield f"  zero copy  {size(done.zero_copy)} in pieces of one run of at least {size(ZERO_COPY)}"
    yield f"  packed     {size(done.packed)} in {counted(done.segments, 'run')} of memory"
    yield from _classes(plan)
    yield from _links(found)


def _busiest(plan: BasePlan, s: PlanStats, load: Loads, limit: LowerBounds, found: LinkTable) -> Iterator[str]:
    if not s.wire_bytes:
        return
    yield f"  busiest    rank out {size(s.max_rank_egress)}, in {size(s.max_rank_ingress)}; host out " + (
        f"{size(s.max_host_egress)}, in {size(s.max_host_ingress)}; NIC out {size(s.max_nic_egress)}, "
        f"in {size(s.max_nic_ingress)}"
    )
    m = len(plan.topology.source_host)
    wire = found.distance == 2
    for way, ranks, hosts in (("out", load.rank_out, load.host_out), ("in", load.rank_in, load.host_in)):
        which, host = int(ranks.argmax()), int(hosts.argmax())
        side, rank = ("source", which) if which < m else ("target", which - m)
        mine = wire & ((found.sender if way == "out" else found.receiver) == which)
        inner = int(found.nbytes[mine & (found.kind == CONTRIBUTE)].sum())
        to_reduce = f", {size(inner)} of it to reduce" if inner else ""
        mean = float(ranks[ranks > 0].mean())
        links, all_ranks = counted(int(mine.sum()), "link"), counted(int((ranks > 0).sum()), "rank")
        yield f"    {side} rank {rank}: {size(int(ranks[which]))} {way} over {links}{to_reduce}; " + (
            f"the mean is {size(mean)} of {all_ranks}"
        )
        needs = f", {size(limit.ingress.get(host, 0))} of it is not held there" if way == "in" else ""
        yield f"    host {_host(plan, host)}: {size(int(hosts[host]))} {way}{needs}"


def _host(plan: BasePlan, host: int) -> str:
    """Name a host by its ranks, because a plan does not keep host names."""
    t = plan.topology
    named = []
    for side, hosts in (("source", t.source_host), ("target", t.target_host)):
        ranks = np.flatnonzero(hosts == host).tolist()
        if ranks:
            consecutive = len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1))
            text = f"{ranks[0]}-{ranks[-1]}" if consecutive else ",".join(map(str, ranks[:8]))
            named.append(f"of {side} ranks {text}")
    return " and ".join(named)


def _limits(plan: BasePlan, s: PlanStats, limit: LowerBounds) -> Iterator[str]:
    yield f"  bounds     a host in {size(s.bound_host_ingress)}, out once {size(s.bound_host_egress_once)}, " + (
        f"out directly {size(s.bound_host_egress_direct)}"
    )
    nics = sorted(set(nics_of_hosts(plan).every.values()))
    if s.bound_nic:
        count = "-".join(str(n) for n in (nics[:1] if len(nics) == 1 else (nics[0], nics[-1])))
        yield f"    a NIC {size(s.bound_nic)}, from {limit.reason} ({count} NICs a host)"
    yield f"  quality    {s.quality:.3f}: the busiest NIC over its bound"


def _time(found: LinkTable, load: Loads, limit: LowerBounds, links: Links) -> Iterator[str]:
    p = predict(found, load, limit, links)
    parts = f"wire {seconds(p.wire)}, host {seconds(p.host)}, local {seconds(p.local)}"
    yield f"  predicted  {seconds(p.seconds)}: the longest of {parts}, and {seconds(p.latency)} of latency; " + (
        f"bound {seconds(p.bound)}"
    )
    yield f"    at {links.nic:g} GB/s a NIC, {links.host:g} inside a host, {links.local:g} inside an agent"


def _classes(plan: BasePlan) -> Iterator[str]:
    yield "classes"
    for at, klass in enumerate(plan.classes[:_CLASSES]):
        members = np.flatnonzero(plan.class_of == at)
        name = plan.names[int(members[0])]
        a, b = plan.source[name], plan.target[name]
        kinds = f"{dtypes.name_of(a.dtype)} -> {dtypes.name_of(b.dtype)}"
        yield f"  {len(members)} x {list(klass.shape)} {kinds}, such as {name!r}"
        yield f"      {_layouts(a)} -> {_layouts(b)}"
    if len(plan.classes) > _CLASSES:
        yield f"  and {len(plan.classes) - _CLASSES} more"


def _layouts(spec: TensorSpec) -> str:
    def one(part: Layout) -> str:
        if part.kept is not None:
            return f"{part.ranks.size} [{' x '.join(_short(str(kept)) for kept in part.kept)}]"
        return f"{'x'.join(map(str, part.mesh_shape))} [{', '.join(str(a) for a in part.axes)}]"

    shown = [one(part) for part in spec.layouts[:_PARTS]]
    more = len(spec.layouts) - len(shown)
    return " and ".join([*shown, f"{more} more"] if more else shown)


def _short(runs: str) -> str:
    return runs if len(runs) <= _RUNS else f"{runs[: _RUNS - 3]}..."


def _links(found: LinkTable) -> Iterator[str]:
    order = np.argsort(-found.nbytes, kind="stable")
    yield f"links ({len(order):,} in all, the heaviest first)"
    for i in order[:_LINKS].tolist():
        a, b, far = (int(c[i]) for c in (found.source, found.target, found.distance))
        of, to = (
            ("target" if inside_target(found.kind[i : i + 1]).all() else "source"),
            ("source" if found.kind[i] == CONTRIBUTE else "target"),
        )
        yield f"  {of} {a} -> {to} {b}  {size(int(found.nbytes[i]))}  {_DISTANCE[far]}"
