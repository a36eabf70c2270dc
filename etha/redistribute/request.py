"""A call of redistribute, checked: a tensor, two layouts in ranks of the torch world, and a wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from etha.errors import ConfigError, LayoutError
from etha.plan.layouts import dtypes
from etha.redistribute.exchange import GroupExchange
from etha.redistribute.meshes import MeshTables, group_of
from etha.redistribute.reading import agree, misfit
from etha.redistribute.route import at_coordinates
from etha.redistribute.stage import Layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributeRequest:
    """One call. ``source`` and ``target`` are layouts over disjoint ranks, each of which holds the whole tensor."""

    local: torch.Tensor
    shape: tuple[int, ...]
    source: Layouts
    target: Layouts
    rank: int
    wire: GroupExchange
    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def read_request(dtensor: Any, device_mesh: Any, placements: Any) -> RedistributeRequest | None:
    """Check and read a call; None for a rank that is in neither mesh. ConfigError or LayoutError say what is wrong."""
    check_tensor(dtensor)
    mesh = dtensor.device_mesh if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"device_mesh is a DeviceMesh, not {mesh!r}")
    shape, rank = tuple(dtensor.shape), dist.get_rank()
    local = local_of(dtensor, mesh)
    dtypes.name_of(local.dtype)
    wanted = check_placements(placements, len(shape), mesh)
    here, there = MeshTables.of(dtensor.device_mesh), MeshTables.of(mesh)
    if here == there:
        own = here.row_of(rank)
        if own is None:
            return None
        here = there = own
    ranks = here.ranks | there.ranks
    if rank not in ranks:
        return None
    wire = GroupExchange(tuple(sorted(ranks)), group_of(ranks, mesh))
    source, target = here.layouts(source_placements(dtensor), "auto"), there.layouts(wanted, "order")
    for layout in (*source, *target):
        layout.grid(len(shape))
    source = agree(source, shape, local, rank, wire)
    source, target = _without_kept(source, target, rank, same=here == there)
    why = misfit(source, shape, local, rank)
    if why:
        raise LayoutError(f"{why}: give from_local the tensor's true global shape and stride")
    return RedistributeRequest(
        local=local, shape=shape, source=source, target=target, rank=rank, wire=wire, mesh=mesh, placements=wanted
    )


def check_tensor(dtensor: Any) -> None:
    """Raise ConfigError or LayoutError for what is not a DTensor, or would be differentiated."""
    if not isinstance(dtensor, DTensor):
        raise LayoutError(
            f"a {type(dtensor).__name__} has no layout: redistribute takes a DTensor (DTensor.from_local makes one)"
        )
    if dtensor.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "this tensor requires grad, and etha.redistribute is not differentiable: call it under torch.no_grad(), "
            "give dtensor.detach(), or use DTensor.redistribute where gradients are needed"
        )


def local_of(dtensor: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """The plain local tensor, after waiting for it. ConfigError if it cannot be moved to ``mesh``."""
    local: torch.Tensor = dtensor._local_tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(f"its local tensor is a {type(local).__name__}: redistribute the plain tensors it is made of")
    if local.is_meta or local.layout != torch.strided or local.is_quantized:
        raise ConfigError(f"its local tensor is {local.layout} on {local.device}: only dense tensors with memory move")
    if mesh.device_type != local.device.type:
        raise ConfigError(f"it lies on {local.device} and device_mesh is of {mesh.device_type}: move it there first")
    return local.detach().resolve_conj().resolve_neg()


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


def _without_kept(source: Layouts, target: Layouts, rank: int, *, same: bool) -> tuple[Layouts, Layouts]:
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
