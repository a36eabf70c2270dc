"""A coordinator's bookings at every agent of its batch, from all READY to GO; pure.

READY with a booking, or Book --> Booked    all booked: GO
Recall --> Unbook, Book (same ticket)    an older transfer goes first on that agent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from etha.peer.messages import Book, Booked, Recall, Ticket, Unbook

_NOBODY: Mapping[str, int] = MappingProxyType({})


class Reservation:
    """Of the coordinator of the direction from ``side``; a number names one Book, so that what is late is known."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.ticket: Ticket | None = None
        self._last = 0
        self._numbers: dict[str, int] = {}
        self._booked: set[str] = set()

    @property
    def complete(self) -> bool:
        """Every agent that was asked has granted it."""
        return bool(self._numbers) and self._booked == self._numbers.keys()

    def ask(
        self, agents: Iterable[str], ticket: Ticket, held: Mapping[str, int] = _NOBODY
    ) -> list[tuple[str, Book | Unbook]]:
        """Book at ``agents`` under ``ticket``; those ``held`` (agent -> number) came with READY."""
        self.ticket = ticket
        self._numbers |= held
        self._booked |= held.keys()
        return [(agent, self._book(agent, ticket)) for agent in agents if agent not in held]

    def booked(self, agent: str, message: Booked) -> None:
        """An agent granted it, if it is the one that was asked for last."""
        if self._numbers.get(agent) == message.number:
            self._booked.add(agent)

    def recall(self, agent: str, message: Recall) -> list[tuple[str, Book | Unbook]]:
        """An agent wants it back for an older one: queue behind that, as old as before."""
        if self.ticket is None or self._numbers.get(agent) != message.number:
            return []
        self._booked.discard(agent)
        back = Unbook(side=self.side, number=message.number)
        return [(agent, back), (agent, self._book(agent, self.ticket))]

    def cancel(self) -> list[tuple[str, Book | Unbook]]:
        """Give everything back."""
        out: list[tuple[str, Book | Unbook]] = [
            (agent, Unbook(side=self.side, number=number)) for agent, number in self._numbers.items()
        ]
        self.close()
        return out

    def close(self) -> None:
        """GO is said: what was booked is the transfer's."""
        self.ticket = None
        self._numbers.clear()
        self._booked.clear()

    def _book(self, agent: str, ticket: Ticket) -> Book:
        self._last += 1
        self._numbers[agent] = self._last
        return Book(side=self.side, number=self._last, ticket=ticket)
