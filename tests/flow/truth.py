"""What a rank must hold, enumerated from the global tensor by ``torch.chunk`` alone: no planner, no DTensor."""

from __future__ import annotations

import math

import torch


def whole(shape: tuple[int, ...], version: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A global tensor whose every element tells its place and its version; exact in float32."""
    return (torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape) + 100_003 * version).to(dtype)


def cut(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    """Shard ``index`` of ``parts`` along ``dim``, as DTensor cuts: torch.chunk, then empty shards."""
    chunks = tensor.chunk(parts, dim)
    found = chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
    return found.clone()


def stale(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one whose elements are all wrong."""
    return torch.full_like(tensor, 77)
