"""Geometry of copies: describe a region over two strided tensors by few boxes, and cut boxes to a size.

A **box** is a strided copy: axes of (count, source stride, target stride) in elements, outermost first. A **run** is a
contiguous range at one end. Results are cached per class of equal chunks, so the cost is per class and per piece, never
per run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class BoxAxis(NamedTuple):
    """An axis of a box: ``steps`` steps of ``source`` and ``target`` elements each."""

    steps: int
    source: int
    target: int


Axes = tuple[BoxAxis, ...]


class Placed(NamedTuple):
    """A box and its start: offsets in elements from the first elements of the two tensors."""

    axes: Axes
    source: int
    target: int


def boxes(dims: Sequence[Ints], source_strides: Sequence[int], target_strides: Sequence[int]) -> list[Placed]:
    """The boxes of a product of runs (source offset, target offset, length) per dim. No axis has only one step.

    Equal runs at equal distances, as strided shards have them, form one group, so that there is usually one box.
    """
    per_dim: list[list[tuple[tuple[BoxAxis, ...], int, int]]] = []
    for runs, s, t in zip(dims, source_strides, target_strides, strict=True):
        groups = []
        for first, count, step in _groups(runs):
            s0, t0, length = first
            axes = (BoxAxis(count, step[0] * s, step[1] * t), BoxAxis(length, s, t))
            groups.append((tuple(a for a in axes if a.steps > 1), s0 * s, t0 * t))
        per_dim.append(groups)
    return [
        Placed(
            tuple(axis for part in product for axis in part[0]),
            sum(part[1] for part in product),
            sum(part[2] for part in product),
        )
        for product in itertools.product(*per_dim)
    ]


def _groups(runs: Ints) -> list[tuple[list[int], int, tuple[int, int]]]:
    """Group runs into arithmetic progressions: (first run, count, (source step, target step)). Skips empty runs."""
    rows = runs[runs[:, 2] > 0].tolist()
    found: list[tuple[list[int], int, tuple[int, int]]] = []
    i = 0
    while i < len(rows):
        first = rows[i]
        j, step = i + 1, (0, 0)
        if j < len(rows) and rows[j][2] == first[2]:
            step = (rows[j][0] - first[0], rows[j][1] - first[1])
            while (
                j < len(rows)
                and rows[j][2] == first[2]
                and (rows[j][0] - rows[j - 1][0], rows[j][1] - rows[j - 1][1]) == step
            ):
                j += 1
        found.append((first, j - i, step))
        i = j
    return found


def ordered(axes: Axes, by: str) -> Axes:
    """Sort the axes by their steps at one end ("source" or "target"), largest outermost, and merge neighbours where
    both ends allow it. This makes the innermost axis as long as possible."""
    if by == "source":
        axes = tuple(sorted(axes, key=lambda a: (-a.source, -a.target)))
    else:
        axes = tuple(sorted(axes, key=lambda a: (-a.target, -a.source)))
    merged: list[BoxAxis] = []
    for axis in axes:
        if merged:
            outer = merged[-1]
            if outer.source == axis.source * axis.steps and outer.target == axis.target * axis.steps:
                merged[-1] = BoxAxis(outer.steps * axis.steps, axis.source, axis.target)
                continue
        merged.append(axis)
    return tuple(merged)


def numel(axes: Axes) -> int:
    """Number of elements that a box writes."""
    n = 1
    for axis in axes:
        n *= axis.steps
    return n


def span(axes: Axes, end: int) -> int:
    """Elements from the first to one past the last at one end (1: source, 2: target)."""
    return 1 + sum((a.steps - 1) * a[end] for a in axes)


def cut(placed: Placed, limit: int, *, spanning: bool = False) -> list[tuple[Axes, Ints, Ints]]:
    """Cut a box into tiles of at most ``limit`` elements; with ``spanning``, of at most that source span, too.

    Returns (axes, source offsets, target offsets): all tiles of one shape together, in the box's order. A tile has at
    least one element.
    """
    axes = placed.axes
    size = (lambda a: span(a, 1)) if spanning else numel
    inner = len(axes)
    while inner > 0 and size(axes[inner - 1 :]) <= limit and numel(axes[inner - 1 :]) <= limit:
        inner -= 1
    if inner == 0:
        return [(axes, np.array([placed.source], np.int64), np.array([placed.target], np.int64))]
    # Axes before ``inner - 1`` are walked step by step, that axis is cut into chunks, and those after it stay whole.
    chunked, rest = axes[inner - 1], axes[inner:]
    most = max(1, limit // numel(rest))
    if spanning and chunked.source:
        most = max(1, min(most, (limit - span(rest, 1)) // chunked.source + 1))
    chunks = -(-chunked.steps // most)
    even = -(-chunked.steps // chunks)
    starts = np.arange(0, chunked.steps, even, dtype=np.int64)
    source, target = np.array([placed.source], np.int64), np.array([placed.target], np.int64)
    for axis in axes[: inner - 1]:
        steps = np.arange(axis.steps, dtype=np.int64)
        source = (source[:, None] + steps * axis.source).reshape(-1)
        target = (target[:, None] + steps * axis.target).reshape(-1)
    tiles = []
    whole = starts[starts + even <= chunked.steps]
    tail = starts[starts + even > chunked.steps]
    for begin, count in ((whole, even), (tail, int(chunked.steps - tail[0]) if len(tail) else 0)):
        if len(begin):
            shape = ((BoxAxis(count, chunked.source, chunked.target),) if count > 1 else ()) + rest
            tiles.append(
                (
                    shape,
                    (source[:, None] + begin * chunked.source).reshape(-1),
                    (target[:, None] + begin * chunked.target).reshape(-1),
                )
            )
    return tiles


class Runs(NamedTuple):
    """The runs at one end of a box, in the box's order: the offset of each in elements, and their common length."""

    offsets: Ints
    length: int


@lru_cache(maxsize=256)
def runs(axes: Axes, end: int, *, distinct: bool = False) -> Runs:
    """Runs at one end (1: source, 2: target). ``distinct`` leaves out axes of step 0, which would read the same data
    again."""
    steps = [(a.steps, a[end]) for a in axes if not (distinct and a[end] == 0)]
    length = 1
    while steps and steps[-1][1] == length:
        length *= steps.pop()[0]
    offsets = np.zeros(1, np.int64)
    for count, step in steps:
        offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    offsets.setflags(write=False)
    return Runs(offsets, length)


@lru_cache(maxsize=256)
def common_runs(axes: Axes) -> tuple[Ints, Ints, int]:
    """What is contiguous at both ends at once: (source offsets, target offsets, common length)."""
    steps = list(axes)
    length = 1
    while steps and steps[-1].source == length and steps[-1].target == length:
        length *= steps.pop().steps
    source = target = np.zeros(1, np.int64)
    for axis in steps:
        by = np.arange(axis.steps, dtype=np.int64)
        source = (source[:, None] + by * axis.source).reshape(-1)
        target = (target[:, None] + by * axis.target).reshape(-1)
    return source, target, length


def run_shape(axes: Axes, end: int, *, distinct: bool = False) -> tuple[int, int]:
    """(number of runs, their length) as ``runs`` would return them, without listing them."""
    steps = [(a.steps, a[end]) for a in axes if not (distinct and a[end] == 0)]
    length, number = 1, 1
    while steps and steps[-1][1] == length:
        length *= steps.pop()[0]
    for count, _ in steps:
        number *= count
    return number, length


def dense(axes: Axes, end: int, *, distinct: bool = False) -> tuple[int, ...]:
    """Strides of the same box packed in the order in which ``runs`` lists that end."""
    strides, at = [], 1
    for axis in reversed(axes):
        if distinct and axis[end] == 0:
            strides.append(0)
        else:
            strides.append(at)
            at *= axis.steps
    return tuple(reversed(strides))
