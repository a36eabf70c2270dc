"""One rank of a replica: follows the publication, and says for each version whether every element is right."""

import asyncio
import json
import os

import torch
from torch.distributed.tensor import Shard
from trainer import SHAPE, weight

import etha


async def main() -> None:
    rank, world, dim = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["FLEET_DIM"])
    shard = torch.empty(weight(0).chunk(world, dim)[rank].shape)
    async with etha.AsyncTensorBusClient(timeout=120) as client:
        subscription = await client.subscribe(
            "policy",
            {"w": shard},
            subscriber=os.environ["FLEET_REPLICA"],
            device_mesh=(world,),
            placements={"w": [Shard(dim)]},
            shapes={"w": SHAPE},
            atomic=True,
        )
        async for update in subscription:
            right = torch.equal(shard, weight(update.version).chunk(world, dim)[rank])
            said = {"version": update.version, "source": update.source, "seconds": update.seconds, "right": right}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
