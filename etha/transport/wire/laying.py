"""Laying: pieces over views; which copies make one, and whether it is one segment of a mapped tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from etha.memory.views import View, view_of
from etha.plan import Plan
from etha.plan.planner.rank_plan import Region
from etha.transport.copy.layout import Geometry, check, scratch
from etha.transport.copy.program import Columns, Member
from etha.transport.geometry import boxes
from etha.transport.geometry.bounds import Bounds, clip
from etha.transport.geometry.boxes import Axis, Ints
from etha.transport.geometry.overlap import Written, packed
from etha.transport.geometry.tiles import Tile
from etha.transport.wire.crossings import ALIGN, Part
from etha.transport.wire.flows import EARLY, End, Piece, span_memory
from etha.transport.wire.routing import Ways

Views = Mapping[int, Mapping[int, View]]
#: A view, its steps, and the byte offset at which all of it is one segment there (None: it is not).
Laid = tuple[View | None, tuple[tuple[Tile, int, int], ...], int | None]
#: Smaller segments go through a chunk with their neighbours: a system call costs more than their copy.
STRAIGHT = 64 << 10


class Laying:
    """Lays the pieces of one program; ``early`` and ``staged`` are what it found source and target to share."""

    def __init__(self, plan: Plan, ways: Ways, sources: Views, targets: Views, straight: int = STRAIGHT) -> None:
        self.plan, self.ways = plan, ways
        self._views: dict[str, Views] = {"source": sources, "target": targets}
        self._geometry = Geometry(Columns())
        self._written = Written(v for views in targets.values() for v in views.values())
        self._laid: dict[object, tuple[tuple[tuple[Tile, int, int], ...], int | None]] = {}
        self._checked: set[tuple[int, int, tuple[int, ...]]] = set()
        self._kept: list[Region] = []  # their ids are in keys
        self._straight = straight
        self.early: list[tuple[End, View, tuple[Member, ...]]] = []
        self.staged = 0
        #: Whether any source lies where a target is written.
        self.shares = any(self._written.overlaps(v) for views in sources.values() for v in views.values())

    def end(
        self,
        side: str,
        rank: int,
        tensor: int,
        region: Region,
        bounds: Bounds,
        wire: torch.dtype,
        *,
        dense: bool,
        read: bool | None = None,
    ) -> Laid:
        """The part within ``bounds`` of a region, between a tensor and dense bytes.

        ``dense``: bounds count in the region packed; else in the slot at the region's other end. ``read``: from the
        tensor to the bytes; without it as the side says.
        """
        view = self.view(side, rank, tensor)
        end = 0 if (side == "source" if read is None else read) else 1
        self.check(region, view, end)
        key = (id(region), bounds, end, dense, wire, view.shape, view.strides, view.dtype, view.private)
        found = self._laid.get(key)
        if found is None:
            dims: Sequence[Ints] = region.dims
            if dense:
                dims = packed(region)[end]
            clipped = clip(dims, bounds, 1 - end)
            shape = tuple(last - first for first, last in bounds)
            if clipped is None or tuple(int(runs[:, 2].sum()) for runs in clipped) != shape:
                raise ValueError(f"{self.plan.names[tensor]!r}: a chunk does not fill its part of a slot")
            other = scratch(shape, wire)
            here, there = (view, other) if end == 0 else (other, view)
            found = self._laid[key] = (
                self.taken(clipped, here, there, 1 - end),
                self.segment(clipped, here, there, end),
            )
        return view, found[0], found[1]

    def taken(self, dims: Sequence[Ints], here: View, there: View, dense: int) -> tuple[tuple[Tile, int, int], ...]:
        """(tile, offset in the view, offset in the dense bytes); ``dense`` is which end (0, 1) the bytes are."""
        found, source, target = self._geometry.block(dims, here, there)
        steps: list[tuple[Tile, int, int]] = []
        for tile, _, at, to in found:
            for a, b in zip((at + source).tolist(), (to + target).tolist(), strict=True):
                steps.append((tile, b, a) if dense == 0 else (tile, a, b))
        return tuple(steps)

    def segment(self, dims: Sequence[Ints], here: View, there: View, end: int) -> int | None:
        """Offset in bytes at which all of it is one segment of the mapped view at ``end``, None where it is not."""
        view = there if end else here
        if view.private or here.dtype is not there.dtype:
            return None
        placed = boxes.boxes(dims, here.strides, there.strides)
        if len(placed) != 1:
            return None
        axes = boxes.ordered(placed[0].axes, "target")
        if axes and (len(axes) > 1 or axes[0] != Axis(axes[0].steps, 1, 1)):
            return None
        return (placed[0].target if end else placed[0].source) * view.dtype.itemsize

    def piece(
        self,
        stage: int,
        tensor: int,
        wire: torch.dtype,
        bounds: Bounds,
        owners: tuple[Member, ...],
        laid: Sequence[Laid],
        part: Part | None = None,
    ) -> Piece:
        """The piece between the dense bytes of ``bounds`` and these ends, staged early where memory is shared."""
        numel = prod(last - first for first, last in bounds)
        nbytes = numel * wire.itemsize
        if owners and owners[0][0] == "source" and self.aliased(laid[0][0]):
            laid, owners = [self.stage(laid[0], numel, wire, owners)], ()
        view, _, place = laid[0]
        straight, direct = None, False
        if len(laid) == 1 and place is not None and view is not None and nbytes >= self._straight:
            if view.device is None:
                straight = span_memory(view, view.address + place, nbytes)
            else:  # what is staged has no address yet
                direct = view.space != EARLY
        return Piece(
            stage=stage,
            tensor=tensor,
            nbytes=nbytes,
            dtype=wire,
            owners=owners,
            ends=tuple(End(v, steps) for v, steps, _ in laid),
            straight=straight,
            direct=direct,
            address=0 if view is None or place is None else view.address + place,
            part=part,
        )

    def aliased(self, view: View | None) -> bool:
        return view is not None and self._written.overlaps(view)

    def stage(self, laid: Laid, numel: int, dtype: torch.dtype, owners: tuple[Member, ...]) -> Laid:
        """Read before anything is written: somebody writes where this piece lies."""
        view, steps, _ = laid
        if view is not None and view.device is not None:
            stage = replace(
                scratch((numel,), dtype), address=self.staged, space=EARLY, place=self.staged, device=view.device
            )
            self.staged += -(-stage.nbytes // ALIGN) * ALIGN
        else:
            stage = view_of(torch.empty(numel, dtype=dtype))
            self.staged += stage.nbytes
        self.early.append((End(view, steps), stage, owners))
        whole = [np.array([[0, 0, numel]], np.int64)]
        return stage, self.taken(whole, stage, scratch((numel,), dtype), 1), 0

    def view(self, side: str, rank: int, tensor: int) -> View:
        """The view of a rank's tensor; ValueError where it was not given."""
        try:
            return self._views[side][rank][tensor]
        except KeyError:
            raise ValueError(f"{side} rank {rank} gave no memory for {self.plan.names[tensor]!r}") from None

    def check(self, region: Region, view: View, end: int) -> None:
        """ValueError unless a region lies inside a view; asked once."""
        key = (id(region), end, view.shape)
        if key not in self._checked:
            check(region.dims, view, end)
            self._checked.add(key)
            self._kept.append(region)
