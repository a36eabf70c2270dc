"""The copies themselves: how one lane thread carries out a run of operations.

The operations of one call have one path, and one process if a process is read or written directly. Python only calls
the system, torch and compiled loops (mapped.py), which release the GIL; a step moves hundreds of KB. Copies with a
device at one end go to the workspace's copier (device.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from etha.memory.process import IoVec, ProcessMemory
from etha.memory.reach import ReachError
from etha.memory.views import CARRIERS, View
from etha.transport.copy import mapped
from etha.transport.geometry import iovec
from etha.transport.geometry.iovec import IovecBatch, Op
from etha.transport.geometry.tiles import Path

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier


#: So many mapped copies take torch less time than the tables for the compiled loops.
FEW = 4


class Buffer:
    """Scratch memory of one thread, viewed as any dtype. It grows when something does not fit."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return int(self._bytes.numel())

    @property
    def address(self) -> int:
        return int(self._bytes.data_ptr())

    def reserve(self, nbytes: int) -> None:
        """Hold at least ``nbytes``. Growing loses the content."""
        if nbytes > self.nbytes:
            self._bytes = torch.empty(-(-nbytes // 4096) * 4096, dtype=torch.uint8)
            self._typed.clear()

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a 1-D tensor of ``dtype``."""
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = self._bytes.view(dtype)
        return found


class Workspace:
    """Scratch memory of one lane thread. That thread makes it, so that its pages are near.

    ``copier`` is that of a device's agent; whoever made it closes it.
    """

    def __init__(self, copier: Copier | None = None) -> None:
        self.copier = copier
        #: Set once something outside of the buffers may have been written. Whoever reads it clears it beforehand.
        self.wrote = False
        self.read = Buffer(0)
        self.packed = Buffer(0)

    @property
    def nbytes(self) -> int:
        """Bytes of host scratch memory held."""
        held = self.read.nbytes + self.packed.nbytes
        return held if self.copier is None else held + self.copier.nbytes

    @property
    def device(self) -> Copier:
        """The copier. ReachError if there is none."""
        if self.copier is None:
            raise ReachError("memory of a device, but this agent has none: the workers' agent is another one")
        return self.copier


def run(ops: Sequence[Op], work: Workspace) -> None:
    """Carry out the operations, in any order. A ReachError leaves them half done."""
    if not ops:
        return
    match ops[0].tile.path:
        case Path.MAPPED:
            work.wrote = True
            for op in ops if len(ops) < FEW else mapped.copy_compiled(ops):
                _copy_mapped(op)
        case Path.READ | Path.WRITE:
            run_direct(direct_copies(ops), work)
        case Path.BOUNCE:
            for batch in iovec.batches(ops):
                _bounce(batch, work)
        case Path.DEVICE:
            device, work.wrote = work.device, True
            device.run_ops(ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectCopies:
    """System calls from or into a worker's memory: of ``process``, between the rows of two tables."""

    process: ProcessMemory
    reads: bool
    source: IoVec
    target: IoVec

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self.source.nbytes + self.target.nbytes


def direct_copies(ops: Sequence[Op]) -> DirectCopies:
    """The tables of operations with the path READ or WRITE."""
    reads = ops[0].tile.path is Path.READ
    source, target = iovec.copies(ops, by=0 if reads else 1)
    process = _process(ops[0].source if reads else ops[0].target)
    return DirectCopies(process=process, reads=reads, source=source, target=target)


def run_direct(copies: DirectCopies, work: Workspace) -> None:
    """Carry out the calls. A ReachError leaves them half done."""
    with _writing(work):
        if copies.reads:
            copies.process.read(copies.target, copies.source)
        else:
            copies.process.write(copies.source, copies.target)


def run_mixed(ops: Sequence[Op], work: Workspace) -> None:
    """Carry out operations of any mix of paths and processes, each kind in one go. ReachError leaves them half done."""
    for group in iovec.kinds(ops):
        run(group, work)


@contextmanager
def _writing(work: Workspace) -> Iterator[None]:
    """Wraps one system call that copies into a target. A call that fails may have moved nothing."""
    try:
        yield
    except ReachError as error:
        work.wrote = work.wrote or error.moved > 0
        raise
    work.wrote = True


def _process(view: View) -> ProcessMemory:
    assert view.process is not None, "a mapped view on a private path"
    return view.process


def _flat(view: View, raw: bool) -> torch.Tensor:
    flat = view.raw if raw else view.flat
    assert flat is not None, "a private view on a mapped path"
    return flat


def _copy_mapped(op: Op) -> None:
    tile, raw = op.tile, not op.tile.ends.casts
    source, target = _flat(op.source, raw), _flat(op.target, raw)
    _strided(target, tile.counts, tile.target_strides, op.target_offset).copy_(
        _strided(source, tile.counts, tile.source_strides, op.source_offset)
    )


def _strided(flat: torch.Tensor, counts: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    # Offsets of as_strided count from the start of the storage; torch checks them against the storage's size.
    return flat.as_strided(counts, strides, int(flat.storage_offset()) + offset)


def _bounce(batch: IovecBatch, work: Workspace) -> None:
    if batch.ops[0].tile.ends.source_private:
        work.read.reserve(batch.read_nbytes)
        here, there = iovec.reads(batch, work.read.address)
        _bound(here, work.read)
        _process(batch.ops[0].source).read(here, there)
    private = batch.ops[0].tile.ends.target_private
    if private:
        work.packed.reserve(batch.packed_nbytes)
    else:
        work.wrote = True
    for op, start, place in zip(batch.ops, batch.starts, batch.places, strict=True):
        if not op.tile.through:
            _pick(op, start, place, work)
    if not private:
        return
    processes = {id(op.target.process): op.target for op in batch.ops}
    for key, view in processes.items():
        addresses = (work.packed.address, work.read.address)
        here, there = iovec.writes(batch, addresses, [id(op.target.process) == key for op in batch.ops])
        _bound(here, work.packed, work.read)
        with _writing(work):
            _process(view).write(here, there)


def _bound(table: IoVec, *buffers: Buffer) -> None:
    """Refuse a table that reaches outside of the buffers, because the kernel would move bytes wherever it points."""
    first, last = table[:, 0], table[:, 0] + table[:, 1]
    inside = np.zeros(len(table), bool)
    for buffer in buffers:
        inside |= (first >= buffer.address) & (last >= first) & (last <= buffer.address + buffer.nbytes)
    if not inside.all():
        raise ReachError(
            "a copy would reach outside of the agent's buffer, so it was not begun: this is a fault in Etha, please "
            "report it"
        )


def _pick(op: Op, start: int, place: int, work: Workspace) -> None:
    """Copy what was read (or a mapped source) to what will be written (or a mapped target), and cast on the way."""
    tile, raw = op.tile, not op.tile.ends.casts
    if tile.ends.source_private:
        dtype = CARRIERS[tile.ends.source.itemsize] if raw else tile.ends.source
        source = work.read.typed(dtype).as_strided(tile.counts, tile.read_strides, start // dtype.itemsize)
    else:
        source = _strided(_flat(op.source, raw), tile.counts, tile.source_strides, op.source_offset)
    if tile.ends.target_private:
        dtype = CARRIERS[tile.ends.target.itemsize] if raw else tile.ends.target
        target = work.packed.typed(dtype).as_strided(tile.counts, tile.packed_strides, place // dtype.itemsize)
    else:
        target = _strided(_flat(op.target, raw), tile.counts, tile.target_strides, op.target_offset)
    target.copy_(source)
