"""Layout: how one tensor lies over one side; TensorSpec: a tensor and where it lies.

A layout is (mesh of side ranks, one placement per mesh axis), as in PyTorch, without processes. What
a rank owns is read from it by cells.py; who holds what is a transpose of the rank table (grid.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor.placement_types import Placement

from etha.errors import LayoutError
from etha.plan import cells, dtypes
from etha.plan.grid import Grid, grid_of
from etha.plan.mesh import MAX_RANKS, check_mesh_shape, check_ranks, check_shape, read_mesh
from etha.plan.placement import Axis

Ints = npt.NDArray[np.int64]
_READINGS = ("auto", "order", "literal")


class Layout:
    """(mesh, placements): ``mesh`` is a shape tuple over ranks 0..n-1, or a table of ranks.

    The table is nested lists, an int tensor or array, or a DeviceMesh. ``strided`` is how
    ``_StridedShard`` is read where it matters (uneven sizes): "order", "literal" or "auto".
    Immutable and hashable; malformed input raises LayoutError.
    """

    __slots__ = ("_axes", "_digest", "_grids", "_hash", "_placements", "_ranks", "_shape", "_strided")

    _placements: tuple[Placement, ...] | None

    def __init__(self, mesh: Any, placements: Any, *, strided: str = "auto") -> None:
        if isinstance(placements, Placement) or not isinstance(placements, Sequence):
            raise LayoutError(f"placements is a sequence with one placement per mesh axis, not {placements!r}")
        shape, ranks = read_mesh(mesh)
        self._set(shape, ranks, tuple(Axis.from_placement(p) for p in placements), strided)
        self._placements = tuple(placements)

    def _set(self, shape: tuple[int, ...], ranks: Ints | None, axes: tuple[Axis, ...], strided: str) -> None:
        if strided not in _READINGS:
            raise LayoutError(f"strided is {strided!r}, not one of {', '.join(_READINGS)}")
        if len(axes) != len(shape):
            raise LayoutError(f"{len(axes)} placements for a mesh of {len(shape)} axes {shape}: give one per axis")
        if ranks is not None and np.array_equal(ranks, np.arange(ranks.size).reshape(shape)):
            ranks = None
        self._shape, self._axes, self._strided, self._ranks = shape, axes, strided, ranks
        self._placements = None
        self._hash = hash((shape, axes, strided, None if ranks is None else ranks.tobytes()))
        self._digest: str | None = None
        self._grids: dict[int, Grid] = {}

    @classmethod
    def from_dtensor(cls, dt: Any, *, strided: str = "auto") -> Layout:
        """The layout of a DTensor in ranks of its own torch world; a sub-mesh shows the caller's row."""
        return cls(dt.device_mesh.mesh, dt.placements, strided=strided)

    @classmethod
    def replicated(cls, world_size: int) -> Layout:
        """Every one of ``world_size`` ranks holds the whole tensor."""
        return cls.from_plain({"mesh": {"shape": [world_size], "ranks": None}, "placements": [["R"]]})

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self._axes

    @property
    def strided(self) -> str:
        return self._strided

    @property
    def placements(self) -> tuple[Placement, ...]:
        if self._placements is None:
            self._placements = tuple(axis.to_placement() for axis in self._axes)
        return self._placements

    @property
    def ranks(self) -> Ints:
        """The table of ranks, of the mesh's shape; read-only."""
        if self._ranks is None:
            return np.arange(math.prod(self._shape), dtype=np.int64).reshape(self._shape)
        return self._ranks

    @property
    def has_strided(self) -> bool:
        """Whether the two readings of ``_StridedShard`` can differ here."""
        return any(axis.kind == "SS" for axis in self._axes)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and bool((self.ranks == rank).any())

    def grid(self, ndim: int) -> Grid:
        """The layout over a tensor of ``ndim`` dims; LayoutError when it shards a dim that is not there."""
        found = self._grids.get(ndim)
        if found is None:
            found = self._grids[ndim] = grid_of(self._axes, self.ranks, ndim, literal=self._strided == "literal")
        return found

    def owned(self, global_shape: Sequence[int], rank: int) -> list[list[tuple[int, int]]] | None:
        """Per tensor dim the ascending (start, stop) runs of ``rank``, in the order of its local tensor.

        None for a rank outside the mesh, which holds nothing; an empty shard has dims without runs.
        """
        shape = check_shape(global_shape)
        where = self.cell(len(shape), rank)
        if where is None:
            return None
        runs = []
        for n, splits, cell in zip(shape, self.grid(len(shape)).splits, where, strict=True):
            table = cells.table(n, splits)
            rows = table.rows_of(cell)
            runs.append(list(zip(table.start[rows].tolist(), table.stop[rows].tolist(), strict=True)))
        return runs

    def local_shape(self, global_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``; LayoutError for a rank outside the mesh."""
        shape = check_shape(global_shape)
        where = self.cell(len(shape), rank)
        if where is None:
            raise LayoutError(f"rank {rank} is not in the mesh {self.ranks.tolist()}: it holds no local tensor")
        splits = self.grid(len(shape)).splits
        return tuple(int(cells.table(n, s).sizes[c]) for n, s, c in zip(shape, splits, where, strict=True))

    def cell(self, ndim: int, rank: int) -> tuple[int, ...] | None:
        """Index of the cell of ``rank`` in each dim's table, None outside the mesh."""
        grid = self.grid(ndim)
        found = np.flatnonzero(grid.ranks.reshape(-1) == rank)
        if not len(found):
            return None
        flat = int(found[0]) // (grid.ranks.shape[1] * grid.ranks.shape[2])
        counts = [math.prod(cut[0] for cut in s) for s in grid.splits]
        return tuple(int(i) for i in np.unravel_index(flat, counts)) if counts else ()

    def translate(self, ranks: Mapping[int, int]) -> Layout:
        """The same layout with every rank r of the table replaced by ``ranks[r]``."""
        try:
            table = np.array([ranks[r] for r in self.ranks.reshape(-1).tolist()], dtype=np.int64)
        except KeyError as error:
            raise LayoutError(f"rank {error.args[0]} of the mesh has no rank in the side: give ranks=") from None
        return self._replace(ranks=check_ranks(table.reshape(self._shape)))

    def with_reading(self, strided: str) -> Layout:
        """The same layout with ``_StridedShard`` read as "order", "literal" or "auto"."""
        return self._replace(strided=strided)

    def _replace(self, *, ranks: Ints | None = None, strided: str | None = None) -> Layout:
        new = object.__new__(Layout)
        new._set(self._shape, self._ranks if ranks is None else ranks, self._axes, strided or self._strided)
        new._placements = self._placements
        return new

    def to_plain(self) -> dict[str, Any]:
        """Plain data that msgpack and JSON can carry; ranks is None for 0..n-1."""
        ranks = None if self._ranks is None else self._ranks.reshape(-1).tolist()
        return {
            "mesh": {"shape": list(self._shape), "ranks": ranks},
            "placements": [axis.to_plain() for axis in self._axes],
            "strided": self._strided,
        }

    @classmethod
    def from_plain(cls, plain: object) -> Layout:
        """The inverse of ``to_plain`` on untrusted data; LayoutError says what is wrong."""
        match plain:
            case {"mesh": {"shape": list() | tuple() as shape, "ranks": ranks, **more}, "placements": axes, **rest}:
                pass
            case _:
                raise LayoutError(f"not a layout: {str(plain)[:200]}")
        strided = rest.pop("strided", "auto")
        if more or rest or not isinstance(axes, (list, tuple)) or not isinstance(strided, str):
            raise LayoutError(f"not a layout: {str(plain)[:200]}")
        sizes = check_mesh_shape(shape)
        table: Ints | None = None
        if ranks is not None:
            if not isinstance(ranks, (list, tuple)) or not all(type(r) is int for r in ranks):
                raise LayoutError("the ranks of a mesh are a flat list of integers, or null for 0..n-1")
            if len(ranks) != math.prod(sizes) or not all(0 <= r < MAX_RANKS for r in ranks):
                raise LayoutError(f"{len(ranks)} ranks, in 0..{MAX_RANKS - 1}, do not fill a mesh of shape {sizes}")
            table = check_ranks(np.array(ranks, dtype=np.int64).reshape(sizes))
        new = object.__new__(cls)
        new._set(sizes, table, tuple(Axis.from_plain(list(a) if isinstance(a, tuple) else a) for a in axes), strided)
        return new

    def digest(self) -> str:
        """Hex digest of the plain form: equal iff the layouts are equal."""
        if self._digest is None:
            head = [self._shape, [axis.to_plain() for axis in self._axes], self._strided]
            body = b"" if self._ranks is None else self._ranks.astype("<i8").tobytes()
            self._digest = hashlib.sha256(json.dumps(head).encode() + b"\0" + body).hexdigest()[:32]
        return self._digest

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        mine = (self._hash, self._shape, self._axes, self._strided)
        if mine != (other._hash, other._shape, other._axes, other._strided):
            return False
        return np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return (Layout.from_plain, (self.to_plain(),))

    def __repr__(self) -> str:
        table = self._shape if self._ranks is None else self._ranks.tolist()
        reading = "" if self._strided == "auto" else f", strided={self._strided!r}"
        return f"Layout({table}, [{', '.join(str(a) for a in self._axes)}]{reading})"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a side: global ``shape``, ``dtype`` and ``layout``.

    ``layout`` is one Layout, or several over disjoint rank sets that each hold the whole tensor.
    ``present`` are the ranks that really hold their part, None for all of the layouts.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | Sequence[Layout]
    present: frozenset[int] | None = None
    layouts: tuple[Layout, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape))
        dtypes.name_of(self.dtype)
        single = isinstance(self.layout, Layout)
        layouts = cast("tuple[Layout, ...]", (self.layout,) if single else tuple(cast("Sequence[Layout]", self.layout)))
        if not layouts or not all(isinstance(part, Layout) for part in layouts):
            raise LayoutError(f"layout is a Layout or several of them, not {self.layout!r}")
        if not single:
            object.__setattr__(self, "layout", layouts)
            _check_disjoint(layouts)
        for part in layouts:
            part.grid(len(self.shape))
        object.__setattr__(self, "layouts", layouts)
        if self.present is not None:
            object.__setattr__(self, "present", frozenset(self.present))

    def holders(self) -> list[int]:
        """The ranks that hold a local tensor (maybe an empty one), ascending."""
        ranks = {r for part in self.layouts for r in part.ranks.reshape(-1).tolist()}
        return sorted(ranks if self.present is None else ranks & self.present)

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Shape of the local tensor of ``rank``, None when it holds none."""
        if self.present is not None and rank not in self.present:
            return None
        for part in self.layouts:
            if rank in part:
                return part.local_shape(self.shape, rank)
        return None


def _check_disjoint(layouts: Sequence[Layout]) -> None:
    table = np.concatenate([part.ranks.reshape(-1) for part in layouts])
    values, counts = np.unique(table, return_counts=True)
    if (counts > 1).any():
        raise LayoutError(
            f"several layouts of one tensor must be over disjoint ranks; ranks {values[counts > 1].tolist()[:20]} "
            f"are in more than one"
        )
