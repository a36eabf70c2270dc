"""Synthetic data keeps the proportions of Llama-3 8B."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.demo.llama import llama, nbytes, shapes, shard, tensor_parallel_placement


def test_unscaled_it_is_llama_3_8b() -> None:
    full = shapes(1.0)
    assert len(full) == 291
    assert nbytes(full) == pytest.approx(16.06e9, rel=1e-3)


@pytest.mark.parametrize("gib", [0.05, 1.0, 3.0])
def test_scaled_it_has_the_bytes_asked_for(gib: float) -> None:
    scaled = llama(gib)
    assert len(scaled) == 291
    assert nbytes(scaled) == pytest.approx(gib * 2**30, rel=0.1)


def test_shards_follow_torch_chunk_and_cover_every_row() -> None:
    for rows in (1, 3, 16, 17, 33):
        sizes = [len(shard((rows, 2), 4, rank)) for rank in range(4)]
        chunks = [len(part) for part in torch.empty(rows).chunk(4)]
        assert sizes == chunks + [0] * (4 - len(chunks))


def test_an_engine_shards_rows_first_and_columns_after() -> None:
    assert tensor_parallel_placement("layers.0.q_proj") == Shard(0)
    assert tensor_parallel_placement("layers.0.down_proj") == Shard(1)
    assert tensor_parallel_placement("layers.0.input_layernorm") == Replicate()
    assert tensor_parallel_placement("lm_head") == Shard(0)
