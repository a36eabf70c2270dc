"""Partial sources: gather K contributions, reduce once in one order, write the result everywhere.

The arithmetic is ``etha.plan.simulate``'s own ``combine`` and ``finish``, tile by tile: every operation
is exactly rounded element by element, so the cutting does not show. The one exception, powers other
than 1 and 2 of a norm, is not cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from etha.memory.views import View
from etha.plan.program import Slot
from etha.plan.simulate import combine, finish
from etha.transport import kernels
from etha.transport.boxes import Ints
from etha.transport.kernels import Buffer, Workspace
from etha.transport.segments import Op
from etha.transport.staging import dense_view
from etha.transport.tiles import BOUNCE_BYTES, Tile

#: Bytes of the accumulator of one part: contributions and result stay in L2 with it.
PART = 256 << 10

#: Bounds of a part of a slot: (first, last) per dim.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One tile between a worker's view and the dense scratch; ``offset`` in the view, ``at`` in the scratch."""

    tile: Tile
    view: View
    offset: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """One part of a slot: ``contributions`` by index, ascending, then every target's ``results``."""

    slot: Slot
    source: torch.dtype
    wire: torch.dtype
    numel: int
    contributions: tuple[tuple[Step, ...], ...]
    results: tuple[Step, ...]
    nbytes: int
    scratch: int = field(init=False)

    def __post_init__(self) -> None:
        widths = self.source.itemsize + 3 * self.slot.accumulate.itemsize + self.wire.itemsize
        object.__setattr__(self, "scratch", self.numel * widths + 2 * BOUNCE_BYTES)

    def run(self, work: Workspace) -> None:
        """Reduce and write; a ReachError leaves the targets half written."""
        buffer = Buffer(self.numel * self.source.itemsize)
        part = dense_view(buffer.typed(self.source))
        with torch.no_grad():
            total: torch.Tensor | None = None
            for steps in self.contributions:
                _run([Op(s.tile, s.view, part, s.offset, s.at) for s in steps], work)
                assert part.flat is not None
                term = part.flat.to(self.slot.accumulate, copy=True)
                if self.slot.op == "norm":
                    term = term**self.slot.p
                total = term if total is None else combine(total, term, self.slot)
            assert total is not None, "a slot without contributions"
            done = dense_view(finish(total, self.slot).to(self.wire))
        _run([Op(s.tile, done, s.view, s.at, s.offset) for s in self.results], work)


def _run(ops: Sequence[Op], work: Workspace) -> None:
    """Any mix of paths and processes, each kind in one go."""
    kinds: dict[tuple[int, int, int], list[Op]] = {}
    for op in ops:
        kinds.setdefault((op.tile.path, id(op.source.process), id(op.target.process)), []).append(op)
    for group in kinds.values():
        kernels.run(group, work)


def parts(slot: Slot, limit: int) -> Iterator[Bounds]:
    """A slot's bounds cut into parts of at most ``limit`` elements, in order; one part where cutting would show."""
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
    for outer in np.ndindex(*shape[:d]):
        for first in range(0, shape[d], step):
            head = tuple((i, i + 1) for i in outer)
            yield (*head, (first, min(first + step, shape[d])), *((0, n) for n in shape[d + 1 :]))


def clip(dims: Sequence[Ints], bounds: Bounds, end: int) -> tuple[Ints, ...] | None:
    """The runs that lie within ``bounds`` of the slot's end (0: source, 1: target), counted from there."""
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
