"""Kernels launched once before they are needed, over scratch memory.

CUDA loads a kernel when it is first launched, and may wait for all work of the context to do so. Behind an NCCL kernel,
which waits for another host, that is too late: who would abort it may be the one who waits.
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
from etha.transport.copy.device_table import Table, Tables
from etha.transport.geometry.boxes import Ints

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier, Launch

#: What one implementation or another has a kernel of its own for: source and target dtype (None where bits travel),
#: log2 of a unit's bytes, and whether there are strides.
Kind = tuple[torch.dtype | None, torch.dtype | None, int, bool]

_HALF = 2048
_WIDTHS = range(5)


def kinds(launches: Iterable[Launch]) -> set[Kind]:
    """What these launch, and may launch for plain host memory."""
    found: set[Kind] = set()
    bounced: set[tuple[torch.dtype, torch.dtype]] = set()
    for launch in launches:
        found.update(kind for fused in launch.fused for kind in _of(fused))
        bounced |= {(op.tile.ends.source, op.tile.ends.target) for op in launch.bounced}
    return found.union(*(kinds_between(source, target) for source, target in bounced))


def kinds_between(source: torch.dtype, target: torch.dtype) -> set[Kind]:
    """What any copy between these dtypes may launch."""
    if source is not target:
        return {(source, target, 0, strided) for strided in (False, True)}
    return {(None, None, width, strided) for width, strided in product(_WIDTHS, (False, True))}


def rehearse(copier: Copier, some: set[Kind]) -> None:
    """Launch each kind once on the copier's stream, and wait; what it has rehearsed before is left out."""
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
