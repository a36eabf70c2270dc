"""What a plan moves and how it is spread: bytes by distance, the busiest rank and host, operations.

Counted over every rank's rows, each row once. Only bytes between hosts count for the busiest ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from etha.plan.program import CONTRIBUTE, Template

if TYPE_CHECKING:
    from etha.plan.plan import Plan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStats:
    """Bytes at the dtype that travels; ``wire`` is between hosts, ``max_*`` are of the busiest one, wire only."""

    local_bytes: int
    host_bytes: int
    wire_bytes: int
    max_rank_egress: int
    max_rank_ingress: int
    max_host_egress: int
    max_host_ingress: int
    ops: int
    rounds: int

    @property
    def total_bytes(self) -> int:
        return self.local_bytes + self.host_bytes + self.wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """All rows of a plan, each once: (kind, sender, receiver, bytes, how many tensors do so, round)."""

    kind: Ints
    source: Ints
    target: Ints
    nbytes: Ints
    times: Ints


def flows(plan: Plan) -> Flows:
    """Every row of every rank, counted from the receiving end: at targets, and at owners for contributions."""
    columns: list[tuple[Ints, ...]] = []
    for at, klass in enumerate(plan.classes):
        turns = np.bincount(plan.turn_of[plan.class_of == at], minlength=klass.turns)
        ranks = {r for h in klass.m2m.target for r in h.ranks.reshape(-1).tolist() if r >= 0}
        for rank in sorted(ranks):
            _collect(plan.template(at, "target", rank)[0], turns, None, columns)
        if klass.reduction is not None:
            for rank in sorted({r for r in klass.reduction.holding.ranks.reshape(-1).tolist() if r >= 0}):
                _collect(plan.template(at, "source", rank)[0], turns, rank, columns)
    empty = tuple(np.zeros(0, dtype=np.int64) for _ in range(5))
    kind, source, target, nbytes, times = (np.concatenate(c) for c in zip(empty, *columns, strict=True))
    return Flows(kind=kind, source=source, target=target, nbytes=nbytes, times=times)


def _collect(template: Template | None, turns: Ints, owner: int | None, into: list[tuple[Ints, ...]]) -> None:
    if template is None:
        return
    keep = np.ones(len(template.kind), dtype=bool)
    if owner is not None:
        keep = (template.kind == CONTRIBUTE) & (template.target == owner)
    times = np.repeat(turns, np.diff(template.rows))
    into.append(tuple(c[keep] for c in (template.kind, template.source, template.target, template.nbytes, times)))


def distances(plan: Plan, found: Flows) -> tuple[Ints, Ints, Ints]:
    """Per row 0 (one agent), 1 (one host) or 2 (between hosts), and the hosts of its two ends."""
    t = plan.topology
    inside = found.kind == CONTRIBUTE
    here = t.source_host[found.source]
    there = np.where(
        inside,
        t.source_host[np.where(inside, found.target, 0)] if len(t.source_host) else 0,
        t.target_host[np.where(inside, 0, found.target)] if len(t.target_host) else 0,
    ).astype(np.int64)
    local = plan.is_local(found.kind, found.source, found.target)
    return np.where(local, 0, np.where(here == there, 1, 2)).astype(np.int64), here, there


def stats(plan: Plan) -> PlanStats:
    """The figures of ``plan``; runs over the rows of all ranks."""
    found = flows(plan)
    distance, here, there = distances(plan, found)
    total = found.nbytes * found.times
    wire = distance == 2
    m = len(plan.topology.source_host)
    sent, got = found.source[wire], np.where(found.kind == CONTRIBUTE, found.target, found.target + m)[wire]
    rounds = plan.rounds(found.kind, found.source, found.target)[(distance > 0) & (found.times > 0)]
    phases = (found.kind[(distance > 0) & (found.times > 0)] == 2).astype(np.int64)
    return PlanStats(
        local_bytes=int(total[distance == 0].sum()),
        host_bytes=int(total[distance == 1].sum()),
        wire_bytes=int(total[wire].sum()),
        max_rank_egress=_busiest(sent, total[wire]),
        max_rank_ingress=_busiest(got, total[wire]),
        max_host_egress=_busiest(here[wire], total[wire]),
        max_host_ingress=_busiest(there[wire], total[wire]),
        ops=int(found.times.sum()),
        rounds=len(np.unique(np.stack([phases, rounds], axis=1), axis=0)),
    )


def _busiest(who: Ints, nbytes: Ints) -> int:
    if not len(who):
        return 0
    total = np.zeros(int(who.max()) + 1, dtype=np.int64)
    np.add.at(total, who, nbytes)
    return int(total.max())
