"""Processes that are stopped, and serve chains whose beginning dies: the others go on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import etha
from tests.flow.jobs import Job
from tests.flow.publishing.fleets import Cut, Fleet, Replica
from tests.flow.publishing.lives import publisher, replica
from tests.flow.sites import Site
from tests.processes import send_signal

SMALL = 1000
SHAPES = {"w": (SMALL,)}


@pytest.fixture
def job(site: Site) -> Iterator[Job]:
    with Job(site.env) as job:
        yield job


@asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[None]:
    """A process does nothing within."""
    send_signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.ways("tcp", "local")
async def test_a_stopped_publisher_still_feeds_replicas(site: Site, pair: str, job: Job) -> None:
    trainer = job.start(publisher, pair, SMALL, at=("trainer", 0))
    trainer.go("put", 7)
    await asyncio.to_thread(trainer.expect, "put")
    async with stopped(trainer.pid):
        for name in ("first", "second"):
            worker = job.start(replica, pair, name, SMALL, at=(name, 0))
            assert (await asyncio.to_thread(worker.expect, "held"))[:3] == (1, 7, 7.0)
    trainer.go("put", 8)
    assert await asyncio.to_thread(trainer.expect, "put") == 2


@pytest.mark.ways("tcp", "local")
async def test_a_stopped_rank_of_a_replica_keeps_nobody_else_waiting(site: Site, pair: str, job: Job) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(), slots=3)  # one for the stopped rank's hop, one for others, one to write
        other = await fleet.subscribe("other", Cut(), serve=False)
        ranks = [job.start(replica, pair, "pair", SMALL, rank, 2, at=("pair", rank)) for rank in range(2)]
        await trainer.put(1)
        for one in ranks:
            assert (await asyncio.to_thread(one.expect, "held"))[1] == 1
        async with stopped(ranks[1].pid):
            for version in (2, 3, 4):
                await trainer.put(version)
                assert (await other.next()).version == version
        held = 0
        while held < 4:
            held, same = [(await asyncio.to_thread(one.expect, "held"))[1] for one in ranks]
            assert held == same


@pytest.mark.ways("tcp", "local")
async def test_the_beginning_of_a_serve_chain_dies(site: Site, pair: str, job: Job) -> None:
    """A has fed B, which has fed C; A and the publisher die, and the version is still there for D."""
    trainer = job.start(publisher, pair, SMALL, at=("trainer", 0))
    trainer.go("put", 3)
    await asyncio.to_thread(trainer.expect, "put")
    first = job.start(replica, pair, "a", SMALL, at=("a", 0))
    assert (await asyncio.to_thread(first.expect, "held"))[3] == "trainer"
    trainer.kill()
    second = job.start(replica, pair, "b", SMALL, at=("b", 0))
    assert (await asyncio.to_thread(second.expect, "held"))[2] == 3.0
    first.kill()
    third = job.start(replica, pair, "c", SMALL, at=("c", 0))
    assert (await asyncio.to_thread(third.expect, "held"))[2] == 3.0
    second.kill()
    fourth = job.start(replica, pair, "d", SMALL, at=("d", 0))
    assert (await asyncio.to_thread(fourth.expect, "held"))[1:3] == (3, 3.0)


@pytest.mark.ways("tcp", "local")
async def test_a_replica_is_closed_while_a_hop_runs(site: Site, pair: str) -> None:
    """Its own, and one that reads it."""
    shapes = {"w": (8 << 20,)}
    async with Fleet(site, pair, shapes) as fleet:
        trainer = await fleet.publish(Cut())
        serving = await fleet.subscribe("serving", Cut(), atomic=True)
        reading = await fleet.subscribe("reading", Cut(), serve=False)
        await asyncio.gather(serving.next(), trainer.put(1, wait=1))
        closing: list[asyncio.Future[None]] = []

        def close(replica: Replica) -> None:
            if not closing:
                closing.append(asyncio.ensure_future(replica.close()))

        update = await reading.next(progress=lambda done, total: close(serving))
        assert update.source == "serving" and closing
        await closing.pop()
        await trainer.put(2)
        (subscription,) = reading.subscriptions
        moving = asyncio.ensure_future(subscription.next(progress=lambda done, total: close(reading)))
        await asyncio.wait({moving})
        assert moving.exception() is None or isinstance(moving.exception(), etha.EthaError)
        await closing.pop()
        late = await fleet.subscribe("late", Cut(), serve=False)
        assert (await late.next()).version == 2


@pytest.mark.ways("tcp", "local")
async def test_two_publications_of_the_same_tensors_by_one_client(site: Site, pair: str) -> None:
    options = Cut().options(SHAPES, 0)
    async with site.client("trainer", 0, timeout=60) as trainer, site.client("replica", 0, timeout=60) as inference:
        source, target = Cut().held(SHAPES, 0, 0), Cut().held(SHAPES, 0, 0)
        first, second = [await trainer.publish(f"{pair}.{name}"[-100:], source, **options) for name in "ab"]
        one, two = [
            await inference.subscribe(f"{pair}.{name}"[-100:], target, subscriber="replica", serve=False, **options)
            for name in "ab"
        ]
        for version in (1, 2, 3):
            for publication, subscription in ((first, one), (second, two)):
                source["w"].fill_(version)
                await publication.put(version)
                source["w"].fill_(-1)
                assert (await subscription.next()).version == version
                assert target["w"].unique().tolist() == [version]
        await first.close()
        source["w"].fill_(9)
        await second.put(9)
        assert (await two.next()).version == 9
