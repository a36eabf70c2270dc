"""The common ground of the agent's state machines: one place that moves a state, and remembers.

A machine is synchronous and does no I/O: an event goes in, effects come out as data. The table says
which moves exist; any other raises with the machine's history, because it is a bug of ours.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Enum)


class ImpossibleMove(AssertionError):
    """A machine was asked for a move that its table does not have; the message tells its history."""


class Machine(Generic[S]):
    """A named state with a transition table; ``history`` holds the last 32 states."""

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]]

    def __init__(self, name: str, start: S) -> None:
        self.name = name
        self._state = start
        self.history: deque[str] = deque([start.name], maxlen=32)

    @property
    def state(self) -> S:
        """Where the machine stands; only ``move`` changes it."""
        return self._state

    def move(self, to: S) -> None:
        """Go to ``to``, or raise ImpossibleMove with the story so far. Staying is not a move."""
        if to is self._state:
            return
        if to not in self.TABLE[self._state]:
            raise ImpossibleMove(
                f"{self.name}: {self._state.name} -> {to.name} is impossible; so far: {', '.join(self.history)}"
            )
        log.debug("%s: %s -> %s", self.name, self._state.name, to.name)
        self._state = to
        self.history.append(to.name)
