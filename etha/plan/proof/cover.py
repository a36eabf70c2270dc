"""Two questions about runs that the proof asks: do regions tile a tensor, do runs keep their elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from etha.plan.planner.rank_plan import Region

Ints = npt.NDArray[np.int64]


def cover(shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[int, int]:
    """(elements written by no region, elements written more than once) at the regions' target offsets.

    Counted on the grid of all run bounds; its size depends on the runs, never on the tensor. Elements
    outside the shape count as written twice: they belong to somebody else.
    """
    if not shape:
        return max(0, 1 - len(regions)), int(len(regions) > 1)
    bounds = [
        np.unique(
            np.concatenate(
                [[0, n], *((r.dims[d][:, 1], r.dims[d][:, 1] + r.dims[d][:, 2]) for r in regions)], axis=None
            )
        )
        for d, n in enumerate(shape)
    ]
    count = np.zeros([len(b) - 1 for b in bounds], dtype=np.int32)
    for region in regions:
        per_dim = []
        for runs, b in zip(region.dims, bounds, strict=True):
            first = np.searchsorted(b, runs[:, 1])
            last = np.searchsorted(b, runs[:, 1] + runs[:, 2])
            inside = np.zeros(len(b) - 1, dtype=np.int32)
            for lo, hi in zip(first.tolist(), last.tolist(), strict=True):
                inside[lo:hi] += 1
            per_dim.append(inside)
        box = per_dim[0]
        for inside in per_dim[1:]:
            box = box[..., None] * inside
        count += box
    expected = np.ones((1,) * len(shape), dtype=np.int32)
    for d, (b, n) in enumerate(zip(bounds, shape, strict=True)):
        real = ((b[:-1] >= 0) & (b[1:] <= n)).astype(np.int32)
        expected = expected * real.reshape([-1 if i == d else 1 for i in range(len(shape))])
    if np.array_equal(count, expected):
        return 0, 0
    sizes = [np.diff(b) for b in bounds]
    volume = sizes[0].astype(np.float64)
    for size in sizes[1:]:
        volume = volume[..., None] * size
    return int(volume[count < expected].sum()), int(volume[count > expected].sum())


class Covers:
    """``cover``, once for equal regions of equal shapes: replicas ask the same."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[int, int]] = {}

    def of(self, shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[int, int]:
        """See ``cover``."""
        key = (shape, *sorted(tuple(runs[:, 1:].tobytes() for runs in region.dims) for region in regions))
        if key not in self._known:
            self._known[key] = cover(shape, regions)
        return self._known[key]


def same_elements(runs: Ints, here: tuple[Ints, Ints, int], there: tuple[Ints, Ints, int]) -> tuple[str, str] | None:
    """None where every run takes local elements ``here`` to the same global indices as ``there``, else (code, why).

    ``here`` and ``there`` are (local offsets, global starts, local size) of the two ends' runs. A run may
    cross several of them where both jump alike.
    """
    for end, code, (_, _, size) in ((0, "out_of_source", here), (1, "double_write", there)):
        lo, hi = int(runs[:, end].min(initial=0)), int((runs[:, end] + runs[:, 2]).max(initial=0))
        if lo < 0 or hi > size or (runs[:, 2] < 0).any():
            return code, f"elements {lo}..{hi} of a local dim of {size}"
    for source, target, length in runs.tolist():
        if not length:
            continue
        cuts = np.unique(np.concatenate([[0], _inside(here[0], source, length), _inside(there[0], target, length)]))
        a, b = _globals(here, source + cuts), _globals(there, target + cuts)
        if not np.array_equal(a, b):
            at = int(np.flatnonzero(a != b)[0])
            return "out_of_source", f"reads global index {int(a[at])} for {int(b[at])}"
    return None


def within(given: Ints, got: Ints) -> bool:
    """Whether the runs ``given`` read (source offsets) only what the runs ``got`` have written (target offsets)."""
    have = got[np.argsort(got[:, 1], kind="stable")]
    begin, end = have[:, 1], have[:, 1] + have[:, 2]
    fresh = np.append(True, begin[1:] > end[:-1])[: len(begin)]
    first = np.flatnonzero(fresh)
    begin, end = begin[first], np.maximum.reduceat(end, first) if len(first) else end
    read = given[given[:, 2] > 0]
    at = np.searchsorted(begin, read[:, 0], "right") - 1
    if (at < 0).any():
        return False
    return bool((read[:, 0] + read[:, 2] <= end[at]).all())


def _inside(offsets: Ints, start: int, length: int) -> Ints:
    """Where the owner's runs begin inside [start, start + length), counted from start."""
    first, last = np.searchsorted(offsets, [start, start + length])
    return offsets[first:last] - start


def _globals(owned: tuple[Ints, Ints, int], local: Ints) -> Ints:
    offsets, starts, _ = owned
    at = np.searchsorted(offsets, local, "right") - 1
    return starts[at] + local - offsets[at]
