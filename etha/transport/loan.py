"""A loan: a stream that a worker moves at this moment, while the agent's own thread waits.

The agent keeps the socket. It ends a loan by shutting the socket down, in which case nobody needs to answer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from etha.transport.wire.worker_rows import Stretch


class Loan:
    """One stretch of a stream. ``wake`` is called, on any thread, after every change of the other attributes."""

    __slots__ = ("conn", "declined", "done", "ended", "error", "over", "stretch", "wake")

    def __init__(self, stretch: Stretch, conn: socket.socket, wake: Callable[[], None]) -> None:
        self.stretch, self.conn, self.wake = stretch, conn, wake
        #: Bytes that have travelled.
        self.done = 0
        #: Whether the worker moves nothing any more.
        self.over = False
        #: Whether it has moved nothing, so that the agent has to do it.
        self.declined = False
        #: Why it has not moved everything; ``ended`` if the other end has closed the stream.
        self.error: Exception | None = None
        self.ended = False


class Lender(Protocol):
    """Lends streams of one run to workers. Any thread may call it."""

    def stretch(self, peer: str, sends: bool, lane: int, first: int) -> Stretch | None:
        """The stretch that begins with a lane's span number ``first``, if a worker can move it now."""
        ...

    def lend(self, stretch: Stretch, conn: socket.socket, wake: Callable[[], None]) -> Loan:
        """Lend a stream. Returns at once."""
        ...

    def give_up(self, loan: Loan) -> None:
        """Nobody waits for it any more: its socket may be closed."""
        ...
