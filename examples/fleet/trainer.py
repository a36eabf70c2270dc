"""One rank of the trainer: publishes a version every INTERVAL seconds, until the file FLEET_END is there.

A version's elements are derived from its number, so that a replica can check every one of them.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import Shard

import etha

#: Rows and columns of the one weight.
SHAPE = (512, 384)


def weight(version: int) -> torch.Tensor:
    """The whole weight of a version; exact in float32."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + version


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    interval, end = float(os.environ["FLEET_INTERVAL"]), Path(os.environ["FLEET_END"])
    shard = torch.empty(weight(0).chunk(world)[rank].shape)
    with etha.TensorBusClient(timeout=120) as client:
        publication = client.publish(
            "policy", {"w": shard}, device_mesh=(world,), placements={"w": [Shard(0)]}, shapes={"w": SHAPE}, slots=3
        )
        version, last = publication.seq, False
        while not last:
            last = end.exists()
            version += 1
            shard.copy_(weight(version).chunk(world)[rank])
            begun = time.monotonic()
            publication.put(version)
            print(json.dumps({"version": version, "seconds": time.monotonic() - begun, "last": last}), flush=True)
            time.sleep(interval)  # a step of training
        sys.stdin.read()  # until the launcher has seen that everybody has the last version


if __name__ == "__main__":
    main()
