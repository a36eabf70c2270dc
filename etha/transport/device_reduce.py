"""A part of a reduction on a device: contributions gathered by one launch, combined by torch, scattered by another.

The arithmetic is ``Reduced``'s, one contribution after the other, on the copier's stream; its terms and totals are
torch's memory, what is gathered and what is scattered lies in the copier's scratch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from etha.transport.device_memory import dense_on
from etha.transport.segments import Op

if TYPE_CHECKING:
    from etha.transport.device import Copier, Launch
    from etha.transport.reduce import Reduced

#: Bytes of the accumulator of one part: an operation costs some microseconds however small it is.
DEVICE_PART = 32 << 20
#: Most bytes of contributions that are gathered at once.
DEVICE_GATHER = 256 << 20
_ALIGN = 256


class Compiled(NamedTuple):
    """The launches of one ``Reduced`` over one copier's scratch: waves of contributions, then the results."""

    waves: tuple[Launch, ...]
    results: Launch

    def release(self) -> None:
        """Give their tables back."""
        for launch in (*self.waves, self.results):
            launch.release()


def part_numel(count: int, source: torch.dtype, accumulate: torch.dtype) -> int:
    """Elements of a part with ``count`` contributions, all of which are gathered at once if they can be."""
    return max(1, min(DEVICE_PART // accumulate.itemsize, DEVICE_GATHER // (count * source.itemsize)))


def scratch_nbytes(reduced: Reduced) -> int:
    """Device memory that a run takes: what is gathered, the result, and torch's terms and totals."""
    given, result, _ = _places(reduced)
    return given + result + 3 * reduced.numel * reduced.slot.accumulate.itemsize


def run_on_device(reduced: Reduced, copier: Copier) -> None:
    """As of ``Reduced.run``; nothing touches the targets any more once this has returned or raised."""
    given, result, wave = _places(reduced)
    memory = copier.scratch(given + result)
    compiled = reduced.launches.get(memory)
    if compiled is None:
        # Scratch memory that has grown is other memory, and what was compiled over the former is of no use.
        reduced.release()
        compiled = reduced.launches[memory] = _compile(reduced, copier)
    driver, uuid = copier.driver, copier.uuid
    step, count = _row(reduced), len(reduced.contributions)
    total: torch.Tensor | None = None

    def add(number: int) -> None:
        nonlocal total
        with torch.no_grad():
            for place in range(min(wave, count - number * wave)):
                at = memory.address + place * step
                part = driver.tensor(uuid, at, reduced.numel * reduced.source.itemsize).view(reduced.source)
                total = reduced.add(total, part)

    def finish() -> None:
        nonlocal total
        with torch.no_grad():
            done = driver.tensor(uuid, memory.address + given, reduced.numel * reduced.wire.itemsize)
            done.view(reduced.wire).copy_(reduced.value(total))
            total = None

    try:
        for number, launch in enumerate(compiled.waves):
            _queue(copier, launch)
            copier.queue(partial(add, number))
        copier.queue(finish)
        _queue(copier, compiled.results)
    finally:
        copier.finish()


def _queue(copier: Copier, launch: Launch) -> None:
    if launch.bounced:  # plain host memory: the CPU has to wait in between
        copier.run(launch)
    else:
        copier.enqueue(launch, copier.stream)


def _row(reduced: Reduced) -> int:
    return -(-reduced.numel * reduced.source.itemsize // _ALIGN) * _ALIGN


def _places(reduced: Reduced) -> tuple[int, int, int]:
    """(bytes that are gathered at once, bytes of the result, contributions of one wave)."""
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
    return Compiled(tuple(waves), copier.compile([Op(s.tile, done, s.view, s.at, s.offset) for s in reduced.results]))
