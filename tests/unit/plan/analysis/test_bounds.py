"""Loads and lower bounds against plain enumeration: every row of every rank, every element, every set of hosts."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from etha.plan import CONTRIBUTE, DELIVER, FORWARD, LOCAL, RESULT, Layout, Plan, TensorSpec, build_plan
from etha.plan.analysis.bounds import bounds, nics_of_hosts
from etha.plan.analysis.links import flows
from etha.plan.analysis.max_density import densest
from tests.examples import examples
from tests.unit.plan.prove import plan_of
from tests.unit.plan.truth import Case, Truth, random_case

F32 = torch.float32


def rows_of_ranks(plan: Plan) -> Iterator[tuple[int, int, int, int, bool]]:
    """(kind, source, target, bytes, local) of every row, once: from its receiving end."""
    for side, spec in (("source", plan.source), ("target", plan.target)):
        for rank in sorted({r for one in spec.values() for r in one.holders()}):
            rp = plan.for_rank(side, rank)
            for i in range(len(rp)):
                inside = rp.kind[i] == CONTRIBUTE
                if inside == (side == "source") and rp.target[i] == rank:
                    yield (
                        int(rp.kind[i]),
                        int(rp.source[i]),
                        int(rp.target[i]),
                        int(rp.nbytes[i]),
                        rp.role[i] == LOCAL,
                    )


def elements(case: Case) -> Iterator[tuple[tuple[frozenset[int], ...], frozenset[int]]]:
    """(hosts of each contribution, hosts in need) of every element, by the truth's own enumeration."""

    def host(side: str, rank: int) -> object:
        names = case.kwargs.get(f"{side}_hosts")
        return names[rank] if names is not None else (side, rank)

    holders: dict[tuple[int, ...], dict[int, set[object]]] = defaultdict(lambda: defaultdict(set))
    needs: dict[tuple[int, ...], set[object]] = defaultdict(set)
    for truth in (*case.source, *(one for some in case.products for one in some)):
        for rank in truth.ranks:
            if whole(case, truth, rank):
                for at in itertools.product(*truth.indices(case.shape, rank)):
                    holders[at][truth.contribution(rank)].add(host("source", rank))
    for truth in case.target:
        for rank in truth.ranks:
            for at in itertools.product(*truth.indices(case.shape, rank)):
                needs[at].add(host("target", rank))
    number = {h: i for i, h in enumerate(sorted({h for n in needs.values() for h in n} | {
        h for of in holders.values() for hs in of.values() for h in hs}, key=repr))}  # fmt: skip
    for at, wanting in needs.items():
        yield (
            tuple(frozenset(number[h] for h in holders[at][k]) for k in sorted(holders[at])),
            frozenset(number[h] for h in wanting),
        )


def whole(case: Case, truth: Truth, rank: int) -> bool:
    """Whether the replica of ``rank`` is complete; a replica without all its contributions counts for nothing."""
    if case.present is None:
        return True
    axes = truth.partial()
    where = truth.coordinates(rank)
    row = [r for r in truth.ranks if all(a in axes or x == y for a, (x, y) in
                                         enumerate(zip(where, truth.coordinates(r), strict=True)))]  # fmt: skip
    return all(r in case.present for r in row)


def in_one_description(case: Case) -> bool:
    """Several layouts with Partial ones are reduced from one of them alone, which the truth here does not choose."""
    return len(case.source) == 1 or not any(t.partial() for t in case.source)


def by_subsets(items: Counter[frozenset[int]]) -> Fraction:
    hosts = sorted({h for holders in items for h in holders})
    best = Fraction(0)
    for size in range(1, len(hosts) + 1):
        for chosen in itertools.combinations(hosts, size):
            best = max(best, Fraction(sum(b for h, b in items.items() if h <= set(chosen)), size))
    return best


def check_loads(plan: Plan) -> None:
    found = flows(plan)
    links: Counter[tuple[int, ...]] = Counter()
    rows: Counter[tuple[int, ...]] = Counter()
    m = len(plan.topology.source_host)
    hosts = [*plan.topology.source_host.tolist(), *plan.topology.target_host.tolist()]
    local, ranks_out, ranks_in = 0, Counter[int](), Counter[int]()
    for kind, source, target, nbytes, here in rows_of_ranks(plan):
        links[kind, source, target] += nbytes
        rows[kind, source, target] += 1
        sender, receiver = source + m * (kind in (FORWARD, DELIVER)), target + m * (kind != CONTRIBUTE)
        local += nbytes * here
        if not here and hosts[sender] != hosts[receiver]:
            ranks_out[sender] += nbytes
            ranks_in[receiver] += nbytes
    keys = list(zip(found.kind.tolist(), found.source.tolist(), found.target.tolist(), strict=True))
    assert dict(zip(keys, found.nbytes.tolist(), strict=True)) == dict(links)
    assert dict(zip(keys, found.rows.tolist(), strict=True)) == dict(rows)
    s = plan.stats()
    assert s.ops == rows.total() and s.total_bytes == links.total() and s.local_bytes == local
    assert s.max_rank_egress == max(ranks_out.values(), default=0)
    assert s.max_rank_ingress == max(ranks_in.values(), default=0)
    assert s.wire_bytes == ranks_out.total()
    assert s.quality >= 1.0 or not real(plan)


def real(plan: Plan) -> bool:
    """Whether every agent is on one host; random names put some on two, which then copy for nothing."""
    t = plan.topology
    agents = [*t.source_agent.tolist(), *t.target_agent.tolist()]
    hosts = [*t.source_host.tolist(), *t.target_host.tolist()]
    return len(set(zip(agents, hosts, strict=True))) == len(set(agents))


def check_bounds(case: Case, plan: Plan) -> None:
    size = max(plan.wire_dtype(0).itemsize, 0) * len(case.names)
    need, once, union = Counter[int](), Counter[frozenset[int]](), Counter[frozenset[int]]()
    for holders, needs in elements(case):
        full = frozenset.intersection(*holders)
        missing = needs - full
        for host in missing:
            need[host] += size
        if not missing:
            continue
        if len(holders) == 1:
            once[holders[0]] += size
            union[holders[0]] += size * len(missing)
    found = bounds(plan)
    assert {h for h in found.ingress.values() if h} == set(need.values())
    assert sum(found.ingress.values()) == need.total()
    if not any(t.partial() for t in case.source):
        assert found.egress_once == by_subsets(once)
        assert found.egress_direct == max(by_subsets(union), by_subsets(once))
    s = plan.stats()
    assert s.bound_host_ingress == max(need.values(), default=0)
    if real(plan):  # what the plan does is no better than what is said to be possible
        assert s.bound_host_ingress <= s.max_host_ingress
        assert s.bound_host_egress_once <= s.bound_host_egress_direct <= s.max_host_egress


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_loads_and_bounds_of_random_layouts_equal_enumeration(part: int) -> None:
    seen = 0
    for seed in range(part * 40, part * 40 + 40):
        case = random_case(seed)
        plan = plan_of(case)
        check_loads(plan)
        if math.prod(case.shape) <= 600 and in_one_description(case) and not plan.violations:
            check_bounds(case, plan)
            seen += 1
    assert seen > 20


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 20), st.randoms(use_true_random=False))
def test_hypothesis_draws_no_other(seed: int, rng: random.Random) -> None:
    case = random_case(seed, rng)
    plan = plan_of(case)
    check_loads(plan)
    if math.prod(case.shape) <= 300 and in_one_description(case) and not plan.violations:
        check_bounds(case, plan)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.frozensets(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 50), max_size=9))
def test_the_densest_set_is_that_of_all_subsets(items: dict[frozenset[int], int]) -> None:
    assert densest(items, dict.fromkeys(range(7), 1)) == by_subsets(Counter(items))


def test_hosts_with_more_nics_are_less_dense() -> None:
    items = {frozenset({0}): 10, frozenset({0, 1}): 20, frozenset({2}): 9}
    assert densest(items, {0: 8, 1: 1, 2: 1}) == 9
    assert densest(items, {0: 1, 1: 1, 2: 1}) == 15
    assert densest({}, {}) == 0


def spec(mesh: object, *placements: Placement, shape: tuple[int, ...] = (64, 32)) -> TensorSpec:
    return TensorSpec(shape, F32, Layout(mesh, placements))


FULL = 64 * 32 * 4


def test_a_plan_that_meets_its_bound_has_quality_one() -> None:
    plan = build_plan({"w": spec((4,), Shard(0))}, {"w": spec((4,), Shard(1))})
    s = plan.stats()
    assert (s.bound_host_ingress, s.bound_host_egress_once, s.bound_host_egress_direct) == (FULL // 4,) * 3
    assert s.quality == 1.0 and s.max_nic_egress == s.max_nic_ingress == s.bound_nic == FULL // 4


def test_nothing_crosses_has_quality_one() -> None:
    plan = build_plan(
        {"w": spec((4,), Shard(0))}, {"w": spec((4,), Replicate())}, source_hosts=["h"] * 4, target_hosts=["h"] * 4
    )
    s = plan.stats()
    assert s.quality == 1.0 and s.wire_bytes == s.bound_host_ingress == s.bound_nic == 0
    assert build_plan({}, {}).stats().quality == 1.0


def test_a_host_takes_each_byte_once_over_all_its_nics() -> None:
    """One source host, one target host of four ranks that all want everything: in once, over four NICs."""
    plan = build_plan(
        {"w": spec((4,), Shard(0))}, {"w": spec((4,), Replicate())}, source_hosts=["a"] * 4, target_hosts=["b"] * 4
    )
    s = plan.stats()
    assert s.bound_host_ingress == s.bound_host_egress_once == s.bound_host_egress_direct == FULL
    assert s.bound_nic == FULL / 4


def test_one_agent_a_host_is_one_nic() -> None:
    hosts = {"source_hosts": ["a"] * 4, "target_hosts": ["b"] * 4}
    agents = {"source_agents": ["a"] * 4, "target_agents": ["b"] * 4}
    plan = build_plan({"w": spec((4,), Shard(0))}, {"w": spec((4,), Shard(1))}, **hosts, **agents)
    s = plan.stats()
    assert nics_of_hosts(plan).every == {0: 1, 1: 1}
    assert s.bound_nic == s.max_nic_egress == FULL and s.max_rank_egress == FULL // 4 and s.quality == 1.0


def test_contributions_come_in_by_the_agents_of_the_source() -> None:
    """Host 1 needs all of three contributions and has one: the others reach it by two NICs, or one reduced by one."""
    shape = (257,)
    tensors = dict.fromkeys("abc", spec((3,), Partial(), shape=shape))
    wanted = dict.fromkeys("abc", spec((1,), Replicate(), shape=shape))
    plan = build_plan(tensors, wanted, source_hosts=["0", "0", "1"], target_hosts=["1"])
    nics, s = nics_of_hosts(plan), plan.stats()
    assert (nics.every, nics.out, nics.into) == ({0: 2, 1: 2}, {0: 2, 1: 1}, {0: 2, 1: 2})
    assert s.bound_host_ingress == 3 * 257 * 4 <= s.max_host_ingress
    assert s.bound_nic == s.bound_host_ingress / 2 <= max(s.max_nic_ingress, s.max_nic_egress) and s.quality >= 1.0
    check_loads(plan)


def test_what_only_one_side_of_a_host_can_send_or_receive_counts_for_its_own_nics() -> None:
    """Agents of the other side on the same host carry nothing of it."""
    plan = build_plan(
        {"w": spec((2,), Shard(0))},
        {"w": spec((3,), Replicate())},
        source_hosts=["a", "b"],
        target_hosts=["a", "a", "a"],
        relay_bytes=1,
    )
    nics, s = nics_of_hosts(plan), plan.stats()
    assert (nics.every, nics.out, nics.into) == ({0: 4, 1: 1}, {0: 1, 1: 1}, {0: 3})
    assert s.bound_nic == s.max_nic_egress == FULL / 2 and s.quality == 1.0


def test_direct_egress_counts_every_host_in_need() -> None:
    plan = build_plan({"w": spec((2,), Shard(0))}, {"w": spec((6,), Replicate())})
    s = plan.stats()
    assert (s.bound_host_egress_once, s.bound_host_egress_direct) == (FULL // 2, FULL * 3)
    assert s.bound_host_ingress == FULL


def test_every_contributor_of_a_partial_sends_its_share() -> None:
    plan = build_plan({"w": spec((4,), Partial())}, {"w": spec((2,), Shard(0))})
    s = plan.stats()
    # Reduced or not, what each of the four holds must leave it; some owner may send the result twice.
    assert s.bound_host_egress_once == FULL
    assert s.bound_host_ingress == FULL // 2
    # To the contributors themselves, as a reduce-scatter: three quarters out and a quarter in.
    same = ["a", "b", "c", "d"]
    plan = build_plan(
        {"w": spec((4,), Partial())}, {"w": spec((4,), Shard(0))}, source_hosts=same, target_hosts=same,
        source_agents=same, target_agents=same,
    )  # fmt: skip
    s = plan.stats()
    assert s.bound_host_egress_once == FULL * 3 // 4
    assert {int(k) for k in flows(plan).kind} == {CONTRIBUTE, RESULT}


def test_skewed_holders_are_found_among_many() -> None:
    """Hosts 0 and 1 alone hold half of it, four others the rest: the densest set is those two."""
    items = {"a": spec([0, 1], Shard(0)), "b": spec([2, 3, 4, 5], Shard(0))}
    plan = build_plan(items, dict.fromkeys("ab", spec((1,), Replicate())))
    assert plan.stats().bound_host_egress_once == FULL // 2
    assert plan.stats().bound_nic == 2 * FULL  # one NIC takes all
