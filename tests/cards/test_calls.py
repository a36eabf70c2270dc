"""What a call on a GPU comes after, and what it says of its own device, over cards that are played (``played.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etha.errors import ConfigError, RegistrationError
from tests.fakes.cuda import GPU0
from tests.flow.truth import stale, whole

from .played import Cards
from .test_transfers import formed


@pytest.fixture
def cards(runtime: Path) -> Iterator[Cards]:
    with Cards(runtime) as cards:
        cards.start("cuda:0")
        yield cards


async def ready(cards: Cards, a: Any, b: Any, *, name: str = "b", exportable: bool = True, **options: Any) -> Any:
    """(given, wanted, left, right): one tensor a side, registered by clients whose pair is formed."""
    given = cards.tensor(whole((64, 5)), exportable=exportable)
    wanted = cards.tensor(stale(whole((64, 5))), exportable=exportable)
    left, right = await asyncio.gather(
        a.register_tensors(name, {"w": given}, pair_name="weights", **options),
        b.register_tensors(name, {"w": wanted}, pair_name="weights", **options),
    )
    return given, wanted, left, right


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
async def test_a_call_is_of_the_stream_on_which_it_was_made(cards: Cards, snapshot: bool, by_name: bool) -> None:
    """Not of the one that is current when its task begins."""
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted, left, right = await ready(cards, a, b)
        side = cards.driver.stream(GPU0)
        cards.driver.hold(side)
        cards.driver.launch(GPU0, side, lambda: given.fill_(9))
        with cards.driver.using(side):
            call = a.transfer("b", "send", snapshot=snapshot) if by_name else left.transfer("send", snapshot=snapshot)
            sending = asyncio.create_task(call)
        receiving = asyncio.create_task(right.transfer("recv"))
        for _ in range(3):
            await a.status()  # the agent has heard of the calls by now
        assert not sending.done() and not receiving.done()
        assert torch.equal(wanted, stale(whole((64, 5))))
        cards.driver.release(side)
        result = await sending
        if snapshot:
            await result
        await receiving
        assert (wanted == 9).all()
        cards.driver.drop_stream(side)


async def test_what_is_wrong_is_told_by_awaiting_the_call(cards: Cards) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        _, _, left, right = await ready(cards, a, b)
        calls = [a.transfer("nothing", "send"), left.transfer("recv", version=[])]
        with pytest.raises(RegistrationError, match="'nothing' is not registered"):
            await calls[0]
        with pytest.raises(ConfigError, match="version"):
            await calls[1]
        await left.close()
        await right.close()
        closed = left.transfer("send")
        with pytest.raises(RegistrationError, match="is closed"):
            await closed
