"""A replica of ``etha demo --replicas``: a job of its own that follows the trainer's publication in its own layout.

Everything about Etha is in ``follow``: one subscription, whose versions come one after the other.
"""

from __future__ import annotations

import asyncio
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from etha import AsyncTensorBusClient
from etha.demo import text
from etha.demo.events import Reporter
from etha.demo.hashes import digests
from etha.demo.model import GPT, Shape, tensor_parallel
from etha.demo.options import PUBLICATION, Options, ReplicaLayout, layout_of
from etha.demo.seats import DemoSeat


def tensors_of(model: GPT, layout: ReplicaLayout, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The model's parameters in a replica's layout, filled with NaN: an element that never arrives shows."""
    if layout.name == "tensor-parallel":
        model = tensor_parallel(model, mesh)
    found = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if layout.name in ("rows", "columns"):
            placement: Placement = Shard(0 if layout.name == "rows" else tensor.dim() - 1)
            tensor = distribute_tensor(tensor, mesh, [placement])
        found[name] = tensor.fill_(float("nan"))
    return found


async def follow(job: str, options: Options, place: DemoSeat, report: Reporter, end: int) -> None:
    """Receive versions until the last one is there, then feed others until the launcher closes its end of ``end``."""
    mesh = init_device_mesh(place.kind, (dist.get_world_size(),))
    model = GPT(Shape(vocabulary=len(text.load().vocabulary))).requires_grad_(False)
    tensors = tensors_of(model, layout_of(job), mesh)
    report.tell("ready", parameters=sum(tensor.numel() for tensor in tensors.values()))
    async with AsyncTensorBusClient(device=place.device, timeout=options.timeout) as client:
        # DTensors bring their layout. Plain tensors are whole on each rank.
        plain = {name: [Replicate()] for name in tensors}
        subscription = await client.subscribe(
            PUBLICATION, tensors, subscriber=job, device_mesh=(mesh.size(),), placements=plain, atomic=True
        )
        async with subscription:
            while subscription.version != options.versions[-1]:
                update = await subscription.next()
                # Hashed in a thread, so that the loop goes on answering. Others receive from the shadows meanwhile.
                hashes = await asyncio.to_thread(digests, tensors.items(), here=report.speaks)
                report.tell("version", number=update.version, source=update.source, hashes=hashes)
            await asyncio.to_thread(os.read, end, 1)
    report.tell("done")
