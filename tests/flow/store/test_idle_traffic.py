"""What an agent asks of Redis while nothing happens: its lease and a ping, however many pairs it has seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import redis

from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way

#: Seconds of quiet: two ticks of the subscriptions and a renewal of the lease.
QUIET = 4.5


def commands(site: Site) -> Counter[str]:
    """Calls that the site's server has taken, by command."""
    client: Any = redis.Redis.from_url(site.redis or f"unix://{site.directory}/a/redis.sock")
    with client:
        found = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): stat["calls"] for name, stat in found.items()})


def channels(site: Site) -> list[str]:
    """Pairs that somebody is subscribed to."""
    client: Any = redis.Redis.from_url(site.redis or f"unix://{site.directory}/a/redis.sock", decode_responses=True)
    with client:
        return sorted(name for name in client.pubsub_channels("*") if ":pair:" in name)


async def quietest(site: Site) -> Counter[str]:
    """What the server took in a time of quiet; on a slow machine the last pair's own writes may come into the first."""
    found = []
    for _ in range(3):
        before = commands(site)
        await asyncio.sleep(QUIET)
        found.append(commands(site) - before)
        if sum(found[-1].values()) <= 12 * QUIET:
            break
    return min(found, key=lambda done: sum(done.values()))


@pytest.mark.ways("local")
async def test_an_idle_agent_reads_no_pair_whether_it_stands_or_is_over(way: Way) -> None:
    """Twenty pairs were left, ten are held by workers that do nothing."""
    with open_site(way) as site:
        async with Sides(site, "kept") as kept:
            for number in range(30):
                sides = Sides(site, f"pair{number}") if number < 20 else kept
                sides.pair = f"pair{number}"
                if sides is kept:
                    await kept.meet(device_mesh=(1,))
                else:
                    async with sides:
                        await sides.meet(device_mesh=(1,))
            done = await quietest(site)
            assert done["hmget"] + done["hgetall"] <= 2, done
            # The lease every 3 s, what the server is asked to name itself by, pings, and this test.
            assert sum(done.values()) <= 12 * QUIET, done
            assert channels(site) == [f"etha:{{default}}:pair:pair{number}" for number in range(20, 30)]
            # Those that stand are heard of at once all the same.
            lost = [pair.lost for member, pair in kept.pairs.items() if member[0] == "trainer"]
            await kept.clients["inference", 0].close()
            async with asyncio.timeout(20):
                await asyncio.gather(*(one.wait() for one in lost))
