"""A thousand calls of one client in flight, and none of them waits for the place of another."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch.distributed.tensor import Replicate

from etha.errors import ConfigError
from etha.memory import revocation
from tests.flow.sides import Sides
from tests.flow.sites import Site

pytestmark = pytest.mark.ways("local")
MANY = 1100


def test_a_thousand_receives_that_wait_keep_no_other_call_from_its_place(site: Site, pair: str) -> None:
    asyncio.run(_queue(site, pair))  # not on pytest's loop, whose debug mode takes thirty times as long


async def _queue(site: Site, pair: str) -> None:
    async with Sides(site, pair, timeout=60) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {side: torch.zeros(2) for side in sides.worlds}
        queue = await sides.register("queue", lambda side, rank: ({"w": tensors[side]}, {}))
        other = await sides.register("other", lambda side, rank: ({"w": tensors[side]}, {}))
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(queue["inference", 0].transfer("recv")) for _ in range(MANY)]
            await sides.ask_all()
            results = await sides.move(other, trainer={"version": "first"})
            assert [result.version for result in results.values()] == ["first", "first"]
            sends = [group.create_task(queue["trainer", 0].transfer("send", version=n)) for n in range(MANY)]
        assert [task.result().version for task in waiting] == list(range(MANY))
        assert [task.result().seq for task in sends] == list(range(1, MANY + 1))


def test_who_has_more_in_flight_than_there_are_places_is_told_at_once(site: Site, pair: str) -> None:
    asyncio.run(_overfill(site, pair))


async def _overfill(site: Site, pair: str) -> None:
    async with Sides(site, pair, timeout=60) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.zeros(2)}, {}))
        receiver = handles["inference", 0]
        waiting = [asyncio.ensure_future(receiver.transfer("recv")) for _ in range(revocation.SLOTS - 1)]
        await sides.ask_all()
        with pytest.raises(ConfigError, match=f"more than {revocation.SLOTS - 1} transfers"):
            await receiver.transfer("recv")
        await receiver.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert {getattr(error, "outcome", None) for error in ended} == {"withdrawn"}
