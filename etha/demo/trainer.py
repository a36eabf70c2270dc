"""The trainer of the demo: FSDP2 x TP on a 2 x 2 mesh. It sends a version to the inference job every few steps.

Everything about Etha is in ``train``: one pair, one batch, one transfer per version.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from etha import TensorBusClient
from etha.demo import text
from etha.demo.events import Reporter
from etha.demo.hashes import digests
from etha.demo.model import GPT, Shape, evaluating, fsdp_by_tensor_parallel
from etha.demo.options import Options
from etha.demo.seats import DemoSeat

ROWS = 16
HELD_OUT_ROWS = 64
LEARNING_RATE = 3e-3
WARM_UP = 10


def train(options: Options, place: DemoSeat, report: Reporter) -> None:
    """Train for ``options.steps`` steps and send every version of ``options.versions``."""
    mesh = init_device_mesh(place.kind, (2, 2), mesh_dim_names=("dp", "tp"))
    corpus = text.load()
    torch.manual_seed(0)
    model = fsdp_by_tensor_parallel(GPT(Shape(vocabulary=len(corpus.vocabulary))).to(place.device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    random = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    report.tell("ready", parameters=sum(p.numel() for p in model.parameters()))

    with TensorBusClient(device=place.device, timeout=options.timeout) as client:
        client.init_pair("weights", "trainer", "inference")
        # Without a forward pass between the last reshard() and here, parameters are the sharded DTensors.
        with client.register_tensors(
            "model", dict(model.named_parameters()), pair_name="weights", direction="send"
        ) as batch:
            for step in range(options.steps + 1):
                if step in options.versions:
                    loss = held_out_loss(model, corpus, mesh, place.device)
                    result = batch.transfer("send", version=step)
                    hashes = digests(model.named_parameters(), here=report.speaks)
                    report.tell("version", number=step, loss=loss, hashes=hashes, seconds=result.seconds)
                if step < options.steps:
                    inputs, targets = corpus.batch(ROWS, model.shape.context, random, place.device)
                    torch.autograd.backward(model.loss(inputs, targets))
                    optimizer.step()
                    warm_up.step()
                    optimizer.zero_grad()
                    report.tell("progress", step=step + 1, steps=options.steps)
    report.tell("done")


def held_out_loss(model: GPT, corpus: text.Text, mesh: DeviceMesh, device: str) -> float:
    """Loss over the held-out rows in nats per character. Each data-parallel rank takes an equal part of them."""
    inputs, targets = corpus.held_out_rows(HELD_OUT_ROWS, model.shape.context, device)
    parts, mine = mesh["dp"].size(), mesh["dp"].get_local_rank()
    with evaluating(model):
        loss = model.loss(inputs.chunk(parts)[mine], targets.chunk(parts)[mine])
    dist.all_reduce(loss, group=mesh["dp"].get_group())
    return float(loss) / parts
