"""How far a transfer has come, for the workers of one agent: its own part, and what other agents copy from them.

Pure. An agent that copies from another one's workers tells it now and then which share is done.
"""

from __future__ import annotations

from collections.abc import Collection

from etha.agent.runtime.run import Part


class Gauge:
    """``readers`` are the agents that copy from this one's workers."""

    def __init__(self, part: Part, readers: Collection[str]) -> None:
        self._own = part.work
        sent = 0
        if part.wire is not None:
            sent = sum(flow.nbytes for flow in part.wire.sends.values()) - part.wire.passed
        given = sum(nbytes for (role, _), nbytes in part.nbytes.items() if role == "source")
        self._theirs = max(0, given - sent - part.near.total) if readers else 0
        self._done = 0
        self._shares = dict.fromkeys(readers, 0.0)

    def own(self, done: int) -> float:
        """This agent's part has come to ``done`` bytes; as a share of it."""
        self._done = max(self._done, min(done, self._own))
        return self._done / self._own if self._own else 1.0

    def heard(self, agent: str, share: float) -> None:
        """A reader has copied this share of its part."""
        if agent in self._shares:
            self._shares[agent] = max(self._shares[agent], min(max(share, 0.0), 1.0))

    @property
    def fraction(self) -> float:
        """Of all bytes that this agent's workers give and take, those that are done: 0.0 to 1.0."""
        whole = self._own + self._theirs
        if not whole:
            return 0.0
        theirs = self._theirs * sum(self._shares.values()) / len(self._shares) if self._shares else 0.0
        return (self._done + theirs) / whole
