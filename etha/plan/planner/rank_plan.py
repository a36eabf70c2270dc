"""RankPlan: one rank's part of a plan, as columns, which an executor compiles.

A row is one chunk: exactly one product of runs of one tensor, from one rank to one other. Rows are in canonical order
(tensor, phase, target grid, target cell, source cell, slice, target rank). Both ends of every link derive it alone; a
pair of ranks sees the restriction of it to their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

#: Kind of a row:
#: MOVE        source tensor -> target tensor
#: CONTRIBUTE  contributor's tensor -> slot at the owner
#: RESULT      slot -> target tensor
#: FORWARD     target tensor of a rank that got it by an earlier row -> target tensor of another rank
#: CARRY       source tensor -> packed buffer on a rank of the target side that need not hold it
#: DELIVER     that packed buffer -> target tensor
MOVE, CONTRIBUTE, RESULT, FORWARD, CARRY, DELIVER = 0, 1, 2, 3, 4, 5
#: Role of a row for the plan's own rank: both ends are on one agent; this rank sends; this rank receives.
LOCAL, SEND, RECV = 0, 1, 2


def inside_target(kind: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows go from one rank of the target side to another."""
    passed: npt.NDArray[np.bool_] = (kind == FORWARD) | (kind == DELIVER)
    return passed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """A product of runs: per tensor dim an int64 array (k, 3) of (source offset, target offset, length).

    Offsets are indices into that dim of the two ends' local tensors. For CONTRIBUTE the target end, and for RESULT the
    source end, is the dense slot. Both ends of a FORWARD are local tensors of the target side. The target end of a
    CARRY and the source end of its DELIVER are the region itself, packed densely. A 0-d tensor has no dims and one
    element. ``product``: which of the products that the source rank holds of the tensor its offsets are in.
    """

    dims: tuple[Ints, ...]
    product: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dim, which is the shape of the region packed densely."""
        return tuple(int(runs[:, 2].sum()) for runs in self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A dense buffer at ``owner`` in which ``count`` contributions become one value per element.

    Start from contribution 0, combine 1, 2, ... in ``accumulate`` dtype, divide by ``divisor`` once, then round once to
    the wire dtype. op is "sum", "avg", "max", "min", "product" or "norm"; for "norm", contributions to the power ``p``
    are summed and the 1/p-th power is taken. (tensor, number) names one slot on all ranks.
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

    Rows of turn w are ``rows[w]:rows[w+1]``, its slots ``slots[w]:slots[w+1]``. ``slot`` and ``depends`` count from the
    start of the turn; ``region`` is a key for ``make_region``.
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
        """The region of a key of the column ``region``; one object per key and ``cache``."""
        found = cache.get(key)
        if found is None:
            found = cache[key] = self.make_region(key)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPlan:
    """The rows of one rank, one array per column; ``len(rp)`` rows. See the module.

    ``depends`` is the earlier row of the rank that must be done before this one begins: for a contribution the previous
    contribution to the slot, for a result the last contribution, and for a FORWARD row (both of whose ends are target
    ranks) the row that brings its data. Phases rise along it.
    """

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
        """The region of a row. Rows of equal tensors share the object."""
        return self.region_at(int(self.region_index[row]))

    def region_at(self, index: int) -> Region:
        """The region of an index of the column ``region_index``."""
        which = int(np.searchsorted(self._first_region, index, "right")) - 1
        return self._templates[which].region_of(index - int(self._first_region[which]), self._caches[which])

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The reduction slots that the rows refer to, by index."""
        return tuple(
            self._templates[which].make_slot(slot, tensor)
            for tensor, which, first, last in self._slot_segments
            for slot in range(first, last)
        )
