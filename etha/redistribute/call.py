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

    Called with the same arguments by all ranks of both meshes, like a collective; other ranks may call and
    take no part. Where the meshes are one, over its process group; else over WORLD. A rank that is not in
    the source mesh passes a DTensor on that mesh all the same, as torch makes it there: from
    ``distribute_tensor``, or ``DTensor.from_local(torch.empty(0, dtype=...), mesh, placements, shape=...,
    stride=...)``. A rank that is not in the target mesh gets one with an empty local tensor.

    Everything moves in one exchange, straight from who holds an element to who needs it; nothing is
    exchanged where all ranks hold what they need. Axes that are Partial are reduced together, once and in
    one order: replicas are equal to the bit. For large tensors that reduction takes a second exchange
    where that is less to send (``etha/redistribute/route.py`` says when). An axis may stay Partial.

    A sub-mesh such as ``mesh["dp"]`` redistributes in each row of its own; together with another mesh,
    its rows are replicas of one tensor. ``_StridedShard`` is made as ``DTensor.redistribute`` makes it.
    Point to point over an NCCL world (no group has exactly these ranks) needs a communicator that stands:
    ``init_process_group(device_id=...)``, or any collective before.

    LayoutError: no DTensor, placements that do not fit the mesh or the tensor, a Partial that cannot be
    made or reduced, a local tensor of another size than the layout gives it. ConfigError: a tensor that
    requires grad under grad mode (this is not differentiable), a mesh of another device.
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
    """Dims from the slowest to the fastest in memory; as they are where an expanded one says nothing."""
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
