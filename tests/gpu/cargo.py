"""What moves, and what must arrive: cut by ``torch.chunk`` alone, cast by torch on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.flow.endurance.cargo import plain, spaced, turned
from tests.flow.truth import cut

Form = Callable[[torch.Tensor], torch.Tensor]
_MODULUS = 251


@dataclass(frozen=True, slots=True)
class End:
    dtype: torch.dtype
    placement: Placement
    form: Form = plain


@dataclass(frozen=True, slots=True)
class Item:
    shape: tuple[int, ...]
    source: End
    target: End

    def end(self, side: str) -> End:
        return self.source if side == "trainer" else self.target

    def whole(self, version: int, part: int = 0) -> torch.Tensor:
        """The source's global tensor, or one contribution to it: thirds, so that every cast rounds."""
        numbers = torch.arange(math.prod(self.shape), dtype=torch.int64).reshape(self.shape)
        numbers = (numbers * 7 + 31 * version + 101 * part) % _MODULUS
        if not self.source.dtype.is_floating_point:
            return (numbers % 97).to(self.source.dtype)
        return ((numbers - 120) / 3).to(self.source.dtype)

    def given(self, version: int, world: int, rank: int) -> torch.Tensor:
        """What a source rank holds."""
        if isinstance(self.source.placement, Partial):
            return self.whole(version, rank)
        return _local(self.whole(version), self.source, world, rank)

    def wanted(self, version: int, source_world: int, world: int, rank: int) -> torch.Tensor:
        """What a target rank must hold then."""
        found = self.whole(version)
        if isinstance(self.source.placement, Partial):
            # In the order of the ranks, in float32, rounded once.
            parts = [self.whole(version, part).float() for part in range(source_world)]
            found = sum(parts[1:], parts[0]).to(self.source.dtype)
        return _local(found.to(self.target.dtype), self.target, world, rank)


def _local(tensor: torch.Tensor, end: End, world: int, rank: int) -> torch.Tensor:
    return cut(tensor, end.placement.dim, world, rank) if isinstance(end.placement, Shard) else tensor


def items(scale: int) -> dict[str, Item]:
    """Every kind once; ``scale`` makes the larger ones large."""
    rows, columns = 61 * scale, 37 * scale
    f32, bf16 = torch.float32, torch.bfloat16
    return {
        "contiguous": Item((rows, columns), End(f32, Shard(0)), End(f32, Shard(0))),
        "whole": Item((rows, 8), End(f32, Replicate()), End(f32, Replicate())),
        "resharded": Item((rows, columns), End(f32, Shard(0)), End(f32, Shard(1))),
        "turned": Item((rows, columns), End(f32, Shard(1), turned), End(f32, Shard(0))),
        "strided": Item((rows, columns), End(torch.int64, Replicate(), spaced), End(torch.int64, Shard(0), spaced)),
        "to bf16": Item((rows, columns), End(f32, Shard(0)), End(bf16, Shard(1))),
        "to fp16": Item((rows, columns), End(f32, Shard(1)), End(torch.float16, Shard(0), turned)),
        "to fp8": Item((rows, columns), End(f32, Shard(0)), End(torch.float8_e4m3fn, Replicate())),
        "widened": Item((rows, columns), End(bf16, Shard(0)), End(f32, Shard(1))),
        "bytes": Item((1001 * scale,), End(torch.uint8, Shard(0)), End(torch.uint8, Replicate())),
        "empty": Item((0, 4), End(f32, Replicate()), End(f32, Shard(1))),
        "summed": Item((rows, columns), End(f32, Partial()), End(f32, Replicate())),
        "summed bf16": Item((rows, 64), End(bf16, Partial()), End(bf16, Shard(0))),
    }
