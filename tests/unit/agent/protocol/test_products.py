"""Random lists of products, from what each rank hands to ``register_tensors`` to what lies in its flat tensor.

They receive, and they send.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate

from etha.agent.protocol.evaluation import Where, evaluate
from etha.agent.protocol.records import Manifest, Record
from etha.bus.messages import Entry, Register
from etha.client.arguments.world import RankInfo
from etha.client.manifest import PairDefaults, build_manifest
from etha.client.manifest import TensorManifest as Handed
from etha.client.memory.cpu import CpuMemory
from etha.memory.handles import describe
from etha.plan import simulate
from tests.unit.plan.truth import Loaded, Truth, cells_of, random_dim, random_truth, runs_of, take


@dataclass
class Batch:
    """What the ranks of sides ``s`` and ``t`` register of one tensor "w"."""

    shape: tuple[int, ...]
    records: dict[tuple[str, int], Record] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)

    def say(
        self,
        side: str,
        rank: int,
        world: int,
        local: torch.Tensor,
        truth: Truth | None,
        direction: str | None = None,
        **options: Any,
    ) -> Handed:
        """One rank's part, through its client, its agent and Redis."""
        place = RankInfo(rank=rank, world_size=world, launch=None, ranks=None)
        mesh = None if truth is None else torch.tensor(truth.ranks).reshape(truth.mesh)
        placements: Any = None if truth is None else tuple(truth.placements)
        handed = build_manifest(
            {"w": local}, pair_name="p", placements=None, shapes={"w": self.shape}, home=CpuMemory(),
            pairs={"p": PairDefaults(name="p", place=place, mesh=mesh, placements=placements)}, **options,
        )  # fmt: skip
        layouts = list(dict.fromkeys(item.layout for item in handed.items))
        entries = tuple(
            Entry(name=i.name, pair=0, layout=layouts.index(i.layout), shape=i.shape, handle=describe(i.local), of=i.of)
            for i in handed.items
        )
        message = Register(
            batch="b", epoch=1, form="map", pairs=("p",), layouts=tuple(one.to_plain() for one in layouts),
            entries=entries, refusals=(), direction=cast("Any", direction or ("recv" if truth is None else "send")),
            bucket_size=None, atomic=False, verify=None, seq=0,
        )  # fmt: skip
        fields = Manifest.of(message, rank).fields()
        self.manifests[f"{side}{rank}"] = Manifest.from_fields(fields, {one.digest(): one for one in layouts})
        self.records[side, rank] = Record.of(message, f"{side}{rank}")
        return handed


def prove(seed: int) -> int:
    """Hold one random batch against the enumerated truth; how many ranks registered several products."""
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 3, 5, 8, 11]) for _ in range(rng.choice([1, 2, 2, 3])))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    m, n = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3])
    truth = random_truth(rng, list(range(m)), len(shape), None)
    truth.reading = "auto"
    batch, several = Batch(shape), 0
    sent = {r: {"w": take(full, truth.indices(shape, r))} for r in range(m)}
    for r in range(m):
        batch.say("s", r, m, sent[r]["w"], truth)
    wanted, flats, locals_ = {}, {}, {}
    for r in range(n):
        products = [[random_dim(rng, size) for size in shape] for _ in range(rng.choice([1, 1, 2, 3, 5]))]
        runs = [[runs_of(dim) for dim in kept] for kept in products]
        wanted[r] = torch.cat([take(full, kept).reshape(-1) for kept in products])
        regions: Any = runs
        # One without any run is read as a product, and a product by itself lies as it is.
        if not any(dim for product in runs for dim in product) or (len(runs) == 1 and rng.random() < 0.5):
            regions, wanted[r] = runs[0], take(full, products[0])
        flats[r] = torch.full_like(wanted[r], -1)
        handed = batch.say("t", r, n, flats[r], None, regions={"w": regions})
        locals_[r] = {item.name: item.local for item in handed.items}
        several += len(handed.items) > 1
    hosts = {"s": [rng.choice("ab") for _ in range(m)], "t": [rng.choice("abc") for _ in range(n)]}
    agents = {side: [f"{host}{rng.choice('01')}" for host in names] for side, names in hosts.items()}
    found = evaluate(batch.records, batch.manifests, Where(agents=agents, hosts=hosts))
    assert not found.refused, (seed, found.refused)
    plan = found.plans["s"]
    plan.check()
    held = {r: {name: mine[found.parts.get(name, name)] for name in plan.names} for r, mine in sent.items()}
    simulate(plan, held, locals_)
    assert found.nbytes("s") == 4 * sum(flat.numel() for flat in flats.values())
    for r in range(n):
        assert torch.equal(flats[r], wanted[r]), (seed, r, flats[r], wanted[r])
    return several


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_lists_arrive_in_flat_tensors_one_product_after_another(part: int) -> None:
    assert sum(prove(seed) for seed in range(part * 25, part * 25 + 25)) > 10


def flat_of(full: torch.Tensor, products: list[list[list[int]]]) -> torch.Tensor:
    """The flat tensor in which products lie one after another."""
    return torch.cat([take(full, kept).reshape(-1) for kept in products])


def prove_sent(seed: int) -> int:
    """Ranks that hold lists of products send to random targets; how many ranks registered several products."""
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 3, 5, 8, 11]) for _ in range(rng.choice([1, 2, 2, 3])))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    m, n = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 6])
    targets: list[Truth] = [random_truth(rng, list(range(n)), len(shape), None)]
    targets[0].reading = "auto"
    some = rng.random() < 0.5
    if some:
        targets = [Loaded((1,), [r], [Replicate()], kept=[random_dim(rng, size) for size in shape]) for r in range(n)]
    held = [[[random_dim(rng, size) for size in shape] for _ in range(rng.choice([1, 2, 3]))] for _ in range(m)]
    lacking = cells_of(shape, targets) - {i for mine in held for kept in mine for i in itertools.product(*kept)}
    if lacking:
        held[rng.randrange(m)].append([sorted({index[d] for index in lacking}) for d in range(len(shape))])
    batch, several = Batch(shape), 0
    sent: dict[int, dict[str, torch.Tensor]] = {}
    for r, mine in enumerate(held):
        runs = [[runs_of(dim) for dim in kept] for kept in mine]
        if not any(dim for product in runs for dim in product):
            runs[0] = [[(0, size)] for size in shape]
            mine[0] = [list(range(size)) for size in shape]
        options: Any = {"regions": {"w": runs}}
        handed = batch.say("s", r, m, flat_of(full, mine), None, **options, direction="send")
        sent[r] = {item.name: item.local for item in handed.items}
        several += len(handed.items) > 1
    got: dict[int, dict[str, torch.Tensor]] = {}
    for r in range(n):
        truth = next(one for one in targets if r in one.ranks)
        got[r] = {"w": torch.full([len(kept) for kept in truth.indices(shape, r)], -1.0)}
        options = {"regions": {"w": [runs_of(dim) for dim in truth.indices(shape, r)]}} if some else {}
        batch.say("t", r, n, got[r]["w"], None if some else truth, **options, direction="recv")
    hosts = {"s": [rng.choice("ab") for _ in range(m)], "t": [rng.choice("abc") for _ in range(n)]}
    agents = {side: [f"{host}{rng.choice('01')}" for host in names] for side, names in hosts.items()}
    found = evaluate(batch.records, batch.manifests, Where(agents=agents, hosts=hosts))
    assert not found.refused, (seed, found.refused)
    plan = found.plans["s"]
    plan.check()
    simulate(plan, sent, got)
    for r in range(n):
        truth = next(one for one in targets if r in one.ranks)
        assert torch.equal(got[r]["w"], take(full, truth.indices(shape, r))), (seed, r)
    return several


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_lists_send_what_they_hold_together(part: int) -> None:
    assert sum(prove_sent(seed) for seed in range(part * 25, part * 25 + 25)) > 10
