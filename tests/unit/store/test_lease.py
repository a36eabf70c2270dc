"""The task that keeps an agent's lease."""

from __future__ import annotations

import asyncio
import logging
import time
from unittest.mock import Mock

import pytest

from etha.store import lease
from etha.store.lease import AgentRecords


def stand_still() -> None:
    """As a process that is stopped for a while: its loop does not run."""
    time.sleep(0.3)


async def test_an_agent_that_stood_still_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "AGENT_BEAT", 0.01)
    monkeypatch.setattr(lease, "_STOOD_STILL", 0.1)
    said, texts = asyncio.Event(), list[str]()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            said.set()

    async def beat(timeout: float) -> bool:
        return False

    records = AgentRecords(Mock(), Mock(), Mock(), Mock(), Mock())
    monkeypatch.setattr(records, "_beat", beat)
    heard = Heard(logging.WARNING)
    lease.log.addHandler(heard)
    keeping = asyncio.create_task(records.keep())
    try:
        await asyncio.sleep(0)  # the task has begun
        stand_still()
        await said.wait()
        assert texts[0].startswith("this agent did not run for 0.")
    finally:
        keeping.cancel()
        lease.log.removeHandler(heard)
