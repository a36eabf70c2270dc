"""Samples of tensors in standing memory: whether anybody has written to them since a version came.

A sample is a few KiB at some place of a tensor. What changes all tensors is found for certain, and so is what changes
one of a few. What changes little of much may be missed.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import xxhash

from etha.memory.handles import TensorHandle
from etha.memory.mapping import DTYPES, StandingSegment

#: How many samples are taken, half of tensors and half of bytes chosen at random, and the most bytes of one: together
#: half a MiB, which an agent reads in less than a millisecond.
SAMPLES, SAMPLE_BYTES = 128, 4096


class Samples:
    """Samples of the tensors of one buffer, taken when it is made. ``segments``: the memory in which they lie."""

    def __init__(self, tensors: Sequence[TensorHandle], segments: Iterable[StandingSegment]) -> None:
        self._tensors = tensors
        self._segments = {segment.id: segment for segment in segments}
        places = list(self._places())
        self._taken = [(*place, self._sum(*place)) for place in places]

    def changed(self) -> int | None:
        """A tensor that has changed since, by its place among ``tensors``; None if no sample has."""
        return next((tensor for tensor, *place, taken in self._taken if self._sum(tensor, *place) != taken), None)

    def _sum(self, tensor: int, start: int, nbytes: int) -> int:
        segment = self._segments.get(self._tensors[tensor].segment or "")
        pages: Any = segment.pages if segment is not None else None
        return 0 if pages is None else xxhash.xxh3_64_intdigest(memoryview(pages)[start : start + nbytes])

    def _places(self) -> Iterator[tuple[int, int, int]]:
        sizes = [prod(handle.shape) * _itemsize(handle) for handle in self._tensors]
        some = [tensor for tensor, nbytes in enumerate(sizes) if nbytes]
        if not some:
            return
        chance, until = random.Random(), list(accumulate(sizes))
        chosen = chance.sample(some, min(len(some), SAMPLES // 2))
        chosen += [bisect_right(until, chance.randrange(until[-1])) for _ in range(SAMPLES - len(chosen))]
        for tensor in chosen:
            yield tensor, *_place(self._tensors[tensor], chance)


def _itemsize(handle: TensorHandle) -> int:
    dtype = DTYPES.get(handle.dtype)
    return 0 if dtype is None else dtype.itemsize


def _place(handle: TensorHandle, chance: random.Random) -> tuple[int, int]:
    """Start (bytes within the segment) and length of a sample, in which there are elements of the tensor alone."""
    dims = list(zip(handle.shape, handle.strides, strict=True))
    dense = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == dense):
        dense *= dims.pop()[0]
    itemsize = _itemsize(handle)
    count = min(dense, SAMPLE_BYTES // itemsize)
    start = sum(chance.randrange(n) * stride for n, stride in dims) + chance.randrange(dense - count + 1)
    return handle.offset + start * itemsize, count * itemsize
