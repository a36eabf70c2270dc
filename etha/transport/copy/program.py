"""A program: one agent's local copies of one transfer, as columns, cut into pieces for lane threads.

Operations are rows of four integer columns over a few distinct tiles and pairs of views. Their segments exist only
while a piece runs, unless they are few for its bytes; a device's piece is compiled once and kept. Pieces of phase 0
read what later pieces overwrite, so phase 1 waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from etha.memory.views import View
from etha.native.tiles import load_tiles
from etha.transport.copy import cpu
from etha.transport.copy.cpu import DirectCopies, Workspace, direct_copies, run_direct
from etha.transport.copy.mapped import MappedCopies, compiled
from etha.transport.geometry import iovec
from etha.transport.geometry.boxes import Ints
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import BOUNCE_BYTES, Path, Tile

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier, Launch

#: Largest payload of one piece. An abort or a revocation takes effect between pieces.
PIECE = 8 << 20
#: Smallest payload of a piece, and the number of pieces that lets a transfer's threads end together.
MIN_PIECE, PIECES = 256 << 10, 48
#: Most operations of one piece, because each small one may cost interpreter time.
MAX_OPS = 512
#: A piece's tables are kept from one transfer to the next if the piece has that many times their bytes.
KEPT_SHARE = 128
#: Largest payload of a device's piece. A device copies it in about 0.2 ms, less than the CPU's memory needs for 8 MiB.
#: It has any number of operations, because they are one launch. If plain host memory is at an end, the CPU copies, too,
#: and PIECE and MAX_OPS hold.
DEVICE_PIECE = 256 << 20

Member = tuple[str, int]  # ("source" | "target", rank)


class ViewPair(NamedTuple):
    """Two views between which operations copy. A staging view has no owner."""

    source: View
    target: View
    owners: tuple[Member, ...]


class Work(Protocol):
    """Work of a piece other than plain operations."""

    @property
    def scratch(self) -> int:
        """Bytes of scratch memory that it holds while it runs."""
        ...

    def run(self, work: Workspace) -> None:
        """Do the work. A ReachError leaves it half done."""
        ...

    def prove(self) -> None:
        """Raise RuntimeError unless its reads fit the buffers and do not overlap there."""
        ...

    @property
    def room(self) -> int:
        """Bytes of a copier's scratch memory that it uses; 0 if no part of it is on a device."""
        ...

    def prepare(self, copier: Copier) -> None:
        """Allocate and compile what a run with this copier needs on its device."""
        ...

    def release(self) -> None:
        """Free what it keeps on a device between two runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPiece:
    """Operations ``first`` to ``last`` of the program, or other work. ``owners`` are the members whose memory it
    touches."""

    phase: int
    nbytes: int
    owners: tuple[Member, ...]
    first: int = 0
    last: int = 0
    other: Work | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Everything that this agent copies itself in one transfer of one batch. One transfer at a time may run it.

    ``total`` is the payload in bytes at the wire dtype. ``nbytes`` is the part of each ("source" | "target", rank):
    what it sent or received, copies to itself included. ``peers`` are the other ends of each rank. ``work`` is the sum
    of the pieces' sizes, for progress. ``staged`` bytes of staging hold what must be read before memory that source and
    target share is written.
    """

    total: int
    nbytes: Mapping[Member, int]
    peers: Mapping[Member, tuple[Member, ...]]
    pieces: tuple[CopyPiece, ...]
    staged: int
    tiles: tuple[Tile, ...]
    pairs: tuple[ViewPair, ...]
    tile: npt.NDArray[np.int32]
    pair: npt.NDArray[np.int32]
    source: Ints
    target: Ints
    scratch: int = 0
    work: int = field(init=False)
    #: Tables of pieces that read or write a worker's memory directly, by piece index; filled on their first run.
    tables: dict[int, DirectCopies] = field(init=False, default_factory=dict)
    #: Compiled launches of device pieces, by piece index; filled on their first run.
    launches: dict[int, Launch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", sum(p.nbytes for p in self.pieces))

    @cached_property
    def barriers(self) -> tuple[int, ...]:
        """Indices of the pieces that may begin only when all pieces before them are done."""
        return tuple(i for i in range(1, len(self.pieces)) if self.pieces[i].phase != self.pieces[i - 1].phase)

    def peak_staging(self, threads: int) -> int:
        """Most bytes of scratch memory that a run on ``threads`` lane threads holds."""
        return self.staged + min(threads, len(self.pieces)) * self.scratch

    def bytes_of_pairs(self) -> list[int]:
        """Bytes that plain operations write, by the number of their pair of views."""
        nbytes = np.array([tile.nbytes for tile in self.tiles] or [0], np.int64)[self.tile]
        return [int(n) for n in np.bincount(self.pair, weights=nbytes, minlength=len(self.pairs))]

    def ops(self, piece: CopyPiece) -> list[Op]:
        rows = slice(piece.first, piece.last)
        tiles, pairs = self.tiles, self.pairs
        return [
            Op(tiles[tile], pairs[pair].source, pairs[pair].target, source, target)
            for tile, pair, source, target in zip(
                self.tile[rows].tolist(),
                self.pair[rows].tolist(),
                self.source[rows].tolist(),
                self.target[rows].tolist(),
                strict=True,
            )
        ]

    def prove(self) -> None:
        """Raise RuntimeError unless the reads of every piece fit the buffers and do not overlap there."""
        for piece in self.pieces:
            if piece.other is not None:
                piece.other.prove()
            elif self.tiles[self.tile[piece.first]].path is Path.BOUNCE:
                iovec.prove(self.ops(piece))

    def launch(self, index: int, copier: Copier) -> Launch | None:
        """Compile a device's piece, once. None if plain host memory is at an end, because that needs the CPU."""
        found = self.launches.get(index)
        if found is None:
            piece = self.pieces[index]
            rows = slice(piece.first, piece.last)
            used, pair = np.unique(self.pair[rows], return_inverse=True)
            ends = [(self.pairs[p].source, self.pairs[p].target) for p in used.tolist()]
            if not all(source.reachable and target.reachable for source, target in ends):
                return None
            numbers, tile = np.unique(self.tile[rows], return_inverse=True)
            tiles = [self.tiles[t] for t in numbers.tolist()]
            item = np.array([(t.ends.source.itemsize, t.ends.target.itemsize) for t in tiles], np.int64)[tile]
            begin = np.array([(source.address, target.address) for source, target in ends], np.int64)[pair]
            source = begin[:, 0] + self.source[rows] * item[:, 0]
            target = begin[:, 1] + self.target[rows] * item[:, 1]
            found = self.launches[index] = copier.compile_tiles(
                tiles, tile.astype(np.int64), source, target, pair.astype(np.int64)
            )
        return found

    def release(self) -> None:
        """Free what its pieces hold on a device instead of waiting for the program's end. No piece may be running."""
        for index in list(self.launches):
            self.launches.pop(index).release()
        for piece in self.pieces:
            if piece.other is not None:
                piece.other.release()

    def run(self, index: int, work: Workspace) -> int:
        """Run one piece and return its bytes. A ReachError leaves it half done."""
        piece = self.pieces[index]
        if piece.other is not None:
            piece.other.run(work)
            return piece.nbytes
        path = self.tiles[self.tile[piece.first]].path
        if path is Path.DEVICE and (launch := self.launch(index, work.device)):
            work.wrote = True
            work.device.run(launch)
        elif path is Path.MAPPED and self._compiled[index] and (copies := self._mapped):
            work.wrote = True
            copies.run(piece.first, piece.last)
        elif path in (Path.READ, Path.WRITE):
            self._run_direct(index, work)
        else:
            cpu.run(self.ops(piece), work)
        return piece.nbytes

    def _run_direct(self, index: int, work: Workspace) -> None:
        copies = self.tables.get(index)
        if copies is None:
            piece = self.pieces[index]
            copies = direct_copies(self.ops(piece))
            if copies.nbytes * KEPT_SHARE <= piece.nbytes:
                self.tables[index] = copies
        run_direct(copies, work)

    @cached_property
    def _compiled(self) -> tuple[bool, ...]:
        """For each piece: whether the compiled loops copy all of it, without an operation in Python."""
        tiles = np.array([compiled(tile) for tile in self.tiles], bool)
        return tuple(bool(tiles[self.tile[piece.first : piece.last]].all()) for piece in self.pieces)

    @cached_property
    def _mapped(self) -> MappedCopies | None:
        """All operations for the compiled loops; None where there is no such library."""
        library = load_tiles()
        if library is None:
            return None
        ends = [
            (s.address, s.address + s.nbytes, t.address, t.address + t.nbytes)
            for s, t in ((pair.source, pair.target) for pair in self.pairs)
        ]
        item = np.array([(t.ends.source.itemsize, t.ends.target.itemsize) for t in self.tiles], np.int64)[self.tile]
        spans = np.array(ends, np.uint64)[self.pair]
        source, target = (
            (spans[:, 2 * end] + (offset * item[:, end]).astype(np.uint64))
            for end, offset in ((0, self.source), (1, self.target))
        )
        return MappedCopies(library, self.tiles, self.tile, source, target, spans, self.work)


class Columns:
    """Collects operations, then sorts and cuts them into pieces."""

    def __init__(self) -> None:
        self.tiles: list[Tile] = []
        self.pairs: list[ViewPair] = []
        self._numbers: dict[int, int] = {}
        self._parts: list[tuple[int, int, int, Ints, Ints]] = []
        self.others: list[CopyPiece] = []

    def number(self, tile: Tile) -> int:
        """The tile's number. Tiles are told apart by identity."""
        found = self._numbers.get(id(tile))
        if found is None:
            found = self._numbers[id(tile)] = len(self.tiles)
            self.tiles.append(tile)
        return found

    def add(self, phase: int, tile: int, pair: int, source: Ints, target: Ints) -> None:
        """Add operations of one tile between one pair of views, at these offsets in elements."""
        self._parts.append((phase, tile, pair, source, target))

    def add_pair(self, pair: ViewPair) -> int:
        """Add a pair of views and return its number."""
        self.pairs.append(pair)
        return len(self.pairs) - 1

    def program(
        self, *, nbytes: Mapping[Member, int], peers: Mapping[Member, set[Member]], total: int, staged: int
    ) -> Program:
        """Build the program of all collected operations."""
        sizes = [len(p[3]) for p in self._parts]
        phase, tile, pair = (np.repeat(np.array([p[i] for p in self._parts], np.int64), sizes) for i in range(3))
        source, target = (np.concatenate([np.zeros(0, np.int64), *(p[i] for p in self._parts)]) for i in (3, 4))
        size = np.array([t.nbytes for t in self.tiles], np.int64)[tile] if len(tile) else np.zeros(0, np.int64)
        path = np.array([t.path for t in self.tiles], np.int64)[tile] if len(tile) else tile
        plain = np.array([not (p.source.reachable and p.target.reachable) for p in self.pairs], bool)
        path = 2 * path + ((path == Path.DEVICE) & plain[pair])  # pieces that bounce are cut apart from others
        link, place = self._links(tile, pair, source, target)
        # Sort by remote address, so that segments that are neighbours there join in one call.
        order = np.lexsort((place, link, path, phase))
        phase, tile, pair, source, target = (c[order] for c in (phase, tile, pair, source, target))
        pieces = self._cut(phase, path[order], link[order], size[order], pair)
        bouncing = any(t.path is Path.BOUNCE for t in self.tiles)
        scratch = max([2 * BOUNCE_BYTES * bouncing, *(p.other.scratch for p in self.others if p.other is not None)])
        program = Program(
            total=total,
            nbytes=dict(nbytes),
            peers={member: tuple(sorted(others)) for member, others in peers.items()},
            pieces=tuple(sorted((*pieces, *self.others), key=lambda p: (p.phase, -p.nbytes))),
            staged=staged,
            tiles=tuple(self.tiles),
            pairs=tuple(self.pairs),
            tile=tile.astype(np.int32),
            pair=pair.astype(np.int32),
            source=source,
            target=target,
            scratch=scratch,
        )
        program.prove()
        return program

    def _links(self, tile: Ints, pair: Ints, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """For each operation: a number for the process that its system call reaches, and the address there."""
        if not len(tile):
            return tile, tile
        numbers: dict[int, int] = {}

        def process(view: View) -> int:
            return numbers.setdefault(id(view.process), len(numbers)) if view.private else -1

        ends = np.array([(process(p.source), process(p.target)) for p in self.pairs], np.int64)[pair]
        begin = np.array([(p.source.address, p.target.address) for p in self.pairs], np.int64)[pair]
        item = np.array([(t.ends.source.itemsize, t.ends.target.itemsize) for t in self.tiles], np.int64)[tile]
        reads, writes = ends[:, 0] >= 0, ends[:, 1] >= 0
        link = np.where(reads, ends[:, 0], ends[:, 1])
        place = np.where(
            reads, begin[:, 0] + source * item[:, 0], np.where(writes, begin[:, 1] + target * item[:, 1], 0)
        )
        # A bounce may read one process and write several, but all operations of a piece have one kind of source and
        # target.
        return link * 4 + reads * 2 + writes, place

    def _cut(self, phase: Ints, path: Ints, link: Ints, size: Ints, pair: Ints) -> list[CopyPiece]:
        if not len(size):
            return []
        limit = min(PIECE, max(MIN_PIECE, int(size.sum()) // PIECES))
        device = path == 2 * Path.DEVICE
        changes = (np.diff(phase) != 0) | (np.diff(path) != 0) | (np.diff(link) != 0)
        ends = np.append(np.flatnonzero(changes) + 1, len(size))
        total = np.cumsum(size)
        pieces, first = [], 0
        while first < len(size):
            before = int(total[first - 1]) if first else 0
            last = int(np.searchsorted(total, before + (DEVICE_PIECE if device[first] else limit), "right"))
            most = len(size) if device[first] else first + MAX_OPS
            last = min(max(last, first + 1), most, int(ends[np.searchsorted(ends, first, "right")]))
            pieces.append(
                CopyPiece(
                    phase=int(phase[first]),
                    nbytes=int(total[last - 1]) - before,
                    owners=self.owners(np.unique(pair[first:last]).tolist()),
                    first=first,
                    last=last,
                )
            )
            first = last
        return pieces

    def owners(self, pairs: Sequence[int]) -> tuple[Member, ...]:
        """The members whose memory these pairs are."""
        return tuple(sorted({member for p in pairs for member in self.pairs[p].owners}))
