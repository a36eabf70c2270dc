"""The ranks of a DeviceMesh. A sub-mesh shows its caller one row of many, but a plan needs them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _disable_current_modes

from etha.plan import Layout

Row = tuple[tuple[int, ...], tuple[int, ...]]  # (shape, ranks in C-order)


@dataclass(frozen=True)
class MeshTables:
    """The rank tables of a mesh: its own, or those of all equal slices of its root, sorted by lowest rank."""

    tables: tuple[Row, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.tables)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshTables:
        """The tables of ``mesh``, the same on every rank, whichever row the mesh shows it."""
        found = _KNOWN.get(mesh)
        if found is None:
            with _disable_current_modes():  # of torch.compile, which would trace what is read here
                rows = sorted(map(_row, _tables(mesh)), key=lambda row: min(row[1]))
            found = _KNOWN[mesh] = cls(tuple(rows))
        return found

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for _, ranks in self.tables for rank in ranks)

    def row_of(self, rank: int) -> MeshTables | None:
        """The row of ``rank`` alone; None if it is in no row."""
        return next((MeshTables((row,)) for row in self.tables if rank in row[1]), None)

    def layouts(self, placements: Sequence[Placement], strided: str) -> tuple[Layout, ...]:
        """The layout of each row. LayoutError for placements that do not fit the mesh."""
        # By type, too, because torch's kinds of Partial may compare equal.
        return _layouts(self, tuple((type(p), p) for p in placements), strided)


@lru_cache(maxsize=512)
def _layouts(rows: MeshTables, placements: tuple[tuple[type, Placement], ...], strided: str) -> tuple[Layout, ...]:
    # Not tensors, because torch.compile may be tracing.
    tables = [np.array(ranks, dtype=np.int64).reshape(shape) for shape, ranks in rows.tables]
    return tuple(Layout(table, [p for _, p in placements], strided=strided) for table in tables)


#: Cached, because a mesh does not change, and reading its layout costs more than a small exchange.
_KNOWN: WeakKeyDictionary[DeviceMesh, MeshTables] = WeakKeyDictionary()


def _tables(mesh: DeviceMesh) -> Iterable[torch.Tensor]:
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is None or ranks is None:  # a torch that keeps them elsewhere: use the row that is shown
        return [mesh.mesh]
    tables: torch.Tensor = layout.remap_to_tensor(ranks)
    return tables.unbind()


def _row(table: torch.Tensor) -> Row:
    return tuple(table.shape), tuple(int(rank) for rank in table.flatten().tolist())


def group_of(ranks: frozenset[int], mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of exactly ``ranks``: WORLD, or that of ``mesh`` if it has one axis; otherwise None."""
    world = dist.group.WORLD
    if world is not None and ranks == frozenset(dist.get_process_group_ranks(world)):
        return world
    if mesh.ndim == 1 and mesh.get_coordinate() is not None:
        group = mesh.get_group()
        if ranks == frozenset(dist.get_process_group_ranks(group)):
            return group
    return None
