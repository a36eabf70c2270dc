"""A rank closes its handle of a batch, and keeps its client: the other ranks hear of it at once, and can begin anew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import PeerLostError
from tests.flow.sides import Sides
from tests.flow.sites import Site

pytestmark = pytest.mark.ways("local", "tcp", "three")

LAID = {"device_mesh": (2,), "placements": [Shard(0)]}


def tensors(value: float) -> Any:
    return lambda side, rank: ({"w": torch.full((4,), value if side == "trainer" else 0.0)}, {})


@pytest.mark.parametrize("member", [("trainer", 1), ("inference", 0)], ids=lambda member: member[0])
async def test_all_other_ranks_hear_of_it_and_register_again(site: Site, pair: str, member: tuple[str, int]) -> None:
    async with Sides(site, pair, trainer=2, inference=2, timeout=60.0) as sides:
        await sides.meet(**LAID)
        handles = await sides.register("b", tensors(1.0))
        await sides.move(handles)
        others = {other: handle for other, handle in handles.items() if other != member}
        waiting = [
            asyncio.ensure_future(handle.transfer("send" if side == "trainer" else "recv"))
            for (side, _), handle in list(others.items())[:2]
        ]
        await sides.ask_all()
        await handles[member].close()
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, PeerLostError) and ended.reason == "closed" and ended.outcome == "withdrawn"
            assert f"{member[0]} rank {member[1]} has closed batch 'b'" in ended.message
        for answer in (await sides.move(others)).values():
            assert isinstance(answer, PeerLostError), "those that had not called, too"
        # Without a word to each other: who closed registers at once, the others when their call has failed.
        targets = [torch.zeros(4), torch.zeros(4)]
        again = await sides.register(
            "b", lambda side, rank: ({"w": targets[rank] if side == "inference" else torch.full((4,), 2.0)}, {})
        )
        assert [result.seq for result in (await sides.move(again)).values()] == [2] * 4
        assert [target.tolist() for target in targets] == [[2.0] * 4] * 2


async def test_who_closes_at_once_leaves_the_others_their_handles(site: Site, pair: str) -> None:
    async with Sides(site, pair, trainer=2, inference=2, timeout=60.0) as sides:
        await sides.meet(**LAID)

        async def brief(side: str, rank: int) -> Any:
            handle = await sides.clients[side, rank].register_tensors(
                "b", {"w": torch.zeros(4)}, pair_name=pair, atomic=True
            )
            plan = handle.plan
            await handle.close()
            return plan

        for _ in range(10):
            assert all(await asyncio.gather(*(brief(*member) for member in sides.members)))
