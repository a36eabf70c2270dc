"""Find source and target memory that overlaps, because such reads must come before the first write.

The ranks of two sides may be one process, and both may register one tensor. Only addresses are known, so two tensors
are taken to overlap if their byte ranges in one address space do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable

import numpy as np

from etha.memory.views import View
from etha.plan.planner.rank_plan import Region
from etha.transport.geometry.boxes import Ints


class Written:
    """The byte ranges that the targets of a program span, per space."""

    def __init__(self, targets: Iterable[View]) -> None:
        ranges: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for view in targets:
            if view.nbytes:
                ranges[view.space].append((view.place, view.place + view.nbytes))
        self._merged: dict[Hashable, tuple[list[int], list[int]]] = {}
        for space, found in ranges.items():
            starts: list[int] = []
            stops: list[int] = []
            for start, stop in sorted(found):
                if stops and start <= stops[-1]:
                    stops[-1] = max(stops[-1], stop)
                else:
                    starts.append(start)
                    stops.append(stop)
            self._merged[space] = (starts, stops)

    def overlaps(self, view: View) -> bool:
        """Whether any byte between the first and the last one of ``view`` may be written."""
        merged = self._merged.get(view.space)
        if merged is None or not view.nbytes:
            return False
        starts, stops = merged
        i = bisect_left(starts, view.place + view.nbytes) - 1
        return i >= 0 and stops[i] > view.place


def same_place(region: Region, here: View, there: View) -> bool:
    """Whether each element of the region already lies at its target, so that the copy would be onto itself."""
    return (
        here.space == there.space
        and here.place == there.place
        and here.strides == there.strides
        and here.dtype is there.dtype
        and all(np.array_equal(runs[:, 0], runs[:, 1]) for runs in region.dims)
    )


def packed(region: Region) -> tuple[list[Ints], list[Ints]]:
    """(source -> packed, packed -> target): copy the region through a dense buffer of its shape."""
    into, out = [], []
    for runs in region.dims:
        at = np.cumsum(runs[:, 2]) - runs[:, 2]
        into.append(np.stack([runs[:, 0], at, runs[:, 2]], axis=1))
        out.append(np.stack([at, runs[:, 1], runs[:, 2]], axis=1))
    return into, out
