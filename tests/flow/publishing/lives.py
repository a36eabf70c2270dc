"""Publishers and subscribers as processes of their own, which a test kills."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch.distributed.tensor import Replicate

import etha
from tests.flow.jobs import tell, wait_for


def options(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Each rank has all of the one tensor."""
    return {
        "expected_world_size": world,
        "rank": rank,
        "device_mesh": (world,),
        "placements": {"w": [Replicate()]},
        "timeout": 60,
    }


def publisher(name: str, elements: int, rank: int = 0, world: int = 1, slots: int = 2) -> None:
    """Puts each version that the test gives, filled with its number; ends when it is given none."""
    with etha.TensorBusClient(timeout=60) as client:
        tensor = torch.zeros(elements)
        publication = client.publish(name, {"w": tensor}, slots=slots, **options(rank, world))
        tell("published", publication.seq)
        while (version := wait_for("put")) is not None:
            tensor.fill_(version)
            put = publication.put(version)
            tensor.fill_(-1)
            tell("put", put.seq)
        publication.close()


def replica(name: str, subscriber: str, elements: int, rank: int = 0, world: int = 1, **more: Any) -> None:
    """Follows the publication, and tells the test each version that it holds and when a transfer begins to move."""
    asyncio.run(_follow(name, subscriber, elements, options(rank, world) | more))


async def _follow(name: str, subscriber: str, elements: int, options: dict[str, Any]) -> None:
    async with etha.AsyncTensorBusClient(timeout=60) as client:
        tensor = etha.empty(elements)
        subscription = await client.subscribe(name, {"w": tensor}, subscriber=subscriber, **options)
        tell("subscribed")
        while True:
            moving = False

            def progress(done: int, total: int) -> None:
                nonlocal moving
                if not moving:
                    moving = True
                    tell("moving", done)

            update = await subscription.next(timeout=300, progress=progress)
            values = tensor.unique().tolist()
            tell("held", (update.seq, update.version, values[0] if len(values) == 1 else None, update.source))
