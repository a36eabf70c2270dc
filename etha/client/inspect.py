"""What a tensor that a user registers is: whether Etha can move it, and where its bytes lie.

Reads tensors, changes nothing. A tensor that cannot be moved becomes a Refusal, so that one call
reports all of them at once and every rank of both sides hears it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from etha.bus.messages import Refusal
from etha.client.arguments import check_text, shown
from etha.client.memory.base import Home
from etha.config import MAX_TENSOR_NAME
from etha.errors import ConfigError
from etha.plan.layouts import dtypes

#: Steps that the exact overlap test of two strided views may take before we call them overlapping.
_OVERLAP_WORK = 100_000
#: Most elements whose places are listed where those steps do not suffice.
_LISTED = 1 << 22

#: Address, shape, strides and dtype.
Region = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


def check_tensor_name(name: str) -> str:
    """``name`` itself, or ConfigError: any text of at most 500 bytes."""
    if not isinstance(name, str) or not name or len(check_text("tensor name", name).encode()) > MAX_TENSOR_NAME:
        raise ConfigError(f"tensor name {shown(name)} must be a text of 1 to {MAX_TENSOR_NAME} bytes")
    return name


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory a registered one uses at present: its local one, or itself."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.elem if isinstance(local, AsyncCollectiveTensor) else local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain local tensor (no grad, same memory); waits for an unfinished async collective."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return local.detach()


def refusals_of(name: str, tensor: Any, home: Home, unsharded: Mapping[int, str]) -> Iterator[Refusal]:
    """Every reason why ``tensor`` cannot be moved, most basic first; nothing for a good one."""

    def no(text: str) -> Refusal:
        return Refusal(code="unsupported", name=name, text=text, target_only=False)

    if not isinstance(tensor, torch.Tensor):
        yield no(f"a {type(tensor).__name__} is not a tensor")
        return
    if id(tensor) in unsharded:
        yield no(
            f"an unsharded parameter of the FSDP2 module {unsharded[id(tensor)]!r}: call its reshard() first "
            f"(or fully_shard(..., reshard_after_forward=True)) and register the sharded parameters"
        )
        return
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, AsyncCollectiveTensor)
    if type(local) not in plain:
        yield no(f"tensors of class {type(local).__name__} cannot be moved; register the plain tensors it is made of")
    elif local.is_meta:
        yield no("a meta tensor has no memory; materialise it first (module.to_empty(device=...))")
    elif local.is_nested:
        yield no("a nested tensor; register the tensors that unbind() gives")
    elif local.is_mkldnn:
        yield no("an MKL-DNN tensor, whose memory is packed; register to_dense()")
    elif local.layout != torch.strided:
        yield no(f"a sparse tensor ({local.layout}); register its indices and values, or to_dense()")
    elif local.is_quantized:
        yield no("a quantized tensor; register its int_repr() and scales")
    elif local.dtype not in dtypes.BY_NAME.values():
        yield no(f"dtype {local.dtype} cannot be moved; register a view as uint8: view(torch.uint8)")
    elif local.is_conj() or local.is_neg():
        yield no("a conjugate or negative view; call resolve_conj() / resolve_neg() first")
    elif not home.holds(local):
        yield no(
            f"it lies on {local.device}, this client's agent serves {home.agent}; "
            f"use a client with device={str(local.device)!r}"
        )
    elif local.numel() and _is_freed(memory_of(tensor)):
        yield no("it has no memory: its storage was freed or cut short (untyped_storage().resize_); allocate it first")
    elif overlaps_itself(local):
        text = "several of its elements share one memory place (stride 0 or overlapping); fine to send, not to receive"
        yield Refusal(code="alias", name=name, text=text, target_only=True)


def _is_freed(local: torch.Tensor) -> bool:
    """Whether the storage ends before the tensor does; of tensors with elements."""
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    need = (local.storage_offset() + 1 + last) * local.itemsize
    return not local.data_ptr() or local.untyped_storage().nbytes() < need


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory; True also where that takes too long to find out."""
    if tensor.is_contiguous():  # of a thousand tensors nearly all: one call instead of three
        return False
    axes = sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1)
    if not tensor.numel() or _nested(axes):
        return False
    return any(stride == 0 for stride, _ in axes) or _collide(axes)


def _nested(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether each (stride, size), ascending, steps over all that the ones before it reach."""
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _collide(axes: Sequence[tuple[int, int]]) -> bool:
    """Whether two different steps along these axes end at one place.

    If so, one of them is ahead of the other along some axis: then what lies at least one step along it, and what lies
    at its beginning, have a place in common.
    """
    try:
        for i, (stride, size) in enumerate(axes):
            others = [*axes[:i], *axes[i + 1 :]]
            ahead = _Places(stride, [(stride, size - 1), *others])
            work: Any = _OVERLAP_WORK
            if np.shares_memory(np.asarray(ahead), np.asarray(_Places(0, others)), max_work=work):
                return True
    except np.exceptions.TooHardError:
        if prod(size for _, size in axes) > _LISTED:
            return True
        places = np.zeros(1, np.int64)
        for stride, size in axes:
            places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return len(np.unique(places)) < len(places)
    return False


def region_of(tensor: torch.Tensor) -> Region:
    """Which elements of memory a tensor is, in which order; dims of one element have no stride that counts."""
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tuple(tensor.shape), strides, tensor.dtype


def aliases(locals_: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Refusal]:
    """Refusals (target only) for names whose memory overlaps without being the same region."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + _reach(t), name, t) for name, t in locals_ if t.numel() and not t.is_meta
    )
    for i, (_, end, name, tensor) in enumerate(spans):
        for start, _, other, peer in spans[i + 1 :]:
            if start >= end:
                break
            if region_of(tensor) == region_of(peer) or not _share_memory(tensor, peer):
                continue
            text = f"its memory overlaps that of {other!r}; a target may have two names only for the same region"
            yield Refusal(code="alias", name=name, text=text, target_only=True)


def unsharded_parameters() -> dict[int, str]:
    """id of each live FSDP2 parameter that is unsharded at present -> its name in its module.

    PyTorch keeps no public list, so this reads its registry of module states; a PyTorch that moved
    it finds nothing here and such parameters then meet the ordinary layout checks.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return {}
    found: dict[int, str] = {}
    for state in list(_module_state_mapping.values()):
        ref = state() if callable(state) else state
        groups = getattr(ref, "_fsdp_param_groups", None) or filter(None, [getattr(ref, "_fsdp_param_group", None)])
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                unsharded = getattr(parameter, "_unsharded_param", None)
                if unsharded is not None:
                    found[id(unsharded)] = str(getattr(parameter, "_param_fqn", None) or "?")
    return found


def _reach(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return int((last + 1) * tensor.element_size())


class _Places:
    """Bytes at these (stride, size), from ``first`` on, to numpy; nobody reads them."""

    def __init__(self, first: int, axes: Sequence[tuple[int, int]]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (4096 + first, False),
            "shape": tuple(size for _, size in axes),
            "strides": tuple(stride for stride, _ in axes),
            "typestr": "|u1",
        }


class _Bytes:
    """A tensor's memory to numpy, as opaque items: numpy knows no bfloat16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(s * item for s in tensor.stride()),
            "typestr": f"|V{item}",
        }


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        work: Any = _OVERLAP_WORK
        return bool(np.shares_memory(np.asarray(_Bytes(a)), np.asarray(_Bytes(b)), max_work=work))
    except np.exceptions.TooHardError:
        return True
