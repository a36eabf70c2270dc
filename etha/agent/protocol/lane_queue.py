"""What transfers between agents may use of one agent at once, over all of its batches; pure.

A transfer over several agents books what it needs of each before GO, and holds it to its end: staging memory, a place
on the way to each peer, and on a card the order of NCCL. Threads that copy are not booked, because a copying thread
waits only for memory of this machine.

Two transfers that book the same agents cannot wait for each other (wound-wait). Tickets are totally ordered, and a
booking keeps its ticket until GO. Take the oldest ticket that has not begun. What it lacks anywhere is held either by
transfers that have begun, which book nothing more before they end, or by younger ones, which are recalled and queue
behind it. No younger one gets any of it in between. So it gets all that it needs, which is never more than there is,
begins and ends; then the next ticket is the oldest. None is overtaken for ever, because only finitely many tickets are
older.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from etha.peer.messages import Ticket

#: The ticket of what is held for calls that may wait for hours. It gives way to every other ticket.
YOUNGEST: Ticket = (1 << 62, "", "")

#: How much of each resource, by name.
Need = Mapping[str, int]
#: Everything of an agent that has nothing but one lane.
LANE: Need = MappingProxyType({"lane": 1})


@dataclass(frozen=True, slots=True)
class Granted:
    """``key`` has everything that it needs here."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Recalled:
    """An older ticket wants what ``key`` was granted and has not begun to use. Said once per grant."""

    key: Hashable


@dataclass(slots=True, kw_only=True)
class _Booking:
    ticket: Ticket
    need: Need
    held: bool = False
    recalled: bool = False
    begun: bool = False


class LaneQueue:
    """``limit`` says how much there is of a resource; by default one of each."""

    def __init__(self, limit: Callable[[str], int] = lambda resource: 1) -> None:
        self._limit = limit
        self._bookings: dict[Hashable, _Booking] = {}

    @property
    def holders(self) -> frozenset[Hashable]:
        """The keys that have what they need."""
        return frozenset(key for key, booking in self._bookings.items() if booking.held)

    def want(self, key: Hashable, ticket: Ticket, need: Need = LANE) -> list[Granted | Recalled]:
        """``key`` asks for what it needs. Whatever it had or wanted before is given up."""
        before = self.free(key)
        self._bookings[key] = _Booking(ticket=ticket, need=self._within(need))
        return [*before, *self._decide()]

    def can_hold(self, key: Hashable, need: Need = LANE) -> bool:
        """Whether ``hold`` would grant it: ``key`` has no booking, no older one wants it, and it is available."""
        if key in self._bookings:
            return False
        left = self._left()
        for other in self._bookings.values():
            if not other.held:
                self._take(left, other.need)
        return not self._short(left, self._within(need))

    def hold(self, key: Hashable, need: Need = LANE) -> bool:
        """Book it for ``key``, younger than any ticket, if ``can_hold``. Returns whether it was booked."""
        if not self.can_hold(key, need):
            return False
        self._bookings[key] = _Booking(ticket=YOUNGEST, need=self._within(need), held=True)
        return True

    def begin(self, key: Hashable) -> list[Granted | Recalled]:
        """GO was said to ``key``, so it keeps its booking to its end."""
        booking = self._bookings.get(key)
        if booking is None or not booking.held:
            return []
        booking.begun = True
        return self._decide()  # it may have been recalled in vain

    def free(self, key: Hashable) -> list[Granted | Recalled]:
        """``key`` has ended or wants nothing any longer. Does nothing if it has no booking."""
        if self._bookings.pop(key, None) is None:
            return []
        return self._decide()

    # ---- inside -------------------------------------------------------------------------------

    def _within(self, need: Need) -> Need:
        return {name: min(amount, self._limit(name)) for name, amount in need.items() if amount > 0}

    def _left(self) -> dict[str, int]:
        """What nobody holds of each resource that some booking names."""
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
        """In the order of tickets, grant those that find what they need; those that do not keep it from younger
        ones."""
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
        """Recall younger bookings that have not begun, youngest first, until it is enough for ``booking``."""
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
