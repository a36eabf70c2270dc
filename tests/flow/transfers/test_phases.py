"""Where the seconds of a transfer went, as each worker hears it with its result or its error."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.client.results import TransferResult
from etha.config import Settings
from etha.errors import TransferTimeoutError
from etha.events import gather
from etha.observe.history import one_per_transfer
from etha.phases import Phases
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, environment
from tests.flow.ways import Way

ways = pytest.mark.ways(Way.LOCAL, Way.TCP)
#: Seconds of a call that belong to no phase: the way to the agent and back, on a busy machine.
OUTSIDE = 0.5
SECONDS = 60.0


async def timed(call: Any) -> tuple[TransferResult, float]:
    begun = time.monotonic()
    return await call, time.monotonic() - begun


async def simple(sides: Sides, **options: Any) -> dict[Member, Any]:
    await sides.meet(device_mesh=(1,), placements=[Replicate()])
    return await sides.register("b", lambda side, rank: ({"w": torch.ones(1 << 20)}, options))


def check(result: TransferResult, whole: float) -> Phases:
    phases = result.phases
    assert all(seconds >= 0 for _, seconds in phases), phases
    assert phases.total <= whole + 0.001 and whole - phases.total < OUTSIDE, (phases, whole)
    inside = phases.compile + phases.move + phases.verify + phases.commit
    assert abs(inside - result.seconds) < 0.01, (phases, result.seconds)
    return phases


@ways
async def test_they_add_up_to_the_call(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides, verify="full")
        receiver = asyncio.create_task(timed(handles["inference", 0].transfer("recv")))
        await asyncio.sleep(0.4)  # the sender comes later, which is what is measured
        sent, received = await asyncio.gather(timed(handles["trainer", 0].transfer("send")), receiver)
        first = [check(*one) for one in (sent, received)]
        assert first[1].wait > 0.3 and first[1].longest == "wait"
        assert all(phases.move > 0 and phases.verify > 0 and phases.compile > 0 for phases in first)
        again = await asyncio.gather(*(timed(h.transfer(v)) for h, v in verbs(handles)))
        assert all(check(*one).compile == 0 for one in again)


def verbs(handles: dict[Member, Any]) -> list[tuple[Any, str]]:
    return [(handle, "send" if side == "trainer" else "recv") for (side, _), handle in handles.items()]


@pytest.mark.ways(Way.LOCAL)
async def test_the_workers_own_copies_and_callbacks_have_their_phase(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides, atomic=True)

        async def slow() -> None:
            await asyncio.sleep(0.3)

        sent, received = await asyncio.gather(
            timed(handles["trainer", 0].transfer("send")),
            timed(handles["inference", 0].transfer("recv", on_commit=slow)),
        )
        assert check(*received).copy_out >= 0.3 and check(*sent).copy_out < 0.3


@ways
async def test_records_of_agents_say_who_was_late(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        receiver = asyncio.create_task(handles["inference", 0].transfer("recv"))
        await asyncio.sleep(0.4)  # the sender comes later, which is what is measured
        await handles["trainer", 0].transfer("send")
        heard = (await receiver).phases
        with environment(site.at(site.way.place("inference", 0))):
            settings = Settings.from_env()
        found = await gather(settings, since=0.0, failed=False, timeout=SECONDS)
    [line] = [one for one in one_per_transfer(found.happenings) if one.fits(f"{pair}/b") and one.transfer]
    records = [one.transfer for one in found.happenings if one.fits(f"{pair}/b") and one.transfer]
    waited = max(records, key=lambda record: record.phases.wait)
    assert abs(waited.phases.wait - heard.wait) < 0.01 and heard.wait > 0.3, (waited.phases, heard)
    assert re.search(r"[0-9] m?s of it waiting for trainer rank 0 to call", line.text), line.text


@ways
async def test_who_fails_hears_them_too(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        reported = await handles["inference", 0].transfer("recv", timeout=0.2, on_error="report")
        assert not reported.ok and reported.phases.longest == "wait" and reported.phases.wait > 0.1
        with pytest.raises(TransferTimeoutError) as caught:
            await handles["inference", 0].transfer("recv", timeout=0.4)
        assert caught.value.phases is not None and 0.3 < caught.value.phases.wait < 0.4 + OUTSIDE
        assert caught.value.phases.move == 0 and caught.value.culprits == (("trainer", 0),)
        skipped = await handles["inference", 0].transfer("recv", on_error="report")
        assert skipped.skipped and skipped.phases.total == 0


@ways
async def test_each_agent_of_a_batch_and_a_snapshot_have_them(site: Site, pair: str) -> None:
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        await sides.meet(device_mesh=(2,), placements=[Shard(0)])
        handles = await sides.register("b", lambda side, rank: ({"w": torch.ones(1 << 18)}, {}))
        futures = [await handles["trainer", rank].transfer("send", version=1, snapshot=True) for rank in (0, 1)]
        received = await asyncio.gather(*(timed(handles["inference", rank].transfer("recv")) for rank in (0, 1)))
        assert all(check(*one).move > 0 for one in received)
        sent = await asyncio.gather(*futures)
        assert all(result.phases.move > 0 for result in sent)
