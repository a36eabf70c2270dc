"""Copies as descriptor tables for fused kernels (etha/cuda/kernels.py), built by numpy for all tiles at once.

After neighbours of the same two tensors are joined, ranges that are contiguous at both ends are left to
``driver.copy`` if they are few or long. Neighbours of different tensors are not joined: CUDA refuses a copy that runs
from one allocation into the next, even where their addresses touch. Rows that copy bits use the widest unit that their
addresses, steps and runs allow, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from etha.cuda.kernels import (
    COLUMNS,
    COUNTS,
    DEPTH,
    RANK,
    RUN,
    SOURCE,
    SOURCE_STEPS,
    TARGET,
    TARGET_STEPS,
    TOTAL,
    UNITS,
    WIDTH,
)
from etha.memory.reach import ReachError
from etha.transport.geometry import boxes
from etha.transport.geometry.boxes import Axes, BoxAxis, Ints, Placed
from etha.transport.geometry.tiles import Tile

#: What an implementation has a kernel of its own for: source and target dtype (None if bits are copied), log2 of a
#: unit's bytes, and whether there are strides.
Kind = tuple[torch.dtype | None, torch.dtype | None, int, bool]

#: A contiguous range of LONG bytes or more gets a copy of its own; any does where there are no more than FEW and so no
#: kernel is launched. On an H200 it takes 12 us to queue a copy and 70 to launch a kernel, and a kernel moves 1.5 TB/s
#: of long ranges where copies move 1.8.
LONG, FEW = 64 << 20, 4
#: Most bytes of one descriptor (units, if bytes are copied one by one), because its numbers are 32 bits wide in the
#: kernel.
_MOST = 1 << 28
_WIDEST = 16

#: Source and target dtype of a class of rows; None and None if bits are copied.
Dtypes = tuple[torch.dtype | None, torch.dtype | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Descriptors of one dtype class, and the pieces into which they are cut."""

    dtypes: Dtypes
    rows: Ints
    pieces: Ints


class Tables(NamedTuple):
    """All copies of one batch: rows (target, source, bytes) for ``driver.copy``, and a table for each dtype class."""

    copies: Ints
    tables: tuple[Table, ...]


class _Form(NamedTuple):
    """A descriptor without its addresses.

    ``run`` is in bytes, or in elements for a cast. ``axes`` are the outer axes, innermost first, with steps in bytes.
    ``unit`` is the largest power of two, at most 16, that divides all of them.
    """

    dtypes: Dtypes
    run: int
    axes: tuple[tuple[int, int, int], ...]
    unit: int


#: Descriptors of one tile: form, and byte offsets at both ends.
_Rows = tuple[tuple[_Form, int, int], ...]


def build(tiles: Sequence[Tile], tile: Ints, source: Ints, target: Ints, pair: Ints) -> Tables:
    """Tables of the copies ``tiles[tile[i]]`` from address ``source[i]`` to address ``target[i]``.

    Copies of equal ``pair[i]`` lie in one allocation at either end.
    ReachError if a tensor that is to be cast does not begin at a multiple of its dtype's size.
    """
    forms: dict[_Form, int] = {}
    first: list[int] = []
    form: list[int] = []
    source_at: list[int] = []
    target_at: list[int] = []
    for one in tiles:
        first.append(len(form))
        for found, here, there in _rows(one.axes, one.ends.source, one.ends.target):
            form.append(forms.setdefault(found, len(forms)))
            source_at.append(here)
            target_at.append(there)
    starts = np.array([*first, len(form)], np.int64)
    counts = np.diff(starts)[tile]
    if len(form) == len(tiles):
        entry = tile
    else:
        ends = np.cumsum(counts)
        entry = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts[tile] - ends + counts, counts)
        source, target, pair = np.repeat(source, counts), np.repeat(target, counts), np.repeat(pair, counts)
    source = source + np.array(source_at, np.int64)[entry]
    target = target + np.array(target_at, np.int64)[entry]
    return _tables(tuple(forms), np.array(form, np.int64)[entry], source, target, pair)


@lru_cache(maxsize=1 << 16)
def _rows(axes: Axes, source: torch.dtype, target: torch.dtype) -> _Rows:
    here, there = int(source.itemsize), int(target.itemsize)
    casts = source is not target
    ordered = boxes.ordered(tuple(a for a in axes if a.steps > 1), "target")
    flat = not ordered or (len(ordered) == 1 and ordered[0].source == ordered[0].target == 1)
    if flat and not casts:
        nbytes = boxes.numel(ordered) * here
        return ((_Form((None, None), nbytes, (), min(_WIDEST, nbytes & -nbytes)), 0, 0),)
    found: list[tuple[_Form, int, int]] = []
    for cut, at, to in boxes.cut(Placed(ordered, 0, 0), _MOST // max(here, there)):
        run, outer = _split(cut)
        long = not casts and run * here >= LONG
        at, to = at * here, to * there
        while len(outer) > (0 if long else DEPTH):
            axis = outer.pop(min(range(len(outer)), key=lambda i: outer[i].steps))
            by = np.arange(axis.steps, dtype=np.int64)
            at = (at[:, None] + by * (axis.source * here)).reshape(-1)
            to = (to[:, None] + by * (axis.target * there)).reshape(-1)
        steps = tuple((a.steps, a.source * here, a.target * there) for a in reversed(outer))
        if casts:
            form = _Form((source, target), run, steps, 1)
        else:
            bits = _WIDEST | run * here
            for _, s, t in steps:
                bits |= s | t
            form = _Form((None, None), run * here, steps, bits & -bits)
        found += [(form, a, b) for a, b in zip(at.tolist(), to.tolist(), strict=True)]
    return tuple(found)


def _split(axes: Axes) -> tuple[int, list[BoxAxis]]:
    """(elements contiguous at both ends, the other axes)."""
    outer, run = list(axes), 1
    while outer and outer[-1].source == run and outer[-1].target == run:
        run *= outer.pop().steps
    return run, outer


def _tables(forms: Sequence[_Form], form: Ints, source: Ints, target: Ints, pair: Ints) -> Tables:
    flat = np.array([not f.axes and f.dtypes[0] is None for f in forms], bool)[form]
    runs = np.array([f.run for f in forms], np.int64)
    joined = _joined(source[flat], target[flat], runs[form[flat]], pair[flat])
    long = joined[:, 2] >= (0 if len(joined) <= FEW and flat.all() else LONG)
    short = joined[~long]
    template = np.array([_template(f) for f in forms], np.int64).reshape(len(forms), COLUMNS)
    classes: dict[Dtypes, int] = {}
    number = np.array([classes.setdefault(f.dtypes, len(classes)) for f in forms], np.int64)
    tables = []
    for dtypes, i in classes.items():
        chosen = ~flat & (number[form] == i)
        rows = template[form[chosen]]
        rows[:, SOURCE], rows[:, TARGET] = source[chosen], target[chosen]
        if dtypes[0] is None:
            more = np.zeros((len(short), COLUMNS), np.int64)
            more[:, (TARGET, SOURCE, TOTAL)] = short
            more[:, RUN], more[:, WIDTH] = more[:, TOTAL], _WIDEST | more[:, TOTAL]
            rows = np.concatenate((rows, more))
            _widen(rows)
        elif dtypes[1] is not None:
            _aligned(rows, dtypes[0], dtypes[1])
        if len(rows):
            tables.append(Table(dtypes=dtypes, rows=rows, pieces=_pieces(rows[:, TOTAL])))
    return Tables(joined[long], tuple(tables))


def _template(form: _Form) -> list[int]:
    """A row without addresses. For rows that copy bits, the unit is still a byte, and WIDTH is a multiple of the final
    unit."""
    row = [0] * COLUMNS
    row[RUN], row[RANK], row[WIDTH] = form.run, len(form.axes), 0 if form.dtypes[0] is not None else form.unit
    row[TOTAL] = form.run * prod(a[0] for a in form.axes)
    for i, axis in enumerate(form.axes):
        row[COUNTS + i], row[SOURCE_STEPS + i], row[TARGET_STEPS + i] = axis
    return row


def _widen(rows: Ints) -> None:
    bits = rows[:, SOURCE] | rows[:, TARGET] | rows[:, WIDTH]
    unit = bits & -bits
    rows[:, TOTAL] //= unit
    rows[:, RUN] //= unit
    rows[:, WIDTH] = np.log2(unit).astype(np.int64)


def _aligned(rows: Ints, source: torch.dtype, target: torch.dtype) -> None:
    for column, dtype in ((SOURCE, source), (TARGET, target)):
        odd = rows[:, column] % int(dtype.itemsize) != 0
        if odd.any():
            address = int(rows[odd, column][0])
            raise ReachError(
                f"a tensor of {dtype} at {address:#x} is not aligned to its {dtype.itemsize} bytes, so a device "
                "cannot cast it: register one that is"
            )


def _pieces(total: Ints) -> Ints:
    counts = -(-total // UNITS)
    ends = np.cumsum(counts)
    pieces: Ints = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - counts, counts)
    pieces |= np.repeat(np.arange(len(total), dtype=np.int64) << 32, counts)
    return pieces


def _joined(source: Ints, target: Ints, nbytes: Ints, pair: Ints) -> Ints:
    """Rows of (target, source, bytes); rows of one pair that touch at both ends are joined."""
    order = np.argsort(target, kind="stable")
    rows = np.stack((target[order], source[order], nbytes[order]), axis=1)
    if len(rows) < 2:
        return rows
    pair = pair[order]
    ends = rows[:-1, :2] + rows[:-1, 2:]
    starts = np.flatnonzero(np.append(True, (rows[1:, :2] != ends).any(axis=1) | (pair[1:] != pair[:-1])))
    joined = rows[starts]
    joined[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return joined
