"""Memory of our own between the caller's tensors and a backend of torch, and what a backend cannot reduce itself.

A backend whose call was given up may still write. It writes into these buffers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from etha.groups.calls import FLOAT8

_OP: Any = ReduceOp.RedOpType
#: What Gloo cannot reduce is reduced as this; half precision also because it is rounded once then.
_WIDER = {
    **dict.fromkeys((torch.float16, torch.bfloat16, *FLOAT8), torch.float32),
    torch.int16: torch.int32,
}
#: How bytes that are 0 or 1 are reduced as bool.
_OF_BOOL = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "BAND": "MIN", "BXOR": "BXOR"}


def pack(tensors: Sequence[Tensor], *, owned: bool = False) -> Tensor:
    """The bytes of tensors, one after the other, in memory of our own. ``owned``: the tensors' memory is that."""
    flat = [
        tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors
    ]
    if owned and len(flat) == 1 and flat[0].data_ptr() == tensors[0].data_ptr():
        return flat[0]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write bytes that ``pack`` made into tensors of the same sizes."""
    start = 0
    for tensor in tensors:
        length = tensor.numel() * tensor.element_size()
        if length and packed.data_ptr() + start != tensor.data_ptr():
            tensor.copy_(packed[start : start + length].view(tensor.dtype).view(tensor.shape))
        start += length


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StagedReduction:
    """One reduction of a call by what Gloo has: sums, products, extremes and bits of wide types."""

    def __init__(self, op: Any, dtype: torch.dtype, factor: Any, size: int, *, owned: bool = False) -> None:
        self._owned = owned
        self._dtype, self._size, self._factor = dtype, size, factor
        self._name: str = op.name
        self.dtype = _WIDER.get(dtype, dtype)
        name = {"AVG": "SUM", "PREMUL_SUM": "SUM"}.get(self._name, self._name)
        if dtype is torch.bool:
            self.dtype = torch.int32 if self._name == "AVG" else torch.uint8
            name = name if self._name == "AVG" else _OF_BOOL[name]
        self.op: Any = getattr(_OP, name)

    def stage(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of tensors in one buffer of the type that is reduced."""
        pieces = [tensor.detach().reshape(-1).to(self.dtype) for tensor in tensors]
        flat = pieces[0] if self._owned and len(pieces) == 1 else torch.cat(pieces)
        if self._name == "PREMUL_SUM":
            flat.mul_(self._factor)
        return flat

    def fold(self, pieces: Sequence[Tensor]) -> Tensor:
        """Reduce pieces in their order, into the first."""
        first, *rest = pieces
        steps: dict[str, Any] = {
            "SUM": first.add_,
            "PRODUCT": first.mul_,
            "MIN": lambda piece: torch.minimum(first, piece, out=first),
            "MAX": lambda piece: torch.maximum(first, piece, out=first),
            "BAND": first.bitwise_and_,
            "BOR": first.bitwise_or_,
            "BXOR": first.bitwise_xor_,
        }
        for piece in rest:
            steps[self.op.name](piece)
        return first

    def write(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write reduced elements into tensors of the caller's type."""
        if self._name == "AVG":
            flat.div_(self._size, rounding_mode=None if flat.is_floating_point() else "trunc")
        start = 0
        for tensor in tensors:
            piece = flat[start : start + tensor.numel()].view(tensor.shape)
            if piece.data_ptr() != tensor.data_ptr():
                tensor.copy_(piece != 0 if self._dtype is torch.bool else piece)
            start += tensor.numel()
