"""M2M map + shape -> chunks: the rows of one rank in one class of equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etha.plan import dtypes
from etha.plan.blocks import Block, Pieces
from etha.plan.m2m import M2M, Assignment, always_even, assign
from etha.plan.program import MOVE, Region, Slot, Template
from etha.plan.reduction import Reduction

Ints = npt.NDArray[np.int64]


class TensorClass:
    """All tensors of one shape, dtypes and layouts: planned once, used by each of them."""

    def __init__(
        self, shape: tuple[int, ...], source: torch.dtype, target: torch.dtype, m2m: M2M, reduction: Reduction | None
    ) -> None:
        self.shape = shape
        self.m2m = m2m
        self.wire = dtypes.wire_dtype(source, target)
        self.itemsize = dtypes.itemsize(self.wire)
        self.reduction = reduction
        self.members = 0
        origin = m2m.source if reduction is None else (reduction.slots,)
        self.blocks = tuple(Block.of(shape, origin, t) for t in m2m.target)
        self.period = self._period()

    def _period(self) -> int:
        """After how many tensors the rotation among replicas comes round; 1 where it is even at once."""
        if self.reduction is not None:
            return self.reduction.period
        most = self.m2m.replicas
        if most == 1 or self._even():
            return 1
        if not self.m2m.topology.one_agent:
            return most
        step = 0
        for block in self.blocks:
            here = block.target.ranks.shape[2]
            for o in block.overlays:
                here *= int(np.gcd.reduce(o.degrees)) if len(o.degrees) else 1
            step = int(np.gcd(step, here))
        return most // int(np.gcd(most, step)) if step else 1

    def _even(self) -> bool:
        """Whether all of it comes from afar and each tensor alone loads the replicas of a cell alike."""
        source = self.m2m.source
        if not self.m2m.topology.apart or len(source) > 1 or (source[0].count != self.m2m.replicas).any():
            return False
        for block in self.blocks:
            small = [int(o.size.min(initial=0)) for o in block.overlays]
            nbytes = int(np.prod(small, dtype=np.int64)) * self.itemsize
            copies = block.target.ranks.shape[2]
            if (block.target.count != copies).any() or not always_even(self.m2m.replicas, copies, nbytes, small):
                return False
        return True

    @property
    def turns(self) -> int:
        return max(1, min(self.period, self.members))

    def template(self, side: str, rank: int) -> Template | None:
        """The rows of ``rank``, or None when it has nothing to do with this class."""
        if self.reduction is not None:
            return self.reduction.template(self.blocks, side, rank, self.turns, self.itemsize)
        parts = []
        for block in self.blocks:
            if side == "target":
                where = block.target.find(rank)
                if where is not None:
                    parts.append(self._rows(block, block.of_target(where[0]), rank, where[2]))
            else:
                for grid, holding in enumerate(self.m2m.source):
                    where = holding.find(rank)
                    if where is not None:
                        parts.append(self._rows(block, block.of_source(grid, where[0]), rank, None))
        return merge_rows(parts, self.turns) if parts else None

    def _rows(self, block: Block, pieces: Pieces, rank: int, copy: int | None) -> Rows:
        ranks, grids, count = self.m2m.sources(pieces.cells)
        holders = block.target.ranks[:, 0, :]
        found = assign(
            ranks,
            count,
            holders,
            pieces.copies,
            block.target.count[pieces.copies],
            pieces.ordinal,
            pieces.degree,
            pieces.extents,
            pieces.size * self.itemsize,
            self.turns,
            self.m2m.topology,
            copy,
        )
        if copy is not None:
            copies = holders[pieces.copies, copy][:, None]
            picked = np.nonzero(found.valid)
        else:
            sender = ranks[np.arange(len(ranks))[None, :, None, None], found.column]
            picked = np.nonzero(found.valid & (sender == rank))
            copies = holders[pieces.copies]
        return self._columns(block, pieces, found, ranks, grids, copies, picked)

    def _columns(
        self,
        block: Block,
        pieces: Pieces,
        found: Assignment,
        ranks: Ints,
        grids: Ints,
        copies: Ints,
        picked: tuple[Ints, ...],
    ) -> Rows:
        w, m, s, q = picked
        column = found.column[picked]
        grid = grids[m, column]
        parts, dim = found.parts, found.dim
        sizes, cut = pieces.size[m], np.zeros_like(m)
        if parts.max(initial=1) > 1:
            cut = np.where(found.whole[m, q], 0, s + 1)
            extent = pieces.extents[m, dim[m]]
            share = extent * (s + 1) // parts[m] - extent * s // parts[m]
            sizes = np.where(cut > 0, sizes // np.maximum(extent, 1) * share, sizes)
        cuts, wide = int(parts.max(initial=1)) + 1, len(block.source_cells)

        def make_region(key: int) -> Region:
            rest, g = divmod(key, wide)
            piece, part = divmod(rest, cuts)
            if part == 0:
                return block.region(pieces, piece, g, None)
            d, k = int(dim[piece]), int(parts[piece])
            extent = int(pieces.extents[piece, d])
            return block.region(pieces, piece, g, (d, extent * (part - 1) // k, extent * part // k))

        return Rows(
            turn=w,
            source=ranks[m, column],
            target=copies[m, q],
            region=(m * cuts + cut) * wide + grid,
            nbytes=sizes * self.itemsize,
            regions=len(pieces.size) * cuts * wide,
            make_region=make_region,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """MOVE rows of one rank in one block."""

    turn: Ints
    source: Ints
    target: Ints
    region: Ints
    nbytes: Ints
    regions: int
    make_region: Callable[[int], Region]


def _no_slot(_slot: int, _tensor: int) -> Slot:
    raise IndexError("a plan of moves has no reduction slots")


def merge_rows(parts: Sequence[Rows], turns: int) -> Template:
    """Blocks one after the other within each turn."""
    base = np.cumsum([0, *(p.regions for p in parts)])
    turn = np.concatenate([p.turn for p in parts])
    order = np.argsort(turn, kind="stable") if len(parts) > 1 else slice(None)

    def column(name: str) -> Ints:
        return np.concatenate([getattr(p, name) for p in parts])[order]

    def make_region(key: int) -> Region:
        which = int(np.searchsorted(base, key, "right")) - 1
        return parts[which].make_region(key - int(base[which]))

    region = np.concatenate([p.region + b for p, b in zip(parts, base, strict=False)])[order]
    zero = np.zeros(len(turn), dtype=np.int64)
    return Template(
        kind=zero + MOVE,
        phase=zero,
        source=column("source"),
        target=column("target"),
        slot=zero - 1,
        index=zero - 1,
        region=region,
        nbytes=column("nbytes"),
        depends=zero - 1,
        rows=np.append(0, np.cumsum(np.bincount(turn, minlength=turns))).astype(np.int64),
        slots=np.zeros(turns + 1, dtype=np.int64),
        slot_owner=np.zeros(0, dtype=np.int64),
        regions=int(base[-1]),
        make_region=make_region,
        make_slot=_no_slot,
    )
