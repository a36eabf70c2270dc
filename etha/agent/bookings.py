"""Whose turn it is on an agent's lane, over all of its batches; pure.

A transfer over several agents books the lane of each before GO, and holds it to its end. Two that book
the same lanes cannot wait for each other (wound-wait): tickets are totally ordered and a booking keeps
its ticket until GO. Look at the oldest ticket that has not begun. Whoever holds a lane that it wants has
either begun, and then needs no other lane to end, or is younger, and then is recalled and queues behind
it. So it gets every lane, begins and ends; then the next is the oldest. None is overtaken for ever,
for of all tickets ever made only finitely many are older.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from etha.peer.messages import Ticket

#: Of a lane that is held for calls which may wait for hours: gives way to every ticket.
YOUNGEST: Ticket = (1 << 62, "", "")


@dataclass(frozen=True, slots=True)
class Granted:
    """The lane is ``key``'s."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Recalled:
    """An older ticket wants the lane that ``key`` was granted and has not begun on; said once a grant."""

    key: Hashable


class Bookings:
    """One lane: at most one ``holder``; the others queue by ticket."""

    def __init__(self) -> None:
        self.holder: Hashable | None = None
        self.begun = False
        self._recalled = False
        self._tickets: dict[Hashable, Ticket] = {}

    def want(self, key: Hashable, ticket: Ticket) -> list[Granted | Recalled]:
        """``key`` asks for the lane; whatever it had or wanted before is given up."""
        before = self.free(key)
        self._tickets[key] = ticket
        return [*before, *self._turn()]

    def hold(self, key: Hashable) -> bool:
        """Take the lane for ``key`` if nobody has or wants it, younger than any ticket; whether it was free."""
        if self._tickets:
            return False
        self._tickets[key] = YOUNGEST
        self.holder, self.begun, self._recalled = key, False, False
        return True

    def begin(self, key: Hashable) -> None:
        """GO was said to ``key``: it runs to its end now."""
        if key == self.holder:
            self.begun = True

    def free(self, key: Hashable) -> list[Granted | Recalled]:
        """``key`` has ended or wants the lane no longer; nothing where it never did."""
        if self._tickets.pop(key, None) is None:
            return []
        if key == self.holder:
            self.holder = None
        return self._turn()

    def _turn(self) -> list[Granted | Recalled]:
        if not self._tickets:
            return []
        oldest = min(self._tickets, key=self._tickets.__getitem__)
        if self.holder is None:
            self.holder, self.begun, self._recalled = oldest, False, False
            return [Granted(oldest)]
        if self.begun or self._recalled or self._tickets[oldest] >= self._tickets[self.holder]:
            return []
        self._recalled = True
        return [Recalled(self.holder)]
