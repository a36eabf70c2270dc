"""What equal registrations amounted to before: a bounded memory in front of ``evaluate``; pure.

A record names its manifest by digest, and ``evaluate`` depends on records, manifests and places alone. So what was
found for equal ones is found again, plans with all rows that have been asked of them. Only ``seq`` is not part of it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping

from etha.agent.protocol.effects import Member
from etha.agent.protocol.evaluation import Evaluation, Where, evaluate
from etha.agent.protocol.records import Manifest, Record

#: Evaluations kept; the one that was used longest ago goes first. Plans of large models are some MB a rank.
_KEPT = 8

_Key = tuple[object, ...]


class Evaluations:
    """The last few; one an agent. From any thread: two that look for the same at once may both evaluate it."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._most = kept
        self._found: OrderedDict[_Key, Evaluation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def of(self, records: Mapping[Member, Record], manifests: Mapping[str, Manifest], where: Where) -> Evaluation:
        """``evaluate`` of the same; its plans are shared with every equal registration."""
        key = _key(records, where)
        found = self._found.pop(key, None)
        if found is None:
            found = evaluate(records, manifests, where)
        self._found[key] = found
        while len(self._found) > self._most:
            self._found.popitem(last=False)
        seq = max((record.seq for record in records.values()), default=0)
        return found if found.seq == seq else dataclasses.replace(found, seq=seq)


def _key(records: Mapping[Member, Record], where: Where) -> _Key:
    """All that an evaluation depends on, but for ``seq``."""
    told = tuple((member, dataclasses.replace(record, seq=0)) for member, record in sorted(records.items()))
    places = tuple(
        tuple((side, tuple(names)) for side, names in sorted(some.items())) for some in (where.agents, where.hosts)
    )
    return (told, places)
