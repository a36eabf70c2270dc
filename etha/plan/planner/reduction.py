"""Partial sources: each element is reduced once, at one owner, in one order.

The cell of K contributions x P replicas is cut evenly into slots, each owned by one of the K P peers. The owner takes
contributions 0..K-1 (in C-order over the Partial axes, never by rank) from its own replica row, reduces, and rounds
once. Every target holder gets that buffer, so replicas are equal to the bit. Slots do not depend on the targets, so a
second target layout costs no second reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from etha.plan.layouts import cells, dtypes
from etha.plan.layouts.placement import REDUCIBLE, Axis
from etha.plan.layouts.region import DimRuns
from etha.plan.planner.m2m import M2M, MIN_SLICE, Holding
from etha.plan.planner.pieces import CellBlock, Pieces
from etha.plan.planner.rank_plan import CONTRIBUTE, FORWARD, RESULT, Region, Slot, Template
from etha.plan.planner.relay import brought, trees

Ints = npt.NDArray[np.int64]


class ReducedClass(Protocol):
    """What a reduction needs of the class of tensors that it belongs to (``chunks.TensorClass``)."""

    m2m: M2M
    itemsize: int
    chains: int | None
    blocks: tuple[CellBlock, ...]

    @property
    def turns(self) -> int:
        """Number of tensors after which the rotation repeats."""
        ...


def reduce_op(partial: Sequence[tuple[Axis, int]]) -> tuple[str, float, int] | str:
    """(op, p, divisor) of all Partial axes together, or the reason why they cannot be reduced.

    sum with avg is one sum, divided once by the sizes of the avg axes. Any other mix is refused.
    """
    kinds = {("norm" if a.kind == "NP" else "mask" if a.kind == "MP" else a.op, a.p) for a, _ in partial}
    ops = sorted({op for op, _ in kinds})
    if "mask" in ops:
        return "_MaskPartial holds a mask besides its values: reduce the embedding's output first"
    unknown = [op for op in ops if op != "norm" and op not in REDUCIBLE]
    if unknown:
        return f"Partial({unknown[0]}) is not supported: use one of {', '.join(REDUCIBLE)}"
    divisor = int(np.prod([size for axis, size in partial if axis.op == "avg"], dtype=np.int64))
    if set(ops) == {"avg", "sum"}:
        return "avg", 0.0, divisor
    if len(kinds) > 1:
        return f"Partial axes of different kinds do not commute: {' with '.join(str(a) for a, _ in partial)}"
    op, p = next(iter(kinds))
    return op, p, divisor


class Reduction:
    """How the Partial cells of one class are reduced: slots, owners, contributions."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, holding: Holding, how: tuple[str, float, int]
    ) -> None:
        self.op, self.p, self.divisor = how
        self.shape = shape
        self.dtype = dtype
        self.holding = holding
        _, self.count, replicas = holding.ranks.shape
        peers = self.count * replicas
        tables = [cells.table(n, s) for n, s in zip(shape, holding.splits, strict=True)]
        self.extents = [t.sizes for t in tables]
        self.parts = _parts([int(e.max()) for e in self.extents], peers, dtypes.itemsize(dtype))
        self.number = int(np.prod(self.parts, dtype=np.int64))
        self.period = peers // int(np.gcd(peers, self.number)) if self.number else 1
        splits = [
            s for s in holding.splits if not isinstance(s, DimRuns)
        ]  # all of them, because a region has no contributions
        refined = tuple((*s, (p, 0, len(s))) for s, p in zip(splits, self.parts, strict=True))
        refined = tuple(tuple(cut for cut in s if cut[0] > 1) for s in refined)
        self.slots = Holding(splits=refined, ranks=holding.ranks, count=holding.count, partial=())

    def split(self, slot: Ints) -> tuple[Ints, Ints]:
        """Flat slot -> (flat cell of the holding, number of the slot in its cell)."""
        cell, inside = np.zeros_like(slot), np.zeros_like(slot)
        sizes = self.slots.cells
        rest, place = slot, []
        for size in reversed(sizes):
            place.append(rest % size)
            rest = rest // size
        for part, coarse, at in zip(self.parts, self.holding.cells, reversed(place), strict=True):
            cell, inside = cell * coarse + at // part, inside * part + at % part
        return cell, inside

    def owner(self, cell: Ints, inside: Ints, turn: Ints) -> tuple[Ints, Ints, Ints]:
        """(rank, contribution, replica) of the owner of each slot; rank is -1 if no replica is complete."""
        replicas = self.holding.count[cell]
        peer = (inside + turn * self.number) % np.maximum(self.count * replicas, 1)
        k, p = peer // np.maximum(replicas, 1), peer % np.maximum(replicas, 1)
        return np.where(replicas > 0, self.holding.ranks[cell, k, p], -1), k, p

    def shape_of(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Per dim (lo, hi) of a slot inside the local tensor of its cell's holders."""
        bounds = []
        for size, part, extent in zip(
            reversed(self.slots.cells), reversed(self.parts), reversed(self.extents), strict=True
        ):
            slot, at = divmod(slot, size)
            length, s = int(extent[at // part]), at % part
            bounds.append((length * s // part, length * (s + 1) // part))
        return tuple(reversed(bounds))

    def slots_of(self, cell: int) -> Ints:
        """The slots of a cell that are not empty, flat, ascending."""
        place = cells.coordinate(cell, self.holding.cells)
        flat = np.zeros(1, dtype=np.int64)
        for at, part, size, extent in zip(place, self.parts, self.slots.cells, self.extents, strict=True):
            s, length = np.arange(part), int(extent[at])
            mine = int(at) * part + s[(length * (s + 1) // part) > (length * s // part)]
            flat = (flat[:, None] * size + mine).reshape(-1)
        return flat

    def volumes(self) -> tuple[Ints, Ints]:
        """(slot, its elements) of all slots, empty ones included."""
        volume = np.ones(1, dtype=np.int64)
        for n, splits in zip(self.shape, self.slots.splits, strict=True):
            volume = (volume[:, None] * cells.table(n, splits).sizes).reshape(-1)
        return np.arange(len(volume), dtype=np.int64), volume

    def results(
        self, klass: ReducedClass, block: CellBlock, pieces: Pieces, only: int | None
    ) -> tuple[Ints, npt.NDArray[np.bool_], Ints, Ints, Ints]:
        """Who sends each result: (owner (W, M), whether there is a copy, who forwards it or -1, its hop, copies).

        The middle three have shape (W, M, copies). ``only``: one copy, and those that it may forward to.
        """
        topology = klass.m2m.topology
        turn = np.arange(klass.turns, dtype=np.int64)[:, None]
        cell, inside = self.split(pieces.cells[0])
        owner = self.owner(cell[None], inside[None], turn)[0]
        copies = block.target.ranks[pieces.copies, 0, :]
        every = (copies >= 0)[None] & (owner >= 0)[:, :, None]
        if klass.chains is None or not copies.size:
            one = np.arange(copies.shape[1]) if only is None else np.array([only])
            nobody = np.zeros((*owner.shape, len(one)), dtype=np.int64)
            return owner, every[:, :, one], nobody - 1, nobody, one
        here, there = np.maximum(owner, 0)[:, :, None], np.maximum(copies, 0)
        host = topology.target_host[there]
        near = (topology.source_host[here] == host) | (topology.source_agent[here] == topology.target_agent[there])
        far = (every & ~near).reshape(-1, copies.shape[1])
        tree = trees(far, np.broadcast_to(host, every.shape).reshape(far.shape), klass.chains)
        one = tree.beside(only)
        via, hop = (r.reshape(*owner.shape, len(one)) for r in
                    tree.routes((pieces.number + turn).reshape(1, -1), 1, one))  # fmt: skip
        far = far[:, one].reshape(via.shape)
        return owner, every[:, :, one], np.where(far, via, -1), np.where(far, hop, 0), one

    def template(self, klass: ReducedClass, side: str, rank: int) -> Template | None:
        """All rows of ``rank``: contributions, then results. None if it has nothing to do here."""
        blocks, turns = klass.blocks, klass.turns
        parts = SlotRows(self, turns, klass, rank)
        if side == "source":
            where = self.holding.find(rank)
            if where is None:
                return None
            parts.contributions(rank, *where)
        else:
            where = None
        for grid, block in enumerate(blocks):
            if side == "source" and where is not None:
                slots = self.slots_of(where[0])
                # Only slots that this rank owns in some turn; all of them if replicas rotate.
                for slot in slots[self._ever_owned(slots, rank, turns)].tolist():
                    parts.results(grid, block, block.of_source([(0, slot)]), rank, None)
            elif side == "target":
                found = block.target.find(rank)
                if found is not None:
                    parts.results(grid, block, block.of_target(found[0]), rank, found[2])
        return parts.done()

    def _ever_owned(self, slots: Ints, rank: int, turns: int) -> npt.NDArray[np.bool_]:
        cell, inside = self.split(slots)
        turn = np.arange(turns, dtype=np.int64)[:, None]
        mine: npt.NDArray[np.bool_] = (self.owner(cell[None], inside[None], turn)[0] == rank).any(axis=0)
        return mine


def _parts(extents: list[int], peers: int, itemsize: int) -> tuple[int, ...]:
    """Number of parts into which each dim of a cell is cut, so that there is a slot for each peer."""
    nbytes = int(np.prod(extents, dtype=np.int64)) * itemsize
    wanted = max(1, min(peers, nbytes // MIN_SLICE))
    parts = [1] * len(extents)
    for d, extent in enumerate(extents):
        if extent >= wanted:
            parts[d] = wanted
            return tuple(parts)
    for d, extent in enumerate(extents):
        parts[d] = max(1, min(extent, wanted))
        wanted = -(-wanted // parts[d])
    return tuple(parts)


class SlotRows:
    """Collects the rows of one rank and sorts them into canonical order."""

    def __init__(self, reduction: Reduction, turns: int, klass: ReducedClass, rank: int) -> None:
        self.r, self.turns, self.klass, self.rank = reduction, turns, klass, rank
        self.columns: list[dict[str, Ints]] = []
        self.makers: list[tuple[int, Callable[[int], Region]]] = []
        self.regions = 0

    def _add(self, count: int, maker: Callable[[int], Region], regions: int, **columns: Ints | int) -> None:
        full = {name: np.broadcast_to(np.asarray(c, dtype=np.int64), (count,)) for name, c in columns.items()}
        full["region"] = full["region"] + self.regions
        self.makers.append((self.regions, maker))
        self.columns.append(full)
        self.regions += regions

    def contributions(self, rank: int, cell: int, k: int, p: int) -> None:
        """Add what ``rank`` contributes to the slots of its replica row, and what it collects as an owner."""
        r = self.r
        slots = r.slots_of(cell)
        turn, at = (x.reshape(-1) for x in np.meshgrid(np.arange(self.turns), np.arange(len(slots)), indexing="ij"))
        _, inside = r.split(slots)
        owner, _, row = r.owner(np.full(len(at), cell), inside[at], turn)
        index = np.arange(r.count)
        members = r.holding.ranks[cell, :, p]
        mine = owner == rank
        # As an owner: all K contributions of the row. As a member of another owner's row: its own contribution.
        keep = (row == p)[:, None] & (mine[:, None] | (index == k))
        n, i = np.nonzero(keep)
        bounds = [r.shape_of(s) for s in slots.tolist()]
        volume = np.array([int(np.prod([hi - lo for lo, hi in b], dtype=np.int64)) for b in bounds], dtype=np.int64)

        def maker(key: int) -> Region:
            return Region(dims=tuple(np.array([[lo, 0, hi - lo]], dtype=np.int64) for lo, hi in bounds[key]))

        size = dtypes.itemsize(r.dtype)
        self._add(
            len(n), maker, len(slots), turn=turn[n], kind=CONTRIBUTE, phase=0, grid=0, cell=0, slot=slots[at[n]],
            copy=0, index=i, source=members[i], target=owner[n], owner=owner[n], region=at[n],
            nbytes=volume[at[n]] * size,
        )  # fmt: skip

    def results(self, grid: int, block: CellBlock, pieces: Pieces, rank: int, copy: int | None) -> None:
        """Add rows slot -> target: those of one owner (copy None), or those that one target holder gets or forwards."""
        slot = pieces.cells[0]
        owner, keep, via, hop, copies = self.r.results(self.klass, block, pieces, copy)
        if copy is None:
            keep = keep & (owner == rank)[:, :, None] & (via < 0)
        else:
            keep = keep & ((copies == copy) | (via == copy))
        w, m, q = np.nonzero(keep)
        via, hop, cell = via[w, m, q], hop[w, m, q], pieces.copies[m]
        holders, passed = block.target.ranks[:, 0, :], via >= 0

        def maker(key: int) -> Region:
            return block.region(pieces, key % len(slot), key // len(slot), None)

        self._add(
            len(w), maker, 2 * len(slot), turn=w, kind=np.where(passed, FORWARD, RESULT), phase=1 + hop, grid=grid,
            cell=cell, slot=slot[m], copy=copies[q], index=-1,
            source=np.where(passed, holders[cell, via], owner[w, m]), target=holders[cell, copies[q]],
            owner=owner[w, m], region=m + passed * len(slot), nbytes=pieces.size[m] * self.klass.itemsize,
        )  # fmt: skip

    def done(self) -> Template | None:
        """All added rows as a template; None if there are none."""
        if not self.columns:
            return None
        c = {name: np.concatenate([part[name] for part in self.columns]) for name in self.columns[0]}
        order = np.lexsort((c["copy"], c["index"], c["slot"], c["cell"], c["grid"], c["phase"], c["turn"]))
        c = {name: column[order] for name, column in c.items()}
        passed = c["kind"] == FORWARD
        names, at = np.unique(np.stack([c["turn"], c["slot"]])[:, ~passed], axis=1, return_inverse=True)
        slot = np.full(len(passed), -1, dtype=np.int64)
        slot[~passed] = at.reshape(-1)
        owner = np.zeros(names.shape[1], dtype=np.int64)
        owner[slot[~passed]] = c["owner"][~passed]
        slots = np.searchsorted(names[0], np.arange(self.turns + 1))
        rows = np.searchsorted(c["turn"], np.arange(self.turns + 1))
        kind, index = c["kind"], c["index"]
        # The contributions to one slot at its owner are neighbouring rows. They form a chain, and results depend on its
        # end.
        number = np.arange(len(kind))
        last = np.full(names.shape[1], -1, dtype=np.int64)
        complete = (kind == CONTRIBUTE) & (index == self.r.count - 1)
        chained = np.append(False, (kind[1:] == CONTRIBUTE) & (slot[1:] == slot[:-1]) & (kind[:-1] == CONTRIBUTE))
        has_all = complete & (chained | (self.r.count == 1))
        last[slot[has_all]] = number[has_all]
        hung = np.where(kind == RESULT, np.append(last, -1)[slot], -1)
        depends = np.where(chained[: len(kind)], number - 1, hung)
        if passed.any():
            pieces = np.stack([c["turn"], c["grid"], c["cell"], c["slot"]])
            piece = np.unique(pieces, axis=1, return_inverse=True)[1].reshape(-1)
            mine = (c["target"] == self.rank) & (kind != CONTRIBUTE)
            depends = np.where(passed, brought(piece, mine), depends)
        depends = np.where(depends >= 0, depends - rows[c["turn"]], -1)
        bases = np.array([base for base, _ in self.makers])
        makers = [maker for _, maker in self.makers]

        def make_region(key: int) -> Region:
            which = int(np.searchsorted(bases, key, "right")) - 1
            return makers[which](key - int(bases[which]))

        def make_slot(which: int, tensor: int) -> Slot:
            r = self.r
            return Slot(
                tensor=tensor,
                number=int(names[1, which]),
                shape=tuple(hi - lo for lo, hi in r.shape_of(int(names[1, which]))),
                count=r.count,
                op=r.op,
                p=r.p,
                divisor=r.divisor,
                accumulate=dtypes.accumulate_dtype(r.dtype),
                owner=int(owner[which]),
            )

        return Template(
            kind=kind,
            phase=c["phase"],
            source=c["source"],
            target=c["target"],
            slot=np.where(passed, -1, slot - slots[c["turn"]]),
            index=index,
            region=c["region"],
            nbytes=c["nbytes"],
            depends=depends,
            rows=rows,
            slots=slots,
            slot_owner=owner,
            regions=self.regions,
            make_region=make_region,
            make_slot=make_slot,
        )
