"""Rest: which registrations have a transfer between GO and its end, and waiting until some have none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etha.agent.services.batch_state import Key, Live


class Rest:
    """Registrations with a transfer that runs; each has one at a time. Loop thread only."""

    def __init__(self) -> None:
        self._moving: dict[Key, Live] = {}
        self._ended = asyncio.Event()

    @property
    def running(self) -> int:
        """How many run."""
        return len(self._moving)

    @property
    def moving(self) -> tuple[Live, ...]:
        """The registrations whose transfer runs."""
        return tuple(self._moving.values())

    def begin(self, live: Live) -> None:
        """Its transfer runs."""
        self._moving[live.key] = live

    def end(self, live: Live) -> None:
        """It has ended."""
        del self._moving[live.key]
        self._ended.set()

    async def wait(self) -> None:
        """Return when none runs; what the caller does before it awaits again is done while none does."""
        while self._moving:
            self._ended.clear()
            await self._ended.wait()

    async def wait_for(self, lives: Iterable[Live]) -> None:
        """As ``wait``, for these alone: on a busy agent there is always some transfer that runs."""
        keys = {live.key for live in lives}
        while not keys.isdisjoint(self._moving):
            self._ended.clear()
            await self._ended.wait()
