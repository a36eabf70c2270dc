"""An agent that dies while its workers wait for the other side: who comes then waits for those who come again."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import redis.asyncio
import torch
from torch.distributed.tensor import Replicate

from etha import TransferResult
from etha.errors import AgentLostError
from tests.flow.jobs import wait_gone
from tests.flow.sides import Sides
from tests.flow.sites import Site

OPTIONS = {"placements": [Replicate()], "timeout": 60.0}


@pytest.mark.ways("tcp", "three")
async def test_whoever_completes_an_epoch_with_a_dead_agent_waits_for_the_next(rough: Site, pair: str) -> None:
    async with Sides(rough, pair, trainer=2, inference=2) as sides:
        early = [m for m in sides.members if m[0] == "inference"]
        late = [m for m in sides.members if m[0] == "trainer"]
        watcher = sides.clients[early[0]]
        waiting = [asyncio.create_task(sides.init(member, device_mesh=(2,), **OPTIONS)) for member in early]
        pid = (await watcher.status())["agent"]["pid"]
        while not any(
            p["pair"] == pair and p["waiting_for"] == {"trainer": [0]} for p in (await watcher.status())["pairs"]
        ):
            pass
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_gone, pid)
        for end in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(end, AgentLostError)
        # For ten seconds Redis lists that agent, so whoever comes now completes an epoch with it.
        assert rough.redis is not None
        async with redis.asyncio.Redis.from_url(rough.redis) as server, server.pubsub() as news:
            await news.subscribe(f"etha:{{default}}:pair:{pair}")
            coming = [asyncio.create_task(sides.init(member, device_mesh=(2,), **OPTIONS)) for member in late]
            async for message in news.listen():
                if message["data"] == b"lost":
                    break
                assert not any(task.done() for task in coming), await asyncio.gather(*coming, return_exceptions=True)
        again = [asyncio.create_task(sides.init(member, device_mesh=(2,), **OPTIONS)) for member in early]
        epochs = {formed.epoch for formed in await asyncio.gather(*coming, *again)}
        assert epochs == {2}
        handles = await sides.register("b", lambda side, rank: ({"w": torch.full((4,), float(side == "trainer"))}, {}))
        assert all(isinstance(r, TransferResult) for r in (await sides.move(handles)).values())
