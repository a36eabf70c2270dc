"""Random data in the proportions of Llama-3 8B: FSDP over 4 ranks to tensor-parallel over 2.

The pair, the launcher and the comparison by hashes are those of the training demo. No model is run.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import etha
from etha import AsyncTensorBusClient, TensorBusClient
from etha.demo.events import Reporter
from etha.demo.hashes import digests
from etha.demo.inference import whole_transfer
from etha.demo.llama import DTYPE, llama, shard, strides, tensor_parallel_placement
from etha.demo.options import Options
from etha.demo.seats import DemoSeat


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill with random bits, in place. Every bf16 pattern may occur, NaNs included."""
    tensor.view(torch.int16).random_(-(2**15), 2**15, generator=generator)


def send(options: Options, place: DemoSeat, report: Reporter) -> None:
    """The trainer's part: FSDP shards, filled anew for every version."""
    mesh = init_device_mesh(place.kind, (dist.get_world_size(),))
    shapes = llama(options.synthetic or 1.0)
    shards = {name: shard(shape, mesh.size(), dist.get_rank(), place.device) for name, shape in shapes.items()}
    tensors = {
        name: DTensor.from_local(
            shards[name], mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides(shape)
        )
        for name, shape in shapes.items()
    }
    generator = torch.Generator(device=place.device).manual_seed(dist.get_rank())
    report.tell("ready", parameters=sum(math.prod(shape) for shape in shapes.values()))
    with TensorBusClient(device=place.device, timeout=options.timeout) as client:
        client.init_pair("weights", "trainer", "inference")
        with client.register_tensors("synthetic", tensors, pair_name="weights", direction="send") as batch:
            for number in options.versions:
                for local in shards.values():
                    fill(local, generator)
                result = batch.transfer("send", version=number)
                hashes = digests(tensors.items(), here=report.speaks)
                report.tell("version", number=number, hashes=hashes, seconds=result.seconds)
    report.tell("done")


def empty(shape: tuple[int, ...], place: DemoSeat) -> torch.Tensor:
    """Memory that the agent maps: torch's own on a GPU, Etha's on the CPU."""
    if place.kind == "cpu":
        return etha.empty(shape, dtype=DTYPE)
    return torch.empty(shape, dtype=DTYPE, device=place.device)


async def receive(options: Options, place: DemoSeat, report: Reporter) -> None:
    """The inference job's part: tensor-parallel shards."""
    mesh = init_device_mesh(place.kind, (dist.get_world_size(),))
    shapes = llama(options.synthetic or 1.0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        placement = tensor_parallel_placement(name)
        local = list(shape)
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size()
        tensors[name] = DTensor.from_local(
            empty(tuple(local), place),
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size(shape),
            stride=strides(shape),
        )
    report.tell("ready", parameters=sum(math.prod(shape) for shape in shapes.values()))

    def progress(done: int, total: int) -> None:
        report.tell("progress", bytes=done, total=total)

    async with AsyncTensorBusClient(device=place.device, timeout=options.timeout) as client:
        await client.init_pair("weights", "inference", "trainer")
        async with await client.register_tensors("synthetic", tensors, pair_name="weights", direction="recv") as batch:
            for number in options.versions:
                result = await batch.transfer("recv", progress=progress)
                if result.version != number:
                    raise RuntimeError(f"version {result.version} came where {number} was due")
                hashes = digests(tensors.items(), here=report.speaks)
                whole, seconds = whole_transfer(result)
                report.tell("version", number=number, hashes=hashes, bytes=whole, seconds=seconds)
    report.tell("done")
