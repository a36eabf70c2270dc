"""Staging that trainer and child both map, for a call whose tensors the child may not reach itself.

The kernel may forbid the child the trainer's memory (ptrace_scope 2 or 3, a seccomp filter). Then each call has a memfd
with its tensors, one after the other.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from etha.groups.calls import GroupCall
from etha.groups.schedule import Kind

#: Tensors begin at multiples of this.
_ALIGN = 64


def changes_outputs(call: GroupCall, rank: int) -> bool:
    """Whether a member's outputs change: those of a broadcast's root and of a reduction's other members do not."""
    if call.kind is Kind.REDUCE:
        return call.root == rank
    return call.kind is not Kind.BROADCAST or call.root != rank


def make(tensors: Sequence[Tensor]) -> tuple[int, list[int], list[Tensor]]:
    """A new memfd with room for tensors; their offsets, and views of it like them."""
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    fd = os.memfd_create("etha-group-call", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(total, _ALIGN))
    shapes = [(offset, tensor.dtype, tuple(tensor.shape)) for offset, tensor in zip(offsets, tensors, strict=True)]
    return fd, offsets, views(fd, shapes)


def views(fd: int, shapes: Sequence[tuple[int, torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Tensors in a memfd by offset, dtype and shape. They keep the mapping."""
    room = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
    found = []
    for offset, dtype, shape in shapes:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        found.append(room[offset : offset + nbytes].view(dtype).view(shape))
    return found
