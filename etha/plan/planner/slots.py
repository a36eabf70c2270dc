"""The rows of one rank in a class that is reduced: contributions to slots, their results, what is passed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from etha.plan.layouts import dtypes
from etha.plan.planner.rank_plan import CONTRIBUTE, FORWARD, RESULT, Region, Slot, Template
from etha.plan.planner.relay import brought

if TYPE_CHECKING:
    from etha.plan.planner.chunks import TensorClass
    from etha.plan.planner.pieces import Block, Pieces
    from etha.plan.planner.reduction import Reduction

Ints = npt.NDArray[np.int64]


class SlotRows:
    """Collects the rows of one rank and brings them into canonical order."""

    def __init__(self, reduction: Reduction, turns: int, klass: TensorClass, rank: int) -> None:
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
            len(n), maker, len(slots), turn=turn[n], kind=CONTRIBUTE, phase=0, grid=0, cell=0, slot=slots[at[n]],
            copy=0, index=i, source=members[i], target=owner[n], owner=owner[n], region=at[n],
            nbytes=volume[at[n]] * size,
        )  # fmt: skip

    def results(self, grid: int, block: Block, pieces: Pieces, rank: int, copy: int | None) -> None:
        """Rows slot -> target: those of one owner (copy None), or those that one target holder gets or passes on."""
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
        """All that was added, as a template; None where nothing was."""
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
        # The rows of one slot's contributions at its owner are neighbours: a chain, and results hang on its end.
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
