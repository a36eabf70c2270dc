"""A call of redistribute, checked: a tensor, two layouts in ranks of the torch world, and a wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from etha.errors import ConfigError, LayoutError
from etha.plan import Layout
from etha.plan.layouts import dtypes
from etha.redistribute.exchange import GroupExchange
from etha.redistribute.foreign import AllReduce, all_reduce_for
from etha.redistribute.meshes import MeshTables, group_of
from etha.redistribute.reading import agree, misfit
from etha.redistribute.route import Route, at_coordinates, make_route
from etha.redistribute.stage import Layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributeRequest:
    """One call, before anything is known of the local tensors. ``order``: dims from the slowest to the fastest in
    memory.

    ``source`` and ``target`` are layouts over disjoint ranks, each of which holds the whole tensor. ``same``: both lie
    on one mesh. ``all_reduce`` may do all of it, if the caller gave up the order of additions.
    """

    shape: tuple[int, ...]
    source: Layouts
    target: Layouts
    order: tuple[int, ...]
    rank: int
    wire: GroupExchange
    same: bool
    all_reduce: AllReduce | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's result; that of an empty tensor if it is no target."""
        return _local_shape(self.target, self.shape, self.rank)

    def route(self, local: torch.Tensor) -> Route:
        """How it moves. All ranks call this, because they may have to tell each other their local sizes. LayoutError
        if the local tensor is not what its layout gives this rank."""
        source = agree(self.source, self.shape, local, self.rank, self.wire)
        return _route(self.shape, local.dtype, source, self.target, self.rank, self.same, tuple(local.shape))

    def to_text(self) -> str:
        """The request as JSON, the argument of the registered operator."""
        group = None if self.wire.group is None else self.wire.group.group_name
        foreign = self.all_reduce
        plain = {
            "shape": self.shape,
            "source": [layout.to_plain() for layout in self.source],
            "target": [layout.to_plain() for layout in self.target],
            "order": self.order,
            "rank": self.rank,
            "ranks": self.wire.ranks,
            "group": group,
            "same": self.same,
            "all_reduce": foreign and [foreign.group.group_name, foreign.op, foreign.divisor],
        }
        return json.dumps(plain)

    @classmethod
    def from_text(cls, text: str) -> RedistributeRequest:
        """The inverse of ``to_text``."""
        request, group, foreign = _parsed(text)
        # Groups are not kept, because one that is made after another was destroyed may have its name.
        if group is not None:
            request = replace(request, wire=replace(request.wire, group=_group_named(group)))
        if foreign is not None:
            name, op, divisor = foreign
            request = replace(request, all_reduce=AllReduce(_group_named(name), op, divisor))
        return request


#: The rest is cached, because a small exchange takes not much longer than to find it out.
@lru_cache(maxsize=512)
def _local_shape(target: Layouts, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    found = next((layout for layout in target if rank in layout), None)
    return ((0,) if shape else ()) if found is None else found.local_shape(shape, rank)


@lru_cache(maxsize=512)
def _route(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    source: Layouts,
    target: Layouts,
    rank: int,
    same: bool,
    held: tuple[int, ...],
) -> Route:
    """The route of a rank whose local tensor has the shape ``held``."""
    source, target = without_kept(source, target, rank, same=same)
    why = misfit(source, shape, held, rank)
    if why:
        raise LayoutError(f"{why}: give from_local the tensor's true global shape and stride")
    return make_route(shape, dtype, source, target, rank)


def _group_named(name: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = getattr(dist.distributed_c10d, "_resolve_process_group")(name)  # noqa: B009
    return group


@lru_cache(maxsize=512)
def _parsed(text: str) -> tuple[RedistributeRequest, str | None, list[Any] | None]:
    """The request without groups, its group's name, and its all-reduce with the group's name."""
    plain = json.loads(text)
    request = RedistributeRequest(
        shape=tuple(plain["shape"]),
        source=tuple(Layout.from_plain(layout) for layout in plain["source"]),
        target=tuple(Layout.from_plain(layout) for layout in plain["target"]),
        order=tuple(plain["order"]),
        rank=plain["rank"],
        wire=GroupExchange(tuple(plain["ranks"]), None),
        same=plain["same"],
    )
    return request, plain["group"], plain["all_reduce"]


def read_request(
    dtensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], exact_order: bool = True
) -> RedistributeRequest | None:
    """Read a call that ``check_call`` has checked; None for a rank that is in neither mesh. LayoutError for layouts
    that do not fit the tensor or each other."""
    dtypes.name_of(dtensor.dtype)
    shape, stride = tuple(int(n) for n in dtensor.shape), tuple(int(n) for n in dtensor.stride())
    here, there = MeshTables.of(dtensor.device_mesh), MeshTables.of(mesh)
    given = source_placements(dtensor)
    # By type, too, because torch's kinds of Partial may compare equal.
    typed = tuple(map(type, given)), tuple(map(type, placements))
    request = _read(here, there, given, placements, typed, shape, stride, dist.get_rank())
    if request is None:
        return None
    foreign = None
    if not exact_order and request.same and mesh == dtensor.device_mesh and request.order == tuple(range(len(shape))):
        foreign = all_reduce_for(mesh, given, placements, dtensor.dtype)
    # Groups are not kept, because they may be destroyed.
    wire = GroupExchange(request.wire.ranks, group_of(frozenset(request.wire.ranks), mesh))
    return replace(request, wire=wire, all_reduce=foreign)


@lru_cache(maxsize=512)
def _read(
    here: MeshTables,
    there: MeshTables,
    given: tuple[Placement, ...],
    placements: tuple[Placement, ...],
    typed: tuple[tuple[type, ...], tuple[type, ...]],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    rank: int,
) -> RedistributeRequest | None:
    """A request without groups; None for a rank that is in neither mesh. ``typed`` only tells calls apart."""
    if here == there:
        own = here.row_of(rank)
        if own is None:
            return None
        here = there = own
    ranks = here.ranks | there.ranks
    if rank not in ranks:
        return None
    source, target = here.layouts(given, "auto"), there.layouts(placements, "order")
    for layout in (*source, *target):
        layout.grid(len(shape))
    return RedistributeRequest(
        shape=shape,
        source=source,
        target=target,
        order=memory_order(stride),
        rank=rank,
        wire=GroupExchange(tuple(sorted(ranks)), None),
        same=here == there,
    )


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Dims from the slowest to the fastest in memory; unchanged if a stride is 0, because an expanded dim tells
    nothing."""
    dims = range(len(stride))
    return tuple(dims) if 0 in stride else tuple(sorted(dims, key=lambda d: -stride[d]))


def check_call(
    dtensor: Any, device_mesh: Any, placements: Any, exact_order: Any = True
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The target's mesh and placements. ConfigError or LayoutError say what is wrong."""
    check_tensor(dtensor)
    if not isinstance(exact_order, bool):
        raise ConfigError(f"exact_order={exact_order!r} must be True or False, the same on all ranks")
    mesh = dtensor.device_mesh if device_mesh is None else device_mesh
    mesh = getattr(mesh, "real_obj", mesh)  # torch.compile wraps it while it traces
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"device_mesh is a DeviceMesh, not {mesh!r}")
    return mesh, check_placements(placements, dtensor.ndim, mesh)


def check_tensor(dtensor: Any) -> None:
    """LayoutError for what is not a DTensor."""
    if not isinstance(dtensor, DTensor):
        raise LayoutError(
            f"a {type(dtensor).__name__} has no layout: redistribute takes a DTensor (DTensor.from_local makes one)"
        )


def local_of(dtensor: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """The plain local tensor, after waiting for it. ConfigError if it cannot be moved to ``mesh``."""
    local: torch.Tensor = dtensor._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter) and not is_traced(local):
        raise ConfigError(f"its local tensor is a {type(local).__name__}: redistribute the plain tensors it is made of")
    if (local.is_meta and not is_traced(local)) or local.layout != torch.strided or local.is_quantized:
        raise ConfigError(f"its local tensor is {local.layout} on {local.device}: only dense tensors with memory move")
    if mesh.device_type != local.device.type:
        raise ConfigError(f"it lies on {local.device} and device_mesh is of {mesh.device_type}: move it there first")
    return local.detach().resolve_conj().resolve_neg()


def is_traced(local: torch.Tensor) -> bool:
    """Whether torch.compile traces this, so that there is no memory yet."""
    return isinstance(local, FakeTensor | FunctionalTensor)


def check_placements(placements: Any, ndim: int, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """One placement for each axis of ``mesh``, dims counted from the front. LayoutError otherwise."""
    if placements is None or isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise LayoutError(f"placements is a sequence with one placement for each mesh axis, not {placements!r}")
    if len(placements) != mesh.ndim:
        raise LayoutError(f"{len(placements)} placements for a mesh of {mesh.ndim} axes: give one for each")
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard | _StridedShard) and not -ndim <= placement.dim < ndim:
            raise LayoutError(f"placement {placement} shards dim {placement.dim} of a tensor of {ndim} dims")
        if isinstance(placement, _StridedShard) and placement.dim < 0:
            placement = _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
        elif isinstance(placement, Shard) and placement.dim < 0:
            placement = Shard(placement.dim + ndim)
        found.append(placement)
    return tuple(found)


def source_placements(dtensor: DTensor) -> tuple[Placement, ...]:
    """The placements of a DTensor. Shards in another order than left to right become ``_StridedShard``."""
    spec: Any = dtensor._spec
    order = getattr(spec, "shard_order", None)
    if order is None or spec.is_default_device_order(order):
        return tuple(spec.placements)
    return tuple(spec._convert_shard_order_to_StridedShard(order, spec.placements, spec.mesh))


def without_kept(source: Layouts, target: Layouts, rank: int, *, same: bool) -> tuple[Layouts, Layouts]:
    """Drop mesh axes that are Partial on both sides and stay so: each coordinate on such axes is redistributed
    alone."""
    kept = [i for i, axis in enumerate(target[0].axes) if axis.partial]
    if not kept:
        return source, target
    here, there = source[0], target[0]
    for i in kept:
        if not same or here.axes[i] != there.axes[i]:
            was = f", where it is {here.axes[i]}" if same else " of another mesh"
            raise LayoutError(
                f"placements ask for {there.axes[i]} on mesh axis {i}{was}: nobody can say how a value is to be "
                f"split into contributions; give Replicate or Shard"
            )
    if len({str(axis) for axis in here.axes if axis.partial}) > 1:
        raise LayoutError(f"{here} is Partial in several ways, of which some would stay: reduce all of them at once")
    where = (here.ranks == rank).nonzero()
    place = {i: int(where[i][0]) for i in kept}
    return (at_coordinates(here, place),), (at_coordinates(there, place),)
