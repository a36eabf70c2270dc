"""Trains a small model and sends a version of its weights every ten steps.

Run beside server.py, in either order: python examples/quickstart/trainer.py
"""

import torch
from torch.distributed.tensor import Replicate

from etha import TensorBusClient

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

with TensorBusClient() as client:
    # One process on this side; its tensors are whole. Under FSDP or TP, DTensors bring their own layout.
    client.init_pair("weights", "trainer", "server", device_mesh=(1,), placements=[Replicate()], timeout=300)
    with client.register_tensors("model", dict(model.named_parameters()), pair_name="weights") as batch:
        for step in range(1, 51):
            x = torch.randn(512, 64)
            loss = torch.nn.functional.mse_loss(model(x), x.sin().mean(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                result = batch.transfer("send", version=step)
                milliseconds = result.seconds * 1e3
                print(f"sent version {step}: loss {loss.item():.4f}, {result.bytes:,} bytes in {milliseconds:.1f} ms")
