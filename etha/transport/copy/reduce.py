"""Partial sources: gather K contributions, reduce once in one order, write the result everywhere.

The arithmetic is ``etha.plan.proof.simulate``'s own ``combine`` and ``finish``, tile by tile: every operation
is exactly rounded element by element, so the cutting does not show. The one exception, powers other
than 1 and 2 of a norm, is not cut. On a device the same operations run over larger parts (device_reduce.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from etha.memory.views import View
from etha.plan.planner.rank_plan import Slot
from etha.plan.proof.simulate import combine, finish
from etha.transport.copy import cpu
from etha.transport.copy.cpu import Buffer, Workspace
from etha.transport.copy.device_reduce import Compiled, prepare_on_device, room, run_on_device, scratch_nbytes
from etha.transport.copy.layout import scratch
from etha.transport.copy.staging import dense_view
from etha.transport.geometry import iovec
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import BOUNCE_BYTES, Tile

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier

#: Bytes of the accumulator of one part: contributions and result stay in L2 with it.
PART = 256 << 10


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
    #: Of a device: what was compiled over each copier's scratch memory.
    launches: dict[Copier, Compiled] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        widths = self.source.itemsize + 3 * self.slot.accumulate.itemsize + self.wire.itemsize
        nbytes = scratch_nbytes(self) if self.device else self.numel * widths + 2 * BOUNCE_BYTES
        object.__setattr__(self, "scratch", nbytes)

    @property
    def device(self) -> bool:
        """Whether anything of it is on a device."""
        return any(step.tile.ends.device for step in itertools.chain(*self.contributions, self.results))

    def run(self, work: Workspace) -> None:
        """Reduce and write; a ReachError leaves the targets half written."""
        if self.device:
            device, work.wrote = work.device, True
            run_on_device(self, device)
            return
        buffer = Buffer(self.numel * self.source.itemsize)
        part = dense_view(buffer.typed(self.source))
        with torch.no_grad():
            total: torch.Tensor | None = None
            for steps in self.contributions:
                cpu.run_mixed([Op(s.tile, s.view, part, s.offset, s.at) for s in steps], work)
                assert part.flat is not None
                total = self.add(total, part.flat)
            done = dense_view(self.value(total))
        cpu.run_mixed([Op(s.tile, done, s.view, s.at, s.offset) for s in self.results], work)

    def prove(self) -> None:
        """As of ``Work``."""
        part = scratch((self.numel,), self.source)
        for steps in self.contributions:
            for group in iovec.kinds(Op(s.tile, s.view, part, s.offset, s.at) for s in steps):
                iovec.prove(group)

    def add(self, total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        """One more contribution, at the source's dtype."""
        term = part.to(self.slot.accumulate, copy=True)
        if self.slot.op == "norm":
            term = term**self.slot.p
        return term if total is None else combine(total, term, self.slot)

    def value(self, total: torch.Tensor | None) -> torch.Tensor:
        """What all contributions come to, at the wire's dtype."""
        assert total is not None, "a slot without contributions"
        return finish(total, self.slot).to(self.wire)

    @property
    def room(self) -> int:
        """As of ``Work``."""
        return room(self) if self.device else 0

    def prepare(self, copier: Copier) -> None:
        """As of ``Work``."""
        prepare_on_device(self, copier)

    def release(self) -> None:
        """As of ``Work``."""
        while self.launches:
            self.launches.popitem()[1].release()
