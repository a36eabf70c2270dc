"""What a call of redistribute may ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from etha.errors import LayoutError
from etha.redistribute.request import check_placements


def checked(*placements: Any, ndim: int = 2) -> Any:
    """On a mesh of as many axes, of which only their number counts."""
    return check_placements(placements, ndim, torch.empty((1,) * len(placements)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [-3, 2, 64])
def test_a_dim_that_the_tensor_does_not_have(dim: int) -> None:
    for placement in (Shard(dim), _StridedShard(dim, split_factor=2)):
        with pytest.raises(LayoutError, match=f"shards dim {dim} of a tensor of 2 dims"):
            checked(Replicate(), placement)


def test_dims_are_counted_from_the_front() -> None:
    assert checked(Shard(-1), Shard(-2), Shard(1)) == (Shard(1), Shard(0), Shard(1))
