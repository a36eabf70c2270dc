"""Receives every version that trainer.py sends and evaluates it; asyncio stays free meanwhile.

Run beside trainer.py, in either order: python examples/quickstart/server.py
"""

import asyncio

import torch
from torch.distributed.tensor import Replicate

from etha import AsyncTensorBusClient

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).requires_grad_(False)


async def main() -> None:
    x = torch.randn(512, 64)
    async with AsyncTensorBusClient() as client:
        await client.init_pair("weights", "server", "trainer", device_mesh=(1,), placements=[Replicate()], timeout=300)
        # atomic: the weights change only once the whole version is here.
        batch = await client.register_tensors(
            "model", dict(model.named_parameters()), pair_name="weights", direction="recv", atomic=True
        )
        async with batch:
            for _ in range(5):
                result = await batch.transfer("recv")
                loss = torch.nn.functional.mse_loss(model(x), x.sin().mean(dim=1, keepdim=True))
                print(f"version {result.version}: loss {loss.item():.4f} on the server's own data")


asyncio.run(main())
