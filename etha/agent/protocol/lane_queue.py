"""What transfers between agents may use of one agent at once, over all of its batches; pure.

A transfer over several agents books what it needs of each before GO, and holds it to its end: staging memory, one
of the places on the way to each peer, on a card the order of NCCL. Threads that copy are not booked: whoever has one
never waits for anything but memory of this machine while he has it.

Two that book the same agents cannot wait for each other (wound-wait): tickets are totally ordered and a booking keeps
its ticket until GO. Look at the oldest ticket that has not begun. What it lacks anywhere is held by transfers that
have begun, and those book nothing more to end, or by younger ones, which are recalled and queue behind it; nobody
younger gets any of it in between. So it gets all that it needs, which is never more than there is, begins and ends;
then the next is the oldest. None is overtaken for ever, for of all tickets ever made only finitely many are older.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etha.peer.messages import Ticket

#: Of what is held for calls that may wait for hours: gives way to every ticket.
YOUNGEST: Ticket = (1 << 62, "", "")

#: How much of each resource, by its name.
Need = Mapping[str, int]
#: All of an agent that has nothing but one lane.
LANE: Need = MappingProxyType({"lane": 1})


@dataclass(frozen=True, slots=True)
class Granted:
    """``key`` has all that it needs here."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Recalled:
    """An older ticket wants what ``key`` was granted and has not begun on; said once a grant."""

    key: Hashable


@dataclass(slots=True, kw_only=True)
class _Booking:
    ticket: Ticket
    need: Need
    held: bool = False
    recalled: bool = False
    begun: bool = False


class Bookings:
    """``limit`` tells how much there is of a resource: one of each where nothing else is said."""

    def __init__(self, limit: Callable[[str], int] = lambda resource: 1) -> None:
        self._limit = limit
        self._bookings: dict[Hashable, _Booking] = {}

    @property
    def holders(self) -> frozenset[Hashable]:
        """Who has what it needs."""
        return frozenset(key for key, booking in self._bookings.items() if booking.held)

    def want(self, key: Hashable, ticket: Ticket, need: Need = LANE) -> list[Granted | Recalled]:
        """``key`` asks for what it needs; whatever it had or wanted before is given up."""
        before = self.free(key)
        self._bookings[key] = _Booking(ticket=ticket, need=self._within(need))
        return [*before, *self._decide()]

    def can_hold(self, key: Hashable, need: Need = LANE) -> bool:
        """Whether ``hold`` would grant it: ``key`` has nothing, nobody older wants it, and it is there."""
        if key in self._bookings:
            return False
        left = self._left()
        for other in self._bookings.values():
            if not other.held:
                self._take(left, other.need)
        return not self._short(left, self._within(need))

    def hold(self, key: Hashable, need: Need = LANE) -> bool:
        """Take it for ``key`` if ``can_hold``, younger than any ticket; whether it was taken."""
        if not self.can_hold(key, need):
            return False
        self._bookings[key] = _Booking(ticket=YOUNGEST, need=self._within(need), held=True)
        return True

    def begin(self, key: Hashable) -> list[Granted | Recalled]:
        """GO was said to ``key``: it runs to its end now."""
        booking = self._bookings.get(key)
        if booking is None or not booking.held:
            return []
        booking.begun = True
        return self._decide()  # it may have been recalled in vain

    def free(self, key: Hashable) -> list[Granted | Recalled]:
        """``key`` has ended or wants nothing any longer; nothing where it never did."""
        if self._bookings.pop(key, None) is None:
            return []
        return self._decide()

    # ---- inside -------------------------------------------------------------------------------

    def _within(self, need: Need) -> Need:
        return {name: min(amount, self._limit(name)) for name, amount in need.items() if amount > 0}

    def _left(self) -> dict[str, int]:
        """What nobody holds, of the resources that somebody has named."""
        left: dict[str, int] = {}
        for booking in self._bookings.values():
            if booking.held:
                self._take(left, booking.need)
        return left

    def _take(self, left: dict[str, int], need: Need) -> None:
        for name, amount in need.items():
            left[name] = left.get(name, self._limit(name)) - amount

    def _give(self, left: dict[str, int], need: Need) -> None:
        for name, amount in need.items():
            left[name] = left.get(name, self._limit(name)) + amount

    def _short(self, left: Mapping[str, int], need: Need) -> set[str]:
        return {name for name, amount in need.items() if left.get(name, self._limit(name)) < amount}

    def _decide(self) -> list[Granted | Recalled]:
        """In the order of tickets: who finds what it needs is granted it, who does not keeps younger ones from it."""
        changes: list[Granted | Recalled] = []
        left = self._left()
        waiting = [(key, booking) for key, booking in self._bookings.items() if not booking.held]
        for key, booking in sorted(waiting, key=lambda item: item[1].ticket):
            if self._short(left, booking.need):
                changes += self._recall(left, booking)
            else:
                booking.held, booking.recalled, booking.begun = True, False, False
                changes.append(Granted(key))
            self._take(left, booking.need)
        return changes

    def _recall(self, left: Mapping[str, int], booking: _Booking) -> list[Granted | Recalled]:
        """Call back from younger ones that have not begun, the youngest first, until it is enough for ``booking``."""
        coming = dict(left)
        idle = [(key, other) for key, other in self._bookings.items() if other.held and not other.begun]
        for _, other in idle:
            if other.recalled:
                self._give(coming, other.need)
        changes: list[Granted | Recalled] = []
        for key, other in sorted(idle, key=lambda item: item[1].ticket, reverse=True):
            if other.recalled or other.ticket <= booking.ticket:
                continue
            if self._short(coming, booking.need) & other.need.keys():
                other.recalled = True
                self._give(coming, other.need)
                changes.append(Recalled(key))
        return changes
