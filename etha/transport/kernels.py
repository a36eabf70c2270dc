"""The copies themselves: what one lane thread does with a run of operations.

Operations of one call have one path and, where a process is involved, one process per end. Python is
left for system calls and torch, which release the GIL; a step moves hundreds of KB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from etha.memory.process import IoVec, ProcessMemory
from etha.memory.views import CARRIERS, View
from etha.transport.tiles import BOUNCE_BYTES, Path, Tile

_ALIGN = 64


class Op(NamedTuple):
    """One tile at one place: offsets in elements of the two views."""

    tile: Tile
    source: View
    target: View
    source_offset: int
    target_offset: int


class Buffer:
    """Scratch memory of one thread, seen as any dtype; grows for what does not fit."""

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
        """Have at least ``nbytes``; what was in it is lost when it grows."""
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
    """What one lane thread has for itself; made by that thread, so that its pages are near it."""

    def __init__(self) -> None:
        self.read = Buffer(0)
        self.packed = Buffer(0)

    @property
    def nbytes(self) -> int:
        """Scratch memory held."""
        return self.read.nbytes + self.packed.nbytes


def run(ops: Sequence[Op], work: Workspace) -> None:
    """Do the operations, in any order; a ReachError leaves them half done."""
    if not ops:
        return
    match ops[0].tile.path:
        case Path.MAPPED:
            for op in ops:
                _copy_mapped(op)
        case Path.READ:
            process = _process(ops[0].source)
            process.read(_tables(ops, 1), _tables(ops, 0))
        case Path.WRITE:
            process = _process(ops[0].target)
            process.write(_tables(ops, 0), _tables(ops, 1))
        case Path.BOUNCE:
            for batch in _batches(ops):
                _bounce(batch, work)


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
    # Offsets of as_strided count from the storage; torch checks it against the storage's size.
    return flat.as_strided(counts, strides, int(flat.storage_offset()) + offset)


def _tables(ops: Sequence[Op], end: int) -> IoVec:
    """The segments of one end (0: source, 1: target) of all operations, in their order."""
    parts = []
    for tile, addresses in _by_tile(ops, end):
        table = tile.target_table if end else tile.source_table
        if len(addresses) == 1:
            part = table.copy()
            part[:, 0] += np.uint64(addresses[0])
        else:
            part = np.repeat(table[None], len(addresses), axis=0)
            part[:, :, 0] += np.array(addresses, np.uint64)[:, None]
            part = part.reshape(-1, 2)
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _by_tile(ops: Sequence[Op], end: int) -> Iterator[tuple[Tile, list[int]]]:
    """Neighbours of one tile together, with the address of each at one end."""
    last: Tile | None = None
    addresses: list[int] = []
    for op in ops:
        if op.tile is not last:
            if last is not None:
                yield last, addresses
            last, addresses = op.tile, []
        if end:
            addresses.append(op.target.address + op.target_offset * op.tile.ends.target.itemsize)
        else:
            addresses.append(op.source.address + op.source_offset * op.tile.ends.source.itemsize)
    if last is not None:
        yield last, addresses


def _batches(ops: Sequence[Op]) -> Iterator[Sequence[Op]]:
    """As many operations together as the buffers take: small tensors share their system calls."""
    first = read = packed = 0
    for i, op in enumerate(ops):
        more_read, more_packed = _aligned(op.tile.read_nbytes), _aligned(op.tile.packed_nbytes)
        if i > first and (read + more_read > BOUNCE_BYTES or packed + more_packed > BOUNCE_BYTES):
            yield ops[first:i]
            first, read, packed = i, 0, 0
        read, packed = read + more_read, packed + more_packed
    yield ops[first:]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _bounce(ops: Sequence[Op], work: Workspace) -> None:
    ends = ops[0].tile.ends
    starts = _places([op.tile.read_nbytes for op in ops])
    if ends.source_private:
        work.read.reserve(starts[-1])
        local = _local(work.read, starts, [op.tile.read_nbytes for op in ops])
        _process(ops[0].source).read(local, _tables(ops, 0))
    if ends.target_private and all(op.tile.through for op in ops):
        _process(ops[0].target).write(_local(work.read, starts, [op.tile.read_nbytes for op in ops]), _tables(ops, 1))
        return
    places = _places([op.tile.packed_nbytes for op in ops])
    if ends.target_private:
        work.packed.reserve(places[-1])
    for op, start, place in zip(ops, starts, places, strict=False):
        tile = op.tile
        raw = not tile.ends.casts
        read_as = CARRIERS[tile.ends.source.itemsize] if raw else tile.ends.source
        pack_as = CARRIERS[tile.ends.target.itemsize] if raw else tile.ends.target
        if tile.ends.source_private:
            source = work.read.typed(read_as).as_strided(tile.counts, tile.read_strides, start // read_as.itemsize)
        else:
            source = _strided(_flat(op.source, raw), tile.counts, tile.source_strides, op.source_offset)
        if tile.ends.target_private:
            target = work.packed.typed(pack_as).as_strided(tile.counts, tile.packed_strides, place // pack_as.itemsize)
        else:
            target = _strided(_flat(op.target, raw), tile.counts, tile.target_strides, op.target_offset)
        target.copy_(source)
    if ends.target_private:
        packed = _local(work.packed, places, [op.tile.packed_nbytes for op in ops])
        _process(ops[0].target).write(packed, _tables(ops, 1))


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each of these begins in a buffer, and the end of all."""
    places = [0]
    for nbytes in sizes:
        places.append(places[-1] + _aligned(nbytes))
    return places


def _local(buffer: Buffer, places: Sequence[int], sizes: Sequence[int]) -> IoVec:
    return np.array([[buffer.address + at, n] for at, n in zip(places, sizes, strict=False)], np.uint64)
