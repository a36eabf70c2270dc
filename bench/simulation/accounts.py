"""What one agent has sent, read and computed in a phase. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Counters of one agent. ``cpu`` are seconds that its callbacks took here, ``assumed`` are seconds that constants
    add for what is not simulated.

    ``messages`` and ``sent`` (bytes) go to other agents, without what belongs to a link itself: greetings, and
    ``beats``. ``links`` and ``streams`` are those that it opened. ``commands``, ``asked`` and ``read`` (bytes) are
    Redis's.
    """

    cpu: float = 0.0
    assumed: float = 0.0
    messages: int = 0
    sent: int = 0
    beats: int = 0
    links: int = 0
    streams: int = 0
    commands: int = 0
    asked: int = 0
    read: int = 0
