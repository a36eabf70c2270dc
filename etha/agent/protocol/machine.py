"""The base of the agent's state machines: one place that changes a state, and remembers its history.

A machine is synchronous and does no I/O: an event goes in, effects come out as data. The table says which moves exist.
Any other move raises with the machine's history, because it is a bug in Etha.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

log = logging.getLogger(__name__)


class MachineState(Enum):
    """The base of a machine's states. They hash by identity, as they compare: Enum's own hash is that of the name, in
    Python code, which every look-up of a move would run."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=MachineState)


class ImpossibleMove(AssertionError):
    """A machine was asked for a move that its table does not have. The message has its history."""


class Machine(Generic[S]):
    """A named state with a transition table. ``history`` holds the last 32 states."""

    TABLE: ClassVar[Mapping[Any, frozenset[Any]]]
    #: Whether moves are logged at debug. Those of each transfer are not: a transfer has one line, at its end.
    LOGGED: ClassVar[bool] = True

    def __init__(self, name: str, start: S) -> None:
        self.name = name
        #: The current state. Only ``move`` changes it.
        self.state = start
        self.history: deque[S] = deque([start], maxlen=32)

    def move(self, to: S) -> None:
        """Change the state to ``to``. ImpossibleMove, with the history, if the table lacks that move. Staying is not a
        move."""
        if to is self.state:
            return
        if to not in self.TABLE[self.state]:
            so_far = ", ".join(state.name for state in self.history)
            raise ImpossibleMove(f"{self.name}: {self.state.name} -> {to.name} is impossible; so far: {so_far}")
        if self.LOGGED:
            log.debug("%s: %s -> %s", self.name, self.state.name, to.name)
        self.state = to
        self.history.append(to)
