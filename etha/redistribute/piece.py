"""A region of a local tensor, copied to or from a dense buffer on any device.

Few boxes are copied one by one. Many are gathered and scattered by index, in one call. Values travel as bits, because
nothing here does arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch

from etha.plan import Region

#: Up to this number of boxes, copying each is cheaper than an index.
FEW = 16
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: (start in the dense piece, start in the local tensor, length) along one dim.
Run = tuple[int, int, int]


#: Dtypes that have every kernel themselves. A copy between tensors of one dtype keeps all bits.
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype of the same width that has every kernel: integers, if its own has not."""
    if tensor.dtype in _PLAIN:
        return tensor
    return tensor.view(_BITS[tensor.element_size()]) if tensor.element_size() in _BITS else tensor


class LocalRegion:
    """One region at one end: offsets in the local tensor of the source (``end`` 0) or of the target (``end`` 1)."""

    def __init__(self, region: Region, end: int) -> None:
        self.shape = region.shape
        self.numel = prod(self.shape)
        self._runs: list[list[Run]] = []
        for runs in region.dims:
            starts, lengths = runs[:, end].tolist(), runs[:, 2].tolist()
            self._runs.append(list(zip(itertools.accumulate(lengths, initial=0), starts, lengths, strict=False)))
        #: Dims with several runs, the one with most runs last, because that one is indexed if there are many boxes.
        self._many = sorted((d for d, r in enumerate(self._runs) if len(r) > 1), key=lambda d: len(self._runs[d]))
        #: Whether copying box by box is cheaper than an index.
        self.few = prod(len(r) for r in self._runs) <= FEW

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether it is all of a local tensor of this shape."""
        return self.shape == tuple(shape)

    def start_in(self, strides: Sequence[int]) -> int | None:
        """Its first element in the memory of a local tensor with these strides, if its elements follow each other there
        in the order in which they lie in the dense piece; None if they do not."""
        if self._many or not self.numel:
            return None
        start, step = 0, 1
        for d in reversed(range(len(self.shape))):
            start += self._runs[d][0][1] * strides[d]
            if self.shape[d] != 1 and strides[d] != step:
                return None
            step *= self.shape[d]
        return start

    def boxes(self, tensor: torch.Tensor, dense: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of its boxes in the local tensor, each with that of the same elements in the dense piece."""
        for part, view in self._boxes(dense, tensor, self._many):
            yield view, part

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region of ``tensor``, in the shape of the dense piece: a view if it is one box, otherwise a copy."""
        if not self._many:
            return self._narrow(tensor)
        dense = tensor.new_empty(self.shape)
        self.pack(tensor, dense)
        return dense

    def copy_to(self, tensor: torch.Tensor, other: LocalRegion, target: torch.Tensor) -> None:
        """Copy the region of ``tensor`` to ``other``, the other end of it, in ``target``; both as bits."""
        if not self.numel:
            return
        if not self._many:
            other._narrow(target).copy_(self._narrow(tensor))
            return
        if self.few:
            for here, there in zip(self._views(tensor), other._views(target), strict=True):
                there.copy_(here)
            return
        other.unpack(target, self.dense(tensor))

    def pack(self, tensor: torch.Tensor, dense: torch.Tensor) -> None:
        """Copy the region of ``tensor`` into ``dense``, both as bits; ``dense`` has the piece's shape."""
        if not self.numel:
            return
        if self.few:
            for there, here in self._boxes(dense, tensor, self._many):
                there.copy_(here)
            return
        found = self._narrow(tensor)
        for d in self._many:
            found = found.index_select(d, self._index[d].to(tensor.device))
        dense.copy_(found)

    def unpack(self, tensor: torch.Tensor, dense: torch.Tensor) -> None:
        """Copy ``dense`` into the region of ``tensor``."""
        if not self.numel:
            return
        if self.few:
            for here, there in self._boxes(dense, tensor, self._many):
                there.copy_(here)
            return
        *outer, inner = self._many
        index = self._index[inner].to(tensor.device)
        for here, there in self._boxes(dense, tensor, outer):
            there.index_copy_(inner, index, here)

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        for d, runs in enumerate(self._runs):
            if len(runs) == 1 and runs[0][2] != tensor.shape[d]:
                tensor = tensor.narrow(d, runs[0][1], runs[0][2])
        return tensor

    def _views(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views of the boxes in the local tensor. Both ends of a region have equal boxes, in one order."""
        tensor = self._narrow(tensor)
        for box in itertools.product(*(self._runs[d] for d in self._many)):
            view = tensor
            for d, (_, start, length) in zip(self._many, box, strict=True):
                view = view.narrow(d, start, length)
            yield view

    def _boxes(
        self, dense: torch.Tensor, tensor: torch.Tensor, dims: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of both, one pair for each combination of runs of ``dims``."""
        tensor = self._narrow(tensor)
        for box in itertools.product(*(self._runs[d] for d in dims)):
            here, there = dense, tensor
            for d, (at, start, length) in zip(dims, box, strict=True):
                here, there = here.narrow(d, at, length), there.narrow(d, start, length)
            yield here, there

    @cached_property
    def _index(self) -> dict[int, torch.Tensor]:
        return {
            d: torch.from_numpy(np.concatenate([np.arange(s, s + n, dtype=np.int64) for _, s, n in self._runs[d]]))
            for d in self._many
        }
