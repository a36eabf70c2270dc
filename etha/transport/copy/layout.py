"""Regions between views as tiles. Each class of equal chunks is computed once.

A row of a plan then costs a look-up, because its class already has its tiles as numbers and offsets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from etha.memory.views import View
from etha.plan.planner.rank_plan import Region
from etha.transport.copy.program import Columns
from etha.transport.geometry import boxes
from etha.transport.geometry.boxes import Ints
from etha.transport.geometry.tiles import Ends, Tile, tiles

#: (tile, its number, source offsets, target offsets): one entry per shape of tile.
Tiles = list[tuple[Tile, int, Ints, Ints]]


_NOWHERE = "scratch"


def scratch(shape: tuple[int, ...], dtype: torch.dtype) -> View:
    """A view that stands for a dense buffer which exists only while a piece runs."""
    strides, at = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        strides[d] = at
        at *= shape[d]
    return View(
        shape=shape,
        strides=tuple(strides),
        dtype=dtype,
        address=0,
        space=_NOWHERE,
        place=0,
        nbytes=at * dtype.itemsize,
    )


class TileCache:
    """Tiles of regions, cached, numbered as in one program's columns."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._found: dict[Hashable, Tiles] = {}
        self._regions: list[Region] = []  # keeps them alive, because their ids are in keys

    def region(self, region: Region, here: View, there: View, joint: bool = False) -> Tiles:
        """Tiles of a region from ``here`` to ``there``. ValueError if it lies outside of either."""
        key = (id(region), joint, *_key(here), *_key(there))
        found = self._found.get(key)
        if found is None:
            self._regions.append(region)
            check(region.dims, here, 0)
            check(region.dims, there, 1)
            found = self._found[key] = self.dims(region.dims, here, there, joint)
        return found

    def dims(self, dims: Sequence[Ints], here: View, there: View, joint: bool = False) -> Tiles:
        """Tiles of a product of runs, which the caller has checked against both shapes."""
        if any(not runs[:, 2].any() for runs in dims):
            return []
        ends = Ends(
            source=here.dtype,
            target=there.dtype,
            source_private=here.private,
            target_private=there.private,
            joint=joint,
            device=_on_device(here, there),
            bounced=_on_device(here, there) and (_plain(here) or _plain(there)),
        )
        return [
            (tile, self._columns.number(tile), source, target)
            for tile, source, target in tiles(boxes.boxes(dims, here.strides, there.strides), ends)
        ]

    def block(self, dims: Sequence[Ints], here: View, there: View) -> tuple[Tiles, int, int]:
        """(tiles, source offset, target offset to add): like ``dims``, but a single block is cached regardless of where
        it lies."""
        if any(len(runs) != 1 for runs in dims):
            return self.dims(dims, here, there), 0, 0
        source = sum(int(runs[0, 0]) * s for runs, s in zip(dims, here.strides, strict=True))
        target = sum(int(runs[0, 1]) * s for runs, s in zip(dims, there.strides, strict=True))
        lengths = tuple(int(runs[0, 2]) for runs in dims)
        kinds = (
            here.dtype,
            here.private,
            _plain(here),
            there.dtype,
            there.private,
            _plain(there),
            _on_device(here, there),
        )
        key = ("block", lengths, here.strides, there.strides, kinds)
        found = self._found.get(key)
        if found is None:
            at_zero = [runs * (0, 0, 1) for runs in dims]
            found = self._found[key] = self.dims(at_zero, here, there)
        return found, source, target


def check(dims: Sequence[Ints], view: View, end: int) -> None:
    """Raise ValueError unless the runs of one end (0: source, 1: target) lie inside the view's shape."""
    for runs, size in zip(dims, view.shape, strict=True):
        if len(runs) and (runs[:, end].min() < 0 or (runs[:, end] + runs[:, 2]).max() > size):
            raise ValueError(f"a chunk reaches outside the registered shape {view.shape}: {runs.tolist()[:4]}")


def _key(view: View) -> tuple[Hashable, ...]:
    return view.shape, view.strides, view.dtype, view.private, view.device is not None, _plain(view)


def _on_device(here: View, there: View) -> bool:
    return here.device is not None or there.device is not None


def _plain(view: View) -> bool:
    """Whether no device reaches the view. The stand-in for a buffer does not count, because it will lie where that
    buffer lies."""
    return not view.reachable and view.space != _NOWHERE
