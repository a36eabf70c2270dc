"""One random case against the truth: check(), simulate(), links, rounds, digest."""

from __future__ import annotations

import random
from collections import defaultdict

import torch

from etha.plan import CONTRIBUTE, DELIVER, FORWARD, LOCAL, RECV, SEND, Plan, build_plan, simulate
from tests.unit.plan.truth import Case, random_case


def plan_of(case: Case) -> Plan:
    here, there = case.specs()
    return build_plan(dict.fromkeys(case.names, here), dict.fromkeys(reversed(case.names), there), **case.kwargs)


def prove(seed: int, rng: random.Random | None = None) -> Plan:
    """Plan case ``seed`` and hold everything about it against the enumerated truth."""
    case = random_case(seed, rng)
    here, there = case.specs()
    for truths, spec in ((case.source, here), (case.target, there)):
        for truth in truths:
            for rank in truth.ranks:
                owned = truth.layout().owned(case.shape, rank)
                assert owned is not None
                flat = [[i for start, stop in runs for i in range(start, stop)] for runs in owned]
                assert flat == truth.indices(case.shape, rank), (seed, truth, rank)
                assert spec.local_shape(rank) == tuple(len(kept) for kept in flat)
    plan = plan_of(case)
    plan.check()
    fulls = case.fulls()
    got = case.targets()
    simulate(plan, case.sources(fulls), got)
    for rank, tensors in case.expected(fulls).items():
        for name, value in tensors.items():
            assert torch.equal(got[rank][name], value), (seed, rank, name, got[rank][name], value)
    check_links(plan, here.holders(), there.holders())
    return plan


def check_links(plan: Plan, sources: list[int], targets: list[int]) -> None:
    """Both ends of each link list the same rows in the same order, and a round has one partner a direction."""
    sent, received = defaultdict(list), defaultdict(list)
    total = 0
    for side, ranks in (("source", sources), ("target", targets)):
        for rank in ranks:
            rp = plan.for_rank(side, rank)
            partners = defaultdict(set)
            for i in range(len(rp)):
                assert rp.depends[i] < i
                region = rp.region(i).product, *(tuple(map(tuple, runs.tolist())) for runs in rp.region(i).dims)
                inside = rp.kind[i] == CONTRIBUTE
                row = (int(rp.kind[i]), int(rp.tensor[i]), int(rp.index[i]), int(rp.nbytes[i]), int(rp.phase[i]),
                       int(rp.round[i]), region, rp.slots[rp.slot[i]] if rp.slot[i] >= 0 else None)  # fmt: skip
                passed = rp.kind[i] in (FORWARD, DELIVER)
                assert not passed or rp.target[i] == rank or (rp.depends[i] >= 0 and
                                                              rp.phase[rp.depends[i]] < rp.phase[i])  # fmt: skip
                link = ("in" if inside else "on" if passed else "out", int(rp.source[i]), int(rp.target[i]))
                if rp.role[i] == LOCAL:
                    ends = [sent, received] if inside and rp.source[i] == rp.target[i] else []
                    mine = side == "source" if not passed else rp.target[i] != rank
                    ends = ends or ([sent] if mine and rp.source[i] == rank else [received])
                else:
                    gets = rp.target[i] == rank and (side == "target" or inside)
                    assert rp.role[i] == (RECV if gets else SEND)
                    ends = [received] if rp.role[i] == RECV else [sent]
                    mate = link[1] if rp.role[i] == RECV else link[2]
                    partners[int(rp.role[i]), link[0], int(rp.round[i])].add(mate)
                for end in ends:
                    end[link].append(row)
                total += 1
            assert all(len(mates) == 1 for mates in partners.values())
    assert sent == received
    assert plan.stats().ops == sum(len(rows) for rows in received.values())
