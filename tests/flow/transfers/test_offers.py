"""``wait_offer`` and a ``recv`` of the same worker at once: GO does not swallow the offer."""

from __future__ import annotations

import asyncio
import uuid

import torch
from torch.distributed.tensor import Replicate

from tests.flow.sides import Sides
from tests.flow.sites import Site


async def test_an_offer_is_heard_although_a_recv_takes_it_up_at_once(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(4)}, {}))
        send, recv = handles["trainer", 0], handles["inference", 0]
        async with asyncio.TaskGroup() as group:
            offer = group.create_task(recv.wait_offer())
            received = group.create_task(recv.transfer("recv"))
            group.create_task(send.transfer("send", version="v1"))
        assert (offer.result().version, offer.result().bytes) == ("v1", 16)
        assert received.result().version == "v1"
