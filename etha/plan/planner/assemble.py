"""Lay the templates of one rank end to end, and gather the rank's plan from them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etha.plan.planner.rank_plan import CONTRIBUTE, LOCAL, RECV, SEND, RankPlan, Region, Template

Ints = npt.NDArray[np.int64]
#: Columns that a row takes from its template, and their width in a RankPlan.
_WIDTHS = {
    "kind": np.int8,
    "phase": np.int16,
    "source": np.int32,
    "target": np.int32,
    "index": np.int16,
    "nbytes": np.int64,
}


class RankRows:
    """All rows of one rank, each once for all equal tensors. It is made once, and is as long as the templates together.

    ``local(kind, source, target)`` says which rows stay on one agent; ``rounds`` numbers them.
    """

    def __init__(
        self,
        side: str,
        rank: int,
        templates: Sequence[Template],
        caches: Sequence[dict[int, Region]],
        local: Callable[[Ints, Ints, Ints], npt.NDArray[np.bool_]],
        rounds: Callable[[Ints, Ints, Ints], Ints],
    ) -> None:
        self.side, self.rank = side, rank
        self.templates, self.caches = tuple(templates), tuple(caches)
        row_base = _bases(len(t.kind) for t in templates)
        self._turn_base = _bases(len(t.rows) - 1 for t in templates)
        self._region_base = _bases(t.regions for t in templates)
        self._begin = _joined([t.rows[:-1] + b for t, b in zip(templates, row_base, strict=False)])
        self._lengths = _joined([np.diff(t.rows) for t in templates])
        self._slots = _joined([np.diff(t.slots) for t in templates])
        kind, source, target, slot, depends = (
            _joined([getattr(t, name) for t in templates]) for name in ("kind", "source", "target", "slot", "depends")
        )
        receives = (target == rank) & ((kind == CONTRIBUTE) == (side == "source"))
        role = np.where(local(kind, source, target), LOCAL, np.where(receives, RECV, SEND))
        region = _joined([t.region + b for t, b in zip(templates, self._region_base, strict=False)])
        self._columns: dict[str, npt.NDArray[Any]] = {
            **{name: _joined([getattr(t, name) for t in templates]).astype(w) for name, w in _WIDTHS.items()},
            "role": role.astype(np.int8),
            "round": rounds(kind, source, target).astype(np.int32),
            "region_index": region.astype(np.int32),
        }
        # Both count from the start of a tensor's rows; None if no row has any.
        self._slot = slot.astype(np.int32) if (slot >= 0).any() else None
        self._depends = depends.astype(np.int32) if (depends >= 0).any() else None

    def rows(self, klass: Ints, turn: Ints, tensor: Ints) -> RankPlan:
        """The rank's plan in which tensor ``tensor[i]`` is turn ``turn[i]`` of template ``klass[i]``."""
        segment = self._turn_base[klass] + turn
        begin, lengths = self._begin[segment], self._lengths[segment]
        ends = np.cumsum(lengths)
        first = ends - lengths  # row at which each tensor begins
        gather = np.repeat(begin - first, lengths)
        gather += np.arange(len(gather))
        taken = {name: column.take(gather) for name, column in self._columns.items()}
        absent = np.full(len(gather), -1, dtype=np.int32)
        absent.flags.writeable = False
        counts = self._slots[segment]
        slot = _shifted(self._slot, gather, np.cumsum(counts) - counts, lengths)
        depends = _shifted(self._depends, gather, first, lengths)
        return RankPlan(
            side=self.side,
            rank=self.rank,
            tensor=np.repeat(tensor.astype(np.int32), lengths),
            slot=absent if slot is None else slot,
            depends=absent if depends is None else depends,
            _templates=self.templates,
            _caches=self.caches,
            _first_region=self._region_base[:-1],
            _slot_segments=tuple(self._segments(klass, turn, tensor, np.flatnonzero(counts))),
            **taken,
        )

    def _segments(self, klass: Ints, turn: Ints, tensor: Ints, some: Ints) -> list[tuple[int, int, int, int]]:
        found = []
        for i in some.tolist():
            which, w = int(klass[i]), int(turn[i])
            slots = self.templates[which].slots
            found.append((int(tensor[i]), which, int(slots[w]), int(slots[w + 1])))
        return found


def _bases(counts: Any) -> Ints:
    return np.cumsum([0, *counts], dtype=np.int64)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _shifted(
    column: npt.NDArray[np.int32] | None, gather: Ints, base: Ints, lengths: Ints
) -> npt.NDArray[np.int32] | None:
    """A column of places within a tensor's own rows, turned into places within all rows. -1 stays -1."""
    if column is None:
        return None
    found = column.take(gather)
    return np.where(found >= 0, found + np.repeat(base.astype(np.int32), lengths), np.int32(-1))
