"""``named_tensors`` of one transformer, sharded in every way by a trainer, into a plain module of another job.

Truth is the same transformer from the same seed, never sharded, taken through the same steps. Gradients are
enumerated (an odd multiple of each element), so that a step is exact to the bit whoever makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etha
from etha.integrations.fsdp import named_tensors
from tests.flow.jobs import Job

VOCABULARY, WIDTH, HIDDEN, HEADS = 13, 8, 20, 2
VERSIONS = 3
#: How the trainer is laid out: axes and their ranks; a mesh of fewer ranks lies on the first of them.
MESHES: dict[str, dict[str, int]] = {
    "plain": {},
    "fsdp-2": {"dp": 2},
    "fsdp-3": {"dp": 3},
    "fsdp-tp": {"dp": 2, "tp": 2},
    "hsdp": {"replicate": 2, "dp": 2},
}
TENSOR_PARALLEL = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
    **dict.fromkeys(("o", "down"), RowwiseParallel()),
}


class Block(nn.Module):
    """Attention and a perceptron; ``gain`` has one element, so that most ranks hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)) * self.gain
        z: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return z


class Transformer(nn.Module):
    """Two blocks under the name that a job has for them, the head tied to the embedding, buffers of both kinds."""

    def __init__(self, blocks: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks_name = blocks
        self.add_module(blocks, nn.ModuleList([Block(), Block()]))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positions", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += tokens.numel()
        x = self.embedding(tokens) + self.positions
        for block in getattr(self, self.blocks_name):
            x = block(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


def build(blocks: str) -> Transformer:
    torch.manual_seed(7)
    return Transformer(blocks)


TOKENS = torch.arange(12).reshape(2, 6) % VOCABULARY


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A forward and a backward as in training, then a step along enumerated gradients."""
    model(TOKENS).pow(2).mean().backward()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = parameter.detach() * (2 * number + 1)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    axes = mesh.mesh_dim_names or ()
    data = mesh["dp"] if "tp" in axes else mesh
    for number, block in enumerate(model.blocks):
        if "tp" in axes:
            parallelize_module(block, mesh["tp"], dict(TENSOR_PARALLEL))
        model.blocks[number] = fully_shard(checkpoint_wrapper(block), mesh=data)
    fully_shard(model, mesh=data)
    return model


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """No collective from here, no ``full_tensor`` from anywhere."""
    forbidden = mock.Mock(side_effect=AssertionError("a tensor was gathered"))
    with mock.patch.multiple(DTensor, full_tensor=forbidden, redistribute=forbidden), CommDebugMode() as collectives:
        yield
    assert collectives.get_total_counts() == 0 and not forbidden.called


def trainer(rank: int, world: int, store: str, pair: str) -> dict[str, Any]:
    """Sends every layout's versions; returns the names given and which of them were DTensors."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)  # type: ignore[attr-defined]
    reported: dict[str, Any] = {}
    with etha.TensorBusClient(timeout=30) as client:
        client.init_pair(pair, "trainer", "inference", device_mesh=(world,), placements=[Replicate()])
        for kind, axes in MESHES.items():
            reported[kind] = send(client, pair, kind, mesh_of(axes), rank < math.prod(axes.values()))
    dist.destroy_process_group()
    return reported


def mesh_of(axes: dict[str, int]) -> DeviceMesh | None:
    """Made by all ranks of the world, those outside it too."""
    if not axes:
        return None
    table = torch.arange(math.prod(axes.values())).reshape(*axes.values())
    return DeviceMesh("cpu", table, mesh_dim_names=tuple(axes))


def send(client: etha.TensorBusClient, pair: str, kind: str, mesh: DeviceMesh | None, here: bool) -> dict[str, bool]:
    tensors: dict[str, torch.Tensor] = {}
    if here:
        model = build("blocks") if mesh is None else shard(build("blocks"), mesh)
        optimizer = optimizer_of(model)
        with torch.no_grad():
            model(TOKENS)  # leaves the root's parameters unsharded
        model.seen.zero_()
        with nothing_gathered():
            tensors = named_tensors(model, names={"^blocks": "layers"})
    with nothing_gathered():
        handle = client.register_tensors(kind, tensors, pair_name=pair)
    with handle:
        for version in range(VERSIONS):
            if here and version:
                step(model, optimizer)
            with nothing_gathered():
                handle.transfer("send", version=version)
    return {name: isinstance(tensor, DTensor) for name, tensor in tensors.items()}


def receiver(pair: str) -> dict[str, list[dict[str, str]]]:
    """One process without torch.distributed; for every layout and version, what is not as in the truth."""
    wrong: dict[str, list[dict[str, str]]] = {}
    with etha.TensorBusClient(timeout=30) as client:
        client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
        for kind in MESHES:
            model, truth = build("layers"), build("layers")
            for tensor in named_tensors(model).values():
                tensor.data.fill_(77)
            optimizer = optimizer_of(truth)
            wrong[kind] = []
            with client.register_tensors(kind, named_tensors(model), pair_name=pair) as handle:
                for version in range(VERSIONS):
                    before = {name: tensor.clone() for name, tensor in truth.state_dict().items()}
                    if version:
                        step(truth, optimizer)
                    assert handle.transfer("recv").version == version
                    wrong[kind].append(compare(model, truth, before if version else None))
    assert not dist.is_initialized()
    return wrong


def compare(model: Transformer, truth: Transformer, before: dict[str, torch.Tensor] | None) -> dict[str, str]:
    wrong = {}
    received = model.state_dict()
    for name, tensor in truth.state_dict().items():
        if not torch.equal(received[name], tensor):
            wrong[name] = f"{int((received[name] != tensor).sum())} of {tensor.numel()} elements"
        elif before is not None and (before[name] == tensor).any() and tensor.any():
            wrong[name] = "the step has not changed every element"
    return wrong


@pytest.mark.ways("local", reason="what is registered does not depend on the way that bytes take")
def test_every_sharding_of_a_transformer_reaches_a_plain_module_exactly(guests: Job, pair: str, tmp_path: Path) -> None:
    trainers = guests.side("trainer", trainer, 4, str(tmp_path / "t"), pair)
    other = guests.start(receiver, pair, at=("inference", 0))
    reported = guests.results(trainers)
    assert other.result() == {kind: [{}] * VERSIONS for kind in MESHES}
    expected = list(named_tensors(build("layers")))
    assert len(expected) == len(set(expected)) and "head.weight" not in expected and "positions" not in expected
    for kind, axes in MESHES.items():
        ranks = math.prod(axes.values())
        for rank, given in enumerate(reported):
            assert list(given[kind]) == (expected if rank < ranks else [])
            sharded = {name for name, is_dtensor in given[kind].items() if is_dtensor}
            assert sharded == (set(expected) - {"seen"} if axes and rank < ranks else set())
