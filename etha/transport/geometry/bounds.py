"""Blocks: a dense product of sizes cut into ranges of its C-order. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from etha.transport.copy.reduce import Bounds


def blocks(shape: Sequence[int], limit: int) -> Iterator[Bounds]:
    """A dense block cut into parts of at most ``limit`` elements, each a range of the whole in C-order, in order."""
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
    for outer in np.ndindex(*shape[:d]):
        head = tuple((i, i + 1) for i in outer)
        for first in range(0, shape[d], step):
            yield (*head, (first, min(first + step, shape[d])), *((0, n) for n in shape[d + 1 :]))
