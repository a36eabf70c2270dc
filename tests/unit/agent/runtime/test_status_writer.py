"""The writer of what Redis shows of transfers: the newest value, one write on its way, no word more than once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from etha.agent.runtime.status_writer import StatusWriter
from etha.errors import ConfigError


class Far:
    """A store whose every write lasts until the test lets it end."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, dict[str, Any]]] = []
        self.most = self.running = 0
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.error: Exception | None = None
        self.batches = self

    def note_fields(self, pair: str, batch: str, fields: Any) -> None:
        pass

    async def _write(self, pair: str, batch: str, fields: Any) -> None:
        self.writes.append((batch, dict(fields)))
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.set()
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.running -= 1

    async def report_fields(self, pair: str, batch: str, fields: Any, *, timeout: float) -> None:
        await self._write(pair, batch, fields)

    async def set_fields(self, pair: str, batch: str, fields: Any) -> None:
        await self._write(pair, batch, fields)


async def test_one_write_is_on_its_way_and_the_next_one_carries_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Redis that is far away: hundreds of transfers end while one write is answered."""
    monkeypatch.setattr("etha.agent.runtime.status_writer.EVERY", 0.001)
    far = Far()
    async with asyncio.TaskGroup() as group:

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            group.create_task(work)

        chronicle = StatusWriter(far, spawn)  # type: ignore[arg-type]
        chronicle.tell("p", "a", {"seq": 1})
        await far.begun.wait()
        far.begun.clear()
        for seq in range(2, 300):
            for batch in ("a", "b", "c"):
                chronicle.tell("p", batch, {"seq": seq})
            await asyncio.sleep(0.0002)
        assert far.writes == [("a", {"seq": 1})] and far.most == 1
        far.gate.set()
        await far.begun.wait()
        await chronicle.close()
    assert far.most == 1
    assert sorted(far.writes[1:4]) == [(batch, {"seq": 299}) for batch in ("a", "b", "c")]


async def test_what_redis_refuses_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etha.agent.runtime.status_writer.EVERY", 0.0)
    far = Far()
    far.gate.set()
    far.error = ConfigError("refused")
    with caplog.at_level(logging.DEBUG):
        async with asyncio.TaskGroup() as group:

            def spawn(work: Coroutine[Any, Any, None]) -> None:
                group.create_task(work)

            chronicle = StatusWriter(far, spawn)  # type: ignore[arg-type]
            for seq in range(20):
                far.begun.clear()
                chronicle.tell("p", "a", {"seq": seq})
                await far.begun.wait()
            far.error = None
            await chronicle.close()
    ours = [record for record in caplog.records if record.name.startswith("etha")]  # asyncio tells of a slow step
    assert len([record for record in ours if record.levelno >= logging.WARNING]) == 1
