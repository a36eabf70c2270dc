"""etha.redistribute: moves a DTensor of one job from any layout to any other, planned as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["redistribute"]


def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    exact_order: bool = True,
) -> DTensor:
    """The same tensor with ``placements`` over ``device_mesh`` (default: its own), in memory of its own.

    All ranks of both meshes call it with the same arguments, like a collective. Other ranks may call it and take no
    part. If the meshes are one mesh, it runs over that mesh's process group, otherwise over WORLD. A rank that is not
    in the source mesh also passes a DTensor on that mesh, as torch makes it there: from ``distribute_tensor``, or from
    ``DTensor.from_local(torch.empty(0, dtype=...), mesh, placements, shape=..., stride=...)``, with ``torch.empty(())``
    for a scalar. A rank that is not in the target mesh gets one with an empty local tensor. Like collectives, two calls
    over one group must not run at once in two threads.

    Everything moves in one exchange, directly from a rank that holds an element to each rank that needs it. Nothing is
    exchanged if all ranks hold what they need. Partial axes are reduced together, once and in one order, so replicas
    are equal to the bit. For large tensors that reduction takes a second exchange if that sends less
    (``etha/redistribute/route.py`` says when). An axis may stay Partial.

    With ``exact_order=False`` an all-reduce of the process group does what is nothing else: Partial axes of one kind to
    Replicate, no other axis changed, if a group of these ranks exists (one axis, WORLD, or a flattened mesh). The dtype
    is float32, float64 or an integer, and "max" and "min" of floats are left out. It adds in an order of its own, so
    replicas on other axes may differ in their last bits. Everything else is as before.

    A sub-mesh such as ``mesh["dp"]`` redistributes in each of its rows separately. Together with another mesh, its rows
    are replicas of one tensor. ``_StridedShard`` means what ``DTensor.redistribute`` makes of it. Point-to-point
    messages over an NCCL world (if no group has exactly these ranks) need an existing communicator:
    ``init_process_group(device_id=...)``, or any earlier collective.

    It is differentiable, twice too: the gradient is the reverse redistribution of the result's gradient, and Replicate
    where the input is Partial, as DTensor's. So all ranks that called it call backward. ``torch.compile`` traces it
    without a graph break, as the operator ``torch.ops.etha.redistribute``.

    Raises LayoutError for what is not a DTensor, for placements that do not fit the mesh or the tensor, for a Partial
    that cannot be made or reduced, and for a local tensor of another size than the layout gives it. Raises ConfigError
    for a mesh of another device.
    """
    # Here, because it imports all of DTensor, and most programs that import etha have none.
    from etha.redistribute.call import redistribute_dtensor

    moved: DTensor = redistribute_dtensor(dtensor, device_mesh, placements, exact_order)
    return moved
