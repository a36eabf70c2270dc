"""Against DTensor itself: `distribute_tensor` on a fake world, one rank at a time, for the literal reading.

FSDP2's physical bytes follow the shard order instead, which enumeration covers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from etha.plan import Layout


@pytest.fixture
def fake_rank() -> Iterator[object]:
    """Become rank r of a world of n, as often as wanted."""

    def become(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


MESHES = [[[0, 1, 2]], [[0, 1], [2, 3]], [[5, 0, 3], [1, 4, 2]]]
AXIS: list[Placement] = [
    Shard(0),
    Shard(1),
    Replicate(),
    _StridedShard(0, split_factor=2),
    _StridedShard(0, split_factor=3),
]


@pytest.mark.filterwarnings("ignore")  # torch's own, about strided placements
@pytest.mark.parametrize("table", MESHES)
def test_local_tensors_are_those_of_distribute_tensor(fake_rank: object, table: list[list[int]]) -> None:
    ranks = sorted(r for row in table for r in row)
    compared = 0
    for rank in ranks:
        fake_rank(rank, len(ranks))  # type: ignore[operator]
        mesh = DeviceMesh("cpu", torch.tensor(table))
        for placements, shape in itertools.product(
            itertools.product(AXIS, AXIS), [(9, 5), (4, 6), (1, 7), (12, 3), (5, 2)]
        ):
            full = torch.arange(shape[0] * shape[1]).reshape(shape)
            try:
                dt = distribute_tensor(full, mesh, list(placements), src_data_rank=None)
            except (RuntimeError, NotImplementedError, AssertionError, ValueError):
                continue  # torch itself refuses some strided nests
            layout = Layout.from_dtensor(dt, strided="literal")
            owned = layout.owned(shape, rank)
            assert owned is not None
            expected = full
            for dim, runs in enumerate(owned):
                expected = expected.index_select(
                    dim, torch.tensor([i for a, b in runs for i in range(a, b)], dtype=torch.long)
                )
            assert torch.equal(dt.to_local(), expected), (table, placements, shape, rank)
            assert layout.local_shape(shape, rank) == tuple(dt.to_local().shape)
            compared += 1
    assert compared > 50 * len(ranks)


def test_a_sub_mesh_shows_the_callers_row(fake_rank: object) -> None:
    for rank, row in ((0, [0, 2]), (3, [1, 3])):
        fake_rank(rank, 4)  # type: ignore[operator]
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
        dt = distribute_tensor(torch.arange(5), mesh["dp"], [Shard(0)], src_data_rank=None)
        layout = Layout.from_dtensor(dt)
        assert layout.ranks.tolist() == row
        assert layout.local_shape((5,), rank) == tuple(dt.to_local().shape)
