"""Hops on the side that sends: which run, what they are called, and what a buffer holds while they read it; pure.

A hop is one transfer over the pair of a holder and a subscriber. A buffer is memory of one rank of a holder that agents
send from: a publisher's slot, or what a subscriber receives into.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

#: Characters that a pair's name keeps of each name in it. A digest tells apart what is cut.
_KEPT = 20


def hop_pair(publication: str, source: str, subscriber: str) -> str:
    """The pair of two holders (SIDE/SERIAL). All agents derive the same name, and launches have pairs of their own."""
    digest = hashlib.sha256("\0".join((publication, source, subscriber)).encode()).hexdigest()[:16]
    sides = (one.partition("/")[0] for one in (source, subscriber))
    names = ".".join(name[:_KEPT] for name in (publication, *sides))
    return f"hop.{names}.{digest}"


def hop_batch(pair: str, slot: int) -> str:
    """The batch of a hop's pair for one slot of its source."""
    return f"{pair}.slot{slot}"


@dataclass(slots=True)
class HopBuffer:
    """``seq``: the version that the buffer holds whole, 0 for none. ``readers``: numbers of the claims that read it.

    ``coming``: the version that is being written to it while it is passed on; all its readers want that one.
    """

    seq: int = 0
    coming: int = 0
    readers: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """It will be written: nobody may begin to read it."""
        self.seq = self.coming = 0

    def pass_on(self, seq: int) -> None:
        """Version ``seq`` is read while it is written. AssertionError while another is read, which is a bug of Etha."""
        assert not self.readers or self.coming == seq, f"a buffer that claims {sorted(self.readers)} read is written"
        self.coming = seq

    def fill(self, seq: int) -> None:
        """It holds version ``seq`` whole. AssertionError while somebody reads it, which is a bug of Etha."""
        read = self.readers and seq not in (self.seq, self.coming)
        assert not read, f"a buffer that claims {sorted(self.readers)} read was written"
        self.seq, self.coming = seq, 0

    def renumber(self, seq: int) -> None:
        """The version that it holds whole has another number than the one that was meant."""
        self.seq = seq

    def holds(self, seq: int) -> bool:
        """Whether a hop of version ``seq`` may begin to read it."""
        return self.seq == seq > 0


def new_hops(claims: Collection[int], hops: Collection[int], begun: set[int]) -> list[int]:
    """Of the claims that Redis has, those whose hop is to begin now; ``begun`` is brought up to date.

    A claim stays there after its hop has ended, until its subscriber has released it. A hop that began a second time
    would send to whatever the subscriber receives next.
    """
    begun &= {*claims, *hops}
    found = sorted(set(claims) - begun)
    begun.update(found)
    return found


def ended_hops(claims: Mapping[int, str], hops: Mapping[int, str], reading: Collection[int]) -> list[int]:
    """Of the hops that a side has begun, those that it has to end. All are number of the claim -> subscriber.

    ``claims`` are those that Redis has, ``reading`` those whose bytes may move. A hop that has not come so far ends
    with its claim. One that moves goes on, because Redis may have lost the claim: it ends with its transfer, or when
    its subscriber has a newer claim here.
    """
    newest = {subscriber: number for number, subscriber in sorted(claims.items())}
    return sorted(
        number
        for number, subscriber in hops.items()
        if number not in claims and (number not in reading or newest.get(subscriber, 0) > number)
    )
