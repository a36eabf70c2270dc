"""Many pairs whose agents overlap: transfers that start at random moments on both sides take turns, and all end."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.flow.sides import Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, stale, whole

PAIRS, TRANSFERS = 6, 50
#: Seconds for each call, on a busy machine; a deadlock waits for ever.
DEADLINE = 30.0
#: Agents of the pairs: over tcp a and a2 are two of one host.
PLACES = {"tcp": ["a", "a2", "b", "c"], "host": ["a", "b", "c"]}
SHAPES = [(37, 29), (512, 257), (1024, 1025)]


class Traffic:
    """One pair with its own plan of who sends when."""

    def __init__(self, site: Site, pair: str, transfers: int, dice: random.Random) -> None:
        self.sources = [dice.choice(["trainer", "inference"]) for _ in range(transfers)]
        self.shape = dice.choice(SHAPES)
        # Two different agents on each side, so that every pair shares some with every other.
        self.places = {side: dice.sample(PLACES[site.way], 2) for side in ("trainer", "inference")}
        self.sides = Sides(
            site, pair, trainer=2, inference=2, timeout=DEADLINE, where=lambda side, rank: self.places[side][rank]
        )
        full = whole(self.shape)
        self.base = {m: cut(full, 0 if m[0] == "trainer" else 1, 2, m[1]) for m in self.sides.members}
        self.tensors = {member: stale(base) for member, base in self.base.items()}
        self.handles: dict[Any, Any] = {}
        self.seed = dice.random()

    def mine(self, side: str, rank: int, version: int) -> torch.Tensor:
        """What a worker holds of a version: the trainer cuts rows, the other side columns."""
        return self.base[side, rank] + 1000.0 * version

    async def register(self) -> None:
        await self.sides.meet(
            device_mesh=(2,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(1)]}
        )
        self.handles = await self.sides.register(
            "b",
            lambda side, rank: ({"w": self.tensors[side, rank]}, {"shapes": {"w": self.shape}, "direction": "both"}),
        )

    async def worker(self, member: Any) -> list[tuple[int, Any]]:
        """All transfers of the pair as one worker calls them, each at a moment of its own."""
        dice, (side, rank) = random.Random(f"{self.seed}{member}"), member
        seen = []
        for version, source in enumerate(self.sources):
            await asyncio.sleep(dice.choice([0, dice.uniform(0, 0.03)]))
            if member[0] == source:
                self.tensors[member].copy_(self.mine(side, rank, version))
                result = await self.handles[member].transfer("send", version=version)
            else:
                result = await self.handles[member].transfer("recv")
                assert torch.equal(self.tensors[member], self.mine(side, rank, version)), (self.sides.pair, member)
            seen.append((result.seq, result.version))
        return seen


@pytest.mark.ways("tcp", "host")
@pytest.mark.parametrize("seed", [1, 2])
async def test_fifty_transfers_of_six_pairs_over_the_same_agents(site: Site, pair: str, seed: int) -> None:
    dice = random.Random(seed)
    share = [TRANSFERS // PAIRS + (n < TRANSFERS % PAIRS) for n in range(PAIRS)]
    routes = [Traffic(site, f"{n}.{pair}"[:100], transfers, dice) for n, transfers in enumerate(share)]
    async with AsyncExitStack() as stack:
        for route in routes:
            await stack.enter_async_context(route.sides)
        await asyncio.gather(*(route.register() for route in routes))
        found = await asyncio.gather(*(route.worker(member) for route in routes for member in route.sides.members))
        expected = [[(n + 1, n) for n in range(len(route.sources))] for route in routes for _ in route.sides.members]
        assert found == expected
        assert sum(len(route.sources) for route in routes) == TRANSFERS
