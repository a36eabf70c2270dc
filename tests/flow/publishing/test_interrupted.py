"""Calls that end in the middle of a hop: what the tensors hold is said, and the next call mends it."""

from __future__ import annotations

import asyncio

import pytest

from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sites import Site

#: Large enough that a hop reports its progress more than once.
SHAPES = {"w": (24 << 20,)}
ROWS = Cut(world=2, dims={"w": 0})


@pytest.mark.ways("tcp", "local")
async def test_one_rank_gives_up_in_the_middle_of_a_hop_in_place(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", ROWS, mapped=True)
        await trainer.put(1)
        await replica.next()
        first, second = replica.subscriptions
        for version in range(2, 20):
            await trainer.put(version)
            running: asyncio.Future[object]

            def cut(done: int, total: int) -> None:
                running.cancel()  # noqa: B023 -- of this turn

            running = asyncio.ensure_future(first.next(progress=cut))
            other = asyncio.ensure_future(second.next())
            await asyncio.wait({running})
            if running.cancelled() and first.version is None:
                break
            await other  # it was committed before it was cut
            assert first.version == version
            replica.check(version)
        assert first.seq == 0, "it may be half of that version"
        update, _ = await asyncio.gather(first.next(), other)
        assert (update.version, first.version, second.version) == (version, version, version)
        replica.check(version)
