"""Two jobs of real processes: versions arrive in the other job's layout, exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.plan import Layout
from tests.flow.jobs import Job
from tests.flow.ways import Way


def whole(shape: tuple[int, ...], version: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The global tensor of a version: every element tells its place and its version."""
    n = 1
    for size in shape:
        n *= size
    return (torch.arange(n, dtype=torch.float64).reshape(shape) % 1021 + 3000 * version).to(dtype)


def part(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What ``rank`` owns of a global tensor, by the owned runs."""
    owned = layout.owned(tuple(tensor.shape), rank)
    assert owned is not None
    for dim, runs in enumerate(owned):
        index = [i for start, stop in runs for i in range(start, stop)]
        tensor = tensor.index_select(dim, torch.tensor(index, dtype=torch.long))
    return tensor.contiguous()


SHAPES = {"a": (13, 7), "b": (5,), "c": (), "d": (0, 3), "e": (64, 33)}


def layouts(side: str, world: int) -> dict[str, Layout]:
    def lay(*placements: Any) -> Layout:
        return Layout((world,), placements)

    if side == "trainer":
        return {"a": lay(Shard(0)), "b": lay(Shard(0)), "c": lay(Replicate()), "d": lay(Shard(1)), "e": lay(Shard(0))}
    return {"a": lay(Shard(1)), "b": lay(Replicate()), "c": lay(Replicate()), "d": lay(Shard(0)), "e": lay(Shard(1))}


def worker(rank: int, world: int, side: str, versions: int, pair_name: str) -> list[Any]:
    other = "inference" if side == "trainer" else "trainer"
    mine = layouts(side, world)
    with etha.TensorBusClient() as client:
        pair = client.init_pair(pair_name, side, other, world, device_mesh=(world,), rank=rank)
        assert pair.epoch == 1
        tensors = {
            name: part(whole(shape, 0), mine[name], rank)
            if side == "trainer"
            else part(whole(shape, 9), mine[name], rank)
            for name, shape in SHAPES.items()
        }
        placements = {name: layout.placements for name, layout in mine.items()}
        results = []
        with client.register_tensors(
            "step_0", tensors, pair_name=pair_name, placements=placements, shapes=SHAPES
        ) as handle:
            for version in range(versions):
                if side == "trainer":
                    for name, shape in SHAPES.items():
                        tensors[name].copy_(part(whole(shape, version), mine[name], rank))
                    result = handle.transfer("send", version=version)
                else:
                    result = handle.transfer("recv")
                    for name, shape in SHAPES.items():
                        assert torch.equal(tensors[name], part(whole(shape, version), mine[name], rank)), name
                assert (result.seq, result.version) == (version + 1, version)
                results.append(result.bytes)
        return results


@pytest.mark.ways(*Way, each=True)
def test_uneven_layouts_of_plain_tensors_three_to_two(guests: Job, pair: str) -> None:
    trainers = guests.side("trainer", worker, 3, "trainer", 3, pair)
    inference = guests.side("inference", worker, 2, "inference", 3, pair)
    sent = guests.results(trainers)
    got = guests.results(inference)
    assert sum(r[0] for r in sent) == sum(r[0] for r in got) > 0
