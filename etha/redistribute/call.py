"""A call of redistribute: checks it, moves the local tensors, and makes it differentiable and traceable.

redistribute_dtensor --eager--> Redistribution --> move
                     --traced by torch.compile--> one node --> Redistribution --> torch.ops.etha.redistribute
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from etha.redistribute.operator import move, redistribute_local
from etha.redistribute.request import check_call, is_traced, local_of, memory_order, read_request, source_placements


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def redistribute_dtensor(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    exact_order: bool = True,
) -> DTensor:
    """``etha.redistribute``. One node of dynamo's graph, into which AOTAutograd traces what it does."""
    mesh, wanted = check_call(dtensor, device_mesh, placements, exact_order)
    if dtensor.requires_grad and torch.is_grad_enabled():
        moved: DTensor = Redistribution.apply(dtensor, mesh, wanted, exact_order)  # type: ignore[no-untyped-call]
        return moved
    with torch.no_grad():
        return _redistributed(dtensor, mesh, wanted, exact_order)


class Redistribution(torch.autograd.Function):
    """Its backward is the reverse redistribution of the gradient, and differentiable itself."""

    @staticmethod
    def forward(
        ctx: Any, dtensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], exact_order: bool
    ) -> DTensor:
        """The DTensor on ``mesh``."""
        ctx.exact_order = exact_order
        ctx.mesh, ctx.placements = dtensor.device_mesh, source_placements(dtensor)
        return _redistributed(dtensor, mesh, placements, exact_order)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None, None]:
        """Its gradient where the input lies. Like DTensor's, Replicate where the input is Partial."""
        same = gradient.device_mesh == ctx.mesh
        now = gradient.placements if same else [None] * len(ctx.placements)
        wanted = tuple(
            Replicate() if was.is_partial() and has != was else was
            for was, has in zip(ctx.placements, now, strict=True)
        )
        moved: DTensor = redistribute_dtensor(gradient, ctx.mesh, wanted, ctx.exact_order)
        return moved, None, None, None


def _redistributed(dtensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], exact_order: bool) -> DTensor:
    local, shape = local_of(dtensor, mesh), tuple(int(n) for n in dtensor.shape)
    request = read_request(dtensor, mesh, placements, exact_order)
    order = memory_order(dtensor.stride()) if request is None else request.order
    if request is None:
        result = torch.empty((0,) if shape else (), dtype=local.dtype, device=local.device)
    elif is_traced(local):
        result = redistribute_local(local, request.to_text())
    else:
        result = move(local, request)
    if mesh.get_coordinate() is None:  # of a scalar, too
        result = result.new_empty(0)
    made = TensorMeta(torch.Size(shape), _strides(shape, order), result.dtype)
    # As from_local makes it, which takes longer than a small exchange and is differentiable itself.
    moved: DTensor = DTensor(result, DTensorSpec(mesh, placements, tensor_meta=made), requires_grad=False)  # type: ignore
    return moved


@lru_cache(maxsize=512)
def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Of a dense tensor whose dims lie in memory in this order, the slowest first."""
    sizes = [max(int(shape[d]), 1) for d in reversed(order)]
    found = dict(zip(reversed(order), accumulate(sizes[:-1], lambda a, b: a * b, initial=1), strict=False))
    return tuple(found[d] for d in range(len(shape)))
