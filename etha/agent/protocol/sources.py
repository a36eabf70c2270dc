"""Which holder feeds which subscriber of a publication: the rule, without Redis and without a clock; pure.

``etha/store/publication.lua`` and the scripts behind it apply this rule to what Redis holds, and a test plays both
against each other. It is written down here so that every order of events can be walked.

1. Subscribers are served in the order in which they ask, each with the newest version that it can have *now*: from a
   holder with a free place whose tensors fit. One that nobody can serve waits, and does not keep others from being
   served.
2. Of the holders of that version it prefers one to which a link exists, then one on its host, then one in its zone,
   then any subscriber before the publisher, then the one that serves fewest.
3. The publisher gives at most ``copies`` of a version as long as those who have got it serve and fit.
4. At most slots - 1 slots of the publisher are read at once, so that a put finds one that nobody reads. Whoever waits
   for a version that is kept back for this reason comes before those who would read the other slots on.
5. A hop overwrites what the subscriber's own buffer holds. A subscriber whose turn has come while others read that
   buffer is given no more readers and keeps its turn; the next one goes first. If nobody has anything for it any more,
   it serves on.
6. All ranks of a subscriber ask with one question. Of what they hold, the lowest counts, because a hop that was aborted
   may have been written to some of them only.
7. A claim whose lease has ended gives its place back. Its hop may go on, and counts if it commits before the subscriber
   asks again. The last version of a publisher that has died is kept until another holder has all of it.
8. A put takes the version out of its slot at once, so that nobody new reads it. If no rank has written there when the
   put is given up, or its publisher ends, the slot holds that version again.
9. A subscriber that *passes on* may be claimed by other hosts for the version that it is receiving. A holder that has
   it whole comes first. At most MOST_DEEP subscribers pass on one from the other. If the claim that brings a version
   ends without it, the claims for what was passed on end with it. Such a hop commits only after the one that brings
   the version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

#: Most subscribers in a row each of which is still receiving what it passes on.
MOST_DEEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingVersion:
    """A version that a subscriber is receiving by ``claim`` and passes on. ``depth``: it is the so manieth in a row."""

    seq: int
    label: str
    claim: int
    depth: int


@dataclass(slots=True, kw_only=True)
class HolderSlot:
    """One buffer of a holder: ``seq`` of the version that it holds whole, 0 for none, and how many claims read it.

    ``children``: subscribers that serve and have got the version here. ``origin``: the holder that gave it.
    ``arrival``: what it passes on while it has no version whole.
    """

    seq: int = 0
    label: str = ""
    used: int = 0
    children: list[str] = field(default_factory=list)
    origin: str = ""
    arrival: ComingVersion | None = None

    @property
    def arriving(self) -> int:
        """``seq`` of its arrival, 0 for none."""
        return 0 if self.arrival is None else self.arrival.seq

    @property
    def given(self) -> tuple[int, str]:
        """(seq, label) of the version that can be had from it, whole or not."""
        if self.arrival is not None and self.arrival.depth < MOST_DEEP:
            return self.arrival.seq, self.arrival.label
        return self.seq, self.label


@dataclass(slots=True, kw_only=True)
class Holder:
    """The buffers of one launch of a side, SIDE/SERIAL. ``served``: its agents answer."""

    side: str
    serial: int
    slots: list[HolderSlot]
    places: int
    publisher: bool = False
    copies: int = 0
    kind: str = "a"
    host: str = ""
    zone: str = ""
    served: bool = True
    orphan: bool = False
    draining: bool = False

    @property
    def name(self) -> str:
        return f"{self.side}/{self.serial}"

    @property
    def used(self) -> int:
        """How many claims it serves."""
        return sum(slot.used for slot in self.slots)

    @property
    def newest(self) -> int:
        """The newest version that it holds whole."""
        return max(slot.seq for slot in self.slots)

    @property
    def promised(self) -> int:
        """The newest version that it holds or passes on."""
        return max(slot.given[0] for slot in self.slots)

    def claimable(self) -> list[bool]:
        """For each slot whether a new claim may read it, but for the number of places."""
        reading = sum(slot.used > 0 for slot in self.slots)
        full = not self.orphan and reading >= max(1, len(self.slots) - 1)
        return [slot.given[0] > 0 and not (full and not slot.used) for slot in self.slots]

    def offer(self) -> int:
        """The newest version that can be had here now, 0 for none."""
        if self.used >= self.places or self.draining:
            return 0
        return max((s.given[0] for s, can in zip(self.slots, self.claimable(), strict=True) if can), default=0)


@dataclass(slots=True, kw_only=True)
class VersionRequest:
    """A subscriber's question, in the queue."""

    subscriber: str
    serial: int
    call: int
    newer_than: int = 0
    label: str = ""
    links: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    kind: str = "a"
    host: str = ""
    zone: str = ""
    protected: bool = False

    @property
    def name(self) -> str:
        return f"{self.subscriber}/{self.serial}"


@dataclass(slots=True, kw_only=True)
class Hop:
    """A granted claim. ``upstream``: the claim that brings the version to its holder, 0 if that had it whole."""

    number: int
    call: int
    subscriber: str
    serial: int
    holder: str
    slot: int
    seq: int
    label: str
    protected: bool = False
    newer_than: int = 0
    pinned: bool = False
    upstream: int = 0

    @property
    def target(self) -> str:
        """The subscriber as a holder."""
        return f"{self.subscriber}/{self.serial}"


@dataclass(slots=True, kw_only=True)
class Subscriber:
    """One launch of a subscriber: its last ``call``, the last one that is ``over``, and what it holds."""

    serial: int
    places: int = 1
    passes: bool = False
    kind: str = "a"
    host: str = ""
    zone: str = ""
    call: int = 0
    over: int = 0
    refused: int = 0
    claim: int = 0
    held: int = 0
    protect: bool = False


@dataclass(slots=True, kw_only=True)
class RunningPut:
    """The put for which the publisher's ranks write a slot. Until one does, the slot's version can be put back."""

    put: int
    slot: int
    seq: int
    #: (seq, label) that its slot held, and whether a rank was told that it may write there.
    kept: tuple[int, str] = (0, "")
    given: bool = False


class Sources:
    """What Redis knows of a publication whose sides have one rank each. Every method is one script.

    ``unfit``: (source kind, target kind) whose tensors do not fit. ``lacking``: those of which the source does not hold
    all elements that the target wants. ``expired``: claims whose lease has ended, which the next script finds.
    """

    def __init__(
        self,
        *,
        serial: int = 0,
        unfit: frozenset[tuple[str, str]] = frozenset(),
        lacking: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self.unfit, self.lacking = unfit, lacking
        self.serial, self.seq, self.label = serial, 0, ""
        self.holders: dict[str, Holder] = {}
        self.subscribers: dict[str, Subscriber] = {}
        self.queue: list[VersionRequest] = []
        self.hops: dict[int, Hop] = {}
        self.expired: set[int] = set()
        self.publisher, self.publisher_side, self.puts = "", "", 0
        self.put: RunningPut | None = None
        self.orphans: list[str] = []
        self.draining: list[str] = []
        self._vanished = False

    # ---- sides ------------------------------------------------------------------------------------

    def publish(
        self, side: str, *, slots: int = 2, places: int = 1, copies: int = 0, kind: str = "a", host: str = ""
    ) -> str:
        """A publisher is launched, the one before is over. Returns its name as a holder."""
        if self.publisher_side:
            self.leave(self.publisher_side, _last=False)
        self.serial += 1
        buffers = [HolderSlot() for _ in range(slots)]
        one = Holder(
            side=side,
            serial=self.serial,
            slots=buffers,
            places=places,
            publisher=True,
            copies=copies,
            kind=kind,
            host=host,
        )
        self.holders[one.name] = one
        self.publisher, self.publisher_side, self.puts, self.put = one.name, side, 0, None
        self._lapse()
        self._match()
        return one.name

    def subscribe(
        self, name: str, *, places: int = 1, passes: bool = False, kind: str = "a", host: str = "", zone: str = ""
    ) -> int:
        """A subscriber is launched, its launch before is over. Returns its serial."""
        if name in self.subscribers:
            self.leave(name, _last=False)
        self.serial += 1
        self.subscribers[name] = Subscriber(
            serial=self.serial, places=places, passes=passes, kind=kind, host=host, zone=zone
        )
        if places:
            one = Holder(
                side=name, serial=self.serial, slots=[HolderSlot()], places=places, kind=kind, host=host, zone=zone
            )
            self.holders[one.name] = one
        self._lapse()
        self._match()
        return self.subscribers[name].serial

    def leave(self, side: str, *, _last: bool = True) -> None:
        """A side has left or died."""
        if side == self.publisher_side:
            one = self.holders.get(self.publisher)
            if one is not None:
                if self.put is not None and not self.put.given:
                    self._put_back()
                newest = one.newest
                for slot in one.slots:
                    if 0 < slot.seq < newest:
                        self._clear(one.name, slot)
                one.orphan = True
                self.orphans.append(one.name)
            self.publisher, self.publisher_side, self.put = "", "", None
        else:
            mine = self.subscribers.pop(side)
            self._leave_queue(f"{side}/{mine.serial}")
            self._end(mine.claim, committed=False)
            self._drop(f"{side}/{mine.serial}")
        if _last:
            self._lapse()
            self._match()

    # ---- the publisher --------------------------------------------------------------------------------

    def prepare(self) -> tuple[int, bool]:
        """The next put begins, or is asked about again: its slot, and whether nobody reads it."""
        self._lapse()
        one = self.holders[self.publisher]
        if self.put is None:
            number = min((slot.used > 0, slot.seq, number) for number, slot in enumerate(one.slots))[2]
            slot = one.slots[number]
            self.put = RunningPut(put=self.puts + 1, slot=number, seq=self.seq + 1, kept=(slot.seq, slot.label))
            if slot.seq:
                self._clear(one.name, slot)
        ready = not one.slots[self.put.slot].used
        self.put.given = self.put.given or ready
        self._match()
        return self.put.slot, ready

    def abandon(self) -> None:
        """The only rank has given the put up before it wrote anything: the slot holds what it held."""
        self._lapse()
        if self.put is not None:
            self._put_back()
            self.put = None
        self._match()

    def announce(self, label: str = "") -> int:
        """The put is set aside. Returns its seq."""
        assert self.put is not None
        one = self.holders[self.publisher]
        self.seq = max(self.put.seq, self.seq + 1)
        self.label = label or str(self.seq)
        slot = one.slots[self.put.slot]
        slot.seq, slot.label, slot.children, slot.origin = self.seq, self.label, [], ""
        self.puts, self.put = self.put.put, None
        self._lapse()
        self._match()
        return self.seq

    # ---- subscribers ------------------------------------------------------------------------------------

    def claim(
        self,
        name: str,
        call: int,
        *,
        newer_than: int = 0,
        label: str = "",
        links: tuple[str, ...] = (),
        avoid: tuple[str, ...] = (),
    ) -> Hop | None:
        """Ask, or ask again. Returns the hop if one is granted. LookupError: the pinned version is not there."""
        mine = self.subscribers[name]
        if mine.refused == call:
            raise LookupError(label)
        if call > mine.call and call > mine.over:
            ask = VersionRequest(
                subscriber=name,
                serial=mine.serial,
                call=call,
                newer_than=newer_than,
                label=label,
                links=links,
                avoid=avoid,
                kind=mine.kind,
                host=mine.host,
                zone=mine.zone,
                protected=mine.protect,
            )
            if label and not self._pinned(ask):
                raise LookupError(label)
            self._leave_queue(ask.name)
            self._end(mine.claim, committed=False)
            mine.call = call
            self.queue.append(ask)
        elif call == mine.call:
            for ask in self.queue:
                if ask.name == f"{name}/{mine.serial}":
                    ask.newer_than = min(ask.newer_than, newer_than)
        if call >= mine.call and call > mine.over:
            self._lapse()
            self._match()
            if mine.refused == call:
                raise LookupError(label)
        return self.hops.get(mine.claim)

    def withdraw(self, name: str, call: int) -> None:
        """A question is taken back."""
        mine = self.subscribers[name]
        if call < mine.call or call <= mine.over:
            return
        self._leave_queue(f"{name}/{mine.serial}")
        self._end(mine.claim, committed=False)
        mine.call = mine.over = call
        self._lapse()
        self._match()

    def renew(self, number: int) -> bool:
        """A lease is renewed, if it has not ended."""
        self._lapse()
        self._match()
        return number in self.hops

    def release(self, hop: Hop, *, committed: bool, held: int = 0, overwritten: bool = False) -> bool:
        """A hop has ended. ``held``: what the buffer of a subscriber still holds whole after one that failed."""
        self._lapse()
        known = self._end(hop.number, committed=committed)
        mine = self.subscribers.get(hop.subscriber)
        if mine is not None and mine.serial == hop.serial and mine.call == hop.call:
            if committed:
                self._hold(mine, hop, hop.seq, hop.label, hop.holder)
                mine.protect = False
            elif known or mine.over < hop.call:
                mine.protect = mine.protect or overwritten
                mine.held = 0
                if held:
                    self._hold(mine, hop, held, str(held), "")
            mine.over = hop.call
        self._match()
        return known

    def forget(self, name: str) -> None:
        """The buffers of a holder are lost."""
        self._lapse()
        one = self.holders.get(name)
        if one is not None:
            for slot in one.slots:
                if slot.seq:
                    self._clear(name, slot)
            if one.orphan and not one.used:
                self._drop(name)
            mine = self.subscribers.get(one.side)
            if mine is not None and mine.serial == one.serial:
                mine.held = 0
        self._match()

    # ---- the rule -----------------------------------------------------------------------------------------

    def feeds(self, source: str, target: str) -> bool:
        """Whether tables of these kinds fit."""
        return (source, target) not in self.unfit | self.lacking

    def fits(self, ask: VersionRequest, one: Holder, slot: HolderSlot) -> bool:
        """Whether the version in a slot is what a subscriber wants, in a form that it can take."""
        if slot.arrival is not None and one.host and one.host == ask.host:  # nothing is passed on inside a host
            return False
        seq, label = slot.given
        wanted = label == ask.label if ask.label else seq > ask.newer_than
        return seq > 0 and wanted and one.name not in ask.avoid and self.feeds(one.kind, ask.kind)

    def enough(self, ask: VersionRequest, one: Holder, slot: HolderSlot) -> bool:
        """Whether the publisher has given enough copies of a version, and those who have them may feed this one.

        One whose agent is silent is found when it is chosen, or when its own claim lapses.
        """
        if not one.publisher or one.orphan or not one.copies or len(slot.children) < one.copies:
            return False
        children = [self.holders[n] for n in slot.children if n in self.holders and n not in ask.avoid]
        return any(self.feeds(child.kind, ask.kind) for child in children)

    def choose(self, ask: VersionRequest, closed: frozenset[str] = frozenset()) -> tuple[str, int] | None:
        """From whom, and which slot, a subscriber gets the newest version now. A holder without agents is dropped."""
        low = 0 if ask.label else ask.newer_than
        free = sorted(((one.offer(), name) for name, one in self.holders.items()), reverse=True)
        best: tuple[tuple[int, ...], str, int] | None = None
        dropped = False
        for offer, name in free:
            if offer <= low or (best is not None and best[0][0] > offer):
                break
            one = self.holders[name]
            if name == ask.name or name in closed:
                continue
            if not one.served:
                self._drop(name)
                dropped = True
                continue
            preference = (
                name in ask.links,
                bool(one.host) and one.host == ask.host,
                bool(one.zone) and one.zone == ask.zone,
                not one.publisher,
                -one.used,
                -one.serial,
            )
            for number, (slot, can) in enumerate(zip(one.slots, one.claimable(), strict=True)):
                depth = 0 if slot.arrival is None else slot.arrival.depth
                rank = (slot.given[0], int(not depth), *map(int, preference), -depth)
                if can and self.fits(ask, one, slot) and not self.enough(ask, one, slot):
                    best = (rank, name, number) if best is None or rank > best[0] else best
        if dropped and best is None:
            return self.choose(ask, closed)  # without that holder the publisher may give another copy
        return None if best is None else best[1:]

    def kept_back(self, ask: VersionRequest) -> bool:
        """Whether a subscriber waits for a slot that the publisher keeps back, because its other slots are read."""
        one = self.holders.get(self.publisher)
        if one is None:
            return False
        pairs = zip(one.slots, one.claimable(), strict=True)
        return any(not can and self.fits(ask, one, s) and not self.enough(ask, one, s) for s, can in pairs)

    def _match(self) -> None:
        self._drop_orphans()
        for name in reversed(self.draining[:]):
            asks = [ask for ask in self.queue if ask.name == name]
            low = 0 if not asks or asks[0].label else asks[0].newer_than
            if not asks or not any(one.promised > low for one in self.holders.values()):
                self._serve_on(name)
        if self._vanished:
            for ask in [one for one in self.queue if one.label]:
                if not self._pinned(ask):
                    self._leave_queue(ask.name)
                    mine = self.subscribers[ask.subscriber]
                    mine.refused = mine.over = ask.call
        self._vanished = False
        while self._serve_queue():  # what is passed on now may be for those who came before
            pass

    def _serve_queue(self) -> bool:
        """Give free places to those who wait. Returns whether one of them passes on what it gets."""
        closed: frozenset[str] = frozenset()
        passed = False
        for ask in self.queue[:]:
            if not any(one.offer() for one in self.holders.values()):
                return False
            found = self.choose(ask, closed)
            own = self.holders.get(ask.name)
            if found is None:
                if self.publisher not in closed and self.kept_back(ask):
                    closed |= {self.publisher}
            elif own is not None and own.used:
                if not own.draining:
                    own.draining = True
                    self.draining.append(ask.name)
            else:
                self._grant(ask, *found)
                passed = passed or self.subscribers[ask.subscriber].passes
        return passed

    def _grant(self, ask: VersionRequest, name: str, number: int) -> None:
        one = self.holders[name]
        slot = one.slots[number]
        seq, label = slot.given
        self.serial += 1
        hop = Hop(
            number=self.serial,
            call=ask.call,
            subscriber=ask.subscriber,
            serial=ask.serial,
            holder=name,
            slot=number,
            seq=seq,
            label=label,
            protected=ask.protected,
            newer_than=ask.newer_than,
            pinned=bool(ask.label),
            upstream=0 if slot.arrival is None else slot.arrival.claim,
        )
        slot.used += 1
        self.hops[hop.number] = hop
        self.subscribers[ask.subscriber].claim = hop.number
        self._leave_queue(ask.name)
        own = self.holders.get(ask.name)
        if own is not None:
            for one_slot in own.slots:
                if one_slot.seq:
                    self._clear(ask.name, one_slot)
            slot.children.append(ask.name)
            if self.subscribers[ask.subscriber].passes:
                depth = 1 if slot.arrival is None else slot.arrival.depth + 1
                own.slots[0].arrival = ComingVersion(seq=seq, label=label, claim=hop.number, depth=depth)
                own.slots[0].children = []

    def _end(self, number: int, *, committed: bool) -> bool:
        hop = self.hops.pop(number, None)
        self.expired.discard(number)
        if hop is None:
            return False
        one = self.holders.get(hop.holder)
        if one is not None and one.slots[hop.slot].used:
            slot = one.slots[hop.slot]
            slot.used -= 1
            if not committed and hop.seq in (slot.seq, slot.arriving):
                slot.children = [name for name in slot.children if name != hop.target]
        mine = self.subscribers.get(hop.subscriber)
        if mine is not None and mine.claim == number:
            mine.claim = 0
        if not committed:
            self._end_passed(hop)
        return True

    def _end_passed(self, hop: Hop) -> None:
        """A version does not come: nobody is passed it on."""
        own = self.holders.get(hop.target)
        if own is not None and own.slots[0].arrival is not None and own.slots[0].arrival.claim == hop.number:
            own.slots[0].arrival = None
            own.slots[0].children = []
        for number in sorted(number for number, one in self.hops.items() if one.upstream == hop.number):
            ended = self.hops[number]
            self._end(number, committed=False)
            mine = self.subscribers.get(ended.subscriber)
            if mine is not None and mine.serial == ended.serial:
                mine.over = ended.call

    def _hold(self, mine: Subscriber, hop: Hop, seq: int, label: str, origin: str) -> None:
        mine.held = seq
        own = self.holders.get(hop.target)
        if own is None:
            return
        slot = own.slots[0]
        if slot.seq:
            self._clear(own.name, slot)
        passed = slot.children if slot.arriving == seq else []
        slot.seq, slot.label, slot.children, slot.origin, slot.arrival = seq, label, passed, origin, None
        source = self.holders.get(origin)
        for given in source.slots if source is not None else ():
            if given.seq == seq and own.name not in given.children:
                given.children.append(own.name)

    def _lapse(self) -> None:
        for number in sorted(self.expired):
            hop = self.hops.get(number)
            if hop is None:  # it has ended with the claim that brings its version
                continue
            self._end(number, committed=False)
            mine = self.subscribers.get(hop.subscriber)
            if mine is not None and mine.serial == hop.serial:
                mine.over = hop.call

    def _put_back(self) -> None:
        one = self.holders.get(self.publisher)
        if one is not None and self.put is not None:
            slot = one.slots[self.put.slot]
            slot.seq, slot.label = self.put.kept

    def _clear(self, name: str, slot: HolderSlot) -> None:
        origin = self.holders.get(slot.origin)
        for one in origin.slots if origin is not None else ():
            if one.seq == slot.seq:
                one.children = [child for child in one.children if child != name]
        slot.seq, slot.label, slot.children, slot.origin = 0, "", [], ""
        self._vanished = True

    def _drop(self, name: str) -> None:
        one = self.holders.get(name)
        if one is None:
            return
        for slot in one.slots:
            if slot.seq:
                self._clear(name, slot)
        del self.holders[name]
        self.orphans = [other for other in self.orphans if other != name]
        self.draining = [other for other in self.draining if other != name]
        if self.publisher == name:
            self.publisher = ""

    def _drop_orphans(self) -> None:
        for name in reversed(self.orphans[:]):
            one = self.holders[name]
            others = [
                other
                for other in self.holders.values()
                if other.name != name and other.newest >= one.newest and (other.kind, one.kind) not in self.lacking
            ]
            if not one.used and (not one.newest or others):
                self._drop(name)

    def _serve_on(self, name: str) -> None:
        one = self.holders.get(name)
        if one is not None and one.draining:
            one.draining = False
            self.draining.remove(name)

    def _leave_queue(self, name: str) -> None:
        self.queue = [ask for ask in self.queue if ask.name != name]
        self._serve_on(name)

    def _pinned(self, ask: VersionRequest) -> bool:
        return any(
            slot.seq and slot.label == ask.label and self.feeds(one.kind, ask.kind)
            for one in self.holders.values()
            for slot in one.slots
            if one.name != ask.name
        )

    # ---- what always holds ----------------------------------------------------------------------------------

    def violations(self) -> Iterator[str]:
        """What is wrong with this state: nothing, after any events."""
        for name, one in self.holders.items():
            if one.used > one.places:
                yield f"{name} serves {one.used} at {one.places} places"
            for number, slot in enumerate(one.slots):
                hops = [hop for hop in self.hops.values() if (hop.holder, hop.slot) == (name, number)]
                if len(hops) != slot.used:
                    yield f"slot {number} of {name} counts {slot.used} readers and has {len(hops)}"
                if any(slot.seq not in (0, hop.seq) for hop in hops):
                    yield f"slot {number} of {name} was overwritten under a reader"
                if slot.arrival is not None and slot.arrival.claim not in self.hops:
                    yield f"slot {number} of {name} passes on what does not come"
                if slot.seq and slot.arrival is not None:
                    yield f"slot {number} of {name} is whole and passes on"
            reading = sum(slot.used > 0 and slot.seq > 0 for slot in one.slots)
            if one.publisher and not one.orphan and reading > max(1, len(one.slots) - 1):
                yield f"all {reading} slots of {name} are read"
        waiting = [ask.name for ask in self.queue]
        receiving = [hop.target for hop in self.hops.values()]
        if len(set(waiting + receiving)) != len(waiting + receiving):
            yield f"somebody waits or receives twice: {waiting}, {receiving}"
        for hop in self.hops.values():
            row, seen = hop, {hop.number}
            while row.upstream in self.hops:
                row = self.hops[row.upstream]
                if row.number in seen or len(seen) > MOST_DEEP:
                    yield f"claim {hop.number} is passed on in a circle, or by too many"
                    break
                seen.add(row.number)
            if not hop.pinned and hop.seq <= hop.newer_than:
                yield f"{hop.target} asked for more than {hop.newer_than} and is given {hop.seq}"
            mine = self.subscribers.get(hop.subscriber)
            if mine is None or mine.serial != hop.serial or mine.claim != hop.number:
                yield f"claim {hop.number} belongs to nobody"
        closed: frozenset[str] = frozenset()
        for ask in self.queue:
            own = self.holders.get(ask.name)
            if own is not None and own.used and own.draining:
                continue
            if self.choose(ask, closed) is not None:
                yield f"{ask.name} waits though there is a place for it"
            if self.kept_back(ask):
                closed |= {self.publisher}
