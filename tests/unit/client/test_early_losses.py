"""A pair that is lost before ``init_pair`` has returned it."""

from __future__ import annotations

from typing import Any

import pytest

from etha.bus.messages import PairLost
from etha.testing import AsyncDummyTensorBusClient
from etha.testing.connection import _Link


@pytest.mark.parametrize("before", [0, 1], ids=["first epoch", "second epoch"])
async def test_a_loss_that_is_read_with_the_answer_is_told(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    request = _Link.request
    formed: list[Any] = []

    async def lost_at_once(self: _Link, message: Any, **options: Any) -> Any:
        answer = await request(self, message, **options)
        if len(formed) == before:
            assert self.on_push is not None
            self.on_push(PairLost(pair="weights", epoch=answer.epoch, reason="died", text="the other side is gone"))
        formed.append(answer)
        return answer

    monkeypatch.setattr(_Link, "request", lost_at_once)
    async with AsyncDummyTensorBusClient() as client:
        for _ in range(before):
            stands = await client.init_pair("weights", "trainer", "inference", 1, rank=0)
            assert not stands.lost.is_set()
            client.lose("weights", "relaunched")
        pair = await client.init_pair("weights", "trainer", "inference", 1, rank=0)
        assert pair.lost.is_set() and pair.lost.reason == "died"
