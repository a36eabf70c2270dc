"""Writes transfer counts to Redis, for people to read, at most twenty times a second.

A transfer never waits for it, and back-to-back transfers do not cost one write each. Only one write is under way at a
time, over its own connection, and it carries the newest values. So nothing queues up here, however far away Redis is,
and registrations and rendezvous do not wait behind it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Mapping

from etha.agent.runtime import tasks
from etha.agent.runtime.tasks import Spawn, ends_within, outage
from etha.errors import EthaError
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Least seconds between two writes.
EVERY = 0.05

Fields = Mapping[str, int | float | str | None]
Batch = tuple[str, str]


class StatusWriter:
    """Batch hashes that must be brought up to date. An isolated change is written at once."""

    def __init__(self, store: Store, spawn: Spawn) -> None:
        self._store, self._spawn = store, spawn
        self._news: dict[Batch, dict[str, int | float | str | None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._writing = self._closed = self._refused = False
        self._next = 0.0

    def tell(self, pair: str, batch: str, fields: Fields) -> None:
        """Note that these fields have changed. The store remembers them in case Redis loses its data."""
        self._store.batches.note_fields(pair, batch, fields)
        self._news.setdefault((pair, batch), {}).update(fields)
        self._schedule()

    async def close(self) -> None:
        """Write what is left, within two seconds, and stop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not await ends_within(tasks.LAST_WORDS, self._write(tasks.LAST_WORDS)):
            log.info("Redis does not know the last transfers of %d batches", len(self._news))

    def _schedule(self) -> None:
        if self._timer is None and not self._writing and not self._closed and self._news:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._next, loop.time()), self._due)

    def _due(self) -> None:
        self._timer = None
        self._writing = True
        self._spawn(self._round())

    async def _round(self) -> None:
        try:
            await self._write(math.inf)
        finally:
            self._writing = False
            self._next = asyncio.get_running_loop().time() + EVERY
            self._schedule()

    async def _write(self, timeout: float) -> None:
        """Write what has changed, one batch after the other, with the values at the time of each write."""
        for key in list(self._news):
            if (fields := self._news.pop(key, None)) is None:  # another call has written it
                continue
            try:
                await self._store.batches.report_fields(*key, fields, timeout=timeout)
                self._refused = False
            except EthaError as error:
                if not self._refused:  # until a write succeeds, further warnings would say nothing new
                    log.warning("batch %s of pair %s: Redis does not know its last transfer: %s", key[1], key[0], error)
                self._refused = True
            except asyncio.CancelledError:
                self._news[key] = fields | self._news.get(key, {})
                raise


async def quietly(work: Awaitable[object]) -> None:
    """Write what Redis holds for people and for later. Log store errors instead of failing the batch."""
    try:
        await work
    except EthaError as error:
        outage(log, "Redis: %s", error)
