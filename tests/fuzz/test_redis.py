"""A real agent whose Redis is scribbled over while its workers wait and move: refused in the log, and it goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio as aioredis

from etha.errors import EthaError
from tests.flow.sites import Commons
from tests.flow.ways import Way

from .ground import Ground
from .mutation import mutated_hash
from .trial import bounded, count, rng_of, seeds

#: Values written between two transfers.
BURST = 20


@pytest_asyncio.fixture
async def ground(commons: Commons) -> AsyncIterator[Ground]:
    async with Ground(commons.site(Way.TCP, "fuzz")) as ground:
        yield ground
        await ground.transfer()
    assert not ground.bugs(), ground.bugs()[0]


async def hashes(client: Any) -> dict[str, dict[str, str]]:
    """What stands in the namespace, key by key."""
    found = {}
    for key in [key async for key in client.scan_iter("etha:{default}:*")]:
        if await client.type(key) == "hash":
            found[key] = await client.hgetall(key)
    return found


@pytest.mark.timeout(1800)
async def test_values_that_nobody_of_ours_wrote(ground: Ground) -> None:
    client: Any = aioredis.Redis.from_url(ground.site.redis, decode_responses=True)
    pids = await ground.pids()
    todo = list(seeds("Redis values"))
    with bounded(pids[0]), bounded(pids[1]):
        for start in range(0, len(todo), BURST):
            kept = await hashes(client)
            for seed in todo[start : start + BURST]:
                rng = rng_of(seed)
                key = rng.choice(sorted(kept))
                wrong = mutated_hash(kept[key], rng)
                pipe = client.pipeline(transaction=True)
                pipe.delete(key)
                if rng.random() < 0.1:
                    pipe.set(key, "not a hash")
                elif wrong:
                    pipe.hset(key, mapping=wrong)
                pipe.publish(key, "fuzz")
                await pipe.execute()
                count("Redis values", "written")
            # Both agents read while it stands so: somebody comes to the pair, and everybody is asked.
            await asyncio.gather(
                *(c.status(timeout=10) for c in ground.sides.clients.values()),
                newcomer(ground),
            )
            pipe = client.pipeline(transaction=True)
            for key, values in kept.items():
                pipe.delete(key)
                pipe.hset(key, mapping=values)
                pipe.publish(key, "restored")
            await pipe.execute()
    await client.aclose()
    await again(ground)


async def newcomer(ground: Ground) -> None:
    """A worker that wants a rank of a pair that is there, and takes no for an answer."""
    async with ground.site.client("trainer", 0, timeout=5.0) as client:
        try:
            await client.init_pair("ground", "trainer", "inference", 2, rank=1, timeout=0.3)
        except EthaError as error:
            assert len(str(error)) < 10_000


async def again(ground: Ground) -> None:
    """The pair may have been lost by what stood there: its members form it again, as after any loss."""
    await ground.settle()


async def test_a_field_of_thousands_of_brackets_does_not_end_who_follows_the_pair(ground: Ground) -> None:
    client: Any = aioredis.Redis.from_url(ground.site.redis, decode_responses=True)
    key = "etha:{default}:pair:ground"
    was = await client.hgetall(key)
    for name, value in (("sides", "[" * 60_000), ("launches", '{"a":' * 10_000), ("epoch", "--5"), ("state", "x")):
        await client.hset(key, name, value)
        await client.publish(key, "fuzz")
        await newcomer(ground)
    await client.hset(key, mapping=was)
    await client.publish(key, "restored")
    await client.aclose()
    await ground.transfer()
    assert json.loads(was["sides"]) == ["inference", "trainer"]
