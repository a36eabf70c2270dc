"""A call of redistribute: reads the request, plans the route, runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from etha.redistribute.request import check_placements, read_request
from etha.redistribute.route import make_route
from etha.redistribute.run import run


def redistribute_dtensor(
    dtensor: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> DTensor:
    """``etha.redistribute``."""
    request = read_request(dtensor, device_mesh, placements)
    order = memory_order(dtensor.stride())
    if request is None:
        mesh = dtensor.device_mesh if device_mesh is None else device_mesh
        return _made(None, dtensor, mesh, check_placements(placements, dtensor.ndim, mesh), order)
    route = make_route(request.shape, request.local.dtype, request.source, request.target, request.rank)
    shape = route.stages[-1].shape
    with torch.no_grad():
        result = (
            None
            if shape is None
            else torch.empty_permuted(shape, order, dtype=request.local.dtype, device=request.local.device)
        )
        run(route, request.wire, request.local, result)
    return _made(result, dtensor, request.mesh, request.placements, order)


def memory_order(stride: Sequence[int]) -> list[int]:
    """Dims from the slowest to the fastest in memory; unchanged if a stride is 0, because an expanded dim tells
    nothing."""
    dims = list(range(len(stride)))
    return dims if 0 in stride else sorted(dims, key=lambda d: -stride[d])


def _made(
    local: torch.Tensor | None, like: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], order: list[int]
) -> DTensor:
    whole = torch.empty_permuted(tuple(like.shape), order, device="meta", dtype=like.dtype)
    if local is None:
        shape = (0,) if like.ndim else ()
        local = torch.empty(shape, dtype=like.dtype, device=like._local_tensor.device)
    with torch.no_grad():
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
