"""A program's messages in groups, the order in which an agent issues them, and what each depends on. Pure.

A group is all that an agent sends and receives under one key. Keys are the same at both ends of a message, and every
agent issues its groups in ascending order of keys, one after the other on one stream.

**Deadlock cannot occur.** Of all messages anywhere that have not gone, take one with the least key k. At both of its
ends, all groups before the one of k have lower keys, so all of their messages have gone and these groups are done. What
the group of k depends on (``after``: forwarded pieces, reductions, memory of an earlier wave) came with lower keys,
too; ``make_rounds`` refuses a program in which it did not. So both ends get to issue k, in groups that are open until
all of their messages have gone, and the message goes. The messages of two agents are issued in the order of the same
keys, and within one key in the order of the flow, so the n-th send of one meets the n-th receive of the other.

A group holds at most GROUP operations, because a key ends with a colour of the two agents (``MessageCut.colour``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from etha.transport.copy.program import Member
from etha.transport.wire.crossings import ALIGN, SlotPart
from etha.transport.wire.flows import Span, WireProgram
from etha.transport.wire.nccl_messages import DEPTH

Key = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One send or receive. ``at`` is the place of its bytes in the group's slot of the ring; -1 if it does not use the
    slot."""

    peer: str
    span: Span
    at: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageGroup:
    """``after`` is the last group that must be laid down before this one is packed (-1: none).

    ``makes`` are reduced once this group is laid down. ``owners`` are the members whose memory all of it touches.
    """

    key: Key
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    after: int = -1
    makes: tuple[SlotPart, ...] = ()
    owners: tuple[Member, ...] = ()

    @property
    def nbytes(self) -> int:
        """Payload sent and received, in bytes."""
        return sum(m.span.nbytes for m in (*self.sends, *self.receives))


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSchedule:
    """``groups`` in order. ``slot`` is the most bytes of one group that go through the ring. The first group only
    reduces."""

    groups: tuple[MessageGroup, ...]
    slot: int

    @property
    def depth(self) -> int:
        """Number of slots of the ring that are used."""
        return min(DEPTH, len(self.groups)) if self.slot else 0


@dataclass(slots=True)
class _Draft:
    key: Key
    sends: list[tuple[str, Span]] = field(default_factory=list)
    receives: list[tuple[str, Span]] = field(default_factory=list)
    makes: list[SlotPart] = field(default_factory=list)


def make_rounds(program: WireProgram) -> NcclSchedule:
    """The groups of a program that was cut for NCCL. ValueError if a group would wait for itself or a later group."""
    found: dict[Key, _Draft] = {}
    for flows, sending in ((program.sends, True), (program.receives, False)):
        for peer, flow in flows.items():
            for lane in flow.lanes:
                for span in lane:
                    draft = found.setdefault(span.key, _Draft(span.key))
                    (draft.sends if sending else draft.receives).append((peer, span))
    drafts = [_Draft(()), *(found[key] for key in sorted(found))]
    hangs = _Hangs(program, drafts)
    groups = []
    slot = 0
    for number, draft in enumerate(drafts):
        after = hangs.of(draft)
        if after >= number:
            raise ValueError(f"group {number} {draft.key} hangs on group {after}: it would wait for itself")
        at = 0
        placed: tuple[list[Message], list[Message]] = ([], [])
        for some, messages in ((draft.sends, placed[0]), (draft.receives, placed[1])):
            for peer, span in some:
                direct = span.address != 0 or (some is draft.receives and span.index >= 0)
                messages.append(Message(peer=peer, span=span, at=-1 if direct else at))
                at += 0 if direct else -(-span.wire // ALIGN) * ALIGN
        slot = max(slot, at)
        owners = {owner for _, span in (*draft.sends, *draft.receives) for owner in span.owners}
        owners |= {owner for part in draft.makes for owner in program.values[part.number].owners}
        groups.append(
            MessageGroup(
                key=draft.key, sends=tuple(placed[0]), receives=tuple(placed[1]), after=after,
                makes=tuple(draft.makes), owners=tuple(sorted(owners)),
            )
        )  # fmt: skip
    return NcclSchedule(groups=tuple(groups), slot=slot)


class _Hangs:
    """Which group lays down what. Assigns the reductions to the groups after which they are made."""

    def __init__(self, program: WireProgram, drafts: list[_Draft]) -> None:
        self._arrival: dict[int, int] = {}
        contributed: dict[int, int] = {}
        #: The last group that uses the memory of each wave.
        self._wave: dict[int, int] = defaultdict(lambda: -1)
        for number, draft in enumerate(drafts):
            for _, span in draft.receives:
                self._arrival.update(dict.fromkeys(span.arrivals, number))
                if span.index >= 0:
                    part = span.parts[0]
                    contributed[part.number] = number
                    self._wave[part.wave] = number
            for _, span in draft.sends:
                for part in span.parts:
                    self._wave[part.wave] = number
        self._made: dict[int, int] = {}
        for part in program.parts:
            if part.far:
                at = contributed[part.number]
            elif program.values[part.number].sends:
                # As early as its memory is free, which is when the wave before the last has gone.
                at = max(0, self._before(part.wave))
            else:
                at = len(drafts) - 1  # nobody waits for it
            self._made[part.number] = at
            drafts[at].makes.append(part)

    def _before(self, wave: int) -> int:
        """The last group of the earlier waves that use the same memory as this one."""
        return max((self._wave[w] for w in range(wave - 2, -1, -2)), default=-1)

    def of(self, draft: _Draft) -> int:
        """The last group that the messages of a group depend on."""
        found = [-1]
        for _, span in draft.sends:
            found += [self._arrival[number] for number in span.after]
            found += [self._made[part.number] for part in span.parts]
        for _, span in draft.receives:
            if span.index >= 0:
                found.append(self._before(span.parts[0].wave))
        return max(found)
