"""Witness: checksums of what an exchange reduces, taken while it is there: contributions as they came, and values.

What comes by wire is gone when its wave is over, so a reduction for others cannot be looked at afterwards, and
doing it twice would mean to send twice. Any thread; ``start`` before each run.
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

#: (kind, part, number): GIVEN with the contribution's index, RESULT with the place in ``part.wanted``.
Key = tuple[Kind, int, int]


def key_of(chunk: CheckChunk) -> Key:
    """What a witness calls a GIVEN or RESULT chunk."""
    part = chunk.subject.part
    assert part is not None
    return chunk.subject.kind, part.number, chunk.subject.number


class Witness:
    """Of one program; ``sums`` of the keys that were asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys: frozenset[Key] = frozenset()
        self.sums: dict[Key, int] = {}

    def start(self, keys: Collection[Key]) -> None:
        """A run begins of which these are wanted."""
        self._keys, self.sums = frozenset(keys), {}

    def given(self, part: SlotPart, index: int, flat: torch.Tensor) -> None:
        """A contribution as it enters the reduction, dense, in the source's dtype."""
        key = (Kind.GIVEN, part.number, index)
        if key in self._keys:
            self.sums[key] = checksum(flat, flat.dtype, False)

    def value(self, part: SlotPart, flat: torch.Tensor) -> None:
        """The reduced value in the wire dtype, dense: for each target what it shall hold of it."""
        if not self._keys:
            return
        target = self._plan.target[self._plan.names[part.slot.tensor]].dtype
        for number, (_, region) in enumerate(part.wanted):
            key = (Kind.RESULT, part.number, number)
            dims = clip(region.dims, part.bounds, 0)
            if key in self._keys and dims is not None:
                found = pack(flat.view(part.shape), Region(dims=dims), 0)
                self.sums[key] = checksum(found.reshape(-1), target, True)
