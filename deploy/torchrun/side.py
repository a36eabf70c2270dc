"""One process of either side of deploy/torchrun/pair.sh: three ranks shard a tensor by rows, two by columns.

Each rank knows every element, so the receivers check what they get.
"""

from __future__ import annotations

import os
import sys

import torch
from torch.distributed.tensor import Shard

from etha import TensorBusClient

SHAPE, VERSIONS = (90, 40), 3


def main(side: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    dim = 0 if side == "trainer" else 1
    mine = whole.chunk(world, dim)[rank].contiguous()
    tensors = {"w": mine.clone() if side == "trainer" else torch.zeros_like(mine)}
    other = "inference" if side == "trainer" else "trainer"
    with TensorBusClient(timeout=120) as client:
        client.init_pair("torchrun", side, other, device_mesh=(world,), placements=[Shard(dim)])
        with client.register_tensors("policy", tensors, pair_name="torchrun") as batch:
            for version in range(1, VERSIONS + 1):
                if side == "trainer":
                    tensors["w"].copy_(mine * version)
                    batch.transfer("send", version=version)
                else:
                    batch.transfer("recv")
                    if not torch.equal(tensors["w"], mine * version):
                        raise SystemExit(f"rank {rank}: version {version} is wrong")
                    print(f"inference rank {rank}: version {version} as it was sent")


if __name__ == "__main__":
    main(sys.argv[1])
