"""The 24 mesh cases: eight pairs of meshes, three source placements, what each rank must hold, what must cross.

Sources are 8 ranks on one host, targets 8 ranks on another. Everything here is enumerated from ``Layout.owned``,
element by element, and knows neither plan nor transport. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from etha.plan import Layout, TensorSpec

Mesh = tuple[int, int, int, int]
RANKS = 8
PAIRS: tuple[tuple[Mesh, Mesh], ...] = (
    ((1, 1, 4, 2), (4, 2, 1, 1)),
    ((8, 1, 1, 1), (1, 2, 2, 2)),
    ((1, 2, 4, 1), (8, 1, 1, 1)),
    ((2, 2, 2, 1), (1, 1, 4, 2)),
    ((2, 4, 1, 1), (1, 2, 4, 1)),
    ((4, 1, 1, 2), (2, 1, 1, 4)),
    ((4, 1, 2, 1), (1, 1, 1, 8)),
    ((4, 2, 1, 1), (1, 1, 2, 4)),
)
SOURCES: dict[str, tuple[Placement, ...]] = {
    "R S0 R S1": (Replicate(), Shard(0), Replicate(), Shard(1)),
    "R R R S1": (Replicate(), Replicate(), Replicate(), Shard(1)),
    "R P R S1": (Replicate(), Partial("sum"), Replicate(), Shard(1)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCase:
    """One case; ``placements`` are the source's, the target's follow from its mesh."""

    source_mesh: Mesh
    target_mesh: Mesh
    kind: str

    @property
    def name(self) -> str:
        """(1,1,4,2)->(4,2,1,1) R S0 R S1."""
        meshes = "->".join(f"({','.join(map(str, mesh))})" for mesh in (self.source_mesh, self.target_mesh))
        return f"{meshes} {self.kind}"

    @property
    def slug(self) -> str:
        """The name in letters that a pair's name may have: 1.1.4.2-4.2.1.1-R.S0.R.S1."""
        meshes = (".".join(map(str, mesh)) for mesh in (self.source_mesh, self.target_mesh))
        return "-".join([*meshes, self.kind.replace(" ", ".")])

    @property
    def source(self) -> Layout:
        """Of the sending side."""
        return Layout(self.source_mesh, list(SOURCES[self.kind]))

    @property
    def target(self) -> Layout:
        """Of the receiving side: FSDP over tensor parallel, in DTensor's own order of cuts."""
        strided = _StridedShard(0, split_factor=self.target_mesh[-1])
        return Layout(self.target_mesh, [Replicate(), Replicate(), strided, Shard(0)])

    def layout(self, side: str) -> Layout:
        """Of "source" or "target"."""
        return self.source if side == "source" else self.target

    def specs(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[TensorSpec, TensorSpec]:
        """Source and target of a tensor of ``shape``."""
        return TensorSpec(shape, dtype, self.source), TensorSpec(shape, dtype, self.target)


CASES = tuple(
    MeshCase(source_mesh=source, target_mesh=target, kind=kind) for source, target in PAIRS for kind in SOURCES
)


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """The global tensor: every element tells its place; exact in float32 up to 2^24 elements."""
    return torch.arange(int(np.prod(shape, dtype=np.int64)), dtype=torch.float32).reshape(shape)


def index(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The indices of runs of one dim, in their order."""
    return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in runs)])


def part(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What ``rank`` owns of ``whole``, a copy."""
    owned = layout.owned(whole.shape, rank)
    assert owned is not None
    for dim, runs in enumerate(owned):
        if list(runs) != [(0, whole.shape[dim])]:
            whole = whole.index_select(dim, index(runs))
    return whole.clone(memory_format=torch.contiguous_format)


def contribution(layout: Layout, rank: int) -> tuple[int, int]:
    """(number of this rank's contribution, how many there are): its place along the Partial axes, in C-order."""
    place = np.argwhere(layout.ranks == rank)[0]
    number, count = 0, 1
    for axis, placement in enumerate(layout.placements):
        if placement.is_partial():
            size = layout.mesh_shape[axis]
            number, count = number * size + int(place[axis]), count * size
    return number, count


def held(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The local tensor of a source rank: its part, or integers that add up to it over the Partial axes."""
    mine = part(whole, layout, rank)
    number, count = contribution(layout, rank)
    if count == 1:
        return mine
    if number == 0:  # what the others leave; exact in any order of adding, all are integers below 2^24
        return mine - sum(mine.remainder(other + 7) for other in range(1, count))
    return mine.remainder(number + 7)


def ideal_bytes(
    source: TensorSpec, target: TensorSpec, source_hosts: Sequence[str], target_hosts: Sequence[str]
) -> int:
    """Least bytes between hosts: every distinct element that a host's targets need and its sources do not hold.

    A contribution to a Partial is not the element. At the narrower dtype; reductions over several hosts need more.
    """
    itemsize = min(source.dtype.itemsize, target.dtype.itemsize)
    crossing = 0
    for host in sorted(set(target_hosts)):
        wanted = _mask(target, [r for r in target.holders() if target_hosts[r] == host])
        whole = [part for part in source.layouts if not any(p.is_partial() for p in part.placements)]
        near = [r for r in source.holders() if source_hosts[r] == host and any(r in layout for layout in whole)]
        crossing += int((wanted & ~_mask(source, near)).sum()) * itemsize
    return crossing


def _mask(spec: TensorSpec, ranks: Sequence[int]) -> np.ndarray:
    """Which elements these ranks own together."""
    found = np.zeros(spec.shape, dtype=bool)
    for rank in ranks:
        for layout in spec.layouts:
            owned = layout.owned(spec.shape, rank)
            if owned is not None:
                found[np.ix_(*(index(runs).numpy() for runs in owned))] = True
    return found
