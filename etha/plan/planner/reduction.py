"""Partial sources: each element is reduced once, at one owner, in one order.

The cell of K contributions x P replicas is cut evenly into slots, one owner among the K P peers each.
The owner takes contributions 0..K-1 (C-order over the Partial axes, never ranks) from its own replica
row, reduces, rounds once; every target holder gets that buffer, so replicas are equal to the bit.
Slots do not depend on the targets: a second target layout costs no second reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from etha.plan.layouts import cells, dtypes
from etha.plan.layouts.placement import REDUCIBLE, Axis
from etha.plan.layouts.region import Kept
from etha.plan.planner.m2m import MIN_SLICE, Holding
from etha.plan.planner.rank_plan import Template
from etha.plan.planner.relay import trees
from etha.plan.planner.slots import SlotRows

if TYPE_CHECKING:
    from etha.plan.planner.chunks import TensorClass
    from etha.plan.planner.pieces import Block, Pieces

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
        splits = [s for s in holding.splits if not isinstance(s, Kept)]  # all of them: no source is a region
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

    def results(
        self, klass: TensorClass, block: Block, pieces: Pieces, only: int | None
    ) -> tuple[Ints, npt.NDArray[np.bool_], Ints, Ints, Ints]:
        """Who sends each result: (owner (W, M), whether there is a copy, who passes it on or -1, its hop, copies).

        The middle three are (W, M, copies). ``only``: one copy and those that it may pass on to.
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

    def template(self, klass: TensorClass, side: str, rank: int) -> Template | None:
        """All rows of ``rank``: contributions, then results; None when it has nothing to do here."""
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
                # Only slots that this rank owns in some turn; all of them when replicas rotate.
                for slot in slots[self._ever_owned(slots, rank, turns)].tolist():
                    parts.results(grid, block, block.of_source(0, slot), rank, None)
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
