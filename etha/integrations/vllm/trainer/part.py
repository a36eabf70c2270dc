"""A part of a tensor: ranges of its dims, in another order. A view of a plain tensor, or a DTensor of a DTensor.

    [experts, 2 * inner, hidden]      ->  expert 3's second half of dim 1:  [inner, hidden]
    Shard(0) over four ranks          ->  a DTensor over the one rank that has expert 3
    Shard(2) over four ranks          ->  a DTensor of Shard(1) over all four

Nothing is copied, and no other rank is asked, because every rank can compute the layout of a part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from etha.errors import ConfigError
from etha.integrations.vllm.weights.trace import Trace
from etha.plan import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """For dim d of a tensor of ``shape``: the indices of ``runs[d]``, (start, stop), on dim ``axes[d]`` of the part.

    None in ``axes``: one index, whose dim the part does not have. ``ndim``: dims of the part. Dims of the part without
    a source dim have one element.
    """

    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    axes: tuple[int | None, ...]
    ndim: int

    @classmethod
    def of(cls, trace: Trace) -> TensorPart | None:
        """The part that a view shows; None if it takes every other element, or folds a dim into several."""
        if 0 in trace.shape and trace.sizes == trace.shape:
            return cls.all(trace.shape)
        if 0 in trace.counts or trace.counts != trace.sizes:
            return None
        axes: list[int | None] = [None] * len(trace.shape)
        for axis, (dim, step) in enumerate(trace.walks):
            if dim < 0 and trace.counts[axis] == 1:
                continue
            if dim < 0 or step != 1 or axes[dim] is not None:
                return None
            axes[dim] = axis
        lengths = [1 if axis is None else trace.counts[axis] for axis in axes]
        runs = tuple((at, at + n) for at, n in zip(trace.start, lengths, strict=True))
        return cls(shape=trace.shape, runs=runs, axes=tuple(axes), ndim=len(trace.counts))

    @classmethod
    def all(cls, shape: Sequence[int]) -> TensorPart:
        """A whole tensor of ``shape``."""
        runs = tuple((0, n) for n in shape)
        return cls(shape=tuple(shape), runs=runs, axes=tuple(range(len(runs))), ndim=len(runs))

    @property
    def whole(self) -> bool:
        """Whether the part is the whole tensor, unchanged."""
        return self.sizes == self.shape and all(a in (d, None) for d, a in enumerate(self.axes))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The part's shape."""
        found = [1] * self.ndim
        for (start, stop), axis in zip(self.runs, self.axes, strict=True):
            if axis is not None:
                found[axis] = stop - start
        return tuple(found)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a plain tensor of ``shape``: a view of it."""
        return self._view(tensor.detach(), self.runs)

    def _view(self, local: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        for dim, (start, stop) in enumerate(runs):
            local = local.narrow(dim, start, stop - start)
        order = sorted((axis, dim) for dim, axis in enumerate(self.axes) if axis is not None)
        dropped = [dim for dim, axis in enumerate(self.axes) if axis is None]
        local = local.permute([dim for _, dim in order] + dropped)
        for _ in dropped:
            local = local.select(-1, 0)
        taken = {axis for axis, _ in order}
        for axis in range(self.ndim):
            if axis not in taken:
                local = local.unsqueeze(axis)
        return local


class TensorParts:
    """Parts of DTensors. Equal sub-meshes are one object, so that registration reads each layout once."""

    def __init__(self) -> None:
        self._meshes: dict[tuple[int, tuple[tuple[int, int], ...]], DeviceMesh] = {}
        self._holdings: dict[tuple[int, tuple[Placement, ...], tuple[int, ...]], _Holding] = {}

    def of(self, name: str, tensor: torch.Tensor, part: TensorPart) -> torch.Tensor | None:
        """``part`` of ``tensor``; None if this rank holds none of it.

        ConfigError that names ``name`` if no placements describe how the part lies over the ranks.
        """
        if part.whole:
            return tensor
        if not isinstance(tensor, DTensor):
            return part.view(tensor)
        key = (id(tensor.device_mesh), tensor.placements, part.shape)
        if key not in self._holdings:
            self._holdings[key] = _Holding(tensor)
        try:
            ranges, placements = self._holdings[key].lay(part)
        except ConfigError as error:
            raise ConfigError(f"{name!r}: {error.message}") from None
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None or not all(a <= at < b for at, (a, b) in zip(coordinate, ranges, strict=True)):
            return None
        mesh = self._mesh(tensor.device_mesh, ranges)
        local = part._view(tensor._local_tensor.detach(), self._holdings[key].mine(part, tuple(coordinate)))
        strides = [math.prod(part.sizes[d + 1 :]) for d in range(part.ndim)]
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(part.sizes), stride=tuple(strides)
        )

    def _mesh(self, mesh: DeviceMesh, ranges: Sequence[tuple[int, int]]) -> DeviceMesh:
        """The sub-mesh of the ``ranges`` of each axis of ``mesh``. It has no process group, because nothing computes on
        it."""
        key = (id(mesh), tuple(ranges))
        if key not in self._meshes:
            # DeviceMesh reads a tensor's storage from its first element, even if it is given a view.
            ranks = mesh.mesh[tuple(slice(start, stop) for start, stop in ranges)].clone()
            self._meshes[key] = DeviceMesh(mesh.device_type, ranks, _init_backend=False)
        return self._meshes[key]


class _Holding:
    """How the elements of DTensors of one shape and layout, and of their parts, lie over the ranks."""

    def __init__(self, tensor: DTensor) -> None:
        self._mesh, self._placements, self._shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
        self._layout = Layout.from_dtensor(tensor)
        self._owned: dict[tuple[int, ...], list[list[tuple[int, int]]]] = {}
        self._laid: dict[TensorPart, tuple[list[tuple[int, int]], list[Placement]]] = {}

    def mine(self, part: TensorPart, coordinate: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each dim of the local tensor of the rank at ``coordinate``: the indices that belong to the part."""
        found = []
        for runs, (start, stop) in zip(self._at(coordinate), part.runs, strict=True):
            before = sum(min(b, start) - a for a, b in runs if a < start)
            found.append((before, before + _common(runs, start, stop)))
        return found

    def lay(self, part: TensorPart) -> tuple[list[tuple[int, int]], list[Placement]]:
        """The range of each mesh axis that holds elements of the part, and the part's placements over these ranges."""
        if part not in self._laid:
            self._laid[part] = self._lay(part)
        return self._laid[part]

    def _lay(self, part: TensorPart) -> tuple[list[tuple[int, int]], list[Placement]]:
        ranges = [(0, n) for n in self._mesh.mesh.shape]
        placements: list[Placement] = list(self._placements)
        cut: dict[int, list[int]] = {}
        for at, placement in enumerate(self._placements):
            dim: int | None = getattr(placement, "dim", None)
            if dim is None:
                continue
            axis = part.axes[dim]
            if axis is not None and part.runs[dim] == (0, self._shape[dim]):
                placements[at] = _moved(placement, axis)
            else:
                cut.setdefault(dim, []).append(at)
        for dim, mesh_axes in cut.items():
            for at, (extent, placement) in self._held(part, dim, mesh_axes).items():
                ranges[at], placements[at] = extent, placement
        return ranges, placements

    def _held(
        self, part: TensorPart, dim: int, mesh_axes: list[int]
    ) -> Mapping[int, tuple[tuple[int, int], Placement]]:
        """For each mesh axis that shards the cut dim ``dim``: the range of it that holds the part, and the
        placement."""
        start, stop = part.runs[dim]
        pieces: dict[tuple[int, ...], int] = {}
        for where in itertools.product(*(range(self._mesh.mesh.shape[at]) for at in mesh_axes)):
            coordinate = [0] * self._mesh.mesh.ndim
            for at, n in zip(mesh_axes, where, strict=True):
                coordinate[at] = n
            held = _common(self._at(tuple(coordinate))[dim], start, stop)
            if held:
                pieces[where] = held
        if len(pieces) == 1:
            (where,) = pieces
            return {at: ((n, n + 1), Replicate()) for at, n in zip(mesh_axes, where, strict=True)}
        axis = part.axes[dim]
        if len(mesh_axes) == 1 and axis is not None and type(self._placements[mesh_axes[0]]) is Shard:
            holders = [where[0] for where in pieces]
            if list(pieces.values()) == _chunks(stop - start, len(holders)):
                return {mesh_axes[0]: ((holders[0], holders[-1] + 1), Shard(axis))}
        raise ConfigError(
            f"elements {start} to {stop} of dim {dim} are a tensor of the checkpoint, and the ranks hold "
            f"{list(pieces.values())} of them, which no placement describes: shard that dim over a number of ranks "
            f"that divides them evenly, or shard another dim (fully_shard(..., shard_placement_fn=...))"
        )

    def _at(self, coordinate: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        """The runs of each dim that the rank at ``coordinate`` of the mesh holds."""
        if coordinate not in self._owned:
            owned = self._layout.owned(self._shape, int(self._layout.ranks[coordinate]))
            assert owned is not None
            self._owned[coordinate] = owned
        return self._owned[coordinate]


def _common(runs: Sequence[tuple[int, int]], start: int, stop: int) -> int:
    """How many indices of ``runs`` lie in start to stop."""
    return sum(max(0, min(b, stop) - max(a, start)) for a, b in runs)


def _moved(placement: Placement, axis: int) -> Placement:
    """The same sharding of another dim."""
    if type(placement) is Shard:
        return Shard(axis)
    return type(placement)(axis, split_factor=placement.split_factor)  # type: ignore[call-arg, attr-defined]


def _chunks(n: int, ranks: int) -> list[int]:
    """The sizes of Shard over ``ranks``, without empty shards."""
    step = -(-n // ranks)
    return [min(step, n - at) for at in range(0, n, step)]
