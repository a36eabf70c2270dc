"""What Redis is told of transfers, for people to read: the latest counts, at most twenty times a second.

A transfer never waits for it, and back-to-back transfers do not pay one write each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping

from etha.agent.pairs import Spawn
from etha.errors import EthaError
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Least seconds between two rounds of writes.
EVERY = 0.05

Fields = Mapping[str, int | float | str | None]


class Chronicle:
    """Batch hashes that are to be brought up to date. An isolated change is written at once."""

    def __init__(self, store: Store, spawn: Spawn) -> None:
        self._store, self._spawn = store, spawn
        self._news: dict[tuple[str, str], dict[str, int | float | str | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0

    def tell(self, pair: str, batch: str, fields: Fields) -> None:
        """These fields have changed; the store remembers them should Redis lose its data."""
        self._store.note_batch(pair, batch, fields)
        self._news.setdefault((pair, batch), {}).update(fields)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._next, loop.time()), self._due)

    async def close(self) -> None:
        """Write what is left, and nothing more."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self._due)
        self._timer.cancel()  # and none is set any more
        await self.write()

    def _due(self) -> None:
        self._next = asyncio.get_running_loop().time() + EVERY
        self._timer = None
        self._spawn(self.write())

    async def write(self) -> None:
        """Write all that has changed; an outage of Redis is logged and leaves transfers alone."""
        news, self._news = self._news, {}
        for (pair, batch), fields in news.items():
            try:
                await self._store.set_batch(pair, batch, fields)
            except EthaError as error:
                log.warning("batch %s of pair %s: Redis does not know its last transfer: %s", batch, pair, error)


async def quietly(work: Awaitable[object]) -> None:
    """Write what Redis holds for people and for later: its outage is logged, and not the batch's."""
    try:
        await work
    except EthaError as error:
        log.warning("Redis: %s", error)
