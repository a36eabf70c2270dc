"""Choose how a box is copied, by estimated cost, and cut the box into tiles for that path.

    MAPPED   mapped -> mapped     run by run in compiled loops (mapped.py); casts and very short runs by torch
    READ     private -> mapped    process_vm_readv straight into place
    WRITE    mapped -> private    process_vm_writev straight from place
    BOUNCE   everything else      through a buffer that stays in cache: read, pick and cast, write
    DEVICE   a device at an end   by its kernels and copy engines (device.py), whatever is at the other end

An iovec segment in another process costs a look-up and the pinning of its pages; one in this process costs almost
nothing. If the gaps of a tile are its neighbours' payload (``joint``: a row that is cut up among targets), a piece's
segments are sorted by remote address, so that they join. Very short runs are read as one span with their gaps, and
picked from the buffer. The costs were measured for one thread of a 2-core machine; only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from etha.memory.casts import Cast, cast_of
from etha.transport.geometry import boxes
from etha.transport.geometry.boxes import Axes, Ints, Placed

#: Largest tile that is copied in place: large enough to hide the cost of a call, small enough to share among threads.
DIRECT = 2 << 20
#: The same limit on a device, which copies that much in about 0.2 ms.
DEVICE = 256 << 20
#: The same limit if plain host memory is at the other end: the CPU needs as long for it as for one of its own pieces.
DEVICE_BOUNCED = 8 << 20
#: Size of a bounce buffer. Smaller ones stay in L2, but calls cost more than that saves; this size measured best.
BOUNCE_BYTES = 2 << 20
#: Most runs of one tile at either end. It keeps the tables small.
MAX_RUNS = 16384

# Nanoseconds per: segment in another process, segment in this one, sorting one segment among its neighbours, byte
# through a system call, byte picked from cache, tile handled by the interpreter.
_REMOTE, _LOCAL, _SORT, _CALL_BYTE, _PICK_BYTE, _TILE = 400.0, 40.0, 50.0, 0.14, 0.09, 15_000.0


Bytes = npt.NDArray[np.uint64]


class Path(IntEnum):
    """How a tile is copied."""

    MAPPED = 0
    READ = 1
    WRITE = 2
    BOUNCE = 3
    DEVICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The properties of the two tensors that decide the path: their dtypes, and whether each is private to a worker.

    ``joint``: this program copies (nearly) all of the private tensor, or of the source if both are private. ``device``:
    at least one is on a device. ``bounced``: and the other is where devices cannot reach it.
    """

    source: torch.dtype
    target: torch.dtype
    source_private: bool
    target_private: bool
    joint: bool = False
    device: bool = False
    bounced: bool = False

    @property
    def casts(self) -> bool:
        """Whether a copy changes the dtype."""
        return self.source is not self.target

    @property
    def cast(self) -> Cast | None:
        """How compiled code changes the dtype; None if it cannot."""
        return cast_of(self.source, self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedSteps:
    """A tile as runs of ``run`` bytes of the source, whose elements ``cast`` changes: how many along each axis, and how
    many bytes apart in the source and in the target; ``source_nbytes`` and ``target_nbytes`` from the first byte to the
    last of all."""

    cast: Cast
    run: int
    counts: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    source_nbytes: int
    target_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The shape of a copy that one step does. Each operation says where it begins.

    ``spanning``: the source is read as one span, gaps included, instead of run by run.
    """

    path: Path
    axes: Axes
    ends: Ends
    spanning: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements that the copy writes."""
        return boxes.numel(self.axes)

    @cached_property
    def nbytes(self) -> int:
        """Payload in bytes, at the narrower of the two dtypes."""
        return self.numel * min(self.ends.source.itemsize, self.ends.target.itemsize)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(a.steps for a in self.axes)

    @cached_property
    def source_strides(self) -> tuple[int, ...]:
        """Strides of the axes in the source, in elements."""
        return tuple(a.source for a in self.axes)

    @cached_property
    def target_strides(self) -> tuple[int, ...]:
        """Strides of the axes in the target, in elements."""
        return tuple(a.target for a in self.axes)

    @cached_property
    def copies(self) -> tuple[Bytes, Bytes, int]:
        """For READ and WRITE: runs common to both ends, (source offsets, target offsets, length) in bytes."""
        source, target, length = boxes.common_runs(self.axes)
        item = self.ends.source.itemsize
        return _bytes(source, item), _bytes(target, item), length * item

    @cached_property
    def cast_runs(self) -> tuple[Bytes, Bytes, int]:
        """For a copy that changes the dtype: runs common to both ends, (source offsets in bytes, target offsets in
        bytes, elements of a run)."""
        source, target, length = boxes.common_runs(self.axes)
        return _bytes(source, self.ends.source.itemsize), _bytes(target, self.ends.target.itemsize), length

    @cached_property
    def reads(self) -> tuple[Bytes, int]:
        """For BOUNCE from a private source: (offsets of the runs to read, their length) in bytes."""
        item = self.ends.source.itemsize
        if self.spanning:
            return np.zeros(1, np.uint64), boxes.span(self.axes, 1) * item
        offsets, length = boxes.runs(self.axes, 1, distinct=True)
        return _bytes(offsets, item), length * item

    @cached_property
    def writes(self) -> tuple[Bytes, int]:
        """For BOUNCE to a private target: (offsets of the runs to write, their length) in bytes, in packed order."""
        offsets, length = boxes.runs(_by_target(self.axes), 2)
        return _bytes(offsets, self.ends.target.itemsize), length * self.ends.target.itemsize

    @cached_property
    def read_nbytes(self) -> int:
        """Bytes of the bounce buffer that a read fills."""
        return len(self.reads[0]) * self.reads[1] if self.ends.source_private else 0

    @cached_property
    def read_strides(self) -> tuple[int, ...]:
        """Strides of the axes in the data that was read."""
        return self.source_strides if self.spanning else boxes.dense(self.axes, 1, distinct=True)

    @cached_property
    def packed_nbytes(self) -> int:
        """Bytes of the second buffer, from which a private target is written."""
        return self.numel * self.ends.target.itemsize if self.ends.target_private else 0

    @cached_property
    def packed_strides(self) -> tuple[int, ...]:
        """Strides of the axes in the second buffer, which is dense in the target's order."""
        order = sorted(range(len(self.axes)), key=lambda i: (-self.axes[i].target, -self.axes[i].source))
        strides, at = [0] * len(order), 1
        for i in reversed(order):
            strides[i] = at
            at *= self.axes[i].steps
        return tuple(strides)

    @cached_property
    def steps(self) -> MappedSteps | None:
        """For MAPPED: how the runs common to both ends follow each other. None for a cast that only torch has."""
        cast = self.ends.cast
        if self.path is not Path.MAPPED or cast is None:
            return None
        item, target_item = self.ends.source.itemsize, self.ends.target.itemsize
        axes, run = self.axes, item
        if axes and axes[-1].source == 1 and axes[-1].target == 1:
            run *= axes[-1].steps
            axes = axes[:-1]
        return MappedSteps(
            cast=cast,
            run=run,
            counts=tuple(a.steps for a in axes),
            source=tuple(a.source * item for a in axes),
            target=tuple(a.target * target_item for a in axes),
            source_nbytes=boxes.span(self.axes, 1) * item,
            target_nbytes=boxes.span(self.axes, 2) * target_item,
        )

    @cached_property
    def through(self) -> bool:
        """Whether the data that was read can be written unchanged: nothing to pick, reorder or cast."""
        private = self.ends.source_private and self.ends.target_private
        return private and not self.ends.casts and self.read_strides == self.packed_strides


def _by_target(axes: Axes) -> Axes:
    return tuple(sorted(axes, key=lambda a: (-a.target, -a.source)))


def _bytes(offsets: Ints, itemsize: int) -> Bytes:
    return (offsets * itemsize).astype(np.uint64)


def tiles(found: Sequence[Placed], ends: Ends) -> Iterator[tuple[Tile, Ints, Ints]]:
    """Cut each box for its cheapest path: (tile, source offsets, target offsets), offsets in elements."""
    for placed in found:
        path, spanning, box, limit = _choose(placed, ends)
        for axes, source, target in boxes.cut(box, limit, spanning=spanning):
            yield Tile(path=path, axes=axes, ends=ends, spanning=spanning), source, target


def _choose(placed: Placed, ends: Ends) -> tuple[Path, bool, Placed, int]:
    """(path, spanning, the box with its axes in a suitable order, elements per tile)."""
    by_source, by_target = (
        Placed(boxes.ordered(placed.axes, by), placed.source, placed.target) for by in ("source", "target")
    )
    if ends.device:
        most = DEVICE_BOUNCED if ends.bounced else DEVICE
        return Path.DEVICE, False, by_target, most // max(ends.source.itemsize, ends.target.itemsize)
    item = max(ends.source.itemsize, ends.target.itemsize)
    direct, bounce = DIRECT // item, BOUNCE_BYTES // item
    options: list[tuple[float, Path, bool, Placed, int]] = []
    if not ends.source_private and not ends.target_private:
        return Path.MAPPED, False, by_target, direct
    if not ends.casts and ends.source_private != ends.target_private:
        path = Path.READ if ends.source_private else Path.WRITE
        here, there = (2, 1) if ends.source_private else (1, 2)
        limit = max(1, min(direct, MAX_RUNS * min(boxes.run_shape(by_target.axes, end)[1] for end in (1, 2))))
        axes = _tile(by_target, limit, False)
        n = boxes.numel(axes)
        cost = _TILE + n * item * _CALL_BYTE
        local, remote = boxes.run_shape(axes, here)[0], boxes.run_shape(axes, there)[0]
        cost += _segments(remote, local, ends)
        options.append((cost / n, path, False, by_target, limit))
    if ends.source_private:
        for spanning in (False, True):
            axes = _tile(by_source, bounce, spanning)
            n, read = boxes.numel(axes), boxes.span(axes, 1) if spanning else boxes.numel(axes)
            if spanning and ends.joint:
                read = n  # neighbours share the span
            cost = 2 * _TILE + read * item * _CALL_BYTE
            cost += _REMOTE if spanning else _segments(boxes.run_shape(axes, 1, distinct=True)[0], 1, ends)
            if spanning or ends.casts or not ends.target_private:
                cost += n * item * _PICK_BYTE
            cost += _writing(axes, n * item, ends)
            options.append((cost / n, Path.BOUNCE, spanning, by_source, bounce))
    else:
        axes = _tile(by_target, bounce, False)
        n = boxes.numel(axes)
        cost = 2 * _TILE + n * item * _PICK_BYTE + _writing(axes, n * item, ends)
        options.append((cost / n, Path.BOUNCE, False, by_target, bounce))
    _, path, spanning, box, limit = min(options, key=lambda o: o[0])
    return path, spanning, box, limit


def _segments(remote: int, local: int, ends: Ends) -> float:
    if ends.joint and remote > 1:
        return max(remote, local) * (_LOCAL + _SORT)
    return remote * _REMOTE + local * _LOCAL


def _tile(placed: Placed, limit: int, spanning: bool) -> Axes:
    return boxes.cut(placed, limit, spanning=spanning)[0][0]


def _writing(axes: Axes, nbytes: int, ends: Ends) -> float:
    if not ends.target_private:
        return 0.0
    return boxes.run_shape(_by_target(axes), 2)[0] * _REMOTE + nbytes * _CALL_BYTE
