"""Redis frozen, or killed and started again without its memory, in a run of transfers: none fails, all comes back."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis.asyncio as aioredis
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.store.keys import AGENT_LEASE
from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site, private_directory
from tests.flow.ways import Way
from tests.unit.store.server import Server, served

#: Seconds within which leases and keys are to be back.
BACK = 5.0
#: What an outage of the suite takes, and one of `make proof`: longer than every agent's lease.
SHORT, LONG = 3.0, 30.0
assert SHORT < AGENT_LEASE < LONG


@pytest.fixture
def server() -> Iterator[Server]:
    with private_directory() as directory, served(directory) as running:
        yield running


@pytest.fixture
def apart(server: Server, way: Way) -> Iterator[Site]:
    """A site whose Redis a test may stop."""
    with open_site(way, server.url) as site:
        yield site


class Traffic:
    """Transfers one after the other, every element of each compared, until ``over``."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self.done = 0
        self.over = False
        self.more = asyncio.Event()

    async def run(self) -> None:
        whole = torch.zeros(64, 8)
        source, target = whole.clone(), whole.clone()
        handles = await self._sides.register(
            "b", lambda side, rank: ({"w": source if side == "trainer" else target}, {"shapes": {"w": (64, 8)}})
        )
        while not self.over:
            source.copy_(torch.arange(512.0).reshape(64, 8) + self.done)
            for result in (await self._sides.move(handles, timeout=10.0)).values():
                assert not isinstance(result, BaseException), result
            assert torch.equal(source, target), f"transfer {self.done}"
            self.done += 1
            self.more.set()

    async def reach(self, count: int) -> None:
        """Wait for so many transfers in all."""
        while self.done < count:
            self.more.clear()
            await self.more.wait()


async def contents(url: str) -> dict[str, dict[str, str]]:
    """The hashes of agents, pairs, their sides and batches; rosters and manifests have done their work."""
    client: Any = aioredis.Redis.from_url(url, decode_responses=True)
    try:
        keys = [key async for key in client.scan_iter("etha:{default}:*")]
        wanted = [key for key in keys if key.split(":")[2] in ("agent", "pair", "batch") and len(key.split(":")) < 6]
        return {key: await client.hgetall(key) for key in wanted if await client.type(key) == "hash"}
    finally:
        await client.aclose()


def lasting(found: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Of each hash what must be there again: who and what, not how often or which transfer was last."""
    names = {
        "agent": ("pid", "address", "public_key", "host"),
        "pair": ("state", "epoch", "sides", "world_sizes", "0"),
        "batch": ("state", "generation", "epoch"),
    }
    return {key: {n: plain(v[n]) for n in names[key.split(":")[2]] if n in v} for key, v in found.items()}


def plain(text: str) -> Any:
    """A field without the order in which its JSON was written; a key may begin as JSON does."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def ride_out(
    site: Site, server: Server, stop: Callable[[], None], start: Callable[[], None], away: float
) -> None:
    """One outage of ``away`` seconds in a run of transfers."""
    async with Sides(site, "weights") as sides:
        await sides.meet(
            trainer={"device_mesh": (1,), "placements": [Shard(0)]},
            inference={"device_mesh": (1,), "placements": [Replicate()]},
        )
        traffic = Traffic(sides)
        async with asyncio.timeout(away + 60), asyncio.TaskGroup() as group:
            group.create_task(traffic.run())
            await traffic.reach(20)
            before = lasting(await contents(server.url))
            kinds = sorted(key.split(":")[2] for key in before)
            assert kinds == ["agent"] * (1 if site.way is Way.LOCAL else 2) + ["batch"] + ["pair"] * 3
            stop()
            began, seen = time.monotonic(), traffic.done
            while time.monotonic() < began + away:  # the outage is as long as this
                await traffic.reach(traffic.done + 1)
            moved = traffic.done - seen
            await asyncio.to_thread(start)
            returned = time.monotonic()
            while (found := lasting(await contents(server.url))) != before:
                assert time.monotonic() < returned + BACK, f"leases and keys are not back: {found} was {before}"
                await traffic.reach(traffic.done + 1)
            # What was there again at once may still have been about to end: leases are renewed, too.
            beats = await beating(server.url)
            while any(now <= then for now, then in zip(await beating(server.url), beats, strict=True)):
                assert time.monotonic() < returned + BACK, "leases are not renewed"
                await traffic.reach(traffic.done + 1)
            print(f"\n{site.way}: away {away:g} s, {moved} transfers; back after {time.monotonic() - returned:.2f} s")
            traffic.over = True
        assert moved > 20, "transfers go on while Redis is away"
        await sides.ask_all()


async def beating(url: str) -> list[int]:
    """How often each agent has renewed its lease."""
    return [int(v["beats"]) for k, v in sorted((await contents(url)).items()) if ":agent:" in k]


def outages(server: Server) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """How Redis goes away and comes back."""
    return {
        "frozen": (lambda: server.signal(signal.SIGSTOP), lambda: server.signal(signal.SIGCONT)),
        "killed": (server.stop, server.start),
    }


@pytest.mark.ways("local", "tcp")
@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_transfers_go_on_without_redis(apart: Site, server: Server, how: str) -> None:
    await ride_out(apart, server, *outages(server)[how], SHORT)


@pytest.mark.proof
@pytest.mark.timeout(240)
@pytest.mark.ways("local", "tcp")
@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_transfers_go_on_without_redis_for_longer_than_any_lease(apart: Site, server: Server, how: str) -> None:
    await ride_out(apart, server, *outages(server)[how], LONG)
