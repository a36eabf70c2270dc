"""An all-reduce of the process group that does a whole redistribution, for callers who give up the order of additions.

It reduces in an order of its own, so results may differ in the last bits from one group to another. The route is still
planned, because that finds all errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

#: What gloo reduces, and NCCL too, in the dtype in which the planned route adds up. That takes float32 for 16 bits, in
#: which a sum may overflow on its way, and loses more than the last bits.
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and divided, because gloo has no mean
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce over ``group``; a mean is a sum divided by ``divisor``."""

    group: dist.ProcessGroup
    op: str
    divisor: int

    def run(self, local: torch.Tensor, result: torch.Tensor) -> None:
        """Reduce ``local`` of each rank of the group into ``result``, of the same shape and contiguous."""
        result.copy_(local)
        dist.all_reduce(result, _OPS[self.op], group=self.group)
        if self.divisor > 1:
            result.div_(self.divisor)


def all_reduce_for(
    mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement], dtype: torch.dtype
) -> AllReduce | None:
    """The all-reduce that makes ``target`` of ``source`` on this mesh, if there is one and a group for it exists."""
    if dtype not in (*_FLOATS, *_INTEGERS):
        return None
    axes = [i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b or type(a) is not type(b)]
    ops = {p.reduce_op if type(p) is Partial else "" for p in (source[i] for i in axes)}
    if len(ops) != 1 or any(type(target[i]) is not Replicate for i in axes) or any(p.is_partial() for p in target):
        return None
    [op] = ops
    if op in ("max", "min") and dtype in _FLOATS:  # gloo's ignore a NaN
        return None
    group = _group_over(mesh, axes) if op in _OPS else None
    return None if group is None else AllReduce(group, op, group.size() if op == "avg" else 1)


def _group_over(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup | None:
    """The group of the ranks that differ from this one on ``axes`` only: an axis's, WORLD, or a flattened mesh's."""
    if mesh.get_coordinate() is None:
        return None
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    world = dist.group.WORLD
    if world is not None and len(axes) == mesh.ndim and mesh.size() == world.size():
        return world
    names = mesh.mesh_dim_names
    root = mesh._get_root_mesh()
    if names is None or root is not mesh:
        return None
    wanted = mesh[tuple(names[i] for i in axes)].mesh.flatten().tolist()
    for flat in getattr(root, "_flatten_mapping", {}).values():
        if flat.mesh.flatten().tolist() == wanted:
            group: dist.ProcessGroup = flat.get_group()
            return group
    return None
