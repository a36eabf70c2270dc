"""Targets that pass on what they receive: once into a host, chains of hosts, exact and as balanced as the bounds."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from etha.plan import CARRY, DELIVER, FORWARD, MOVE, Layout, Plan, TensorSpec, build_plan
from tests.examples import examples, parts
from tests.unit.plan.analysis.test_bounds import check_loads
from tests.unit.plan.relayed import prove_relayed

CASES = 400
PART = 100


@pytest.mark.slow
@pytest.mark.parametrize("part", parts(CASES // PART, 2))
def test_random_relays_are_exact_and_proven(part: int) -> None:
    seen = Counter[str]()
    for seed in range(part * PART, (part + 1) * PART):
        plan = prove_relayed(seed)
        found = plan.survey().flows
        seen["passed"] += bool((found.kind == FORWARD).any())
        seen["chains"] += found.hops > 1
        seen["carried"] += bool((found.kind == CARRY).any())
    assert seen["passed"] > PART // 3 and seen["chains"] > PART // 10 and seen["carried"] > 1


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 20), st.randoms(use_true_random=False))
def test_hypothesis_draws_no_relay_that_fails(seed: int, rng: random.Random) -> None:
    prove_relayed(seed, rng)


def spec(mesh: object, *placements: Placement, shape: tuple[int, ...] = (1024, 64)) -> TensorSpec:
    return TensorSpec(shape, torch.float32, Layout(mesh, placements))


def hosts(name: str, ranks: int, each: int) -> list[str]:
    return [f"{name}{rank // each:03}" for rank in range(ranks)]


def plan_of(source: TensorSpec, target: TensorSpec, each: int, **kwargs: object) -> Plan:
    """One tensor, ``each`` ranks a host, relays whatever its size."""
    m, n = (1 + int(one.layout.ranks.max()) for one in (source, target))
    where = {"source_hosts": hosts("s", m, each), "target_hosts": hosts("t", n, each)}
    return build_plan({"w": source}, {"w": target}, **{**where, "relay_bytes": 0, **kwargs})  # type: ignore[arg-type]


FULL = 1024 * 64 * 4


def test_a_host_takes_each_byte_once_over_all_its_nics() -> None:
    s = plan_of(spec((4,), Shard(0)), spec((4,), Replicate()), 4).stats()
    assert s.wire_bytes == FULL and s.max_nic_ingress == FULL // 4 and s.quality == 1.0
    assert s.host_bytes == 3 * FULL


def test_one_host_reaches_many_by_a_chain() -> None:
    plan = plan_of(spec((4,), Shard(0)), spec((32,), Replicate()), 4)
    s = plan.stats()
    assert s.bound_host_egress_direct == 8 * FULL
    assert s.max_nic_egress == s.max_nic_ingress == FULL // 4 and s.quality == 1.0
    assert plan.survey().flows.hops == 8  # seven from host to host, one inside the last


def test_as_many_chains_as_the_source_has_time_for() -> None:
    """Two source hosts, eight target hosts of as many NICs: the source can send twice while targets take in once."""
    plan = plan_of(spec((8,), Shard(0)), spec((32,), Replicate()), 4)
    (klass,) = plan.classes
    assert klass.chains == 2 and plan.stats().quality == 1.0


def test_owners_that_reduce_send_less() -> None:
    """Four contributions: an owner sends three quarters of its share, so that there is time for one copy."""
    plan = plan_of(spec((4, 4), Partial(), Shard(0)), spec((4, 4), Replicate(), Shard(0)), 4)
    assert plan.classes[0].chains == 1
    assert plan.stats().quality < 1.03
    plan.check()


def test_every_copy_comes_from_the_source_where_it_is_no_longer_busy_than_the_targets() -> None:
    plan = plan_of(spec((32,), Shard(0)), spec((8, 4), Replicate(), Shard(0)), 4)
    assert plan.stats().quality == 1.0 and plan.survey().flows.hops == 0


def test_small_tensors_and_those_that_widen_go_directly() -> None:
    source, target = spec((4,), Shard(0)), spec((16,), Replicate())
    assert not forwards(plan_of(source, target, 4, relay_bytes=FULL + 1))
    assert forwards(plan_of(source, target, 4, relay_bytes=FULL))
    assert not forwards(plan_of(source, target, 4, fan_out="direct"))
    wide = TensorSpec(target.shape, torch.float64, target.layout)
    assert not forwards(plan_of(source, wide, 4))
    narrow = TensorSpec(target.shape, torch.bfloat16, target.layout)
    assert forwards(plan_of(source, narrow, 4, relay_bytes=FULL // 2))


def test_idle_nics_carry_for_busy_ones() -> None:
    """Columns 3, 3 and 2 of one host: the third rank takes in for the other two."""
    source, target = (spec((n,), Shard(d), shape=(1024, 8)) for n, d in ((4, 0), (3, 1)))
    plan = plan_of(source, target, 4)
    assert {CARRY, DELIVER} <= set(plan.survey().flows.kind.tolist())
    s = plan.stats()
    assert s.quality < 1.02 < 3 * 3 / 8
    plan.check()
    check_loads(plan)


def forwards(plan: Plan) -> bool:
    return bool((plan.survey().flows.kind == FORWARD).any())


def test_fan_out_is_in_the_digest() -> None:
    source, target = spec((4,), Shard(0)), spec((16,), Replicate())
    made = [plan_of(source, target, 4, **k).digest() for k in ({}, {"relay_bytes": 1}, {"fan_out": "direct"}, {})]
    assert len(set(made)) == 3 and made[0] == made[3]


def test_a_row_that_passes_on_depends_on_the_one_that_brings_it() -> None:
    plan = plan_of(spec((4,), Shard(0)), spec((16,), Replicate()), 4)
    seen = 0
    for rank in range(16):
        rp = plan.for_rank("target", rank)
        for row in np.flatnonzero((rp.kind == FORWARD) & (rp.source == rank)).tolist():
            before = int(rp.depends[row])
            assert rp.target[before] == rank and rp.phase[before] < rp.phase[row]
            assert rp.kind[before] in (MOVE, FORWARD)
            for read, got in zip(rp.region(row).dims, rp.region(before).dims, strict=True):
                assert read[:, [0, 2]].tolist() == got[:, [1, 2]].tolist()
            seen += 1
    assert seen


def test_a_rank_plans_the_same_alone_as_with_all_others() -> None:
    """What one rank sees of a chain is what the plan's links say of it (flows looks at all copies at once)."""
    plan = plan_of(spec((3,), Shard(0), shape=(1000, 7)), spec((30,), Replicate(), shape=(1000, 7)), 5)
    check_loads(plan)
    plan.check()


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_rank_plans_its_own_part_alone(side: str) -> None:
    """512 pieces for 2,048 copies: no array of one rank's planning has an entry for each of both."""
    held = TensorSpec((4096, 1024), torch.float32, Layout((512,), [Shard(0)]))
    plan = build_plan({"w": held}, {"w": TensorSpec((4096, 1024), torch.float32, Layout((2048,), [Replicate()]))})
    assert plan.classes[0].chains is not None
    tracemalloc.start()
    rows = len(plan.for_rank(side, 5))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows >= (512 if side == "target" else plan.classes[0].chains)
    assert peak < 1 << 20
