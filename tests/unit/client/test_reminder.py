"""A rendezvous that takes long says in the log where one sees whom it waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from etha.client import aio
from etha.testing import AsyncDummyTensorBusClient
from etha.testing.connection import _Link


class Seen(logging.Handler):
    """Sets ``said`` at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.said = asyncio.Event()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.said.set()


@pytest.mark.timeout(30)
async def test_a_long_rendezvous_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_REMIND", 0.01)
    request, seen = _Link.request, Seen()

    async def late(self: _Link, message: Any, **options: Any) -> Any:
        await seen.said.wait()
        return await request(self, message, **options)

    monkeypatch.setattr(_Link, "request", late)
    logger = logging.getLogger("etha")
    logger.addHandler(seen)
    try:
        async with AsyncDummyTensorBusClient() as client:
            await client.init_pair("weights", "trainer", "inference", 1, rank=0)
    finally:
        logger.removeHandler(seen)
    assert "init_pair of 'weights' has waited 0.01 s" in seen.text and "etha status" in seen.text
