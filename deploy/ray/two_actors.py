"""Two Ray actors as the two sides of a pair: one trains, the other receives each version. Ray moves no tensor.

    make ray                                         # on this machine, in an environment of its own
    python deploy/ray/two_actors.py --address auto   # on a cluster: set ETHA_REDIS_URL to a Redis that all nodes reach

Each actor is a process like any other: it makes a client, and the first on a host starts the agent. An actor that is
restarted calls init_pair again. The agent ends by itself when no worker has used it for ETHA_IDLE seconds.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray

#: Variables of Etha that actors get from whoever starts this.
PASSED = ("ETHA_REDIS_URL", "ETHA_NAMESPACE", "ETHA_RUNTIME_DIR", "ETHA_IDLE")
VERSIONS = 3


def weights(value: float) -> dict[str, Any]:
    import torch

    return {f"layer{number}": torch.full((256, 256), value) for number in range(4)}


def variables() -> dict[str, str]:
    """What each actor must know. ETHA_LISTEN is its own node's address, or nobody on another node could reach it."""
    address = ray.util.get_node_ip_address()
    several = len([node for node in ray.nodes() if node["Alive"]]) > 1
    return {"ETHA_LISTEN": f"{address}:0"} if several else {}


@ray.remote(max_restarts=-1)
class Trainer:
    def run(self) -> int:
        from torch.distributed.tensor import Replicate

        from etha import TensorBusClient

        os.environ.update(variables())
        tensors, sent = weights(0.0), 0
        with TensorBusClient() as client:
            client.init_pair(
                "ray", "trainer", "inference", 1, rank=0, device_mesh=(1,), placements=[Replicate()], timeout=120
            )
            with client.register_tensors("policy", tensors, pair_name="ray", timeout=120) as batch:
                for version in range(1, VERSIONS + 1):
                    for tensor in tensors.values():
                        tensor.add_(1)
                    sent += batch.transfer("send", version=version, timeout=120).bytes
        return sent


@ray.remote(max_restarts=-1)
class Inference:
    async def run(self) -> list[float]:
        from torch.distributed.tensor import Replicate

        from etha import AsyncTensorBusClient

        os.environ.update(variables())
        tensors, seen = weights(-1.0), []
        async with AsyncTensorBusClient() as client:
            await client.init_pair(
                "ray", "inference", "trainer", 1, rank=0, device_mesh=(1,), placements=[Replicate()], timeout=120
            )
            async with await client.register_tensors("policy", tensors, pair_name="ray", timeout=120) as batch:
                for _ in range(VERSIONS):
                    await batch.transfer("recv", timeout=120)
                    seen.append(min(float(tensor.min()) for tensor in tensors.values()))
        return seen


def main() -> None:
    words = argparse.ArgumentParser(description="Two Ray actors that share weights through Etha")
    words.add_argument("--address", help="of a Ray cluster; without it Ray is started here")
    found = words.parse_args()
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    here = {} if found.address else {"num_cpus": 2, "include_dashboard": False}
    ray.init(address=found.address, runtime_env={"env_vars": passed}, log_to_driver=True, **here)
    try:
        trainer, inference = Trainer.remote(), Inference.remote()
        sent, seen = ray.get([trainer.run.remote(), inference.run.remote()], timeout=300)
    finally:
        ray.shutdown()
    expected = [float(version) for version in range(1, VERSIONS + 1)]
    if seen != expected:
        raise SystemExit(f"received {seen}, expected {expected}")
    print(f"{VERSIONS} versions, {sent:,} bytes in all, each as it was sent: {seen}")


if __name__ == "__main__":
    main()
