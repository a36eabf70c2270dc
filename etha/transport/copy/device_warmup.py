"""Launch kernels once over scratch memory, before a program needs them. ``prepare`` does so for a whole program.

CUDA loads a kernel at its first launch, and may wait for all work of the context to do so. Behind an NCCL kernel, which
waits for another host, that is too late: the thread that would abort it may be the one that waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import torch

from etha.cuda.kernels import (
    COLUMNS,
    COUNTS,
    RANK,
    RUN,
    SOURCE,
    SOURCE_STEPS,
    TARGET,
    TARGET_STEPS,
    TOTAL,
    WIDTH,
    Fused,
)
from etha.transport.copy.device_table import Kind, Table, Tables
from etha.transport.geometry.boxes import Ints
from etha.transport.geometry.tiles import Path

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier, Launch
    from etha.transport.copy.program import Program

_HALF = 2048
_WIDTHS = range(5)


def kinds(launches: Iterable[Launch]) -> set[Kind]:
    """The kinds of kernels that these launches use, and may use for plain host memory."""
    found: set[Kind] = set()
    bounced: set[tuple[torch.dtype, torch.dtype]] = set()
    for launch in launches:
        found.update(kind for fused in launch.fused for kind in _of(fused))
        bounced |= {(op.tile.ends.source, op.tile.ends.target) for op in launch.bounced}
    return found.union(*(kinds_between(source, target) for source, target in bounced))


def kinds_between(source: torch.dtype, target: torch.dtype) -> set[Kind]:
    """The kinds of kernels that any copy between these dtypes may use."""
    if source is not target:
        return {(source, target, 0, strided) for strided in (False, True)}
    return {(None, None, width, strided) for width, strided in product(_WIDTHS, (False, True))}


def rehearse(copier: Copier, some: set[Kind]) -> None:
    """Launch each kind once on the copier's stream, and wait. Kinds rehearsed before are left out."""
    new = some - copier.rehearsed
    if not new:
        return
    room = copier.scratch(2 * _HALF).address
    classes: dict[tuple[torch.dtype | None, torch.dtype | None], list[list[int]]] = {}
    for source, target, width, strided in new:
        here, there = (1 << width if dtype is None else dtype.itemsize for dtype in (source, target))
        row = [0] * COLUMNS
        row[SOURCE], row[TARGET], row[RUN], row[RANK], row[WIDTH] = room, room + _HALF, 2, int(strided), width
        row[TOTAL] = 4 if strided else 2
        row[COUNTS], row[SOURCE_STEPS], row[TARGET_STEPS] = 2, 4 * here, 8 * there
        classes.setdefault((source, target), []).append(row)
    tables = tuple(
        Table(dtypes=dtypes, rows=_ints(rows), pieces=_pieces(len(rows))) for dtypes, rows in classes.items()
    )
    copier.run_tables(Tables(np.zeros((0, 3), np.int64), tables))
    copier.rehearsed |= new


def _of(fused: Fused) -> Iterator[Kind]:
    for number in np.unique(fused.rows[:, WIDTH] * 2 + (fused.rows[:, RANK] > 0)).tolist():
        yield fused.source, fused.target, number >> 1, bool(number & 1)


def _ints(rows: list[list[int]]) -> Ints:
    return np.array(rows, np.int64)


def _pieces(count: int) -> Ints:
    return np.arange(count, dtype=np.int64) << 32


def prepare(program: Program, copier: Copier) -> None:
    """Allocate and compile what the program's runs with this copier need on its device, and wait, so that the first run
    allocates nothing more.

    Call it on the copier's thread while no piece runs, once for each copier that may run pieces, because each has its
    own scratch memory.
    """
    works = [piece.other for piece in program.pieces if piece.other is not None and piece.other.room]
    if works:  # the largest first, because what is compiled lies over it
        copier.scratch(max(work.room for work in works))
    for work in works:
        work.prepare(copier)
    launches: list[Launch] = []
    needed: set[Kind] = set()
    bounced = False
    for index, piece in enumerate(program.pieces):
        if piece.other is not None or program.tiles[program.tile[piece.first]].path is not Path.DEVICE:
            continue
        if (launch := program.launch(index, copier)) is not None:
            launches.append(launch)
            continue
        bounced = True
        for tile in np.unique(program.tile[piece.first : piece.last]).tolist():
            ends = program.tiles[tile].ends
            needed |= kinds_between(ends.source, ends.target)
    rehearse(copier, needed | kinds(launches))
    if bounced:
        copier.provide_bounce()
