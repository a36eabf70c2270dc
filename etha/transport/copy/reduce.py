"""Partial sources: gather K contributions, reduce them once in a fixed order, and write the result to every target.

The arithmetic is ``combine`` and ``finish`` of ``etha.plan.proof.simulate``, tile by tile. Every operation rounds
exactly, element by element, so that cutting does not change the result. Norms with p other than 1 and 2 are the
exception, and are not cut.

On a device the same operations run over larger parts, on the copier's stream: one launch gathers contributions, torch
combines them, and another launch scatters the result. Terms and totals are torch's memory; gathered contributions and
the result to scatter lie in the copier's scratch memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from etha.memory.views import View
from etha.plan.planner.rank_plan import Slot
from etha.plan.proof.simulate import combine, finish
from etha.transport.copy import cpu
from etha.transport.copy.cpu import Buffer, Workspace
from etha.transport.copy.device_memory import DeviceMemory, dense_on
from etha.transport.copy.layout import scratch
from etha.transport.copy.staging import dense_view
from etha.transport.geometry import iovec
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import BOUNCE_BYTES, Tile

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier, Launch

#: Bytes of the accumulator of one part. Contributions and result stay in L2 with it.
PART = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TileStep:
    """One tile between a worker's view and the dense scratch buffer: ``offset`` in the view, ``at`` in the scratch."""

    tile: Tile
    view: View
    offset: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """One part of a slot: ``contributions`` by ascending index, then the ``results`` of every target."""

    slot: Slot
    source: torch.dtype
    wire: torch.dtype
    numel: int
    contributions: tuple[tuple[TileStep, ...], ...]
    results: tuple[TileStep, ...]
    nbytes: int
    scratch: int = field(init=False)
    #: On a device: what was compiled over each copier's scratch memory.
    launches: dict[Copier, Compiled] = field(init=False, default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        widths = self.source.itemsize + 3 * self.slot.accumulate.itemsize + self.wire.itemsize
        nbytes = scratch_nbytes(self) if self.device else self.numel * widths + 2 * BOUNCE_BYTES
        object.__setattr__(self, "scratch", nbytes)

    @property
    def device(self) -> bool:
        """Whether any part of it is on a device."""
        return any(step.tile.ends.device for step in itertools.chain(*self.contributions, self.results))

    def run(self, work: Workspace) -> None:
        """Reduce and write. A ReachError leaves the targets half written."""
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
        part = scratch((self.numel,), self.source)
        for steps in self.contributions:
            for group in iovec.kinds(Op(s.tile, s.view, part, s.offset, s.at) for s in steps):
                iovec.prove(group)

    def add(self, total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        """Add one contribution, given at the source's dtype."""
        term = part.to(self.slot.accumulate, copy=True)
        if self.slot.op == "norm":
            term = term**self.slot.p
        return term if total is None else combine(total, term, self.slot)

    def value(self, total: torch.Tensor | None) -> torch.Tensor:
        """The result of all contributions, at the wire dtype."""
        assert total is not None, "a slot without contributions"
        return finish(total, self.slot).to(self.wire)

    @property
    def room(self) -> int:
        return room(self) if self.device else 0

    def prepare(self, copier: Copier) -> None:
        prepare_on_device(self, copier)

    def release(self) -> None:
        while self.launches:
            self.launches.popitem()[1].release()


#: Bytes of the accumulator of one part. An operation costs some microseconds however small it is.
DEVICE_PART = 32 << 20
#: Most bytes of contributions that are gathered at once.
DEVICE_GATHER = 256 << 20
_ALIGN = 256


class Compiled(NamedTuple):
    """The launches of one ``Reduced`` over one copier's scratch memory: waves of contributions, then the results."""

    memory: DeviceMemory
    waves: tuple[Launch, ...]
    results: Launch

    def release(self) -> None:
        for launch in (*self.waves, self.results):
            launch.release()


def part_numel(count: int, source: torch.dtype, accumulate: torch.dtype) -> int:
    """Elements of a part with ``count`` contributions, so that all are gathered at once if possible."""
    return max(1, min(DEVICE_PART // accumulate.itemsize, DEVICE_GATHER // (count * source.itemsize)))


def scratch_nbytes(reduced: Reduced) -> int:
    """Bytes of device memory that a run takes: gathered contributions, the result, and torch's terms and totals."""
    given, result, _ = _places(reduced)
    return given + result + 3 * reduced.numel * reduced.slot.accumulate.itemsize


def room(reduced: Reduced) -> int:
    """Bytes of that which are a copier's scratch memory."""
    given, result, _ = _places(reduced)
    return given + result


def prepare_on_device(reduced: Reduced, copier: Copier) -> None:
    """Compile it, load its kernels, and do its arithmetic once with arbitrary data, so that torch has allocated its
    memory."""
    from etha.transport.copy.device_warmup import kinds, rehearse  # only an agent with a device loads kernels

    compiled = _compiled(reduced, copier)
    launches = (*compiled.waves, compiled.results)
    rehearse(copier, kinds(launches))
    if any(launch.bounced for launch in launches):
        copier.provide_bounce()
    slot, count = reduced.slot, len(reduced.contributions)
    kind = ("reduction", reduced.numel, count, reduced.source, reduced.wire, slot.accumulate, slot.op, slot.p)
    if kind in copier.rehearsed:
        return
    arithmetic = _Arithmetic(reduced, copier, compiled.memory)
    try:
        for number in range(len(compiled.waves)):
            copier.queue(partial(arithmetic.add, number))
        copier.queue(arithmetic.finish)
    finally:
        copier.finish()
    copier.rehearsed.add(kind)


def run_on_device(reduced: Reduced, copier: Copier) -> None:
    """Run it as ``Reduced.run`` does. Once this has returned or raised, nothing touches the targets any more."""
    compiled = _compiled(reduced, copier)
    arithmetic = _Arithmetic(reduced, copier, compiled.memory)
    try:
        for number, launch in enumerate(compiled.waves):
            _queue(copier, launch)
            copier.queue(partial(arithmetic.add, number))
        copier.queue(arithmetic.finish)
        _queue(copier, compiled.results)
    finally:
        copier.finish()


class _Arithmetic:
    """The arithmetic on gathered waves, up to the result behind them."""

    def __init__(self, reduced: Reduced, copier: Copier, memory: DeviceMemory) -> None:
        self._reduced, self._copier, self._memory = reduced, copier, memory
        self._total: torch.Tensor | None = None

    def add(self, number: int) -> None:
        reduced, count = self._reduced, len(self._reduced.contributions)
        wave = _places(reduced)[2]
        with torch.no_grad():
            for place in range(min(wave, count - number * wave)):
                part = self._tensor(place * _row(reduced), reduced.numel * reduced.source.itemsize)
                self._total = reduced.add(self._total, part.view(reduced.source))

    def finish(self) -> None:
        reduced, given = self._reduced, _places(self._reduced)[0]
        with torch.no_grad():
            done = self._tensor(given, reduced.numel * reduced.wire.itemsize)
            done.view(reduced.wire).copy_(reduced.value(self._total))
            self._total = None

    def _tensor(self, place: int, nbytes: int) -> torch.Tensor:
        copier = self._copier
        return copier.driver.tensor(copier.uuid, self._memory.address + place, nbytes)


def _compiled(reduced: Reduced, copier: Copier) -> Compiled:
    memory = copier.scratch(room(reduced))
    found = reduced.launches.get(copier)
    if found is None or found.memory is not memory:
        if found is not None:
            # Scratch memory that has grown is another allocation, so what was compiled over the former one is useless.
            del reduced.launches[copier]
            found.release()
        found = reduced.launches[copier] = _compile(reduced, copier)
    return found


def _queue(copier: Copier, launch: Launch) -> None:
    if launch.bounced:  # plain host memory: the CPU has to wait in between
        copier.run(launch)
    else:
        copier.enqueue(launch, copier.stream)


def _row(reduced: Reduced) -> int:
    return -(-reduced.numel * reduced.source.itemsize // _ALIGN) * _ALIGN


def _places(reduced: Reduced) -> tuple[int, int, int]:
    """(bytes gathered at once, bytes of the result, contributions of one wave)."""
    row, count = _row(reduced), len(reduced.contributions)
    wave = max(1, min(count, DEVICE_GATHER // row))
    return wave * row, -(-reduced.numel * reduced.wire.itemsize // _ALIGN) * _ALIGN, wave


def _compile(reduced: Reduced, copier: Copier) -> Compiled:
    given, result, wave = _places(reduced)
    memory, row = copier.scratch(given + result), _row(reduced)
    waves = []
    for first in range(0, len(reduced.contributions), wave):
        ops = []
        for place, steps in enumerate(reduced.contributions[first : first + wave]):
            part = dense_on(memory, (reduced.numel,), reduced.source, place * row)
            ops += [Op(s.tile, s.view, part, s.offset, s.at) for s in steps]
        waves.append(copier.compile(ops))
    done = dense_on(memory, (reduced.numel,), reduced.wire, given)
    return Compiled(
        memory, tuple(waves), copier.compile([Op(s.tile, done, s.view, s.at, s.offset) for s in reduced.results])
    )
