"""Tally: checksums that other agents send for transfers of one batch, until all of one transfer have come.

Links keep the order of each agent's messages, and an agent gives the sums of one transfer at a time, so what
is kept of each is its newest transfer; it may be one that has not begun here yet.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from etha.peer.introductions import Sums
from etha.transport.verify.chunks import MAX_SUMS


class Tally:
    """``watch`` is called after each message that counts."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, bytearray]] = {}
        self.watch: Callable[[], None] | None = None

    def take(self, agent: str, message: Sums) -> None:
        """One message; what is late, out of order or beyond all bounds does not count."""
        seq, data = self._held.get(agent, (0, bytearray()))
        if message.seq < seq:
            return
        if message.seq > seq:
            seq, data = message.seq, bytearray()
            self._held[agent] = seq, data
        follows = len(message.sums) % 8 == 0 and message.first * 8 == len(data)
        if follows and len(data) + len(message.sums) <= 8 * MAX_SUMS:
            data += message.sums
        if self.watch is not None:
            self.watch()

    def sums(self, agent: str, seq: int, count: int) -> npt.NDArray[np.uint64] | None:
        """The ``count`` sums of a transfer, None while some are missing."""
        held, data = self._held.get(agent, (0, b""))
        if held != seq or len(data) < 8 * count:
            return None
        return np.frombuffer(bytes(data), "<u8", count)

    def forget(self, seq: int) -> None:
        """A transfer is over here: what came for it, or for one before it, is needed no more."""
        self._held = {agent: held for agent, held in self._held.items() if held[0] > seq}
