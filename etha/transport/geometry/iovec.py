"""Segment tables (iovecs) for the system calls of a piece's operations, built when the piece runs and then dropped.

Each row is (address, bytes), and the two tables of a call have the same number of bytes. Adjacent rows are joined. If
neighbours fill each other's gaps, rows are sorted first, so that they join.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from etha.memory.process import IoVec
from etha.memory.views import View
from etha.transport.geometry.tiles import BOUNCE_BYTES, Bytes, Path, Tile

_ALIGN = 64


class Op(NamedTuple):
    """One tile at one place: offsets in elements into the two views."""

    tile: Tile
    source: View
    target: View
    source_offset: int
    target_offset: int

    @property
    def source_address(self) -> int:
        """Address of the tile's first element in the source's process."""
        return self.source.address + self.source_offset * self.tile.ends.source.itemsize

    @property
    def target_address(self) -> int:
        """Address of the tile's first element in the target's process."""
        return self.target.address + self.target_offset * self.tile.ends.target.itemsize


def copies(ops: Sequence[Op], *, by: int) -> tuple[IoVec, IoVec]:
    """(source table, target table) of direct copies; ``by`` is the remote end (0: source, 1: target)."""
    parts = []
    for tile, some in _by_tile(ops):
        source, target, length = tile.copies
        parts.append(
            (
                _spread(source, [o.source_address for o in some]),
                _spread(target, [o.target_address for o in some]),
                length,
            )
        )
    return _tables(parts, by, any(op.tile.ends.joint for op in ops))


def cast_copies(ops: Sequence[Op]) -> tuple[IoVec, IoVec]:
    """(source table, target table) of copies that change the dtype: as many elements in each, in the same order."""
    sources, targets = list[IoVec](), list[IoVec]()
    for tile, some in _by_tile(ops):
        source, target, count = tile.cast_runs
        for offsets, addresses, itemsize, found in (
            (source, [o.source_address for o in some], tile.ends.source.itemsize, sources),
            (target, [o.target_address for o in some], tile.ends.target.itemsize, targets),
        ):
            at = _spread(offsets, addresses)
            found.append(np.stack([at, np.full_like(at, count * itemsize)], axis=1))
    return np.concatenate(sources), np.concatenate(targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class IovecBatch:
    """Operations that go through the bounce buffers together, so that small tensors share system calls.

    ``starts`` and ``places`` are the offsets of each operation's bytes in the read buffer and in the packed buffer.
    ``spans`` are the (address, place, bytes) that are read whole, each for one or several operations.
    """

    ops: Sequence[Op]
    starts: tuple[int, ...]
    places: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    read_nbytes: int
    packed_nbytes: int

    def check(self) -> None:
        """Raise RuntimeError if two reads share a byte of the read buffer, or one lies outside of it.

        The bytes of an operation inside a span count as the span's.
        """
        spanning = np.array([op.tile.spanning for op in self.ops], bool)
        starts = np.array(self.starts, np.int64)
        needs = np.array([op.tile.read_nbytes for op in self.ops], np.int64)
        spans = np.array(self.spans, np.int64).reshape(-1, 3)
        begin = np.concatenate([spans[:, 1], starts[~spanning]])
        stop = begin + np.concatenate([spans[:, 2], needs[~spanning]])
        order = np.argsort(begin, kind="stable")
        begin, stop = begin[order], stop[order]
        apart = bool((stop[:-1] <= begin[1:]).all())
        inside = not len(stop) or (begin[0] >= 0 and stop[-1] <= self.read_nbytes)
        if spanning.any():
            where = np.searchsorted(spans[:, 1], starts[spanning], "right") - 1
            inside = inside and bool((where >= 0).all())
            inside = inside and bool((starts[spanning] + needs[spanning] <= spans[where, 1] + spans[where, 2]).all())
        if not (apart and inside):
            raise RuntimeError(
                f"the reads of a batch of {len(self.ops)} copies overlap in the agent's buffer, or do not fit its "
                f"{self.read_nbytes} bytes: this is a fault in Etha, please report it"
            )


def kinds(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """Group operations of any mix by path and pair of processes."""
    found: dict[tuple[int, int, int], list[Op]] = {}
    for op in ops:
        found.setdefault((op.tile.path, id(op.source.process), id(op.target.process)), []).append(op)
    yield from found.values()


def prove(ops: Sequence[Op]) -> None:
    """Build every batch of ``ops``, which are of one kind, as a run will. RuntimeError if one is not sound."""
    tiles = {id(op.tile): op.tile for op in ops}.values()
    if len({(tile.path, tile.ends.source_private, tile.ends.target_private) for tile in tiles}) > 1:
        raise RuntimeError("copies of several kinds in one go: this is a fault in Etha, please report it")
    if any(tile.path is Path.BOUNCE and tile.ends.source_private for tile in tiles):
        for batch in batches(ops):
            batch.check()


def batches(ops: Sequence[Op]) -> Iterator[IovecBatch]:
    """Cut operations, which are neighbours in the source, into batches that fit the buffers.

    They are not checked here, because this runs with every transfer; ``prove`` checks the same batches once.
    """
    first = read = packed = 0
    starts: list[int] = []
    places: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for i, op in enumerate(ops):
        need, more = op.tile.read_nbytes, _aligned(op.tile.packed_nbytes)
        address = op.source_address
        shared = op.tile.spanning and bool(spans) and _shares(spans[-1], read, address, need, op)
        extra = max(0, address + need - spans[-1][0] - spans[-1][2]) if shared else _aligned(need)
        if i > first and (read + extra > BOUNCE_BYTES or packed + more > BOUNCE_BYTES):
            yield _batch(ops[first:i], starts, places, spans, read, packed)
            first, read, packed, shared = i, 0, 0, False
            starts, places, spans = [], [], []
        if shared:
            begin, place, nbytes = spans[-1]
            starts.append(place + address - begin)
            nbytes = max(nbytes, address + need - begin)
            spans[-1] = (begin, place, nbytes)
            read = max(read, place + nbytes)  # other bytes may lie behind a span that did not grow
        else:
            read = _aligned(read)
            starts.append(read)
            if op.tile.spanning:
                spans.append((address, read, need))
            read += need
        places.append(packed)
        packed += more
    yield _batch(ops[first:], starts, places, spans, read, packed)


def _shares(span: tuple[int, int, int], read: int, address: int, need: int, op: Op) -> bool:
    """Whether an operation is read with the last span: it lies inside the span, or continues it at the buffer's end."""
    begin, place, nbytes = span
    ahead = address - begin
    # The span's place keeps the address's alignment, so elements stay aligned, too.
    if not 0 <= ahead <= nbytes or ahead % op.tile.ends.source.itemsize:
        return False
    return ahead + need <= nbytes or place + nbytes == read


def _batch(
    ops: Sequence[Op], starts: list[int], places: list[int], spans: list[tuple[int, int, int]], read: int, packed: int
) -> IovecBatch:
    return IovecBatch(
        ops=ops, starts=tuple(starts), places=tuple(places), spans=tuple(spans), read_nbytes=read, packed_nbytes=packed
    )


def reads(batch: IovecBatch, buffer: int) -> tuple[IoVec, IoVec]:
    """(table of the read buffer at address ``buffer``, table of the source) of a batch."""
    parts: list[tuple[Bytes, Bytes, int]] = [
        (np.array([address], np.uint64), np.array([buffer + place], np.uint64), nbytes)
        for address, place, nbytes in batch.spans
    ]
    for op, start in zip(batch.ops, batch.starts, strict=True):
        if not op.tile.spanning:
            offsets, length = op.tile.reads
            here = np.arange(len(offsets), dtype=np.uint64) * np.uint64(length) + np.uint64(buffer + start)
            parts.append((offsets + np.uint64(op.source_address), here, length))
    source, target = _tables(parts, 0, any(op.tile.ends.joint for op in batch.ops))
    return target, source


def writes(batch: IovecBatch, buffers: tuple[int, int], chosen: Sequence[bool]) -> tuple[IoVec, IoVec]:
    """(table of the buffers, table of the target) of a batch's ``chosen`` operations.

    ``buffers`` are the addresses of the packed and of the read buffer. Data that needs no packing is written from the
    read buffer.
    """
    parts: list[tuple[Bytes, Bytes, int]] = []
    for op, start, place, mine in zip(batch.ops, batch.starts, batch.places, chosen, strict=True):
        if mine:
            offsets, length = op.tile.writes
            begin = buffers[1] + start if op.tile.through else buffers[0] + place
            here = np.arange(len(offsets), dtype=np.uint64) * np.uint64(length) + np.uint64(begin)
            parts.append((here, offsets + np.uint64(op.target_address), length))
    return _tables(parts, 1, False)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _by_tile(ops: Sequence[Op]) -> Iterator[tuple[Tile, list[Op]]]:
    """Group consecutive operations of the same tile."""
    some: list[Op] = []
    for op in ops:
        if some and op.tile is not some[0].tile:
            yield some[0].tile, some
            some = []
        some.append(op)
    yield some[0].tile, some


def _spread(offsets: Bytes, addresses: list[int]) -> Bytes:
    return (np.array(addresses, np.uint64)[:, None] + offsets).reshape(-1)


def _tables(parts: Sequence[tuple[Bytes, Bytes, int]], by: int, sort: bool) -> tuple[IoVec, IoVec]:
    """Both tables of parts (source addresses, target addresses, bytes of each), with adjacent rows joined."""
    if len(parts) == 1:
        source, target, length = parts[0]
        nbytes = np.full(len(source), length, np.uint64)
    else:
        source = np.concatenate([p[0] for p in parts])
        target = np.concatenate([p[1] for p in parts])
        nbytes = np.repeat(np.array([p[2] for p in parts], np.uint64), [len(p[0]) for p in parts])
    if sort and len(source) > 1:
        order = _order(target if by else source)
        source, target, nbytes = source[order], target[order], nbytes[order]
    return _joined(source, nbytes), _joined(target, nbytes)


def _order(remote: Bytes) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Order by address. Equal addresses are spread over as many rounds, so that the segments of each round join."""
    order = np.argsort(remote, kind="stable")
    found = remote[order]
    again = found[1:] == found[:-1]
    if again.any():
        at = np.arange(len(found))
        begin = np.maximum.accumulate(np.where(np.append(True, ~again), at, 0))
        order = order[np.lexsort((found, at - begin))]
    return order


def _joined(addresses: Bytes, nbytes: Bytes) -> IoVec:
    if len(addresses) > 1:
        starts = np.flatnonzero(np.append(True, addresses[1:] != addresses[:-1] + nbytes[:-1]))
        if len(starts) < len(addresses):
            addresses, nbytes = addresses[starts], np.add.reduceat(nbytes, starts)
    table = np.empty((len(addresses), 2), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = nbytes
    return table
