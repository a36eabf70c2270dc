"""``publish`` and ``subscribe``: versions reach subscribers of any layout, and nobody waits for anybody else."""

from __future__ import annotations

import asyncio

import torch
from torch.distributed.tensor import Replicate

import etha
from tests.flow.sites import Site


async def test_a_version_reaches_a_subscriber(site: Site, pair: str) -> None:
    source, target = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    options = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,), "placements": {"w": [Replicate()]}}
    async with site.client("trainer", 0) as trainer, site.client("inference", 0) as replica:
        publication = await trainer.publish(pair, {"w": source}, **options)
        subscription = await replica.subscribe(pair, {"w": target}, subscriber="replica", atomic=True, **options)
        put = await publication.put("first")
        source.fill_(-1)
        update = await subscription.next()
        assert (update.seq, update.version, update.source) == (put.seq, "first", "trainer")
        assert torch.equal(target, torch.arange(12.0).reshape(3, 4))
        await publication.put()
        update = await subscription.next()
        assert torch.equal(target, torch.full((3, 4), -1.0))
        waiting = asyncio.ensure_future(subscription.next())
        source.fill_(7)
        await publication.put(3)
        assert (await waiting).version == 3 and target.unique().tolist() == [7]
        assert isinstance(subscription, etha.AsyncSubscription)
        await subscription.close()
        await publication.close()
