"""How the workers of a test lie over hosts and agents.

   local            host                tcp                 three
agent a          agent a  agent b    agent a | agent b   agent a | agent b   | agent c
both sides       trainer  others     trainer | others    even    | odd ranks | others
                                                          ranks of trainer

   far: a host and an agent for each worker; they link as if they were many (``epoch_links``)
"""

from __future__ import annotations

from enum import StrEnum


class Way(StrEnum):
    """``local``: one agent; ``tcp``: two hosts; ``host``: two agents of one host; ``three``: three hosts; ``far``: a
    host for each worker."""

    LOCAL = "local"
    TCP = "tcp"
    HOST = "host"
    THREE = "three"
    FAR = "far"

    def place(self, side: str, rank: int) -> str:
        """Where a worker lives: workers of one place share an agent."""
        if self is Way.LOCAL:
            return "a"
        if self is Way.FAR:
            return f"{side}-{rank}"
        if self is Way.THREE:
            return "ab"[rank % 2] if side == "trainer" else "c"
        return "a" if side == "trainer" else "b"

    def host(self, place: str) -> str:
        """The host of a place: its first letter, so that "a" and "a2" are two agents of one host."""
        if self is Way.FAR:
            return f"host-{place}"
        return "the-only-one" if self in (Way.LOCAL, Way.HOST) else f"host-{place[0]}"

    @property
    def transport(self) -> str:
        """What ``status`` calls the way between trainer and inference side."""
        return "tcp" if self in (Way.THREE, Way.FAR) else str(self)


#: Where a test runs that says nothing else.
WAYS = (Way.LOCAL, Way.TCP, Way.HOST)
