"""Ranks of a side are not always ranks of its torch world: both jobs in one world, and meshes that are translated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import etha
from tests.flow.jobs import Job
from tests.flow.sites import Site
from tests.flow.truth import cut, whole


def one_world(rank: int, world: int, store: str, pair: str) -> Any:
    """Rank 0 trains; ranks 1 and 2 are ranks 0 and 1 of the inference side, on a mesh that names them 1 and 2."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)  # type: ignore[attr-defined]
    mesh = DeviceMesh("cpu", [1, 2])
    full = {"w": whole((5, 3), 1), "b": whole((7,), 2)}
    with etha.TensorBusClient(timeout=20) as client:
        if rank == 0:
            client.init_pair(pair, "trainer", "inference", 1, (1,), [Replicate()])
            with client.register_tensors("b", full, pair_name=pair) as handle:
                peers: Any = handle.transfer("send").peers
        else:
            client.init_pair(pair, "inference", "trainer", 2, mesh, [Shard(0)], rank=rank - 1)
            tensors = {
                "w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)], src_data_rank=None),
                "b": torch.zeros(4 - (rank - 1)),
            }
            with client.register_tensors("b", tensors, pair_name=pair) as handle:
                peers = handle.transfer("recv").peers
            assert torch.equal(tensors["w"].to_local(), cut(full["w"], 1, 2, rank - 1))  # type: ignore[attr-defined]
            assert torch.equal(tensors["b"], cut(full["b"], 0, 2, rank - 1))
    dist.destroy_process_group()
    return peers


def test_both_sides_in_one_torch_world(guests: Job, pair: str, tmp_path: Path) -> None:
    members = [("trainer", 0), ("inference", 0), ("inference", 1)]
    store = str(tmp_path / "store")
    workers = [guests.start(one_world, rank, 3, store, pair, at=at) for rank, at in enumerate(members)]
    to_inference, *to_trainer = guests.results(workers)
    assert to_inference == (("inference", 0), ("inference", 1))
    assert to_trainer == [(("trainer", 0),)] * 2


def turned(rank: int, world: int, store: str, pair: str) -> None:
    """``ranks`` turns the sides' order around: torch rank 0 is the side's rank 1."""
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)  # type: ignore[attr-defined]
    mesh = DeviceMesh("cpu", [0, 1])
    full = whole((5, 4), 3)
    tensor = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)], src_data_rank=None)
    with etha.TensorBusClient(timeout=20) as client:
        client.init_pair(pair, "trainer", "inference", rank=1 - rank, ranks={0: 1, 1: 0})
        with client.register_tensors("b", {"w": tensor}, pair_name=pair) as handle:
            tensor.to_local().copy_(cut(full, 0, 2, rank))
            handle.transfer("send")
    dist.destroy_process_group()


async def test_explicit_ranks_translate_meshes(guests: Job, site: Site, pair: str, tmp_path: Path) -> None:
    workers = guests.side("trainer", turned, 2, str(tmp_path / "store"), pair)
    async with site.client("inference", 0, timeout=20) as client:
        await client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
        target = torch.zeros(5, 4)
        async with await client.register_tensors("b", {"w": target}, pair_name=pair) as handle:
            await handle.transfer("recv")
        assert torch.equal(target, whole((5, 4), 3))
    guests.results(workers)
