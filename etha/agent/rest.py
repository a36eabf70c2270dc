"""Rest: whether any transfer of this agent is between GO and its end."""

from __future__ import annotations

import asyncio


class Rest:
    """``running`` transfers; loop thread only."""

    def __init__(self) -> None:
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """One more."""
        self.running += 1
        self._idle.clear()

    def end(self) -> None:
        """One less."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def wait(self) -> None:
        """Return when none runs; what the caller does before it awaits again is done while none does."""
        while self.running:  # the next one may have begun since the event was set
            await self._idle.wait()
