"""``publish`` and ``subscribe``: versions reach subscribers of any layout, and nobody waits for anybody else."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sites import Site


async def test_a_version_reaches_a_subscriber(site: Site, pair: str) -> None:
    source, target = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    options = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,), "placements": {"w": [Replicate()]}}
    async with site.client("trainer", 0) as trainer, site.client("inference", 0) as replica:
        publication = await trainer.publish(pair, {"w": source}, **options)
        subscription = await replica.subscribe(pair, {"w": target}, subscriber="replica", atomic=True, **options)
        put = await publication.put("first")
        source.fill_(-1)
        update = await subscription.next()
        assert (update.seq, update.version, update.source) == (put.seq, "first", "trainer")
        assert torch.equal(target, torch.arange(12.0).reshape(3, 4))
        await publication.put()
        update = await subscription.next()
        assert torch.equal(target, torch.full((3, 4), -1.0))
        waiting = asyncio.ensure_future(subscription.next())
        source.fill_(7)
        await publication.put(3)
        assert (await waiting).version == 3 and target.unique().tolist() == [7]
        assert isinstance(subscription, etha.AsyncSubscription)
        await subscription.close()
        await publication.close()


def test_the_blocking_client(site: Site, pair: str) -> None:
    """A thread trains, another one serves, and the loop over versions ends when the subscription is closed."""
    options: dict[str, Any] = {
        "expected_world_size": 1,
        "rank": 0,
        "device_mesh": (1,),
        "placements": {"w": [Replicate()]},
    }
    source, target = torch.zeros(300, 7), etha.empty((300, 7))
    seen: list[tuple[Any, Any]] = []
    third = threading.Event()
    with (
        site.blocking("trainer", 0, timeout=60) as trainer,
        site.blocking("inference", 0, timeout=60) as replica,
        ThreadPoolExecutor(1) as pool,
        trainer.publish(pair, {"w": source}, **options) as publication,
        replica.subscribe(pair, {"w": target}, subscriber="replica", **options) as subscription,
    ):

        def follow() -> None:
            for update in subscription:
                seen.append((update.version, target.unique().tolist()))
                if update.version == 3:
                    third.set()

        following = pool.submit(follow)
        for version in (1, 2, 3):
            source.fill_(version)
            put = publication.put(version, wait=1)
            source.fill_(-1)
            assert (put.seq, publication.seq, publication.version) == (version, version, version)
        assert third.wait(30)
        assert (subscription.version, subscription.seq, subscription.lag) == (3, 3, 0)
        assert [one.name for one in publication.subscribers()] == ["replica"]
        subscription.close()
        following.result(30)
        assert seen == [(1, [1.0]), (2, [2.0]), (3, [3.0])]


async def test_a_callback_s_error_does_not_hide_that_the_version_is_there(site: Site, pair: str) -> None:
    options: dict[str, Any] = {"expected_world_size": 1, "rank": 0, "device_mesh": (1,)}
    placements, target, calls = {"w": [Replicate()]}, torch.zeros(5), []

    async def pause() -> None:
        calls.append(target.tolist())
        raise ValueError("the engine does not pause")

    async with site.client("trainer", 0, timeout=60) as trainer, site.client("inference", 0, timeout=60) as replica:
        publication = await trainer.publish(pair, {"w": torch.ones(5)}, placements=placements, **options)
        subscription = await replica.subscribe(
            pair, {"w": target}, subscriber="replica", placements=placements, atomic=True, **options
        )
        await publication.put(4)
        try:
            await subscription.next(on_commit=pause)
        except ValueError as error:
            assert str(error) == "the engine does not pause"
        assert calls == [[0.0] * 5] and target.tolist() == [1.0] * 5
        assert (subscription.version, subscription.seq) == (4, 1)


@pytest.mark.ways("tcp")
async def test_a_pair_that_all_have_left_forms_again_at_once(site: Site, pair: str) -> None:
    """A subscription keeps four pairs. With five holders each pair is left and formed again, as epoch 1 once more, and
    neither agent waits for one that has answered already (which took 10 s)."""
    async with Fleet(
        site, pair, {"w": (64, 33)}, where=lambda side, rank: "b" if side.startswith("holder") else "a"
    ) as fleet:
        trainer = await fleet.publish(Cut())
        for version in range(1, 6):
            await trainer.put(version)
            await (await fleet.subscribe(f"holder{version}", Cut(), atomic=True)).next()
        for version in (98, 99):
            await trainer.put(version)
        reader = await fleet.subscribe("reader", Cut(), atomic=True, serve=False)
        for version in (1, 2, 3, 4, 5) * 3:
            update = await reader.next(version=version, newer_than=0, timeout=8)
            assert update.source == f"holder{version}"
