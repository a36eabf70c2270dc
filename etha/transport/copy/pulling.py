"""Which copies of a program the receiving workers can do themselves, as a table for each of them.

These are the copies that cross an agent's buffer only because neither worker's memory is mapped there. A worker that
pulls them copies each byte once, and one that changes its dtype once more, within its processor's cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etha.memory.casts import Cast
from etha.memory.pull import PullTable, Rows, rows_of
from etha.transport.copy.program import CopyPiece, Member, Program
from etha.transport.geometry import boxes, iovec
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Path, Tile

#: Payload of a chunk, to the next operation. A pull stops between two chunks.
CHUNK = 1 << 20
#: Smallest payload that workers pull: for less, their two messages take longer than the copy through the agent.
MIN_BYTES = 1 << 20
#: Shortest runs that a worker pulls out of the gaps between them, in bytes: an agent picks shorter ones faster.
SHORT_RUN = 512
#: Most rows of all tables. Rows are sent once, as 32 bytes each. Runs of equal length at equal steps are one row.
MAX_ROWS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PullPlan:
    """``tables`` are those of the receiving members. ``pieces`` are the numbers of the program's pieces that they
    cover, which have ``work`` bytes. ``sources`` are the members from which they read."""

    tables: Mapping[Member, PullTable]
    pieces: frozenset[int]
    work: int
    sources: tuple[Member, ...]


def pull_plan(program: Program) -> PullPlan | None:
    """What workers can pull of a program. None if that is not worth its messages, or if copies wait for others."""
    if program.barriers or program.staged:
        return None
    chosen = [i for i, piece in enumerate(program.pieces) if _pullable(program, piece)]
    work = sum(program.pieces[i].nbytes for i in chosen)
    if work < MIN_BYTES:
        return None
    parts: dict[Member, _Parts] = defaultdict(_Parts)
    for i in chosen:
        _collect(program, program.pieces[i], parts)
    tables = {member: found.table() for member, found in sorted(parts.items())}
    if sum(len(table.local) + len(table.remote) for table in tables.values()) > MAX_ROWS:
        return None
    sources = {owner for i in chosen for owner in program.pieces[i].owners if owner[0] == "source"}
    return PullPlan(tables=tables, pieces=frozenset(chosen), work=work, sources=tuple(sorted(sources)))


def _pullable(program: Program, piece: CopyPiece) -> bool:
    if piece.other is not None:
        return False
    return all(_direct(program.tiles[t]) for t in np.unique(program.tile[piece.first : piece.last]).tolist())


def _direct(tile: Tile) -> bool:
    """Whether a worker can copy the tile by itself, and not slower than the agent."""
    ends = tile.ends
    return (
        tile.path is Path.BOUNCE
        and ends.source_private
        and ends.target_private
        and tile.ends.cast is not None
        and not (tile.spanning and tile.read_nbytes > tile.numel * ends.source.itemsize and _run(tile) < SHORT_RUN)
    )


def _run(tile: Tile) -> int:
    """Bytes of a run that is contiguous at both ends, at the narrower of the two dtypes."""
    _, _, numel = boxes.common_runs(tile.axes)
    return numel * min(tile.ends.source.itemsize, tile.ends.target.itemsize)


class _Parts:
    """The chunks of one receiving member."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, int], int] = {}
        self._process: list[int] = []
        self._casts: list[Cast] = []
        self._local: list[Rows] = []
        self._remote: list[Rows] = []

    def add(self, ops: Sequence[Op]) -> None:
        """Add a chunk of operations from one process."""
        process = ops[0].source.process
        assert process is not None, "a mapped source in a chunk of a pull"
        cast = ops[0].tile.ends.cast
        assert cast is not None, "a chunk of a pull whose cast no worker knows"
        remote, local = iovec.copies(ops, by=0) if cast is Cast.NONE else iovec.cast_copies(ops)
        self._casts.append(cast)
        key = (process.pid, process.started)
        self._process.append(self._processes.setdefault(key, len(self._processes)))
        self._local.append(rows_of(local))
        self._remote.append(rows_of(remote))

    def table(self) -> PullTable:
        return PullTable(
            processes=tuple(self._processes),
            process=np.array(self._process, np.int32),
            local=np.concatenate(self._local),
            remote=np.concatenate(self._remote),
            local_ends=np.cumsum([len(rows) for rows in self._local]).astype(np.uint64),
            remote_ends=np.cumsum([len(rows) for rows in self._remote]).astype(np.uint64),
            casts=np.array(self._casts, np.int32),
        )


def _collect(program: Program, piece: CopyPiece, parts: dict[Member, _Parts]) -> None:
    """Cut a piece's operations into chunks by receiving member and source process."""
    pairs = program.pair[piece.first : piece.last].tolist()
    open_chunks: dict[tuple[Member, int, Cast | None], tuple[list[Op], int]] = {}
    for op, pair in zip(program.ops(piece), pairs, strict=True):
        member = next(owner for owner in program.pairs[pair].owners if owner[0] == "target")
        key = (member, id(op.source.process), op.tile.ends.cast)
        ops, nbytes = open_chunks.pop(key, ([], 0))
        ops.append(op)
        nbytes += op.tile.nbytes
        if nbytes >= CHUNK:
            parts[member].add(ops)
        else:
            open_chunks[key] = (ops, nbytes)
    for (member, _, _), (ops, _) in open_chunks.items():
        parts[member].add(ops)
