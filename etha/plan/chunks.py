"""M2M map + shape -> chunks: the rows of one rank in one class of equal tensors.

A piece is the overlap of a source cell and a target cell, a product of one pair per dim. A rank's
pieces are the product of its own cell's pairs; nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etha.plan import cells, dtypes
from etha.plan.cells import Overlay
from etha.plan.m2m import M2M, Assignment, Holding, assign
from etha.plan.program import MOVE, Region, Slot, Template
from etha.plan.reduction import Reduction

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """M pieces of one block in canonical order: (target cell, source cell)."""

    pairs: tuple[Ints, ...]  # per dim (M,): index of the pair in the dim's overlay
    cells: tuple[Ints, ...]  # per source grid (M,): flat cell
    copies: Ints  # (M,): flat cell of the target grid
    ordinal: Ints
    degree: Ints
    extents: Ints  # (M, d)
    size: Ints  # (M,) elements


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One target grid of a class laid over its source grids."""

    overlays: tuple[Overlay, ...]
    parts: tuple[tuple[Ints, ...], ...]  # per dim, per source grid: its cell of a joint cell
    joint_cells: tuple[int, ...]
    source_cells: tuple[tuple[int, ...], ...]  # per source grid: cells of each dim
    target_cells: tuple[int, ...]
    target: Holding

    @classmethod
    def of(cls, shape: tuple[int, ...], source: Sequence[Holding], target: Holding) -> Block:
        """Overlay the cuts of every dim of ``shape``."""
        grids = [tuple(h.splits[d] for h in source) for d in range(len(shape))]
        joints = [cells.joint(n, g) for n, g in zip(shape, grids, strict=True)]
        return cls(
            overlays=tuple(cells.overlay(n, g, t) for n, g, t in zip(shape, grids, target.splits, strict=True)),
            parts=tuple(j.part for j in joints),
            joint_cells=tuple(max(j.cells, 1) for j in joints),
            source_cells=tuple(h.cells for h in source),
            target_cells=target.cells,
            target=target,
        )

    def of_target(self, cell: int) -> Pieces:
        """All pieces of a target cell."""
        place = np.unravel_index(cell, self.target_cells) if self.target_cells else ()
        return self.over(
            [np.arange(o.by_target[c], o.by_target[c + 1]) for o, c in zip(self.overlays, place, strict=True)]
        )

    def of_source(self, grid: int, cell: int) -> Pieces:
        """All pieces of a cell of one source grid."""
        sizes = self.source_cells[grid]
        ranges = []
        for o, c in zip(self.overlays, np.unravel_index(cell, sizes) if sizes else (), strict=True):
            order, ptr = o.by_source[grid]
            ranges.append(order[ptr[c] : ptr[c + 1]])
        return self.over(ranges)

    def over(self, ranges: list[Ints]) -> Pieces:
        """The product of some pairs of each dim."""
        count = int(np.prod([len(r) for r in ranges], dtype=np.int64))
        mesh = np.meshgrid(*ranges, indexing="ij") if ranges else []
        pairs = [m.reshape(-1) for m in mesh]
        zero = np.zeros(count, dtype=np.int64)
        if len(self.source_cells) > 1 and count > 1:
            copies, joint = zero, zero
            for d, (p, o) in enumerate(zip(pairs, self.overlays, strict=True)):
                copies = copies * self.target_cells[d] + o.target[p]
                joint = joint * self.joint_cells[d] + o.source[p]
            order = np.lexsort((joint, copies))
            pairs = [p[order] for p in pairs]
        flat = [zero] * len(self.source_cells)
        copies, ordinal, degree, size = zero, zero, zero + 1, zero + 1
        extents = np.empty((count, len(pairs)), dtype=np.int64)
        for d, (p, o) in enumerate(zip(pairs, self.overlays, strict=True)):
            joint = o.source[p]
            for g, sizes in enumerate(self.source_cells):
                flat[g] = flat[g] * sizes[d] + self.parts[d][g][joint]
            copies = copies * self.target_cells[d] + o.target[p]
            ordinal = ordinal * o.degree[p] + o.ordinal[p]
            degree = degree * o.degree[p]
            extents[:, d] = o.size[p]
            size = size * o.size[p]
        return Pieces(
            pairs=tuple(pairs),
            cells=tuple(flat),
            copies=copies,
            ordinal=ordinal,
            degree=degree,
            extents=extents,
            size=size,
        )

    def region(self, pieces: Pieces, piece: int, grid: int, cut: tuple[int, int, int] | None) -> Region:
        """The region of one piece as grid ``grid`` holds it; ``cut`` (dim, lo, hi) keeps a slice of it."""
        dims = []
        for d, (p, o) in enumerate(zip(pieces.pairs, self.overlays, strict=True)):
            pair = int(p[piece])
            runs = o.runs[grid][o.ptr[pair] : o.ptr[pair + 1]]
            dims.append(runs if cut is None or cut[0] != d else cut_runs(runs, cut[1], cut[2]))
        return Region(dims=tuple(dims))


def cut_runs(runs: Ints, lo: int, hi: int) -> Ints:
    """The runs of the elements lo..hi-1, counted along the runs."""
    ends = np.cumsum(runs[:, 2])
    begins = ends - runs[:, 2]
    first, last = np.maximum(begins, lo), np.minimum(ends, hi)
    keep = last > first
    shift = (first - begins)[keep]
    return np.stack([runs[keep, 0] + shift, runs[keep, 1] + shift, (last - first)[keep]], axis=1)


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
        if most == 1 or not self.m2m.topology.one_agent:
            return most
        step = 0
        for block in self.blocks:
            here = block.target.ranks.shape[2]
            for o in block.overlays:
                here *= int(np.gcd.reduce(o.degrees)) if len(o.degrees) else 1
            step = int(np.gcd(step, here))
        return most // int(np.gcd(most, step)) if step else 1

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
        copies = block.target.ranks[pieces.copies, 0, :]
        found = assign(
            ranks,
            count,
            copies,
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
            copies = copies[:, copy : copy + 1]
            picked = np.nonzero(found.valid)
        else:
            sender = ranks[np.arange(len(ranks))[None, :, None, None], found.column]
            picked = np.nonzero(found.valid & (sender == rank))
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
