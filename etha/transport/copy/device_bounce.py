"""Copies between a device and plain host memory, through a pinned buffer of bounded size.

Operations are cut to the buffer's size and run in rounds. On the device's side, one kernel moves all bytes of a round.
On the host's side, cpu.py copies them as it copies any host memory, workers' private memory included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from etha.memory.views import View
from etha.transport.copy import cpu
from etha.transport.copy.device_memory import PinnedMemory
from etha.transport.geometry import boxes
from etha.transport.geometry.boxes import Axes, BoxAxis, Placed
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Ends, Path, Tile, tiles

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier

#: Size of the buffer, at which a round's bytes take longer than its launch.
BYTES = 8 << 20
_ALIGN = 16


class _Part(NamedTuple):
    """The part of an operation that fits the buffer: ``axes`` from offset to offset, in elements."""

    axes: Axes
    source: View
    target: View
    source_offset: int
    target_offset: int


class Bounce:
    """See the module. The buffer is pinned when it is first needed."""

    def __init__(self, copier: Copier, nbytes: int) -> None:
        self._copier, self._most = copier, nbytes
        self._pinned: PinnedMemory | None = None
        self._views: dict[torch.dtype, View] = {}
        self._work = cpu.Workspace()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds."""
        return self._work.nbytes + (self._pinned.nbytes if self._pinned is not None else 0)

    def run(self, ops: Sequence[Op]) -> None:
        """Run all operations. Each has plain host memory at one end or at both."""
        host = [op for op in ops if not op.source.reachable and not op.target.reachable]
        cpu.run_mixed(host, self._work)
        self._rounds([op for op in ops if not op.source.reachable and op.target.reachable], inward=True)
        self._rounds([op for op in ops if op.source.reachable and not op.target.reachable], inward=False)

    def provide(self) -> None:
        """Allocate the buffer."""
        if self._pinned is None:
            self._pinned = PinnedMemory(self._copier.driver, self._copier.uuid, self._most + 4096)

    def close(self) -> None:
        """Free the buffer."""
        self._views.clear()
        if self._pinned is not None:
            self._pinned.release()
        self._pinned = None

    def _rounds(self, ops: Sequence[Op], *, inward: bool) -> None:
        near: list[Op] = []
        far: list[Op] = []
        used = 0
        for part in self._parts(ops):
            # The host's side casts nothing, because kernels do that.
            dtype = part.source.dtype if inward else part.target.dtype
            need = boxes.numel(part.axes) * dtype.itemsize
            if used and used + need > self._most:
                self._round(near, far, inward)
                near, far, used = [], [], 0
            here, there = self._halves(part, self._view(dtype), used // dtype.itemsize, inward)
            near += here
            far += there
            used += -(-need // _ALIGN) * _ALIGN
        if near:
            self._round(near, far, inward)

    def _round(self, near: list[Op], far: list[Op], inward: bool) -> None:
        if inward:
            cpu.run_mixed(near, self._work)
        self._copier.run_ops(far)
        if not inward:
            cpu.run_mixed(near, self._work)

    def _parts(self, ops: Sequence[Op]) -> Iterator[_Part]:
        for op in ops:
            item = max(op.source.dtype.itemsize, op.target.dtype.itemsize)
            placed = Placed(op.tile.axes, op.source_offset, op.target_offset)
            for axes, source, target in boxes.cut(placed, self._most // item):
                for a, b in zip(source.tolist(), target.tolist(), strict=True):
                    yield _Part(axes, op.source, op.target, a, b)

    def _halves(self, part: _Part, pinned: View, at: int, inward: bool) -> tuple[list[Op], list[Op]]:
        """(operations between host and buffer, operations between buffer and device) of one part."""
        dense = boxes.dense(part.axes, 2)
        source, target = part.source, part.target
        into = tuple(BoxAxis(a.steps, a.source, d) for a, d in zip(part.axes, dense, strict=True))
        out = tuple(BoxAxis(a.steps, d, a.target) for a, d in zip(part.axes, dense, strict=True))
        if inward:
            host = Placed(into, part.source_offset, at)
            near = list(_host(host, source, pinned))
            ends = Ends(source=pinned.dtype, target=target.dtype, source_private=False, target_private=False)
            return near, [Op(Tile(path=Path.DEVICE, axes=out, ends=ends), pinned, target, at, part.target_offset)]
        near = list(_host(Placed(out, at, part.target_offset), pinned, target))
        ends = Ends(source=source.dtype, target=pinned.dtype, source_private=False, target_private=False)
        return near, [Op(Tile(path=Path.DEVICE, axes=into, ends=ends), source, pinned, part.source_offset, at)]

    def _view(self, dtype: torch.dtype) -> View:
        self.provide()
        assert self._pinned is not None
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = self._pinned.view(dtype)
        return found


def _host(placed: Placed, source: View, target: View) -> Iterator[Op]:
    ends = Ends(source=source.dtype, target=target.dtype, source_private=source.private, target_private=target.private)
    for tile, a, b in tiles([placed], ends):
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            yield Op(tile, source, target, x, y)
