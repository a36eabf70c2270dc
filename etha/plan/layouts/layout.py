"""Layout: how one tensor lies over one side.

A layout is a mesh of side ranks and one placement per mesh axis, as in PyTorch but without processes; or a region, the
same irregular part on each of its ranks (region.py). cells.py computes what a rank owns. Who holds what is a transpose
of the rank table (grid.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from etha.errors import LayoutError
from etha.plan.layouts import cells
from etha.plan.layouts.grid import Grid, grid_of, grid_of_region
from etha.plan.layouts.mesh import check_ranks, check_shape, mesh_from_plain, read_mesh
from etha.plan.layouts.placement import Axis
from etha.plan.layouts.region import Product, check_product, plain_product, read_product
from etha.torch_types import is_placement

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

Ints = npt.NDArray[np.int64]
_READINGS = ("auto", "order", "literal")


class Layout:
    """(mesh, placements): ``mesh`` is a shape tuple over ranks 0..n-1, or a table of ranks.

    The table is nested lists, an int tensor or array, or a DeviceMesh. ``strided`` says how to read ``_StridedShard``
    where it matters (uneven sizes): "order", "literal" or "auto". Immutable and hashable. Malformed input raises
    LayoutError.
    """

    __slots__ = (
        "_axes",
        "_digest",
        "_grids",
        "_hash",
        "_placements",
        "_ranks",
        "_region",
        "_shape",
        "_strided",
        "_table",
    )

    _placements: tuple[Placement, ...] | None

    def __init__(self, mesh: Any, placements: Any, *, strided: str = "auto") -> None:
        if is_placement(placements) or not isinstance(placements, Sequence):
            raise LayoutError(f"placements is a sequence with one placement per mesh axis, not {placements!r}")
        shape, ranks = read_mesh(mesh)
        self._set(shape, ranks, tuple(Axis.from_placement(p) for p in placements), strided)
        self._placements = tuple(placements)

    def _set(
        self,
        shape: tuple[int, ...],
        ranks: Ints | None,
        axes: tuple[Axis, ...],
        strided: str,
        region: Product | None = None,
    ) -> None:
        if strided not in _READINGS:
            raise LayoutError(f"strided is {strided!r}, not one of {', '.join(_READINGS)}")
        if len(axes) != len(shape):
            raise LayoutError(f"{len(axes)} placements for a mesh of {len(shape)} axes {shape}: give one per axis")
        if ranks is not None and np.array_equal(ranks, np.arange(ranks.size).reshape(shape)):
            ranks = None
        if region is not None and not (len(axes) == 1 and axes[0].kind == "R" and strided == "auto"):
            raise LayoutError("the ranks of a region are a mesh of one axis on which it is replicated")
        self._shape, self._axes, self._strided, self._ranks, self._region = shape, axes, strided, ranks, region
        self._table = ranks
        self._placements = None
        self._hash = hash((shape, axes, strided, None if ranks is None else ranks.tobytes(), region))
        self._digest: str | None = None
        self._grids: dict[int, Grid] = {}

    @classmethod
    def from_dtensor(cls, dt: Any, *, strided: str = "auto") -> Layout:
        """The layout of a DTensor, in ranks of its own torch world. A sub-mesh shows only the caller's row."""
        return cls(dt.device_mesh.mesh, dt.placements, strided=strided)

    @classmethod
    def replicated(cls, world_size: int) -> Layout:
        """The layout in which each of ``world_size`` ranks holds the whole tensor."""
        return cls.from_plain({"mesh": {"shape": [world_size], "ranks": None}, "placements": [["R"]]})

    @classmethod
    def region(cls, runs: Sequence[Sequence[tuple[int, int]]], ranks: Sequence[int]) -> Layout:
        """A layout in which each of ``ranks`` keeps the same part: the elements ``runs[d]`` of each tensor dim d.

        ``runs[d]`` are ascending disjoint (start, stop). The part is their product, and lies in the local tensor
        without gaps, in order. The regions of a side may overlap, and need not cover the tensor, unless the other side
        wants all of it. LayoutError for anything else. Runs are compared with a tensor's shape once the layout is used
        with one.
        """
        new = object.__new__(cls)
        new._set(*read_mesh(list(ranks)), (Axis("R"),), "auto", read_product(runs))
        return new

    @property
    def kept(self) -> Product | None:
        """What the ranks of a region keep of each tensor dim; None for other layouts."""
        return self._region

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
        """The table of ranks, in the mesh's shape; read-only."""
        if self._table is None:
            self._table = np.arange(math.prod(self._shape), dtype=np.int64).reshape(self._shape)
            self._table.flags.writeable = False
        return self._table

    @property
    def has_strided(self) -> bool:
        """Whether the two readings of ``_StridedShard`` can differ here."""
        return any(axis.kind == "SS" for axis in self._axes)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and bool((self.ranks == rank).any())

    def grid(self, ndim: int) -> Grid:
        """The layout over a tensor of ``ndim`` dims. LayoutError if it shards a dim that the tensor lacks."""
        found = self._grids.get(ndim)
        if found is None:
            if self._region is not None:
                found = grid_of_region(self._region, self.ranks, ndim)
            else:
                found = grid_of(self._axes, self.ranks, ndim, literal=self._strided == "literal")
            self._grids[ndim] = found
        return found

    def check(self, global_shape: Sequence[int]) -> None:
        """Raise LayoutError if a tensor of this shape cannot have this layout: a missing dim, or a region that reaches
        beyond it."""
        if self._region is not None:
            check_product(self._region, global_shape, self.ranks.reshape(-1).tolist())
        self.grid(len(global_shape))

    def owned(self, global_shape: Sequence[int], rank: int) -> list[list[tuple[int, int]]] | None:
        """The ascending (start, stop) runs of ``rank`` per tensor dim, in the order of its local tensor.

        None for a rank outside the mesh, which holds nothing. An empty shard has dims without runs.
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
        """Shape of the local tensor of ``rank``. LayoutError for a rank outside the mesh."""
        shape = check_shape(global_shape)
        where = self.cell(len(shape), rank)
        if where is None:
            raise LayoutError(f"rank {rank} is not in the mesh {self.ranks.tolist()}: it holds no local tensor")
        if self._region is not None:
            self.check(shape)
            return tuple(kept.size for kept in self._region)
        splits = self.grid(len(shape)).splits
        return tuple(int(cells.table(n, s).sizes[c]) for n, s, c in zip(shape, splits, where, strict=True))

    def cell(self, ndim: int, rank: int) -> tuple[int, ...] | None:
        """Index of the cell of ``rank`` in each dim's table; None outside the mesh."""
        grid = self.grid(ndim)
        found = np.flatnonzero(grid.ranks.reshape(-1) == rank)
        if not len(found):
            return None
        flat = int(found[0]) // (grid.ranks.shape[1] * grid.ranks.shape[2])
        counts = [cells.count(s) for s in grid.splits]
        return cells.coordinate(flat, counts)

    def translate(self, ranks: Mapping[int, int]) -> Layout:
        """The same layout with every rank r of the table replaced by ``ranks[r]``."""
        try:
            table = np.array([ranks[r] for r in self.ranks.reshape(-1).tolist()], dtype=np.int64)
        except KeyError as error:
            raise LayoutError(f"rank {error.args[0]} of the mesh has no rank in the side: give ranks=") from None
        return self._replace(ranks=check_ranks(table.reshape(self._shape)))

    def held_by(self, ranks: Sequence[int]) -> Layout:
        """The same region on other ranks, a flat list of any length."""
        shape, table = read_mesh(list(ranks))
        new = object.__new__(Layout)
        new._set(shape, table, self._axes, self._strided, self._region)
        return new

    def with_reading(self, strided: str) -> Layout:
        """The same layout with ``_StridedShard`` read as "order", "literal" or "auto"."""
        return self._replace(strided=strided)

    def _replace(self, *, ranks: Ints | None = None, strided: str | None = None) -> Layout:
        new = object.__new__(Layout)
        table = self._ranks if ranks is None else ranks
        new._set(self._shape, table, self._axes, strided or self._strided, self._region)
        new._placements = self._placements
        return new

    def to_plain(self) -> dict[str, Any]:
        """Plain data for msgpack and JSON. "ranks" is None for 0..n-1."""
        ranks = None if self._ranks is None else self._ranks.reshape(-1).tolist()
        mesh = {"shape": list(self._shape), "ranks": ranks}
        if self._region is not None:
            return {"mesh": mesh, "region": plain_product(self._region)}
        return {
            "mesh": mesh,
            "placements": [axis.to_plain() for axis in self._axes],
            "strided": self._strided,
        }

    @classmethod
    def from_plain(cls, plain: object) -> Layout:
        """The inverse of ``to_plain``, for untrusted data. LayoutError says what is wrong."""
        new = object.__new__(cls)
        match plain:
            case {"mesh": mesh, "region": runs, **rest} if not rest:
                new._set(*mesh_from_plain(mesh), (Axis("R"),), "auto", read_product(runs))
            case {"mesh": mesh, "placements": list() | tuple() as axes, **rest} if rest.keys() <= {"strided"}:
                placed = tuple(Axis.from_plain(list(a) if isinstance(a, tuple) else a) for a in axes)
                new._set(*mesh_from_plain(mesh), placed, cast("str", rest.get("strided", "auto")))
            case _:
                raise LayoutError(f"not a layout: {str(plain)[:200]}")
        return new

    def digest(self) -> str:
        """Hex digest of the plain form: equal if and only if the layouts are equal."""
        if self._digest is None:
            head: list[Any] = [self._shape, [axis.to_plain() for axis in self._axes], self._strided]
            if self._region is not None:
                head.append(plain_product(self._region))
            body = b"" if self._ranks is None else self._ranks.astype("<i8").tobytes()
            self._digest = hashlib.sha256(json.dumps(head).encode() + b"\0" + body).hexdigest()[:32]
        return self._digest

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        mine = (self._hash, self._shape, self._axes, self._strided, self._region)
        if mine != (other._hash, other._shape, other._axes, other._strided, other._region):
            return False
        return np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return (Layout.from_plain, (self.to_plain(),))

    def __repr__(self) -> str:
        table = self._shape if self._ranks is None else self._ranks.tolist()
        if self._region is not None:
            return f"Layout.region([{' x '.join(map(str, self._region))}], ranks={self.ranks.tolist()})"
        reading = "" if self._strided == "auto" else f", strided={self._strided!r}"
        return f"Layout({table}, [{', '.join(str(a) for a in self._axes)}]{reading})"
