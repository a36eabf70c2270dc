"""``put`` waits for nobody, except where that is asked for; what a slow subscriber reads is not overwritten."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.store.keys import CLAIM_LEASE
from etha.store.registry import Store
from tests.flow.publishing.fleets import Cut, Fleet, Replica
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way
from tests.processes import send_signal
from tests.unit.store.server import served

SHAPES = {"w": (64, 33), "b": (7,)}
ROWS, COLUMNS = Cut(world=2, dims={"w": 0}), Cut(world=2, dims={"w": 1})


@asynccontextmanager
async def frozen(replica: Replica) -> AsyncIterator[None]:
    """The agent of a subscriber, which is on a host of its own, is stopped."""
    pid = (await replica.clients[0].status())["agent"]["pid"]
    send_signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def where(side: str, rank: int) -> str:
    """The stopped agent is not one that other tests use."""
    return {"trainer": "a", "slow": "s"}.get(side, "b")


@pytest.mark.ways("tcp")
async def test_versions_go_on_while_a_subscriber_is_stuck(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES, where=where) as fleet:
        trainer = await fleet.publish(ROWS, slots=3)
        slow = await fleet.subscribe("slow", COLUMNS, atomic=True)
        quick = await fleet.subscribe("quick", Cut(), serve=False)
        waiting = asyncio.ensure_future(slow.next())
        await asyncio.gather(*(client.status() for client in slow.clients))
        async with frozen(slow):
            for version in range(1, 6):
                put = await trainer.put(version, timeout=20)
                assert (put.seq, put.version) == (version, version)
            assert (await quick.next()).version == 5
        update = await waiting
        assert update.version is not None and (update.version == 5 or (await slow.next()).version == 5)


@pytest.mark.ways("tcp")
async def test_the_only_slot_is_taken_from_a_subscriber_that_is_stuck(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES, where=where) as fleet:
        trainer = await fleet.publish(ROWS, slots=1)
        slow = await fleet.subscribe("slow", COLUMNS, atomic=True)
        waiting = asyncio.ensure_future(slow.next())
        await asyncio.gather(*(client.status() for client in slow.clients))
        async with frozen(slow):
            await trainer.put(1)
            # Sooner than the lease of the claim of the agent that is stopped would lapse.
            assert (await trainer.put(2, grace=0.5, timeout=CLAIM_LEASE - 2)).seq == 2
        assert (await waiting).version == 2


@pytest.mark.ways("local", "tcp")
async def test_a_put_may_wait_until_others_hold_it(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        first, second = (
            await fleet.subscribe("first", COLUMNS, mapped=True),
            await fleet.subscribe("second", Cut(), serve=False),
        )
        both = asyncio.gather(first.next(), second.next())
        assert (await trainer.put(1, wait=2)).seq == 1
        assert {update.version for update in await both} == {1}
        with pytest.raises(etha.TransferTimeoutError, match="wait=2"):
            await trainer.put(2, wait=2, timeout=0.5)
        assert (await first.next()).version == 2


@pytest.mark.ways("local", "tcp")
async def test_those_that_have_received_it_and_left_count_once(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        waiting = asyncio.create_task(trainer.put(1, wait=2))
        for name in ("first", "first", "second"):
            assert not waiting.done(), "one that comes again is no second one"
            one = await fleet.subscribe(name, COLUMNS, mapped=True)
            assert (await one.next()).version == 1
            await one.close()
        assert (await waiting).seq == 1
        with pytest.raises(etha.TransferTimeoutError, match="wait=1 subscribers had received it by the deadline: none"):
            await trainer.put(2, wait=1, timeout=0.5)


@pytest.mark.ways("local", "tcp")
async def test_who_follows(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        first = await fleet.subscribe("first", COLUMNS, mapped=True)
        await fleet.subscribe("idle", Cut(), serve=False)
        await trainer.put(1)
        await first.next()
        await trainer.put(2)
        await trainer.put(3)
        await asyncio.gather(*(client.status() for client in first.clients))
        found = {one.name: one for one in await trainer.publications[1].subscribers()}
        assert set(found) == {"first", "idle"}
        state = found["first"]
        assert (state.ranks, state.seq, state.version, state.lag, state.source) == (2, 1, 1, 2, "trainer")
        assert state.lag_seconds > 0 and state.error == ""
        assert (found["idle"].seq, found["idle"].version, found["idle"].lag) == (0, None, 3)
        assert first.subscriptions[0].seq == 1


@pytest.mark.ways("local", "tcp")
async def test_an_older_version_comes_back_while_somebody_has_it(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS, slots=3)
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        for version in (1, 2):
            await trainer.put(version)
            await replica.next()
        assert (await replica.next(version=1)).seq == 1
        assert (await replica.next()).version == 2
        for version in (3, 4):
            await trainer.put(version)
        with pytest.raises(etha.ConfigError, match="1"):
            await replica.subscriptions[0].next(version=1)


@pytest.mark.ways("tcp")
async def test_a_question_that_was_refused_is_over(site: Site, pair: str) -> None:
    """Nobody has the pinned version any more. The next question is another one."""
    async with Fleet(site, pair, SHAPES) as fleet, await Store.open(str(site.redis), "default", timeout=10) as store:
        trainer = await fleet.publish(ROWS, fan_out=1)
        stuck = await fleet.subscribe("stuck", COLUMNS, atomic=True)
        replica = await fleet.subscribe("replica", Cut(), atomic=True)
        await trainer.put(1)
        half = asyncio.ensure_future(stuck.subscriptions[0].next())  # takes the only place
        async with store.changes(store.keys.publication_side(pair, "stuck")) as changed:
            while not (view := await store.publications.view(pair)) or not view.claims:
                await changed()
        (subscription,) = replica.subscriptions
        waiting = asyncio.ensure_future(subscription.next(version=1))
        async with store.changes(store.keys.publication_side(pair, "replica")) as changed:
            while len((await store.publications.view(pair)).queue) == 0:  # type: ignore[union-attr]
                await changed()
        await store.publications.forget(pair, view.claims[0].holder)
        with pytest.raises(etha.ConfigError, match="no holder has version 1"):
            await waiting
        half.cancel()
        await trainer.put(2)
        assert (await replica.next()).version == 2


@pytest.mark.ways("local")
async def test_a_put_of_one_rank_that_was_cancelled_does_not_end_the_publication(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", Cut(), serve=False)
        (publication,) = trainer.publications
        for moment in range(40):  # some have no slot yet, some are about to be announced, some are
            running = asyncio.ensure_future(publication.put(moment))
            await asyncio.sleep(moment * 0.0001)
            running.cancel()
            await asyncio.wait({running})
        await trainer.put(1000)
        assert (await replica.next()).version == 1000


@pytest.mark.ways("local")
async def test_a_put_behind_another_one_keeps_its_deadline(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        first, second = trainer.publications
        await first.put(1)
        waiting = asyncio.ensure_future(first.put(2, timeout=60))  # the other rank has not put version 1
        await asyncio.sleep(0)
        with pytest.raises(etha.TransferTimeoutError, match="another put of this rank"):
            await asyncio.wait_for(first.put(3, timeout=0.2), 30)
        await second.put(1)
        await second.put(2)
        assert (await waiting).version == 2


@pytest.mark.ways("local")
async def test_a_publication_that_is_closed_in_a_put_says_so(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.client("trainer", 0) as client:
        layout = {"device_mesh": (1,), "placements": {"w": [Replicate()]}, "expected_world_size": 1, "rank": 0}
        publication = await client.publish(pair, {"w": torch.zeros(8)}, **layout)
        copy = publication._copy

        async def closing(slot: int) -> None:
            await publication.close()
            await copy(slot)

        monkeypatch.setattr(publication, "_copy", closing)
        with pytest.raises(etha.ConfigError, match="is closed: call publish again"):
            await publication.put(1)


@pytest.mark.ways("tcp")
async def test_a_publisher_sends_no_faster_than_its_rate(site: Site, pair: str) -> None:
    """Two ranks of a publisher on one host, and two subscribers on others that receive at once."""
    places = {"trainer": "a", "first": "b", "second": "s"}
    rate, shapes = 4e6, {"w": (1024, 1024)}
    async with Fleet(site, pair, shapes, where=lambda side, _: places[side]) as fleet:
        trainer = await fleet.publish(ROWS, max_rate=rate)
        replicas = [await fleet.subscribe(name, Cut(), serve=False) for name in ("first", "second")]
        await trainer.put(1)
        begun = asyncio.get_running_loop().time()
        updates = await asyncio.gather(*(replica.next() for replica in replicas))
        seconds = asyncio.get_running_loop().time() - begun
        assert {update.source for update in updates} == {"trainer"}
        sent = sum(update.bytes for update in updates)
        assert sent == 8 << 20
        assert 0.2 < sent / seconds / rate < 1.15


@pytest.mark.ways("local")
@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), "fast", True])
async def test_a_rate_that_is_none(site: Site, pair: str, rate: object) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        with pytest.raises(etha.ConfigError, match=r"max_rate=.* must be bytes per second"):
            await fleet.publish(ROWS, max_rate=rate)


@pytest.mark.ways("tcp")
async def test_a_put_that_ends_at_its_deadline_takes_no_version_away(site: Site, pair: str) -> None:
    """The only slot is read by a subscriber that is stuck. The put gives up, and others still get the version."""
    async with Fleet(site, pair, SHAPES, where=where) as fleet:
        trainer = await fleet.publish(Cut(), slots=1, fan_out=2)
        slow = await fleet.subscribe("slow", COLUMNS, atomic=True)
        waiting = asyncio.ensure_future(slow.next())
        await asyncio.gather(*(client.status() for client in slow.clients))
        async with frozen(slow):
            await trainer.put(1)
            with pytest.raises(etha.TransferTimeoutError, match="had a slot: others read it"):
                await trainer.publications[0].put(2, grace=60, timeout=0.5)
            quick = await fleet.subscribe("quick", Cut(), serve=False)
            assert (await quick.next(timeout=20)).version == 1
        assert (await waiting).version == 1
        assert (await trainer.put(3)).seq == 2
        assert (await quick.next()).version == 3


@pytest.mark.ways("local")
async def test_no_time_at_all_is_a_deadline_and_no_outage_of_redis(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", Cut(), serve=False)
        await trainer.put(1)
        for call in (replica.subscriptions[0].next, trainer.publications[0].put, trainer.publications[0].subscribers):
            with pytest.raises(etha.TransferTimeoutError, match="ended at its deadline"):
                await call(timeout=0)
        await trainer.put(2)
        assert (await replica.next()).version == 2


async def test_a_redis_that_is_stopped_is_an_outage(tmp_path_factory: pytest.TempPathFactory) -> None:
    with served(tmp_path_factory.mktemp("r")) as server, open_site(Way.TCP, server.url) as site:
        async with Fleet(site, "policy", SHAPES, where=lambda side, rank: "a") as fleet:
            trainer = await fleet.publish(Cut())
            replica = await fleet.subscribe("replica", Cut(), serve=False)
            server.signal(signal.SIGSTOP)
            try:
                for call in (trainer.publications[0].put, replica.subscriptions[0].next):
                    with pytest.raises(etha.RedisUnavailableError, match="before Redis had answered"):
                        await call(timeout=2)
            finally:
                server.signal(signal.SIGCONT)
            await trainer.put(2)
            assert (await replica.next()).version == 2


@pytest.mark.parametrize("how", ["close", "its client ends"])
async def test_a_rank_that_leaves_after_its_last_put_takes_nothing_from_the_others(
    site: Site, pair: str, how: str
) -> None:
    """Without a barrier: the others may still be in that put."""
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(world=3, dims={"w": 0}))
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        await trainer.put(1)
        await trainer.put_rank(0, 2)
        await (trainer.publications[0] if how == "close" else trainer.clients[0]).close()
        await trainer.put_rank(2, 2)
        await trainer.publications[2].close()
        assert (await trainer.put_rank(1, 2)).seq == 2
        await trainer.publications[1].close()
        assert (await replica.next()).version == 2
        again = await fleet.publish(Cut(world=3, dims={"w": 0}))
        await again.put(3)
        assert (await replica.next()).version == 3


async def test_a_rank_that_leaves_after_its_last_put_does_not_wait_for_one_that_leaves_before(
    site: Site, pair: str
) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(ROWS)
        replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
        await trainer.put(1)
        await trainer.put_rank(0, 2)
        await trainer.publications[0].close()
        await trainer.publications[1].close()
        again = await fleet.publish(ROWS, timeout=20)
        assert (await again.put(3)).seq >= 2
        assert (await replica.next()).version == 3
