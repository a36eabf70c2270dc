"""Partial sources: each element is reduced once, at one owner, in one order.

The cell of K contributions x P replicas is cut evenly into slots, one owner among the K P peers each.
The owner takes contributions 0..K-1 (C-order over the Partial axes, never ranks) from its own replica
row, reduces, rounds once; every target holder gets that buffer, so replicas are equal to the bit.
Slots do not depend on the targets: a second target layout costs no second reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from etha.plan import cells, dtypes
from etha.plan.m2m import MIN_SLICE, Holding
from etha.plan.placement import REDUCIBLE, Axis
from etha.plan.program import CONTRIBUTE, RESULT, Region, Slot, Template

if TYPE_CHECKING:
    from etha.plan.blocks import Block, Pieces

Ints = npt.NDArray[np.int64]


def reduce_op(partial: Sequence[tuple[Axis, int]]) -> tuple[str, float, int] | str:
    """(op, p, divisor) of all Partial axes together, or the reason why they cannot be reduced.

    sum with avg is one sum, divided once by the sizes of the avg axes; any other mix is refused.
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
        refined = tuple((*s, (p, 0, len(s))) for s, p in zip(holding.splits, self.parts, strict=True))
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
        """(rank, contribution, replica) of the owner of each slot; -1 where no replica is complete."""
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
        place = np.unravel_index(cell, self.holding.cells) if self.holding.cells else ()
        flat = np.zeros(1, dtype=np.int64)
        for at, part, size, extent in zip(place, self.parts, self.slots.cells, self.extents, strict=True):
            s, length = np.arange(part), int(extent[at])
            mine = int(at) * part + s[(length * (s + 1) // part) > (length * s // part)]
            flat = (flat[:, None] * size + mine).reshape(-1)
        return flat

    def volumes(self) -> tuple[Ints, Ints]:
        """(slot, its elements) of all slots, empty ones too."""
        volume = np.ones(1, dtype=np.int64)
        for n, splits in zip(self.shape, self.slots.splits, strict=True):
            volume = (volume[:, None] * cells.table(n, splits).sizes).reshape(-1)
        return np.arange(len(volume), dtype=np.int64), volume

    def template(self, blocks: Sequence[Block], side: str, rank: int, turns: int, itemsize: int) -> Template | None:
        """All rows of ``rank``: contributions, then results; None when it has nothing to do here."""
        parts = _Parts(self, turns)
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
                # Only slots that this rank owns in some turn; all of them when replicas rotate.
                for slot in slots[self._ever_owned(slots, rank, turns)].tolist():
                    parts.results(grid, block, block.of_source(0, slot), rank, None, itemsize)
            elif side == "target":
                found = block.target.find(rank)
                if found is not None:
                    parts.results(grid, block, block.of_target(found[0]), rank, found[2], itemsize)
        return parts.done()

    def _ever_owned(self, slots: Ints, rank: int, turns: int) -> npt.NDArray[np.bool_]:
        cell, inside = self.split(slots)
        turn = np.arange(turns, dtype=np.int64)[:, None]
        mine: npt.NDArray[np.bool_] = (self.owner(cell[None], inside[None], turn)[0] == rank).any(axis=0)
        return mine


def _parts(extents: list[int], peers: int, itemsize: int) -> tuple[int, ...]:
    """Into how many parts each dim of a cell is cut, so that there is a slot for each peer."""
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


class _Parts:
    """Collects the rows of one rank and brings them into canonical order."""

    def __init__(self, reduction: Reduction, turns: int) -> None:
        self.r, self.turns = reduction, turns
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
        """What ``rank`` contributes to the slots of its replica row, and what it collects as an owner."""
        r = self.r
        slots = r.slots_of(cell)
        turn, at = (x.reshape(-1) for x in np.meshgrid(np.arange(self.turns), np.arange(len(slots)), indexing="ij"))
        _, inside = r.split(slots)
        owner, _, row = r.owner(np.full(len(at), cell), inside[at], turn)
        index = np.arange(r.count)
        members = r.holding.ranks[cell, :, p]
        mine = owner == rank
        # As owner: all K contributions of the row; as member of another owner's row: its own one.
        keep = (row == p)[:, None] & (mine[:, None] | (index == k))
        n, i = np.nonzero(keep)
        bounds = [r.shape_of(s) for s in slots.tolist()]
        volume = np.array([int(np.prod([hi - lo for lo, hi in b], dtype=np.int64)) for b in bounds], dtype=np.int64)

        def maker(key: int) -> Region:
            return Region(dims=tuple(np.array([[lo, 0, hi - lo]], dtype=np.int64) for lo, hi in bounds[key]))

        size = dtypes.itemsize(r.dtype)
        self._add(
            len(n), maker, len(slots), turn=turn[n], kind=CONTRIBUTE, grid=0, cell=0, slot=slots[at[n]], copy=0,
            index=i, source=members[i], target=owner[n], owner=owner[n], region=at[n], nbytes=volume[at[n]] * size,
        )  # fmt: skip

    def results(self, grid: int, block: Block, pieces: Pieces, rank: int, copy: int | None, itemsize: int) -> None:
        """Rows slot -> target: those of one owner (copy None), or those of one target holder."""
        r = self.r
        slot = pieces.cells[0]
        cell, inside = r.split(slot)
        turn = np.arange(self.turns, dtype=np.int64)[:, None]
        owner = r.owner(cell[None], inside[None], turn)[0]  # (W, M)
        copies = block.target.ranks[pieces.copies, 0, :]
        if copy is not None:
            copies = copies[:, copy : copy + 1]
        keep = (copies >= 0)[None] & (owner >= 0)[:, :, None]
        if copy is None:
            keep = keep & (owner == rank)[:, :, None]
        w, m, q = np.nonzero(keep)

        def maker(key: int) -> Region:
            return block.region(pieces, key, 0, None)

        self._add(
            len(w), maker, len(slot), turn=w, kind=RESULT, grid=grid,
            cell=pieces.copies[m], slot=slot[m], copy=q, index=-1, source=owner[w, m], target=copies[m, q],
            owner=owner[w, m], region=m, nbytes=pieces.size[m] * itemsize,
        )  # fmt: skip

    def done(self) -> Template | None:
        if not self.columns:
            return None
        c = {name: np.concatenate([part[name] for part in self.columns]) for name in self.columns[0]}
        order = np.lexsort((c["copy"], c["index"], c["slot"], c["cell"], c["grid"], c["kind"], c["turn"]))
        c = {name: column[order] for name, column in c.items()}
        names, slot = np.unique(np.stack([c["turn"], c["slot"]]), axis=1, return_inverse=True)
        slot = slot.reshape(-1)
        owner = np.zeros(names.shape[1], dtype=np.int64)
        owner[slot] = c["owner"]
        slots = np.searchsorted(names[0], np.arange(self.turns + 1))
        rows = np.searchsorted(c["turn"], np.arange(self.turns + 1))
        kind, index = c["kind"], c["index"]
        # The rows of one slot's contributions at its owner are neighbours: a chain, and results hang on its end.
        number = np.arange(len(kind))
        last = np.full(names.shape[1], -1, dtype=np.int64)
        complete = (kind == CONTRIBUTE) & (index == self.r.count - 1)
        chained = np.append(False, (kind[1:] == CONTRIBUTE) & (slot[1:] == slot[:-1]) & (kind[:-1] == CONTRIBUTE))
        has_all = complete & (chained | (self.r.count == 1))
        last[slot[has_all]] = number[has_all]
        depends = np.where(chained[: len(kind)], number - 1, np.where(kind == RESULT, last[slot], -1))
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
            phase=(kind == RESULT).astype(np.int64),
            source=c["source"],
            target=c["target"],
            slot=slot - slots[c["turn"]],
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
