"""RankPlan: one rank's part of a plan, as columns; what an executor compiles.

A row is one chunk: exactly one product of runs of one tensor, from one rank to one other. Rows are in
canonical order (tensor, phase, target grid, target cell, source cell, slice, target rank), which both
ends of every link derive alone; a pair of ranks sees its restriction of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

#: kind: source tensor -> target tensor; contributor's tensor -> slot at the owner; slot -> target tensor.
MOVE, CONTRIBUTE, RESULT = 0, 1, 2
#: role, from the plan's own rank: both ends on one agent; this rank sends; this rank receives.
LOCAL, SEND, RECV = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A product of runs: per tensor dim an int64 array (k, 3) of (source offset, target offset, length).

    Offsets are indices into the dim of the two ends' local tensors; for CONTRIBUTE the target end and
    for RESULT the source end is the dense slot. A 0-d tensor has no dims and one element.
    """

    dims: tuple[Ints, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dim: the shape of the region packed densely."""
        return tuple(int(runs[:, 2].sum()) for runs in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A dense buffer at ``owner`` in which ``count`` contributions become one value per element.

    Start from contribution 0, combine 1, 2, ... in ``accumulate`` dtype, divide by ``divisor`` once,
    then round once to the wire dtype. op: "sum", "avg", "max", "min", "product" or "norm": contributions
    to the power ``p`` are summed and the 1/p-th power is taken. (tensor, number) is one slot on all ranks.
    """

    tensor: int
    number: int
    shape: tuple[int, ...]
    count: int
    op: str
    p: float
    divisor: int
    accumulate: torch.dtype
    owner: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """One rank's rows in one class of equal tensors, for each turn of the rotation among replicas.

    Rows of turn w are ``rows[w]:rows[w+1]``, its slots ``slots[w]:slots[w+1]``. ``slot`` and ``depends``
    count from the start of the turn; ``region`` is a key that ``make_region`` understands.
    """

    kind: Ints
    phase: Ints
    source: Ints
    target: Ints
    slot: Ints
    index: Ints
    region: Ints
    nbytes: Ints
    depends: Ints
    rows: Ints
    slots: Ints
    slot_owner: Ints
    regions: int
    make_region: Callable[[int], Region]
    make_slot: Callable[[int, int], Slot]  # (slot of the template, tensor) -> Slot

    def region_of(self, key: int, cache: dict[int, Region]) -> Region:
        """The region of a key of the column ``region``, one object per key and ``cache``."""
        found = cache.get(key)
        if found is None:
            found = cache[key] = self.make_region(key)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPlan:
    """The rows of one rank, each column one array; ``len(rp)`` rows. See the module's head."""

    side: str
    rank: int
    kind: npt.NDArray[np.int8]
    role: npt.NDArray[np.int8]
    phase: npt.NDArray[np.int16]
    round: npt.NDArray[np.int32]
    tensor: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]
    slot: npt.NDArray[np.int32]
    index: npt.NDArray[np.int16]
    region_index: npt.NDArray[np.int32]
    nbytes: npt.NDArray[np.int64]
    depends: npt.NDArray[np.int32]
    _templates: tuple[Template, ...]
    _caches: tuple[dict[int, Region], ...]
    _first_region: Ints
    _slot_segments: tuple[tuple[int, int, int, int], ...]  # (tensor, template, first, last slot)

    def __len__(self) -> int:
        return len(self.kind)

    def region(self, row: int) -> Region:
        """The region of a row; rows of equal tensors share the object."""
        return self.region_at(int(self.region_index[row]))

    def region_at(self, index: int) -> Region:
        """The region of an index of the column ``region_index``."""
        which = int(np.searchsorted(self._first_region, index, "right")) - 1
        return self._templates[which].region_of(index - int(self._first_region[which]), self._caches[which])

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The reduction slots that the rows name, by index."""
        return tuple(
            self._templates[which].make_slot(slot, tensor)
            for tensor, which, first, last in self._slot_segments
            for slot in range(first, last)
        )


def assemble(
    side: str,
    rank: int,
    templates: Sequence[Template],
    caches: Sequence[dict[int, Region]],
    klass: Ints,
    turn: Ints,
    tensor: Ints,
    local: Callable[[Ints, Ints, Ints], npt.NDArray[np.bool_]],
    rounds: Callable[[Ints, Ints, Ints], Ints],
) -> RankPlan:
    """Lay the templates of all tensors in a row: tensor ``tensor[i]`` is turn ``turn[i]`` of class ``klass[i]``.

    ``local(kind, source, target)`` says which rows stay on one agent, ``rounds`` numbers them.
    """
    row_base = np.cumsum([0, *(len(t.kind) for t in templates)])
    turn_base = np.cumsum([0, *(len(t.rows) - 1 for t in templates)])
    region_base = np.cumsum([0, *(t.regions for t in templates)])

    def column(name: str) -> Ints:
        return np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(t, name) for t in templates)])

    first = np.concatenate(
        [np.zeros(0, np.int64), *(t.rows[:-1] + b for t, b in zip(templates, row_base, strict=False))]
    )
    last = np.concatenate([np.zeros(0, np.int64), *(t.rows[1:] + b for t, b in zip(templates, row_base, strict=False))])
    segment = turn_base[klass] + turn
    begin, lengths = first[segment], (last - first)[segment]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    out = ends - lengths  # row at which each tensor begins
    gather = np.repeat(begin - out, lengths) + np.arange(total)
    kind, source, target = column("kind")[gather], column("source")[gather], column("target")[gather]
    depends = column("depends")[gather]
    depends = np.where(depends >= 0, depends + np.repeat(out, lengths), -1)
    owner = np.repeat(np.arange(len(templates)), [len(t.kind) for t in templates])
    region = (column("region") + region_base[owner])[gather]

    slot = column("slot")[gather]
    segments: list[tuple[int, int, int, int]] = []
    if any(len(t.slot_owner) for t in templates):
        counts = np.concatenate([np.diff(t.slots) for t in templates])[segment]
        base = np.cumsum(counts) - counts
        slot = np.where(slot >= 0, slot + np.repeat(base, lengths), -1)
        for i in np.flatnonzero(counts).tolist():
            t = templates[int(klass[i])]
            w = int(turn[i])
            segments.append((int(tensor[i]), int(klass[i]), int(t.slots[w]), int(t.slots[w + 1])))

    same = local(kind, source, target)
    receives = (target == rank) & ((kind == CONTRIBUTE) == (side == "source"))
    role = np.where(same, LOCAL, np.where(receives, RECV, SEND))
    return RankPlan(
        side=side,
        rank=rank,
        kind=kind.astype(np.int8),
        role=role.astype(np.int8),
        phase=column("phase")[gather].astype(np.int16),
        round=rounds(kind, source, target).astype(np.int32),
        tensor=np.repeat(tensor, lengths).astype(np.int32),
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        slot=slot.astype(np.int32),
        index=column("index")[gather].astype(np.int16),
        region_index=region.astype(np.int32),
        nbytes=column("nbytes")[gather],
        depends=depends.astype(np.int32),
        _templates=tuple(templates),
        _caches=tuple(caches),
        _first_region=region_base[:-1],
        _slot_segments=tuple(segments),
    )
