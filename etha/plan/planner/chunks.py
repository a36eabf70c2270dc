"""M2M map + shape -> chunks: the rows of one rank in one class of equal tensors."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from etha.plan.layouts import dtypes
from etha.plan.planner.carriers import Carried, Carriers, carried, packed
from etha.plan.planner.m2m import M2M
from etha.plan.planner.pieces import CellBlock, Pieces
from etha.plan.planner.rank_plan import CARRY, DELIVER, FORWARD, MOVE, Region, Template
from etha.plan.planner.reduction import Reduction
from etha.plan.planner.relay import brought
from etha.plan.planner.rows import BlockRows, merge_rows, taken
from etha.plan.planner.senders import Assignment, always_even, assign, cuts

Ints = npt.NDArray[np.int64]
#: Most turns of a rotation that evens out several numbers at once.
_MOST_TURNS = 64


class TensorClass:
    """All tensors of one shape, dtypes and layouts. They are planned once."""

    def __init__(
        self, shape: tuple[int, ...], source: torch.dtype, target: torch.dtype, m2m: M2M, reduction: Reduction | None
    ) -> None:
        self.shape = shape
        self.m2m = m2m
        self.wire = dtypes.wire_dtype(source, target)
        self.itemsize = dtypes.itemsize(self.wire)
        self.reduction = reduction
        self.passable = dtypes.passable(source, target)
        self.members = 0
        #: Most chains of hosts into which the copies of a piece are cut; None if nothing is forwarded.
        self.chains: int | None = None
        #: Who receives for whom on a host; None if every rank receives for itself.
        self.carriers: Carriers | None = None
        origin = m2m.source if reduction is None else (reduction.slots,)
        self.blocks = tuple(CellBlock.of(shape, origin, t) for t in m2m.target)

    @cached_property
    def period(self) -> int:
        """Number of tensors after which the rotation among replicas repeats; 1 if each tensor alone is even."""
        if self.reduction is not None:
            return self.reduction.period
        most = self.m2m.replicas
        if self.m2m.gaps:
            most = int(np.lcm.reduce(self.crowds))
            most = most if most <= _MOST_TURNS else int(self.crowds.max())
        entries = self.entries if self.chains is not None else 1
        if most * entries == 1 or self._even(entries):
            return 1
        if entries > 1:
            both = most * entries // int(np.gcd(most, entries))
            return both if both <= _MOST_TURNS else max(most, entries)
        if not self.m2m.topology.one_agent:
            return most
        step = 0
        for block in self.blocks:
            here = block.target.ranks.shape[2]
            for o in block.overlays:
                here *= int(np.gcd.reduce(o.degrees)) if len(o.degrees) else 1
            step = int(np.gcd(step, here))
        return most // int(np.gcd(most, step)) if step else 1

    @cached_property
    def crowds(self) -> Ints:
        """The numbers of holders that wanted pieces have, each once, ascending. At least one, and none is 0."""
        found = {1}
        for block in self.blocks:
            for pieces in block.all(self.m2m.replicas):
                found |= set(np.unique(self.m2m.sources(pieces.cells)[2]).tolist())
        return np.array(sorted(found - {0}), dtype=np.int64)

    @cached_property
    def entries(self) -> int:
        """The most holders of a target cell on one host."""
        most = 1
        for block in self.blocks:
            ranks = block.target.ranks[:, 0, :]
            host = np.where(ranks < 0, -1 - np.arange(ranks.shape[1]), self.m2m.topology.target_host[ranks])
            for ahead in range(1, ranks.shape[1]):
                if not (host[:, ahead:] == host[:, :-ahead]).any():
                    break
                most = ahead + 1
        return most

    def _even(self, entries: int) -> bool:
        """Whether all data comes from other hosts, and each tensor alone loads the replicas of a cell evenly."""
        source = self.m2m.source
        if not self.m2m.topology.apart or len(source) > 1 or (source[0].count != self.m2m.replicas).any():
            return False
        for block in self.blocks:
            small = [int(o.size.min()) if len(o.size) else 0 for o in block.overlays]
            crowd = int(np.prod([np.diff(o.by_target).min(initial=0) for o in block.overlays], dtype=np.int64))
            cut = int(cuts(np.array([entries]), np.array([crowd]))[0])
            nbytes = int(np.prod(small, dtype=np.int64)) * self.itemsize
            copies = block.target.ranks.shape[2]
            if (block.target.count != copies).any():
                return False
            heads = copies if self.chains is None else min(self.chains, -(-copies // entries))
            if not always_even(self.m2m.replicas, heads, cut, nbytes, small):
                return False
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor at the wire dtype."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def turns(self) -> int:
        return max(1, min(self.period, self.members))

    def template(self, side: str, rank: int) -> Template | None:
        """The rows of ``rank``; None if it has nothing to do with this class."""
        if self.reduction is not None:
            return self.reduction.template(self, side, rank)
        parts = []
        for at, block in enumerate(self.blocks):
            if side == "target":
                where = block.target.find(rank)
                held = [] if where is None else [(where[0], where[2], rank)]
                for donor in () if self.carriers is None else self.carriers.donors.get(rank, ()):
                    theirs = block.target.find(donor)
                    if theirs is not None:
                        held.append((theirs[0], theirs[2], donor))
                for cell, copy, holder in sorted(held):
                    made = self._rows(block, block.of_target(cell), holder, copy, rank)
                    parts.append(dataclasses.replace(made, group=(at, cell)))
            else:
                places = [(grid, holding.find(rank)) for grid, holding in enumerate(self.m2m.source)]
                mine = [(grid, where[0]) for grid, where in places if where is not None]
                if mine:  # several of them if the rank holds several products
                    made = self._rows(block, block.of_source(mine), rank, None)
                    parts.append(dataclasses.replace(made, group=(at, mine[0][0])))
        return merge_rows(parts, self.turns) if parts else None

    def _rows(self, block: CellBlock, pieces: Pieces, rank: int, copy: int | None, viewer: int = -1) -> BlockRows:
        """The rows of ``rank``. If ``viewer`` is another rank, only those that it carries for ``rank``."""
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
            pieces.number,
            pieces.crowd,
            pieces.extents,
            pieces.size * self.itemsize,
            self.turns,
            self.m2m.topology,
            copy,
            self.chains,
            direct=copy is None,
        )
        if copy is None:
            sender = ranks[np.arange(len(ranks))[None, :, None, None], found.column]
            keep = found.valid & (sender == rank)
            picked = np.nonzero(keep if found.via is None else keep & (found.via < 0))
        elif found.via is None:
            picked = np.nonzero(found.valid)
        else:
            picked = np.nonzero(found.valid & ((found.copies == copy) | (found.via == copy)))
        rows = self._columns(block, pieces, found, ranks, grids, picked, copy)
        if self.carriers is None:
            return rows
        x = carried(self.carriers, self.m2m.topology, pieces, found, picked, rows.kind, rows.source, rows.target)
        if x is None:
            return rows if copy is None or viewer == rank else taken(rows, np.zeros(0, dtype=np.int64))
        return self._split(rows, block, pieces, x, grids[picked[1], found.column[picked]], (copy is None, rank, viewer))

    def _columns(
        self,
        block: CellBlock,
        pieces: Pieces,
        found: Assignment,
        ranks: Ints,
        grids: Ints,
        picked: tuple[Ints, ...],
        copy: int | None,
    ) -> BlockRows:
        w, m, s, q = picked
        column = found.column[picked]
        grid, source = grids[m, column], ranks[m, column]
        holders, cell = block.target.ranks[:, 0, :], pieces.copies[m]
        target = holders[cell, found.copies[q]]
        kind = phase = np.zeros_like(m)
        depends = None
        if found.via is not None and found.depth is not None:
            via, phase = found.via[picked], found.depth[picked]
            passed = via >= 0
            kind = np.where(passed, FORWARD, MOVE)
            source = np.where(passed, holders[cell, via], source)
            grid = np.where(passed, len(block.source_cells), grid)
            if copy is not None:
                depends = brought((w * len(ranks) + m) * len(found.column[0, 0]) + s, found.copies[q] == copy)
        parts, dim = found.parts, found.dim
        sizes, cut = pieces.size[m], np.zeros_like(m)
        if parts.max(initial=1) > 1:
            cut = np.where(found.whole[m, q], 0, s + 1)
            extent = pieces.extents[m, dim[m]]
            share = extent * (s + 1) // parts[m] - extent * s // parts[m]
            sizes = np.where(cut > 0, sizes // np.maximum(extent, 1) * share, sizes)
        cuts, wide = int(parts.max(initial=1)) + 1, len(block.source_cells) + 1

        def make_region(key: int) -> Region:
            rest, g = divmod(key, wide)
            piece, part = divmod(rest, cuts)
            if part == 0:
                return block.region(pieces, piece, g, None)
            d, k = int(dim[piece]), int(parts[piece])
            extent = int(pieces.extents[piece, d])
            return block.region(pieces, piece, g, (d, extent * (part - 1) // k, extent * part // k))

        return BlockRows(
            turn=w,
            kind=kind,
            phase=phase,
            source=source,
            target=target,
            depends=depends,
            region=(m * cuts + cut) * wide + grid,
            nbytes=sizes * self.itemsize,
            place=(m * found.column.shape[2] + s) * holders.shape[1] + found.copies[q],
            regions=len(pieces.size) * cuts * wide,
            make_region=make_region,
        )

    def _split(
        self, rows: BlockRows, block: CellBlock, pieces: Pieces, x: Carried, grid: Ints, who: tuple[bool, int, int]
    ) -> BlockRows:
        """Split off what carriers receive. For a carrier, return only what it carries."""
        source_side, rank, viewer = who
        keep = ~x.deliver if source_side else (x.kind != CARRY) if viewer == rank else (x.carrier == viewer)
        at = np.flatnonzero(keep)
        row, kind, split = x.row[at], x.kind[at], x.low[at] >= 0
        depends = None
        if not source_side:
            # A forwarded row depends on a row that stayed whole; a delivered one depends on its CARRY row.
            place = np.full(len(rows.kind) + 1, -1, dtype=np.int64)
            place[row[::-1]] = np.arange(len(row))[::-1]
            depends = np.full(len(row), -1) if rows.depends is None else place[rows.depends[row]]
            depends = np.where((kind == DELIVER) & (viewer != rank), np.arange(len(row)) - 1, depends)
        m, d, low, high = x.piece[at], x.dim[at], x.low[at], x.high[at]
        which = grid[row]
        base = rows.regions

        def make_region(key: int) -> Region:
            if key < base:
                return rows.make_region(key)
            i = key - base
            region = block.region(pieces, int(m[i]), int(which[i]), (int(d[i]), int(low[i]), int(high[i])))
            return packed(region, int(kind[i]))

        return BlockRows(
            turn=rows.turn[row],
            kind=kind,
            phase=np.where(kind == DELIVER, 1, rows.phase[row]),
            source=x.source[at],
            target=x.target[at],
            depends=depends,
            region=np.where(split, base + np.arange(len(row)), rows.region[row]),
            nbytes=np.where(split, x.size[at] * self.itemsize, rows.nbytes[row]),
            place=rows.place[row],
            group=rows.group,
            regions=base + len(row),
            make_region=make_region,
        )
