"""The trainer of the demo: FSDP2 x TP on a 2 x 2 mesh. It sends a version to the inference job every few steps.

Everything about Etha is in ``train``, one pair, one batch, one transfer per version; and in ``publish``, which puts
versions for replicas.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from etha import TensorBusClient
from etha.demo import text
from etha.demo.events import Reporter
from etha.demo.hashes import digests
from etha.demo.model import GPT, Shape, evaluating, fsdp_by_tensor_parallel
from etha.demo.options import PUBLICATION, Options
from etha.demo.seats import DemoSeat

ROWS = 16
HELD_OUT_ROWS = 64
LEARNING_RATE = 3e-3
WARM_UP = 10


def train(options: Options, place: DemoSeat, report: Reporter) -> None:
    """Train for ``options.steps`` steps and send every version of ``options.versions``."""
    training = Training(options, place, report)
    with TensorBusClient(device=place.device, timeout=options.timeout) as client:
        client.init_pair("weights", "trainer", "inference")
        # Without a forward pass between the last reshard() and here, parameters are the sharded DTensors.
        with client.register_tensors("model", training.parameters, pair_name="weights", direction="send") as batch:
            training.run(lambda step: batch.transfer("send", version=step).seconds)
    report.tell("done")


def publish(options: Options, place: DemoSeat, report: Reporter, release: int) -> None:
    """The same for replicas: put every version, wait for nobody, and stay until ``release`` is closed."""
    training = Training(options, place, report)
    with TensorBusClient(device=place.device, timeout=options.timeout) as client:
        with client.publish(PUBLICATION, training.parameters) as publication:

            def put(step: int) -> float:
                begun = time.monotonic()
                publication.put(version=step)
                return time.monotonic() - begun

            training.run(put)
            os.read(release, 1)
    report.tell("done")


class Training:
    """The model on the trainer's mesh, and its steps. Nothing here knows how versions travel."""

    def __init__(self, options: Options, place: DemoSeat, report: Reporter) -> None:
        self._options, self._place, self._report = options, place, report
        self._mesh = init_device_mesh(place.kind, (2, 2), mesh_dim_names=("dp", "tp"))
        self._corpus = text.load()
        torch.manual_seed(0)
        model = GPT(Shape(vocabulary=len(self._corpus.vocabulary))).to(place.device)
        self._model = fsdp_by_tensor_parallel(model, self._mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        self._warm_up = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        report.tell("ready", parameters=sum(p.numel() for p in self._model.parameters()))

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name."""
        return dict(self._model.named_parameters())

    def run(self, send: Callable[[int], float]) -> None:
        """Make all steps. ``send(step)`` hands over a version; it returns the seconds that this took."""
        options, model, corpus, report = self._options, self._model, self._corpus, self._report
        random = torch.Generator().manual_seed(self._mesh["dp"].get_local_rank())
        for step in range(options.steps + 1):
            if step in options.versions:
                loss = held_out_loss(model, corpus, self._mesh, self._place.device)
                seconds = send(step)
                hashes = digests(model.named_parameters(), here=report.speaks)
                report.tell("version", number=step, loss=loss, hashes=hashes, seconds=seconds)
            if step < options.steps:
                inputs, targets = corpus.batch(ROWS, model.shape.context, random, self._place.device)
                torch.autograd.backward(model.loss(inputs, targets))
                self._optimizer.step()
                self._warm_up.step()
                self._optimizer.zero_grad()
                report.tell("progress", step=step + 1, steps=options.steps)


def held_out_loss(model: GPT, corpus: text.Text, mesh: DeviceMesh, device: str) -> float:
    """Loss over the held-out rows in nats per character. Each data-parallel rank takes an equal part of them."""
    inputs, targets = corpus.held_out_rows(HELD_OUT_ROWS, model.shape.context, device)
    parts, mine = mesh["dp"].size(), mesh["dp"].get_local_rank()
    with evaluating(model):
        loss = model.loss(inputs.chunk(parts)[mine], targets.chunk(parts)[mine])
    dist.all_reduce(loss, group=mesh["dp"].get_group())
    return float(loss) / parts
