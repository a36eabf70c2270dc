"""Chunks -> buckets: rows between the same two ranks coalesced into one wire operation.

Both ends cut the same list at the same rows, so a bucket needs no tag: it is the n-th between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etha.errors import ConfigError
from etha.plan.program import CONTRIBUTE, LOCAL, RankPlan, inside_target

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Rows of one RankPlan that travel as one: ascending row indices, together ``nbytes``."""

    phase: int
    round: int
    source: int
    target: int
    rows: Ints
    nbytes: int


def buckets(rp: RankPlan, size: int) -> list[Bucket]:
    """The wire operations of a rank, in order of (phase, round, source, target); local rows are none.

    A bucket closes before the row that would take it above ``size`` bytes; a larger row is one alone.
    """
    if size <= 0:
        raise ConfigError(f"bucket size {size} is not positive")
    wire = np.flatnonzero(rp.role != LOCAL)
    # Ranks of which sides: source to source, source to target, target to target.
    sides = 1 - (rp.kind[wire] == CONTRIBUTE).astype(np.int8) + inside_target(rp.kind[wire])
    keys = np.stack([rp.phase[wire], sides, rp.round[wire], rp.source[wire], rp.target[wire]], axis=1).astype(np.int64)
    order = np.lexsort(keys.T[::-1])
    found: list[Bucket] = []
    open_rows: list[int] = []
    nbytes = 0

    def close() -> None:
        if open_rows:
            row = open_rows[0]
            found.append(
                Bucket(
                    phase=int(rp.phase[row]),
                    round=int(rp.round[row]),
                    source=int(rp.source[row]),
                    target=int(rp.target[row]),
                    rows=np.array(open_rows, dtype=np.int64),
                    nbytes=nbytes,
                )
            )

    last: tuple[int, ...] | None = None
    for i in order.tolist():
        row, key = int(wire[i]), tuple(keys[i].tolist())
        if key != last or nbytes + int(rp.nbytes[row]) > size:
            close()
            open_rows, nbytes = [], 0
        open_rows.append(row)
        nbytes += int(rp.nbytes[row])
        last = key
    close()
    return found
