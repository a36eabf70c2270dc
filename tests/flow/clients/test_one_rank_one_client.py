"""A rank is held by one client: who holds another one, or comes second, is told so and disturbs nobody."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from etha.errors import ConfigError, PeerLostError, RendezvousTimeoutError
from tests.flow.sides import Sides
from tests.flow.sites import Site

pytestmark = pytest.mark.ways("local")
ONE: dict[str, Any] = {"expected_world_size": 1, "device_mesh": (1,), "placements": [Replicate()]}


async def test_two_ranks_by_one_client_at_once_are_refused(site: Site, pair: str) -> None:
    async with site.client("trainer", 0, timeout=60) as client:
        await client.status()
        both = await asyncio.gather(
            *(client.init_pair(pair, "trainer", "inference", 2, rank=rank, timeout=1) for rank in (0, 1)),
            return_exceptions=True,
        )
        assert isinstance(both[0], RendezvousTimeoutError), both
        assert isinstance(both[1], ConfigError) and "this client is trainer rank 0" in both[1].message


async def test_a_second_client_of_the_process_does_not_get_a_rank_that_is_held(site: Site, pair: str) -> None:
    first, second = (site.client("trainer", 0, timeout=60) for _ in range(2))
    async with first, second, site.client("inference", 0, timeout=60) as other:
        formed, _ = await asyncio.gather(
            first.init_pair(pair, "trainer", "inference", rank=0, **ONE),
            other.init_pair(pair, "inference", "trainer", rank=0, **ONE),
        )
        with pytest.raises(ConfigError, match=rf"held by another client of this process, pid {os.getpid()} on host"):
            await second.init_pair(pair, "trainer", "inference", rank=0, **ONE)
        assert not formed.lost.is_set()
        assert await first.init_pair(pair, "trainer", "inference", rank=0, **ONE) is formed, "the same call again"
        await first.close()
        again, _ = await asyncio.gather(
            second.init_pair(pair, "trainer", "inference", rank=0, **ONE),
            other.init_pair(pair, "inference", "trainer", rank=0, **ONE),
        )
        assert again.epoch == formed.epoch + 1


async def test_a_rank_that_waits_for_the_others_is_held_too(site: Site, pair: str) -> None:
    first, second = (site.client("trainer", 0, timeout=60) for _ in range(2))
    async with first, second:
        await asyncio.gather(first.status(), second.status())
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(first.init_pair(pair, "trainer", "inference", rank=0, **ONE))
            await asyncio.sleep(0)
            await first.status()
            with pytest.raises(ConfigError, match="held by another client of this process"):
                await second.init_pair(pair, "trainer", "inference", rank=0, **ONE)
            async with site.client("inference", 0, timeout=60) as other:
                await other.init_pair(pair, "inference", "trainer", rank=0, **ONE)
                assert (await waiting).epoch == 1


async def test_what_to_do_after_a_loss_is_said_once(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(2)}, {}))
        await sides.clients["inference", 0].close()
        await sides.pairs["trainer", 0].lost
        for snapshot in (False, True):
            with pytest.raises(PeerLostError) as caught:
                await handles["trainer", 0].transfer("send", snapshot=snapshot)
            assert caught.value.message.count("call init_pair") == 1, caught.value.message
