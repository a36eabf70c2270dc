"""Which reading of ``_StridedShard`` a tensor's real local sizes show, if the two differ.

DTensor writes both: ``distribute_tensor`` the literal one, FSDP2 and ``redistribute`` the order of shards. Only some
ranks can see it in their own size, so they tell the others. This takes one byte each, and is done only for the uneven
sizes at which the readings differ.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from etha.errors import LayoutError
from etha.plan import Layout
from etha.redistribute.exchange import GroupExchange
from etha.redistribute.stage import Layouts

_TAG = 0x5D  # a tag of its own, because there is no plan yet


@lru_cache(maxsize=512)
def ambiguous(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the two readings give some rank different sizes; the same answer on all ranks."""
    if not layout.has_strided or layout.strided != "auto":
        return False
    order, literal = layout.with_reading("order"), layout.with_reading("literal")
    ranks = layout.ranks.reshape(-1).tolist()
    return any(order.local_shape(shape, rank) != literal.local_shape(shape, rank) for rank in ranks)


def agree(layouts: Layouts, shape: tuple[int, ...], local: torch.Tensor, rank: int, wire: GroupExchange) -> Layouts:
    """``layouts`` in the reading that fits all ranks. LayoutError on all of them if none does."""
    plain = _unambiguous(layouts, shape)
    if plain is not None:
        return plain
    holders = sorted(r for layout in layouts for r in layout.ranks.reshape(-1).tolist())
    readings = [tuple(layout.with_reading(how) for layout in layouts) for how in ("order", "literal")]
    fits = sum(1 << i for i, reading in enumerate(readings) if not misfit(reading, shape, tuple(local.shape), rank))
    others = [r for r in wire.ranks if r != rank]
    sent = dict.fromkeys(others, 1) if rank in holders else {}
    received = {r: 1 for r in holders if r != rank}
    out = torch.full((len(sent),), fits, dtype=torch.uint8, device=local.device)
    into = torch.empty(len(received), dtype=torch.uint8, device=local.device)
    wire.exchange(out, sent, into, received, _TAG)
    said = [*into.tolist(), fits]
    for i, reading in enumerate(readings):
        if all(flags >> i & 1 for flags in said):
            return reading
    raise LayoutError(
        f"the local sizes of this tensor of shape {shape} fit no reading of {layouts[0]} on all ranks: "
        f"make it with distribute_tensor, or with from_local(..., shape=, stride=) of its true global shape"
    )


@lru_cache(maxsize=512)
def _unambiguous(layouts: Layouts, shape: tuple[int, ...]) -> Layouts | None:
    """The layouts in the one reading that they have; None if a rank's size depends on the reading."""
    if any(ambiguous(layout, shape) for layout in layouts):
        return None
    return tuple(layout.with_reading("order") for layout in layouts)


def misfit(layouts: Layouts, shape: tuple[int, ...], held: tuple[int, ...], rank: int) -> str:
    """Why a local tensor of shape ``held`` is not what its layout gives it; empty if it is, or if ``rank`` has none."""
    for layout in layouts:
        if rank in layout:
            planned = layout.local_shape(shape, rank)
            if planned != held:
                return f"rank {rank} holds {held}, but {layout} gives it {planned} of {shape}"
    return ""
