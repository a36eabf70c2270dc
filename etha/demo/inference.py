"""The inference job of the demo: two tensor-parallel asyncio processes with their own process group.

Everything about Etha is in ``serve``: one pair, one batch, one awaited transfer per version.
"""

from __future__ import annotations

import asyncio
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from etha import AsyncTensorBusClient, TransferResult
from etha.demo import text
from etha.demo.events import Reporter
from etha.demo.hashes import digests
from etha.demo.model import GPT, Shape, evaluating, tensor_parallel, write
from etha.demo.options import Options
from etha.demo.seats import DemoSeat
from etha.demo.trainer import HELD_OUT_ROWS

PROMPT = "HAMLET:\n"
SAMPLE = 72


async def serve(options: Options, place: DemoSeat, report: Reporter) -> None:
    """Receive every version of ``options.versions``, judge it, write a sample."""
    mesh = init_device_mesh(place.kind, (dist.get_world_size(),))
    corpus = text.load()
    model = GPT(Shape(vocabulary=len(corpus.vocabulary))).to(place.device)
    model = tensor_parallel(model, mesh).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # an element that never arrives would show in loss and hash
    report.tell("ready", parameters=sum(p.numel() for p in model.parameters()))

    async with AsyncTensorBusClient(device=place.device, timeout=options.timeout) as client:
        # Linear layers are DTensors and bring their layout. Norms and embeddings are plain, and whole on each rank.
        await client.init_pair("weights", "inference", "trainer", device_mesh=(mesh.size(),), placements=[Replicate()])
        parameters = dict(model.named_parameters())
        async with await client.register_tensors("model", parameters, pair_name="weights", direction="recv") as batch:
            for number in options.versions:
                result = await batch.transfer("recv")
                if result.version != number:
                    raise RuntimeError(f"version {result.version} came where {number} was due")
                # The model computes in a thread, so that the loop goes on answering.
                await asyncio.to_thread(judge, number, result, model, corpus, place, report)
    report.tell("done")


def judge(
    number: int, result: TransferResult, model: GPT, corpus: text.Text, place: DemoSeat, report: Reporter
) -> None:
    """Report loss, hashes and a sample of the version that the model now holds. Collective."""
    place.take()  # the current device is per thread
    inputs, targets = corpus.held_out_rows(HELD_OUT_ROWS, model.shape.context, place.device)
    with evaluating(model):
        loss = float(model.loss(inputs, targets))
    hashes = digests(model.named_parameters(), here=report.speaks)
    # A version with holes has no probabilities to draw from; its loss and hashes show that.
    written = write(model, corpus.encode(PROMPT), SAMPLE, seed=number) if math.isfinite(loss) else torch.empty(0)
    sample = corpus.decode(written)
    nbytes, seconds = whole_transfer(result)
    report.tell("version", number=number, loss=loss, hashes=hashes, bytes=nbytes, seconds=seconds, sample=sample)


def whole_transfer(result: TransferResult) -> tuple[int, float]:
    """Bytes received by all ranks of this job together, and the longest rank's seconds. Collective."""
    nbytes = torch.tensor(result.bytes, dtype=torch.int64)
    seconds = torch.tensor(result.seconds, dtype=torch.float64)
    dist.all_reduce(nbytes)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return int(nbytes), float(seconds)
