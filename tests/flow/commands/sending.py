"""A batch of which a version was sent, and commands run in this process where its agents are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from torch.distributed.tensor import Replicate

from etha import AsyncTensorBusClient
from etha.cli import app
from tests.flow.sites import Site, environment

SECONDS = 60


@asynccontextmanager
async def sent(site: Site, pair: str, batch: str) -> AsyncIterator[None]:
    """A batch of two tensors, of which version 7 has been sent."""
    async with site.client("trainer", 0, timeout=SECONDS) as one, site.client("inference", 0, timeout=SECONDS) as two:
        await asyncio.gather(meet(one, pair, "trainer", "inference"), meet(two, pair, "inference", "trainer"))
        tensors = {"a": torch.zeros(256, 4), "b": torch.zeros(16)}
        here, there = await asyncio.gather(
            one.register_tensors(batch, tensors, pair_name=pair),
            two.register_tensors(batch, {name: t.clone() for name, t in tensors.items()}, pair_name=pair),
        )
        await asyncio.gather(here.transfer("send", version=7), there.transfer("recv"))
        yield


async def meet(client: AsyncTensorBusClient, pair: str, side: str, other: str) -> None:
    await client.init_pair(pair, side, other, 1, rank=0, device_mesh=(1,), placements=[Replicate()])


async def here(site: Site, *words: str) -> None:
    """``etha WORDS`` in this process, as on the trainer's host; its errors are raised."""
    with environment(site.at(site.way.place("trainer", 0))):
        await asyncio.to_thread(app, words, standalone_mode=False)
