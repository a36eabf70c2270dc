"""One exchange, as one rank sees it: the planner's rows as pieces for each peer.

The K contributions of a Partial tensor are K tensors of the plan, "0" .. "K-1": a rank holds one of them, and every
target holder gets all. A tensor that is not Partial is one contribution. So the planner's balance among replicas, and
its proof, hold for reductions, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etha.errors import LayoutError
from etha.plan import LOCAL, RECV, Layout, Plan, RankPlan, TensorSpec, build_plan
from etha.redistribute.piece import LocalRegion

#: Bytes from a rank to another, on average, from which messages go one by one.
LARGE = 1 << 18
#: Part of all links, up to which they do so, too: gloo's collective also sends the empty ones.
FEW_LINKS = 0.6
#: Number of target ranks that are asked for both averages.
SAMPLE = 8

#: A contribution's layouts: one, or several that each hold all of it.
Layouts = tuple[Layout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A piece that comes to this rank: it belongs to contribution ``part``, and ``piece`` says where it goes."""

    part: int
    piece: LocalRegion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangeStage:
    """What one rank packs for each peer, what it gets from each, and what it has already.

    Both ends of a link list their pieces in the plan's order. ``quiet``: no rank has anything to send. ``shape`` is
    that of the local result, None if this rank is not a target. ``kept`` pairs a piece of the local source with its
    place in the local result. ``apart``: messages are better sent one by one than in a collective, because copies of
    them would cost more than waking up for each, or because they go to few. All ranks agree on ``quiet`` and ``apart``.
    """

    parts: int
    shape: tuple[int, ...] | None
    sends: dict[int, tuple[LocalRegion, ...]]
    receives: dict[int, tuple[Arrival, ...]]
    kept: tuple[tuple[LocalRegion, Arrival], ...]
    quiet: bool
    apart: bool
    tag: int


def make_stage(
    shape: tuple[int, ...], dtype: torch.dtype, contributions: Sequence[Layouts], target: Layouts, rank: int
) -> ExchangeStage:
    """Plan ``contributions`` into ``target``. Every rank makes the same call, except for ``rank``."""
    width = len(str(len(contributions)))
    names = [f"{k:0{width}}" for k in range(len(contributions))]
    there = TensorSpec(shape, dtype, target)
    here = {name: TensorSpec(shape, dtype, layouts) for name, layouts in zip(names, contributions, strict=True)}
    top = max(int(layout.ranks.max()) for layouts in (*contributions, target) for layout in layouts)
    # Every rank is its own agent on both sides, so that it copies what it holds.
    places = [str(r) for r in range(top + 1)]
    plan = build_plan(here, dict.fromkeys(names, there), source_agents=places, target_agents=places, fan_out="direct")
    if plan.violations:
        raise LayoutError(f"cannot redistribute: {'; '.join(v.text for v in plan.violations[:3])}")
    sends: dict[int, list[LocalRegion]] = {}
    receives: dict[int, list[Arrival]] = {}
    kept: list[tuple[LocalRegion, Arrival]] = []
    everyone = {*there.holders(), *(r for spec in here.values() for r in spec.holders())}
    source_rows, target_rows = plan.for_rank("source", rank), plan.for_rank("target", rank)
    for row in np.flatnonzero(source_rows.role != LOCAL).tolist():
        sends.setdefault(int(source_rows.target[row]), []).append(LocalRegion(source_rows.region(row), 0))
    for row in range(len(target_rows)):
        region = target_rows.region(row)
        arrival = Arrival(part=int(target_rows.tensor[row]), piece=LocalRegion(region, 1))
        if target_rows.role[row] == LOCAL:
            kept.append((LocalRegion(region, 0), arrival))
        else:
            receives.setdefault(int(target_rows.source[row]), []).append(arrival)
    return ExchangeStage(
        parts=len(names),
        shape=there.local_shape(rank),
        sends={peer: tuple(pieces) for peer, pieces in sends.items()},
        receives={peer: tuple(pieces) for peer, pieces in receives.items()},
        kept=tuple(kept),
        quiet=not sends and not receives and not _anybody(plan, there.holders()),
        apart=_apart(plan, there.holders(), len(everyone)),
        tag=int(plan.digest()[:7], 16),
    )


def _apart(plan: Plan, targets: Sequence[int], ranks: int) -> bool:
    """Judged by what some of the target ranks get from others; ``ranks`` take part in the exchange."""
    nbytes = links = 0
    asked = targets[:SAMPLE]
    for rank in asked:
        rows = plan.for_rank("target", rank)
        crosses = rows.role == RECV
        nbytes += int(rows.nbytes[crosses].sum())
        links += len(np.unique(rows.source[crosses]))
    return nbytes >= LARGE * links or links <= FEW_LINKS * (ranks - 1) * len(asked)


def _anybody(plan: Plan, targets: Sequence[int]) -> bool:
    """Whether any target rank receives anything from another."""
    return any(_crosses(plan.for_rank("target", rank)) for rank in targets)


def _crosses(rows: RankPlan) -> bool:
    return bool((rows.role == RECV).any())
