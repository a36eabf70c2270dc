"""M2M map + shape -> chunks: the rows of one rank in one class of equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from etha.plan import dtypes
from etha.plan.blocks import Block, Pieces
from etha.plan.m2m import M2M
from etha.plan.program import FORWARD, MOVE, Region, Slot, Template
from etha.plan.reduction import Reduction
from etha.plan.relay import brought
from etha.plan.senders import Assignment, always_even, assign, cuts

Ints = npt.NDArray[np.int64]
#: Turns of a rotation that brings several numbers round at once, at most.
_MOST_TURNS = 64


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
        self.passable = dtypes.passable(source, target)
        self.members = 0
        #: Into how many chains of hosts the copies of a piece are cut at most; None where nothing is passed on.
        self.chains: int | None = None
        origin = m2m.source if reduction is None else (reduction.slots,)
        self.blocks = tuple(Block.of(shape, origin, t) for t in m2m.target)

    @cached_property
    def period(self) -> int:
        """After how many tensors the rotation among replicas comes round; 1 where it is even at once."""
        if self.reduction is not None:
            return self.reduction.period
        most = self.m2m.replicas
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
        """Whether all of it comes from afar and each tensor alone loads the replicas of a cell alike."""
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
        """Bytes of one tensor as it travels."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize

    @property
    def turns(self) -> int:
        return max(1, min(self.period, self.members))

    def template(self, side: str, rank: int) -> Template | None:
        """The rows of ``rank``, or None when it has nothing to do with this class."""
        if self.reduction is not None:
            return self.reduction.template(self, side, rank)
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
            pieces.number,
            pieces.crowd,
            pieces.extents,
            pieces.size * self.itemsize,
            self.turns,
            self.m2m.topology,
            copy,
            self.chains,
        )
        if copy is None:
            sender = ranks[np.arange(len(ranks))[None, :, None, None], found.column]
            keep = found.valid & (sender == rank)
            picked = np.nonzero(keep if found.via is None else keep & (found.via < 0))
        elif found.via is None:
            picked = np.nonzero(found.valid)
        else:
            picked = np.nonzero(found.valid & ((found.copies == copy) | (found.via == copy)))
        return self._columns(block, pieces, found, ranks, grids, picked, copy)

    def _columns(
        self,
        block: Block,
        pieces: Pieces,
        found: Assignment,
        ranks: Ints,
        grids: Ints,
        picked: tuple[Ints, ...],
        copy: int | None,
    ) -> Rows:
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

        return Rows(
            turn=w,
            kind=kind,
            phase=phase,
            source=source,
            target=target,
            depends=depends,
            region=(m * cuts + cut) * wide + grid,
            nbytes=sizes * self.itemsize,
            regions=len(pieces.size) * cuts * wide,
            make_region=make_region,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """MOVE and FORWARD rows of one rank in one block; ``depends`` are places among them."""

    turn: Ints
    kind: Ints
    phase: Ints
    source: Ints
    target: Ints
    depends: Ints | None
    region: Ints
    nbytes: Ints
    regions: int
    make_region: Callable[[int], Region]


def _no_slot(_slot: int, _tensor: int) -> Slot:
    raise IndexError("a plan of moves has no reduction slots")


def merge_rows(parts: Sequence[Rows], turns: int) -> Template:
    """Blocks one after the other within each phase of each turn."""
    base = np.cumsum([0, *(p.regions for p in parts)])
    turn, phase = (np.concatenate([getattr(p, name) for p in parts]) for name in ("turn", "phase"))
    passed = bool(phase.any())
    order = np.lexsort((phase, turn)) if len(parts) > 1 or passed else np.arange(len(turn))

    def column(name: str) -> Ints:
        return np.concatenate([getattr(p, name) for p in parts])[order]

    def make_region(key: int) -> Region:
        which = int(np.searchsorted(base, key, "right")) - 1
        return parts[which].make_region(key - int(base[which]))

    region = np.concatenate([p.region + b for p, b in zip(parts, base, strict=False)])[order]
    zero = np.zeros(len(turn), dtype=np.int64)
    rows = np.append(0, np.cumsum(np.bincount(turn, minlength=turns))).astype(np.int64)
    depends = zero - 1
    if passed:
        ahead = np.cumsum([0, *(len(p.turn) for p in parts)])
        for p, b in zip(parts, ahead, strict=False):
            if p.depends is not None:
                depends[b : b + len(p.turn)] = np.where(p.depends >= 0, p.depends + b, -1)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        depends = np.where(depends >= 0, place[depends] - rows[turn], -1)[order]
    return Template(
        kind=column("kind"),
        phase=phase[order],
        source=column("source"),
        target=column("target"),
        slot=zero - 1,
        index=zero - 1,
        region=region,
        nbytes=column("nbytes"),
        depends=depends,
        rows=rows,
        slots=np.zeros(turns + 1, dtype=np.int64),
        slot_owner=np.zeros(0, dtype=np.int64),
        regions=int(base[-1]),
        make_region=make_region,
        make_slot=_no_slot,
    )
