"""Holders of some elements of the tensors: they feed those who want no others, and nobody else."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest

import etha
from etha.store.registry import Store
from tests.flow.publishing.fleets import Cut, Fleet, Replica
from tests.flow.publishing.test_fleets import random_shapes
from tests.flow.sites import Site
from tests.flow.ways import Way
from tests.unit.plan.truth import random_dim, runs_of

SHAPES = {"w": (12, 6), "b": (5,)}
#: Two ranks of an engine: heads that both keep, rows with gaps, a list of products.
ENGINE = Cut(
    world=2,
    regions={
        "w": ([[(0, 4), (6, 8)], [(0, 6)]], [[[(2, 6)], [(0, 6)]], [[(8, 10)], [(0, 3)]]]),
        "b": ([[(0, 3)]], [[(1, 5)]]),
    },
)
#: What lies within it, cut in another way; and what does not.
INSIDE = Cut(
    world=3, regions={"w": ([[(1, 7)], [(1, 5)]], [[(8, 10)], [(1, 3)]], [[], [(0, 6)]]), "b": ([[(0, 5)]],) * 3}
)
BEYOND = Cut(regions={"w": ([[(8, 10)], [(2, 4)]],), "b": ([[(0, 5)]],)})


@pytest.mark.ways(Way.LOCAL, Way.TCP)
@pytest.mark.parametrize("atomic", [True, False])
async def test_a_holder_of_regions_feeds_those_who_want_no_others(site: Site, pair: str, atomic: bool) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(world=2, dims={"w": 0}), fan_out=1)
        engine = await fleet.subscribe("engine", ENGINE, atomic=atomic, mapped=not atomic)
        await trainer.put(1)
        assert (await engine.next()).source == "trainer"
        inside = await fleet.subscribe("inside", INSIDE, atomic=atomic, mapped=not atomic)
        beyond = await fleet.subscribe("beyond", BEYOND, serve=False)
        whole = await fleet.subscribe("whole", Cut(world=2, dims={"w": 1}), serve=False)
        first, second, third = await asyncio.gather(inside.next(), beyond.next(), whole.next())
        assert (second.source, third.source) == ("trainer", "trainer")
        assert first.source == "engine"
        # And once more, each from whom it has had the last one.
        await trainer.put(2)
        assert (await engine.next()).source == "trainer"
        assert (await inside.next()).source == "engine"


@pytest.mark.ways("local")
async def test_a_publisher_that_is_gone_is_replaced_as_far_as_its_holders_reach(site: Site, pair: str) -> None:
    """The agent of a closed publisher keeps its version for those whom the holder of some elements cannot feed."""
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        engine = await fleet.subscribe("engine", ENGINE, atomic=True)
        await trainer.put(1)
        await engine.next()
        await trainer.close()
        whole = await fleet.subscribe("whole", Cut(), atomic=True)
        assert (await whole.next()).source == "trainer"
        inside = await fleet.subscribe("inside", INSIDE, serve=False)
        assert (await inside.next()).source in ("engine", "whole")


@pytest.mark.ways("tcp")
async def test_one_whom_no_holder_can_feed_is_told_why(site: Site, pair: str) -> None:
    """What the publisher had is gone, and the holder of some elements is left. It waits, because others may come."""
    async with Fleet(site, pair, SHAPES) as fleet, await Store.open(str(site.redis), "default", timeout=10) as store:
        trainer = await fleet.publish(Cut())
        engine = await fleet.subscribe("engine", ENGINE, atomic=True)
        whole = await fleet.subscribe("whole", Cut(), atomic=True)
        await trainer.put(1)
        await engine.next()
        view = await store.publications.view(pair)
        assert view is not None
        for holder in view.holders:
            if holder.publisher:
                await store.publications.forget(pair, holder.name)
        why = r"no holder of a newer version can feed it: tensor . lacks elements there that are wanted here"
        (waits,) = whole.subscriptions
        with pytest.raises(etha.TransferTimeoutError, match=f"seq 1 was announced, and {why}"):
            await waits.next(timeout=0.5)
        waiting = asyncio.ensure_future(waits.next())
        await until_error(store, pair, "whole", why)
        logs = [path.read_text() for path in site.directory.rglob("*.log")]
        assert any(re.search(rf"WARNING .*publication {re.escape(pair)}: whole waits: {why}", text) for text in logs)
        await trainer.put(2)
        assert (await waiting).version == 2
        await until_error(store, pair, "whole", "^$")


async def until_error(store: Store, publication: str, subscriber: str, pattern: str) -> None:
    """Wait until Redis says of a subscriber why it has no newer version."""
    async with (
        asyncio.timeout(30),
        store.changes(store.keys.publication_side(publication, subscriber)) as changed,
    ):
        while True:
            view = await store.publications.view(publication)
            assert view is not None
            (found,) = [one for one in view.subscribers if one.name == subscriber]
            if re.search(pattern, found.error):
                return
            await changed()


@pytest.mark.ways("local")
async def test_a_publisher_of_regions(site: Site, pair: str) -> None:
    """Its ranks overlap; together they hold all that is wanted."""
    regions = {"w": ([[(0, 8)], [(0, 6)]], [[(5, 12)], [(0, 4)]], [[[(8, 12)], [(4, 6)]], [[(0, 2)], [(0, 1)]]])}
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(world=3, regions=regions))
        whole = await fleet.subscribe("whole", Cut(world=2, dims={"w": 0}), atomic=True)
        for version in (1, 2):
            await trainer.put(version)
            assert (await whole.next()).source == "trainer"
        engine = await fleet.subscribe("engine", ENGINE, serve=False)
        assert (await engine.next()).version == 2


def random_regions(chance: random.Random, shape: tuple[int, ...], world: int) -> list[Any]:
    """A region for each rank: a product, or a list of products."""

    def product() -> list[Any]:
        return [runs_of(random_dim(chance, n)) for n in shape]

    found: list[Any] = []
    for _ in range(world):
        several = [product() for _ in range(chance.choice((1, 1, 2, 3)))]
        found.append(several if len(several) > 1 and any(dim for one in several for dim in one) else several[0])
    return found


async def play(site: Site, name: str, seed: int) -> None:
    """Random replicas that hold random regions, all of which serve; each version that one reports is exact."""
    chance = random.Random(seed)
    shapes = random_shapes(chance)
    async with Fleet(site, name, shapes) as fleet:
        dims = {tensor: chance.choice((None, *range(len(shape)))) for tensor, shape in shapes.items()}
        trainer = await fleet.publish(Cut(world=chance.randint(1, 2), dims=dims), fan_out=chance.choice((1, 2)))

        async def follow(number: int) -> None:
            world = chance.randint(1, 3)
            some = {t: random_regions(chance, shape, world) for t, shape in shapes.items() if chance.random() < 0.7}
            if chance.random() < 0.3:
                some = {}
            atomic = chance.random() < 0.7
            replica = await fleet.subscribe(
                f"replica-{number}", Cut(world=world, regions=some), atomic=atomic, mapped=not atomic
            )
            await until(replica, 3)

        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(follow(number))
            for version in (1, 2, 3):
                await trainer.put(version)


async def until(replica: Replica, last: int) -> None:
    """Receive versions up to the last one."""
    while (await replica.next()).version != last:
        pass


@pytest.mark.ways("local")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(2))
async def test_random_holders_of_regions(site: Site, pair: str, seed: int) -> None:
    for number in range(3):
        await play(site, f"{pair}-{number}", 10 * seed + number)
