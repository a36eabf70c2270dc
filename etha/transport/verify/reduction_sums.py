"""Checksums of an exchange's contributions as they arrive and of reduced values, taken during the run.

What comes over the wire is gone when its wave is over. So a reduction for others cannot be read afterwards, and doing
it twice would mean sending twice. Thread-safe. Call ``start`` before each run.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from etha.plan import Plan
from etha.plan.planner.rank_plan import Region
from etha.plan.proof.simulate import pack
from etha.transport.geometry.bounds import clip
from etha.transport.verify.checksums import checksum
from etha.transport.verify.chunks import CheckChunk, Kind
from etha.transport.wire.crossings import SlotPart

#: (kind, part, number). For GIVEN, number is the contribution's index; for RESULT, the place in ``part.wanted``.
Key = tuple[Kind, int, int]


def key_of(chunk: CheckChunk) -> Key:
    """The key of a GIVEN or RESULT chunk."""
    part = chunk.subject.part
    assert part is not None
    return chunk.subject.kind, part.number, chunk.subject.number


class ReductionSums:
    """Takes the sums of one program's runs; ``sums`` has those of the wanted keys."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys: frozenset[Key] = frozenset()
        self.sums: dict[Key, int] = {}

    def start(self, keys: Collection[Key]) -> None:
        """Begin a run of which the sums of ``keys`` are wanted."""
        self._keys, self.sums = frozenset(keys), {}

    def given(self, part: SlotPart, index: int, flat: torch.Tensor) -> None:
        """Sum a contribution as it enters the reduction: dense, in the source's dtype."""
        key = (Kind.GIVEN, part.number, index)
        if key in self._keys:
            self.sums[key] = checksum(flat, flat.dtype, False)

    def value(self, part: SlotPart, flat: torch.Tensor) -> None:
        """Sum the part of a reduced value that each target shall hold. ``flat`` is dense, in the wire dtype."""
        if not self._keys:
            return
        target = self._plan.target[self._plan.names[part.slot.tensor]].dtype
        for number, (_, region) in enumerate(part.wanted):
            key = (Kind.RESULT, part.number, number)
            dims = clip(region.dims, part.bounds, 0)
            if key in self._keys and dims is not None:
                found = pack(flat.view(part.shape), Region(dims=dims), 0)
                self.sums[key] = checksum(found.reshape(-1), target, True)
