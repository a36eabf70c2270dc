"""Names that are one memory on a target: allowed where they are one memory on the source, too; pure.

Else every rank would hold what came last, whichever that is. What counts is memory, not values: equal values in two
places may be different ones at the next transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from etha.agent.protocol.records import Manifest
from etha.errors import Violation
from etha.plan import TensorSpec

Specs = Mapping[str, TensorSpec]
Members = Mapping[int, Manifest]
#: A side by its name, what its ranks registered, and what that amounts to for the plan.
Side = tuple[str, Members, Specs]


def double_writes(source: Side, target: Side, parts: Mapping[str, str]) -> list[Violation]:
    """Every rank of ``target`` and every name of it that would be written twice, with different elements.

    ``parts``: names of parts of regions, whose source is the tensor that they are parts of.
    """
    found = []
    known: dict[tuple[str, str], str | None] = {}
    for rank, manifest in sorted(target[1].items()):
        for name, first in sorted(manifest.ties.items()):
            held = parts.get(first, first), parts.get(name, name)
            if any(one not in source[2] for one in held) or any(one not in target[2] for one in (first, name)):
                continue  # that is told by itself
            if held not in known:
                known[held] = _apart(source, *held)
            why = known[held]
            if why is None and _owned(target[2][first], rank) != _owned(target[2][name], rank):
                why = f"here it holds other elements of {name!r} than of {first!r}"
            if why is not None:
                text = (
                    f"it is one memory with {first!r}, but {why}: tie them on the source as well, or register one of "
                    "them"
                )
                found.append(Violation(code="double_write", name=name, side=target[0], rank=rank, text=text))
    return found


def _apart(source: Side, first: str, name: str) -> str | None:
    """Why two names are not one memory on the source, None where they are."""
    side, members, specs = source
    for rank, manifest in sorted(members.items()):
        here = [one for one in (first, name) if one in manifest.tensors]
        if all(_empty(specs[one], rank) for one in here):
            continue
        if len(here) < 2 or manifest.region(first) != manifest.region(name):
            return f"{side} rank {rank} holds them in different memory"
        if _owned(specs[first], rank) != _owned(specs[name], rank):
            return f"{side} rank {rank} gives different elements of them"
    return None


def _empty(spec: TensorSpec, rank: int) -> bool:
    shape = spec.local_shape(rank)
    return shape is None or prod(shape) == 0


def _owned(spec: TensorSpec, rank: int) -> object:
    """The global shape, and the runs of it that a rank owns; of a contribution, which one it is."""
    for part in spec.layouts:
        if rank in part:
            return spec.shape, part.owned(spec.shape, rank), str(part) if any(a.partial for a in part.axes) else ""
    return None
