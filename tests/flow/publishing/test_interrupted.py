"""Calls that end in the middle of a hop: what the tensors hold is said, and the next call mends it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from random import Random

import pytest

import etha
from etha.config import Settings
from etha.events import gather
from etha.store.registry import Store
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sites import Site, environment

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


@pytest.mark.ways("tcp", "local")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_question_that_was_taken_back_has_no_answer_left(site: Site, pair: str, ranks: int, how: str) -> None:
    """A pinned call ends at any moment of its claim; the call after it asks for the newest version, and gets that."""
    async with Fleet(site, pair, {"w": (64, 33)}) as fleet:
        trainer = await fleet.publish(Cut(), slots=4)
        replica = await fleet.subscribe("replica", Cut(world=ranks, dims={"w": 0}), atomic=True)
        for version in (1, 2, 3):
            await trainer.put(version)
        random = Random(ranks)
        for version in range(4, 44):
            await trainer.put(version)
            moment = random.uniform(0, 0.006)
            # The last rank may be in a call of its own still, when the first one asks for something else.
            for subscription in replica.subscriptions:
                pinned = asyncio.ensure_future(
                    subscription.next(version=version - 2, newer_than=0, timeout=moment if how == "late" else 20)
                )
                if how == "cancelled":
                    asyncio.get_running_loop().call_later(moment, pinned.cancel)
                with suppress(asyncio.CancelledError, etha.TransferTimeoutError):
                    await pinned
            await replica.next()
            replica.check(version)


@pytest.mark.ways("tcp")
async def test_ranks_that_ask_for_different_versions_are_told(site: Site, pair: str) -> None:
    """One that waits for the newest and one that pins another: the second one hears it, and nothing is stuck."""
    async with Fleet(site, pair, {"w": (64, 33)}) as fleet:
        trainer = await fleet.publish(Cut(), slots=4)
        replica = await fleet.subscribe("replica", Cut(world=2, dims={"w": 0}), atomic=True)
        for version in (1, 2):
            await trainer.put(version)
        await replica.next()
        first, second = replica.subscriptions
        waiting = asyncio.ensure_future(first.next())
        async with await Store.open(str(site.redis), "default", timeout=10) as store:
            while not (await store.publications.view(pair)).queue:  # type: ignore[union-attr]
                pass
        with pytest.raises(
            etha.ConfigError, match="ranks ask for different versions in the same call, version 1 and the"
        ):
            await second.next(version=1, newer_than=0)
        await trainer.put(3)
        await asyncio.gather(waiting, second.next())
        replica.check(3)


async def test_a_hop_that_nobody_wants_any_more_is_no_failure(site: Site, pair: str) -> None:
    async with Fleet(site, pair, {"w": (64, 33)}) as fleet:
        began = time.time()
        trainer = await fleet.publish(Cut(), slots=1)
        replica = await fleet.subscribe("replica", ROWS, atomic=True)
        await trainer.put(1)
        await replica.next()
        await trainer.put(2)
        waiting = asyncio.ensure_future(replica.subscriptions[0].next())
        async with asyncio.timeout(30):
            while (await trainer.publications[0].subscribers())[0].state != "receiving":
                pass
            # The source's agent waits for the other rank, in the transfer of the hop.
            while not any(one["state"] == "waiting" for one in (await trainer.clients[0].status())["batches"]):
                pass
        waiting.cancel()
        await asyncio.wait({waiting})
        assert (await replica.next()).version == 2
        with environment(site.at(site.way.place("trainer", 0))):
            found = await gather(Settings.from_env(), since=began, failed=True, timeout=30.0)
        [only] = [one.text for one in found.happenings if one.failed]
        assert only.startswith("a call of replica rank 0 ended"), "the trainer has lost nothing"


@pytest.mark.ways("tcp", "local")
@pytest.mark.parametrize("closes", ["client", "subscription"])
async def test_a_callback_closes_what_calls_it(site: Site, pair: str, closes: str) -> None:
    """Of one rank of two: the version is put in place on both, nobody waits for himself, and others go on."""
    async with Fleet(site, pair, {"w": (64, 33)}) as fleet:
        trainer = await fleet.publish(Cut())
        replica, other = [await fleet.subscribe(name, ROWS, atomic=True) for name in ("replica", "other")]
        await trainer.put(1)
        first, second = replica.subscriptions

        async def close() -> None:
            await (replica.clients[0] if closes == "client" else first).close()

        async with asyncio.timeout(20):
            updates = await asyncio.gather(first.next(on_commit=close), second.next(), return_exceptions=True)
        assert [one.version for one in updates if isinstance(one, etha.Update)] == [1, 1]
        replica.check(1)
        with pytest.raises(etha.ConfigError, match="closed"):
            await first.next()
        await trainer.put(2)
        await other.next()
        other.check(2)


async def test_a_publication_that_is_closed_ends_who_waits_for_its_subscribers(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        (publication,) = trainer.publications
        putting = asyncio.create_task(publication.put(1, wait=1, timeout=60))
        await fleet.subscribe("late", Cut(), serve=False)
        holding = asyncio.create_task(publication.holders(other_than=(), timeout=60))
        while publication.seq < 1:
            await trainer.clients[0].status()
        await trainer.clients[0].status()  # both have asked the agent
        async with asyncio.timeout(10):
            await publication.close()
            for waiting in (putting, holding):
                with pytest.raises(etha.ConfigError, match="was closed while this call waited for subscribers"):
                    await waiting


async def test_both_may_be_closed_on_another_loop(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer, replica = await fleet.publish(Cut()), await fleet.subscribe("replica", Cut(), serve=False)
        (publication,), (subscription,) = trainer.publications, replica.subscriptions
        waiting = asyncio.create_task(subscription.next(timeout=60))
        await replica.clients[0].status()
        for one in (subscription, publication):
            await asyncio.to_thread(asyncio.run, one.close())
        with pytest.raises(etha.ConfigError, match="closed while next"):
            await waiting
        with pytest.raises(etha.ConfigError, match="closed: call publish again"):
            await publication.put(1)


async def test_both_may_be_closed_after_their_loop_has_ended(site: Site, pair: str) -> None:
    """What they had is over with the loop: their names are free, and ``close`` only drops the memory."""
    how = Cut().options(SHAPES, 0)

    async def make() -> list[etha.AsyncPublication | etha.AsyncSubscription]:
        clients = [site.client("trainer", 0, timeout=60.0), site.client("inference", 0, timeout=60.0)]
        publication = await clients[0].publish(pair, Cut().held(SHAPES, 1, 0), **how)
        held = Cut().held(SHAPES, 0, 0)
        subscription = await clients[1].subscribe(pair, held, subscriber="replica", atomic=True, **how)
        await asyncio.gather(publication.put(1), subscription.next())
        return [publication, subscription]

    for _ in range(2):
        for one in await asyncio.to_thread(asyncio.run, make()):
            await one.close()
            await one.close()


async def test_after_a_put_of_one_rank_alone_all_may_publish_again(site: Site, pair: str) -> None:
    """The rank that has put waits for the others before it leaves, but not once all have left."""
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer, replica = await fleet.publish(ROWS), await fleet.subscribe("replica", Cut(), atomic=True)
        await asyncio.gather(trainer.put(1), replica.next())
        first, second = trainer.publications
        await first.put(2)
        await first.close()
        await second.close()
        async with asyncio.timeout(30):
            again = await asyncio.gather(
                *(
                    client.publish(pair, held, **ROWS.options(SHAPES, rank))
                    for rank, (client, held) in enumerate(zip(trainer.clients, trainer.tensors, strict=True))
                )
            )
            assert {one.seq for one in await asyncio.gather(*(one.put(3) for one in again))} == {2}
