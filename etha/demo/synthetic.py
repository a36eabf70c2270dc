"""Random data in the proportions of Llama-3 8B: FSDP over 4 ranks to tensor-parallel over 2.

Same pair, same launcher, same comparison by hashes as the training demo; no model is run.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import etha
from etha import AsyncTensorBusClient, TensorBusClient
from etha.demo.events import Reporter
from etha.demo.hashes import digests
from etha.demo.inference import whole_transfer
from etha.demo.options import Options

#: Llama-3 8B: rows and columns of every tensor in units of these widths.
HIDDEN, KEY_VALUE, FEED_FORWARD, VOCABULARY, LAYERS = 4096, 1024, 14336, 128256, 32
DTYPE = torch.bfloat16
#: Scaled widths are multiples of this, so that heads still divide among tensor-parallel ranks.
GRAIN = 16


def llama(gib: float) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all 291 tensors of Llama-3 8B, widths scaled so that bf16 makes about ``gib`` GiB.

    All layers are kept and bytes grow with the square of the width, so the mix of large and small tensors stays.
    """
    scale = math.sqrt(gib * 2**30 / nbytes(_shapes(1.0)))
    return _shapes(scale)


def nbytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of one copy of every tensor."""
    return sum(math.prod(shape) for shape in shapes.values()) * DTYPE.itemsize


def _shapes(scale: float) -> dict[str, tuple[int, ...]]:
    h, kv, ffn, vocabulary = (
        max(GRAIN, round(width * scale / GRAIN) * GRAIN) for width in (HIDDEN, KEY_VALUE, FEED_FORWARD, VOCABULARY)
    )
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, h)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.input_layernorm": (h,),
            f"layers.{i}.q_proj": (h, h),
            f"layers.{i}.k_proj": (kv, h),
            f"layers.{i}.v_proj": (kv, h),
            f"layers.{i}.o_proj": (h, h),
            f"layers.{i}.post_attention_layernorm": (h,),
            f"layers.{i}.gate_proj": (ffn, h),
            f"layers.{i}.up_proj": (ffn, h),
            f"layers.{i}.down_proj": (h, ffn),
        }
    return shapes | {"norm": (h,), "lm_head": (vocabulary, h)}


def tensor_parallel_placement(name: str) -> Placement:
    """How an inference engine shards the tensor: rows, or columns where the input is already sharded."""
    if name.endswith("norm"):
        return Replicate()
    return Shard(1) if name.endswith(("o_proj", "down_proj")) else Shard(0)


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Random bits, in place; every bf16 pattern may come up, NaNs included."""
    tensor.view(torch.int16).random_(-(2**15), 2**15, generator=generator)


def send(options: Options, report: Reporter) -> None:
    """The trainer's part: FSDP shards, filled anew for every version."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = llama(options.synthetic or 1.0)
    shards = {name: shard(shape, mesh.size(), dist.get_rank()) for name, shape in shapes.items()}
    tensors = {
        name: DTensor.from_local(
            shards[name], mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=_stride(shape)
        )
        for name, shape in shapes.items()
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    report.tell("ready", parameters=sum(math.prod(shape) for shape in shapes.values()))
    with TensorBusClient(device="cpu", timeout=options.timeout) as client:
        report.tell("agent", pid=client.status()["agent"]["pid"])
        client.init_pair("weights", "trainer", "inference")
        with client.register_tensors("synthetic", tensors, pair_name="weights", direction="send") as batch:
            for number in options.versions:
                for local in shards.values():
                    fill(local, generator)
                result = batch.transfer("send", version=number)
                hashes = digests(tensors.items(), here=report.speaks)
                report.tell("version", number=number, hashes=hashes, seconds=result.seconds)
    report.tell("done")


async def receive(options: Options, report: Reporter) -> None:
    """The inference job's part: tensor-parallel shards in memory that the agent maps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = llama(options.synthetic or 1.0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        placement = tensor_parallel_placement(name)
        local = list(shape)
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size()
        tensors[name] = DTensor.from_local(
            etha.empty(tuple(local), dtype=DTYPE),
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size(shape),
            stride=_stride(shape),
        )
    report.tell("ready", parameters=sum(math.prod(shape) for shape in shapes.values()))

    def progress(done: int, total: int) -> None:
        report.tell("progress", bytes=done, total=total)

    async with AsyncTensorBusClient(device="cpu", timeout=options.timeout) as client:
        report.tell("agent", pid=(await client.status())["agent"]["pid"])
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


def shard(shape: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """This rank's uninitialised FSDP shard: rows by the ``torch.chunk`` rule."""
    rows = -(-shape[0] // ranks)
    mine = max(0, min(shape[0], (rank + 1) * rows) - rank * rows)
    return torch.empty((mine, *shape[1:]), dtype=DTYPE)


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
