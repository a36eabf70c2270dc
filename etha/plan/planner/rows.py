"""The rows of one rank, block by block, and the template that they make together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.plan.planner.rank_plan import Region, Slot, Template

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRows:
    """Rows of one rank in one block; ``depends`` are indices into them."""

    turn: Ints
    kind: Ints
    phase: Ints
    source: Ints
    target: Ints
    depends: Ints | None
    region: Ints
    nbytes: Ints
    place: Ints  # in order of (source cell, slice, target rank), the same in all parts of a group
    regions: int
    make_region: Callable[[int], Region]
    group: tuple[int, int] = (0, 0)


def taken(rows: BlockRows, at: Ints) -> BlockRows:
    """Some of the rows, none of which depends on another."""
    names = ("turn", "kind", "phase", "source", "target", "region", "nbytes", "place")
    return dataclasses.replace(rows, depends=None, **{name: getattr(rows, name)[at] for name in names})


def _no_slot(_slot: int, _tensor: int) -> Slot:
    raise IndexError("a plan of moves has no reduction slots")


def merge_rows(parts: Sequence[BlockRows], turns: int) -> Template:
    """Put blocks one after the other within each phase of each turn."""
    base = np.cumsum([0, *(p.regions for p in parts)])
    turn, phase = (np.concatenate([getattr(p, name) for p in parts]) for name in ("turn", "phase"))
    passed = bool(phase.any())
    order = np.arange(len(turn))
    if len(parts) > 1 or passed:
        groups = sorted({p.group for p in parts})
        group = np.concatenate([np.full(len(p.turn), groups.index(p.group)) for p in parts])
        several = len(groups) < len(parts)  # otherwise keep their order
        place = np.concatenate([p.place for p in parts]) if several else group
        order = np.lexsort((place, group, phase, turn))

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
