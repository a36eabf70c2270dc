"""Shapes in the proportions of Llama-3 8B, and how both jobs of the synthetic demo shard them."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

#: Llama-3 8B: rows and columns of every tensor are in units of these widths.
HIDDEN, KEY_VALUE, FEED_FORWARD, VOCABULARY, LAYERS = 4096, 1024, 14336, 128256, 32
DTYPE = torch.bfloat16
#: Scaled widths are multiples of this, so that heads still divide among tensor-parallel ranks.
GRAIN = 16


def llama(gib: float) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all 291 tensors of Llama-3 8B, with widths scaled so that bf16 takes about ``gib`` GiB.

    All layers are kept, and bytes grow with the square of the width, so the mix of large and small tensors stays.
    """
    scale = math.sqrt(gib * 2**30 / nbytes(shapes(1.0)))
    return shapes(scale)


def nbytes(tensors: dict[str, tuple[int, ...]]) -> int:
    """Bytes of one copy of every tensor."""
    return sum(math.prod(shape) for shape in tensors.values()) * DTYPE.itemsize


def shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors with every width times ``scale``, rounded to GRAIN."""
    h, kv, ffn, vocabulary = (
        max(GRAIN, round(width * scale / GRAIN) * GRAIN) for width in (HIDDEN, KEY_VALUE, FEED_FORWARD, VOCABULARY)
    )
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, h)}
    for i in range(LAYERS):
        found |= {
            f"layers.{i}.input_layernorm": (h,),
            f"layers.{i}.q_proj": (h, h),
            f"layers.{i}.k_proj": (kv, h),
            f"layers.{i}.v_proj": (kv, h),
            f"layers.{i}.o_proj": (h, h),
            f"layers.{i}.post_attention_layernorm": (h,),
            f"layers.{i}.gate_proj": (ffn, h),
            f"layers.{i}.up_proj": (ffn, h),
            f"layers.{i}.down_proj": (h, ffn),
        }
    return found | {"norm": (h,), "lm_head": (vocabulary, h)}


def tensor_parallel_placement(name: str) -> Placement:
    """How an inference engine shards the tensor: rows, or columns where the input is already sharded."""
    if name.endswith("norm"):
        return Replicate()
    return Shard(1) if name.endswith(("o_proj", "down_proj")) else Shard(0)


def shard(shape: tuple[int, ...], ranks: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """This rank's uninitialised FSDP shard: rows by the ``torch.chunk`` rule."""
    rows = -(-shape[0] // ranks)
    mine = max(0, min(shape[0], (rank + 1) * rows) - rank * rows)
    return torch.empty((mine, *shape[1:]), dtype=DTYPE, device=device)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a dense tensor of ``shape``."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
