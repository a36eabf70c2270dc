"""The registered operator: one redistribution of local tensors, as eager calls and compiled graphs run it.

``torch.ops.etha.redistribute(local, request)`` takes the request as text, because a graph may be kept on disk and run
by another process. Its fake kernel knows the result's shape. It is not differentiable; call.py is.
"""

from __future__ import annotations

import torch

from etha.redistribute.request import RedistributeRequest
from etha.redistribute.run import run


def move(local: torch.Tensor, request: RedistributeRequest) -> torch.Tensor:
    """The local result, in memory of its own; an empty tensor on a rank that is no target. A collective."""
    route = request.route(local)
    result = new_result(local, request)
    if request.all_reduce is not None:
        request.all_reduce.run(local, result)
        return result
    run(route, request.wire, request.rank, local, None if route.stages[-1].shape is None else result)
    return result


def new_result(local: torch.Tensor, request: RedistributeRequest) -> torch.Tensor:
    """Memory for the local result."""
    shape = request.local_shape
    order = request.order if len(shape) == len(request.order) else range(len(shape))
    return torch.empty_permuted(shape, tuple(order), dtype=local.dtype, device=local.device)


@torch.library.custom_op("etha::redistribute", mutates_args=())
def redistribute_local(local: torch.Tensor, request: str) -> torch.Tensor:
    """``move`` for compiled graphs; ``request`` is ``RedistributeRequest.to_text()``."""
    return move(local, RedistributeRequest.from_text(request))


@redistribute_local.register_fake
def _(local: torch.Tensor, request: str) -> torch.Tensor:
    return new_result(local, RedistributeRequest.from_text(request))
