"""Asks agents and reads what happened, as long as somebody looks at the page, and hands on the newest page.

    agents --status, each second--> |
    files and Redis --when new----> | Collector --> model.page() --> everybody who waits for the next one

The reports are asked for and not pushed, as ``etha status --watch`` does; what happened comes by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

from etha.agent_session import look, none_runs
from etha.config import Settings
from etha.dashboard.model import EVENTS, TRANSFERS, WaitClock, page
from etha.errors import EthaError
from etha.events import Follower, Gathered, gather
from etha.observe.history import Happening

log = logging.getLogger(__name__)

#: Seconds between two questions to the agents, and seconds that an answer may take.
EVERY, SECONDS = 1.0, 5.0
#: Seconds of the past that the first page shows.
PAST = 6 * 3600.0
#: Happenings that are kept: several agents may tell each transfer.
KEPT = 8 * (TRANSFERS + EVENTS)


class Collector:
    """A context. It asks nobody while nobody looks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watchers = 0
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._number, self._page = 0, ""
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dashboard")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def end(self) -> None:
        """Whoever watches gets no more pages."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[AsyncIterator[str]]:
        """Pages as JSON in one line, from now on. Who reads slowly misses some, and gets the newest."""
        self._watchers += 1
        self._wanted.set()
        try:
            async with aclosing(self._pages()) as pages:
                yield pages
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._wanted.clear()

    async def _pages(self) -> AsyncGenerator[str, None]:
        seen = self._number
        while True:
            async with self._changed:
                while self._number == seen and not self._ended:
                    await self._changed.wait()
                if self._ended:
                    return
                seen, text = self._number, self._page
            yield text

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            try:
                await self._collect()
            except Exception:
                log.exception("the dashboard could not be brought up to date")
                await asyncio.sleep(EVERY)

    async def _collect(self) -> None:
        """Until nobody looks any more."""
        clock = WaitClock()
        with Follower(self._settings) as follower:
            since = time.time() - PAST
            gathered = await gather(self._settings, since=since, failed=False, timeout=SECONDS)
            kept = deque(gathered.happenings, maxlen=KEPT)
            async with asyncio.TaskGroup() as tasks:
                news = tasks.create_task(self._follow(follower, gathered, kept), name="dashboard events")
                while self._wanted.is_set():
                    notes = list(gathered.notes)
                    try:
                        reports = await look(self._settings, timeout=SECONDS, silent=notes)
                    except EthaError as error:
                        reports, notes = [], [*notes, error.message]
                    if not reports:
                        notes.append(none_runs(self._settings))
                    shown = page(reports, kept, now=time.time(), clock=clock, notes=list(dict.fromkeys(notes)))
                    await self._publish({**shown, "namespace": self._settings.namespace})
                    await asyncio.sleep(EVERY)
                news.cancel()

    async def _follow(self, follower: Follower, gathered: Gathered, kept: deque[Happening]) -> None:
        async with aclosing(follower.follow(gathered)) as news:
            async for happening in news:
                kept.append(happening)

    async def _publish(self, shown: dict[str, Any]) -> None:
        async with self._changed:
            self._number += 1
            self._page = json.dumps(shown, allow_nan=False)
            self._changed.notify_all()
