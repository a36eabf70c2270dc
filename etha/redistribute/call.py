"""redistribute: the public call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from etha.redistribute.request import check_placements, read_request
from etha.redistribute.route import make_route
from etha.redistribute.run import run


def redistribute(
    dtensor: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> DTensor:
    """The same tensor with ``placements`` over ``device_mesh`` (default: its own), in memory of its own.

    All ranks of both meshes call it with the same arguments, like a collective. Other ranks may call it and take no
    part. If the meshes are one mesh, it runs over that mesh's process group, otherwise over WORLD. A rank that is not
    in the source mesh also passes a DTensor on that mesh, as torch makes it there: from ``distribute_tensor``, or from
    ``DTensor.from_local(torch.empty(0, dtype=...), mesh, placements, shape=..., stride=...)``. A rank that is not in
    the target mesh gets one with an empty local tensor.

    Everything moves in one exchange, directly from a rank that holds an element to each rank that needs it. Nothing is
    exchanged if all ranks hold what they need. Partial axes are reduced together, once and in one order, so replicas
    are equal to the bit. For large tensors that reduction takes a second exchange if that sends less
    (``etha/redistribute/route.py`` says when). An axis may stay Partial.

    A sub-mesh such as ``mesh["dp"]`` redistributes in each of its rows separately. Together with another mesh, its rows
    are replicas of one tensor. ``_StridedShard`` means what ``DTensor.redistribute`` makes of it. Point-to-point
    messages over an NCCL world (if no group has exactly these ranks) need an existing communicator:
    ``init_process_group(device_id=...)``, or any earlier collective.

    Raises LayoutError for what is not a DTensor, for placements that do not fit the mesh or the tensor, for a Partial
    that cannot be made or reduced, and for a local tensor of another size than the layout gives it. Raises ConfigError
    for a tensor that requires grad in grad mode (this is not differentiable), and for a mesh of another device.
    """
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
