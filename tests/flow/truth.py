"""What a rank must hold, enumerated from the global tensor by ``torch.chunk`` alone: no planner, no DTensor."""

from __future__ import annotations

import math
from typing import Any

import torch


def whole(shape: tuple[int, ...], version: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A global tensor whose every element tells its place and its version; exact in float32."""
    return (torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape) + 100_003 * version).to(dtype)


def cut(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    """Shard ``index`` of ``parts`` along ``dim``, as DTensor cuts: torch.chunk, then empty shards."""
    chunks = tensor.chunk(parts, dim)
    found = chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
    return found.clone()


def picked(full: torch.Tensor, runs: Any) -> torch.Tensor:
    """What a rank holds whose region is ``runs``: a product, or a list of products, flat, one after another."""
    if runs and runs[0] and isinstance(runs[0][0], list):
        return torch.cat([picked(full, product).reshape(-1) for product in runs])
    for dim, kept in enumerate(runs):
        full = full.index_select(dim, torch.tensor([i for a, b in kept for i in range(a, b)], dtype=torch.long))
    return full.clone()


def stale(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one whose elements are all wrong."""
    return torch.full_like(tensor, 77)
