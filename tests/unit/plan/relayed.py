"""Random cases in which targets pass on what they receive, and the proof of one of them."""

from __future__ import annotations

import random
from unittest import mock

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from etha.plan import Plan, simulate
from etha.plan.planner import reduction, senders
from tests.unit.plan.analysis.test_bounds import check_loads
from tests.unit.plan.prove import check_links, plan_of
from tests.unit.plan.truth import Case, Truth, cells_of, random_case


def relayed_case(seed: int, rng: random.Random | None = None) -> Case:
    """A random case with several hosts, of which some are named on both sides; relays from the first byte."""
    rng = random.Random(seed) if rng is None else rng
    case = random_case(seed, rng)
    if rng.random() < 0.9:
        case.dtypes = rng.choice([(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
    if rng.random() < 0.4:
        ranks = [r for t in case.target for r in t.ranks]
        two = len(ranks) % 2 == 0 and len(case.shape) > 0 and rng.random() < 0.5
        whole = [Truth((2, len(ranks) // 2), ranks, [Shard(0), Replicate()]) if two
                 else Truth((len(ranks),), ranks, [Replicate()])]  # fmt: skip
        held = cells_of(case.shape, [*case.source, *(one for some in case.products for one in some)])
        if cells_of(case.shape, whole) <= held:  # regions may hold less
            case.target = whole
    case.kwargs = {}
    names = {"source": list("ABC"), "target": [*"abcdefgh"[: rng.choice([1, 2, 3, 5, 8])]]}
    if rng.random() < 0.3:
        names["target"] += rng.sample("ABC", rng.choice([1, 2]))
    for side, truths in (("source", case.source), ("target", case.target)):
        world = 1 + max(r for t in truths for r in t.ranks)
        hosts = [rng.choice(names[side]) for _ in range(world)]
        if rng.random() < 0.5:
            hosts.sort()
        if rng.random() < 0.9:
            case.kwargs[f"{side}_hosts"] = hosts
            if rng.random() < 0.4:  # some ranks of a host share an agent
                case.kwargs[f"{side}_agents"] = [f"{host}{rng.choice('012')}" for host in hosts]
    return case


def prove_relayed(seed: int, rng: random.Random | None = None) -> Plan:
    """Plan it with a random least slice, number of chains and least tensor, and hold it against the truth."""
    case = relayed_case(seed, rng)
    rng = random.Random(seed) if rng is None else rng
    here, there = case.specs()
    case.kwargs.update(fan_out="relay", relay_bytes=rng.choice([0, 0, 0, 64]))
    chains = rng.choice([None, 1, 1, 2, 3])
    least = rng.choice([1, 1, 4, 16, 64, 1024])
    with mock.patch.object(senders, "MIN_SLICE", least), mock.patch.object(reduction, "MIN_SLICE", least):
        plan = plan_of(case)
        for klass in plan.classes:
            if chains is not None and klass.passable and not plan.topology.one_agent:
                klass.chains = chains
        plan.check()
        fulls, got = case.fulls(), case.targets()
        simulate(plan, case.sources(fulls), got)
        for rank, tensors in case.expected(fulls).items():
            for name, value in tensors.items():
                assert torch.equal(got[rank][name], value), (seed, rank, name, got[rank][name], value)
        check_links(plan, here.holders(), there.holders())
        check_loads(plan)
    return plan
