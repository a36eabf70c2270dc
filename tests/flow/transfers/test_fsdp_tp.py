"""Models in training, sharded by FSDP2 and tensor parallelism, reach an inference job that is laid out otherwise.

The truth is put together from what each trainer rank held, by the rules of torch.chunk: first tensor
parallel, then FSDP2 along dim 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etha
from tests.flow.jobs import Job
from tests.flow.truth import cut

VERSIONS = 3


class Model(nn.Module):
    """Embedding, norm, a column-parallel and a row-parallel layer; ``sizes``: vocabulary, width, hidden."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(1, width))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(characters)
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        return y


SIZES = {"even": (16, 8, 24), "uneven": (13, 7, 10), "ragged": (13, 7, 11)}
#: The dim that tensor parallelism cuts; every other parameter lies on mesh["dp"] alone.
TP_DIM = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
NAMES = ("embedding.weight", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias", "scale")


def join_world(rank: int, world: int, store: str) -> None:
    """A gloo process group of this side's own."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)  # type: ignore[attr-defined]


def shard_model(model: Model, mesh: DeviceMesh) -> Model:
    if "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    fully_shard(model, mesh=mesh)
    return model


def local(tensor: torch.Tensor) -> Any:
    """A copy of the local part, to tell the test."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone().numpy()


def trainer(
    rank: int, world: int, store: str, pair: str, meshes: dict[str, dict[str, int]]
) -> dict[str, list[dict[str, Any]]]:
    """Trains a model on each mesh, {size: {axis: ranks}}, and sends the version after each step.

    A mesh of fewer ranks lies on the first of them. Returns what this rank held of each model at each version.
    """
    join_world(rank, world, store)
    held: dict[str, list[dict[str, Any]]] = {}
    with etha.TensorBusClient(timeout=20) as client:
        client.init_pair(pair, "trainer", "inference")
        for size, axes in meshes.items():
            n = math.prod(axes.values())
            mesh = DeviceMesh("cpu", torch.arange(n).reshape(*axes.values()), mesh_dim_names=tuple(axes))
            held[size] = list(train(client, pair, size, mesh if rank < n else None))
    dist.destroy_process_group()
    return held


def train(client: etha.TensorBusClient, pair: str, size: str, mesh: DeviceMesh | None) -> Iterator[dict[str, Any]]:
    torch.manual_seed(1)
    model = Model(*SIZES[size]) if mesh is None else shard_model(Model(*SIZES[size]), mesh)
    tensors = {} if mesh is None else dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with client.register_tensors(size, tensors, pair_name=pair) as handle:
        for version in range(VERSIONS):
            yield {name: local(p) for name, p in tensors.items()}
            handle.transfer("send", version=version)
            if size == "ragged":  # tensor-parallel layers of PyTorch compute on even shards only
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
            else:
                row = 0 if mesh is None else mesh.get_local_rank(0)
                random = torch.Generator().manual_seed(version + 10 * row)
                model(torch.randint(0, SIZES[size][0], (4, 6), generator=random)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def inference(rank: int, world: int, store: str, pair: str) -> dict[str, list[dict[str, Any]]]:
    """Tensor-parallel over all ranks: linear layers as DTensors, the rest as plain replicas with placements."""
    join_world(rank, world, store)
    mesh = init_device_mesh("cpu", (world,))
    held: dict[str, list[dict[str, Any]]] = {size: [] for size in SIZES}
    with etha.TensorBusClient(timeout=20) as client:
        client.init_pair(pair, "inference", "trainer", device_mesh=mesh, placements=[Replicate()])
        for size, sizes in SIZES.items():
            tensors: dict[str, torch.Tensor] = {}
            for name, p in reversed(list(Model(*sizes).named_parameters())):
                tensors[name] = torch.zeros(p.shape)
                if name in TP_DIM:
                    tensors[name] = distribute_tensor(tensors[name], mesh, [Shard(TP_DIM[name])])
            with client.register_tensors(size, tensors, pair_name=pair, direction="recv") as handle:
                for version in range(VERSIONS):
                    result = handle.transfer("recv")
                    assert (result.version, handle.version, result.seq) == (version, version, version + 1)
                    held[size].append({n: local(t) for n, t in tensors.items()})
    dist.destroy_process_group()
    return held


def put_together(held: list[dict[str, Any]], name: str, dp: int, tp: int) -> torch.Tensor:
    """The global tensor from the local ones of ranks in (dp, tp) order."""
    columns = [torch.cat([torch.from_numpy(held[d * tp + t][name]) for d in range(dp)]) for t in range(tp)]
    if name in TP_DIM and tp > 1:
        return torch.cat(columns, TP_DIM[name])
    assert all(torch.equal(column, columns[0]) for column in columns)
    return columns[0]


def check_versions(sent: list[Any], got: list[Any], sizes: tuple[int, int, int], dp: int, tp: int) -> None:
    """``sent`` and ``got``: of each rank, its local tensors by name at each version."""
    shapes = {name: p.shape for name, p in Model(*sizes).named_parameters()}
    assert set(shapes) == set(NAMES)
    for name in NAMES:
        wholes = [put_together([rank[version] for rank in sent], name, dp, tp) for version in range(VERSIONS)]
        for version, whole in enumerate(wholes):
            assert whole.shape == shapes[name]
            assert not version or not torch.equal(whole, wholes[version - 1]), f"{name} has not been trained"
            for rank, held in enumerate(got):
                truth = cut(whole, TP_DIM[name], len(got), rank) if name in TP_DIM else whole
                assert torch.equal(torch.from_numpy(held[version][name]), truth), (version, name, rank)


@pytest.mark.ways("tcp", "local", "host", "three")
def test_fsdp_by_tensor_parallel_to_tensor_parallel_version_by_version(guests: Job, pair: str, tmp_path: Path) -> None:
    both = {"dp": 2, "tp": 2}
    trainers = guests.side(
        "trainer", trainer, 4, str(tmp_path / "t"), pair, {"even": both, "uneven": both, "ragged": both}
    )
    receivers = guests.side("inference", inference, 2, str(tmp_path / "i"), pair)
    sent, got = guests.results(trainers), guests.results(receivers)
    for size in SIZES:
        check_versions([rank[size] for rank in sent], [rank[size] for rank in got], SIZES[size], 2, 2)


def test_plain_fully_shard_on_three_ranks_and_on_two_of_them(guests: Job, pair: str, tmp_path: Path) -> None:
    meshes = {"even": {"dp": 2}, "uneven": {"dp": 3}, "ragged": {"dp": 3}}
    trainers = guests.side("trainer", trainer, 3, str(tmp_path / "t"), pair, meshes)
    receivers = guests.side("inference", inference, 1, str(tmp_path / "i"), pair)
    sent, got = guests.results(trainers), guests.results(receivers)
    check_versions([rank["even"] for rank in sent[:2]], [rank["even"] for rank in got], SIZES["even"], 2, 1)
    for size in ("uneven", "ragged"):
        check_versions([rank[size] for rank in sent], [rank[size] for rank in got], SIZES[size], 3, 1)


# ---- parameters that are no place to send from ----------------------------------------------------


def after_a_forward(store: str, pair: str) -> dict[str, Any]:
    """One rank; a forward without gradient leaves the root's parameters unsharded until reshard()."""
    join_world(0, 1, store)
    model = shard_model(Model(*SIZES["even"]), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    with etha.TensorBusClient(timeout=20) as client:
        client.init_pair(pair, "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
        with pytest.raises(etha.RegistrationError) as caught:
            client.register_tensors("model", dict(model.named_parameters()), pair_name=pair, direction="send")
        model.reshard()
        handle = client.register_tensors("model", dict(model.named_parameters()), pair_name=pair, direction="send")
        handle.transfer("send")
        # Registered while sharded, unsharded by the next forward: the module's own affair, the handle has the shards.
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
        handle.transfer("send")
    dist.destroy_process_group()
    return {"code": caught.value.code, "text": str(caught.value), "violations": caught.value.violations}


def beside_it(pair: str) -> tuple[Any, bool]:
    tensors = {name: torch.zeros(p.shape) for name, p in Model(*SIZES["even"]).named_parameters()}
    with etha.TensorBusClient(timeout=20) as client:
        client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
        with pytest.raises(etha.RegistrationError) as caught:
            client.register_tensors("model", tensors, pair_name=pair)
        handle = client.register_tensors("model", tensors, pair_name=pair)
        handle.transfer("recv")
        first = tensors["up.weight"].clone()
        handle.transfer("recv")
        return caught.value.violations, bool(first.any()) and torch.equal(first, tensors["up.weight"])


def test_unsharded_fsdp_parameters_are_refused_by_name_with_the_way_out(guests: Job, pair: str, tmp_path: Path) -> None:
    reported = guests.start(after_a_forward, str(tmp_path / "t"), pair, at=("trainer", 0))
    other = guests.start(beside_it, pair, at=("inference", 0))
    refused = reported.result()
    assert refused["code"] == "registration"
    assert {v.name for v in refused["violations"]} == set(NAMES)
    assert all(v.code == "unsupported" and (v.side, v.rank) == ("trainer", 0) for v in refused["violations"])
    assert "reshard()" in refused["text"] and "fully_shard" in refused["text"]
    heard, received = other.result()
    assert heard == refused["violations"], "both sides hear the same"
    assert received
