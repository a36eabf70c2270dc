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

#: Bytes from a rank to another, on average, from which an exchange is large.
LARGE = 1 << 18
#: Number of target ranks that are asked for that average.
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
    place in the local result. ``large``: messages are so large that copies cost more than waking up for each of them.
    All ranks agree on ``quiet`` and ``large``.
    """

    parts: int
    shape: tuple[int, ...] | None
    sends: dict[int, tuple[LocalRegion, ...]]
    receives: dict[int, tuple[Arrival, ...]]
    kept: tuple[tuple[LocalRegion, Arrival], ...]
    quiet: bool
    large: bool
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
        large=_mean_link(plan, there.holders()) >= LARGE,
        tag=int(plan.digest()[:7], 16),
    )


def _mean_link(plan: Plan, targets: Sequence[int]) -> float:
    """Bytes that a target rank gets from each rank that sends to it, on average."""
    nbytes = links = 0
    for rank in targets[:SAMPLE]:
        rows = plan.for_rank("target", rank)
        crosses = rows.role == RECV
        nbytes += int(rows.nbytes[crosses].sum())
        links += len(np.unique(rows.source[crosses]))
    return nbytes / max(links, 1)


def _anybody(plan: Plan, targets: Sequence[int]) -> bool:
    """Whether any target rank receives anything from another."""
    return any(_crosses(plan.for_rank("target", rank)) for rank in targets)


def _crosses(rows: RankPlan) -> bool:
    return bool((rows.role == RECV).any())
