"""Bounds, (first, last) in each dim: cut blocks and slots into bounded parts, and clip runs to one part. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product  # not np.ndindex, which takes at most 32 dims
from math import prod

import numpy as np

from etha.plan.planner.rank_plan import Slot
from etha.transport.geometry.boxes import Ints

#: Bounds of a part of a block or a slot: (first, last) in each dim.
Bounds = tuple[tuple[int, int], ...]


def blocks(shape: Sequence[int], limit: int) -> Iterator[Bounds]:
    """Cut a dense block into parts of at most ``limit`` elements. Each part is a contiguous range of the block in
    C-order."""
    if 0 in shape:
        return
    inner = len(shape)
    while inner > 0 and prod(shape[inner - 1 :]) <= limit:
        inner -= 1
    if inner == 0:
        yield tuple((0, n) for n in shape)
        return
    d = inner - 1
    most = max(1, limit // prod(shape[d + 1 :]))
    count = -(-shape[d] // most)
    step = -(-shape[d] // count)
    for outer in product(*map(range, shape[:d])):
        head = tuple((i, i + 1) for i in outer)
        for first in range(0, shape[d], step):
            yield (*head, (first, min(first + step, shape[d])), *((0, n) for n in shape[d + 1 :]))


def parts(slot: Slot, limit: int) -> Iterator[Bounds]:
    """Cut a slot into parts of at most ``limit`` elements, in order. A norm with p other than 1 or 2 stays whole,
    because cutting it could change the result."""
    shape = slot.shape
    if 0 in shape:
        return
    if slot.op == "norm" and slot.p not in (1.0, 2.0):
        limit = prod(shape)
    inner = len(shape)
    while inner > 0 and prod(shape[inner - 1 :]) <= limit:
        inner -= 1
    if inner == 0:
        yield tuple((0, n) for n in shape)
        return
    d = inner - 1
    step = max(1, limit // prod(shape[d + 1 :]))
    for outer in product(*map(range, shape[:d])):
        for first in range(0, shape[d], step):
            head = tuple((i, i + 1) for i in outer)
            yield (*head, (first, min(first + step, shape[d])), *((0, n) for n in shape[d + 1 :]))


def clip(dims: Sequence[Ints], bounds: Bounds, end: int) -> tuple[Ints, ...] | None:
    """The runs that lie within ``bounds`` at the slot's end (0: source, 1: target), with that end's offsets relative to
    it."""
    clipped = []
    for runs, (first, last) in zip(dims, bounds, strict=True):
        skip = np.maximum(0, first - runs[:, end])
        stop = np.minimum(runs[:, 2], last - runs[:, end])
        kept = stop > skip
        if not kept.any():
            return None
        out = runs[kept].copy()
        out[:, 0] += skip[kept]
        out[:, 1] += skip[kept]
        out[:, 2] = (stop - skip)[kept]
        out[:, end] -= first
        clipped.append(out)
    return tuple(clipped)
