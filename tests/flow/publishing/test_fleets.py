"""Random fleets: every replica has its own layout and dtypes, and each version that it reports is exact."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from tests.flow.publishing.fleets import Cut, Fleet, Replica, Shapes
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way

#: What a publisher's dtype may become at a subscriber.
DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float64),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.int64: (torch.int64,),
}


def random_shapes(chance: random.Random) -> dict[str, tuple[int, ...]]:
    """Some tensors of one to three dims, uneven, one perhaps empty."""
    return {
        f"t{number}": tuple(chance.choice((1, 2, 3, 5, 8, 17)) for _ in range(chance.randint(1, 3)))
        for number in range(chance.randint(1, 5))
    }


def random_cut(chance: random.Random, shapes: Shapes, source: Cut | None = None) -> Cut:
    """A layout of a side of its own."""
    dtypes = {}
    for name in shapes:
        base = source.dtype(name) if source else None
        dtypes[name] = chance.choice(DTYPES[base] if base else tuple(DTYPES))
    if source and chance.random() < 0.6:  # only such replicas can feed others
        dtypes = dict(source.dtypes)
    dims = {name: chance.choice((None, *range(len(shape)))) for name, shape in shapes.items()}
    return Cut(world=chance.randint(1, 3), dims=dims, dtypes=dtypes)


async def play(site: Site, name: str, seed: int) -> None:
    """One fleet: versions are put while replicas follow, join late and leave; in the end all have the newest."""
    chance = random.Random(seed)
    shapes = random_shapes(chance)
    places = ("a", "b", "c") if site.redis is not None else ("a",)
    where = {}

    def place(side: str, rank: int) -> str:
        return where.setdefault((side, rank), chance.choice(places))

    async with Fleet(site, name, shapes, where=place) as fleet:
        source = random_cut(chance, shapes)
        trainer = await fleet.publish(source, slots=chance.choice((1, 2, 2, 3)), fan_out=chance.choice((None, 1, 2)))
        last, count = chance.randint(2, 4), chance.randint(1, 4)
        seen: dict[str, list[int]] = {}

        async def follow(number: int) -> None:
            atomic, serve = chance.random() < 0.5, chance.random() < 0.7
            cut, mapped = random_cut(chance, shapes, source), chance.random() < 0.5
            replica = await fleet.subscribe(
                f"replica-{number}", cut, atomic=atomic, serve=serve and (atomic or mapped), mapped=mapped
            )
            await _until(replica, last, seen.setdefault(f"replica-{number}", []))

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(follow(number))
            for version in range(1, last + 1):
                await trainer.put(version)
        late = await fleet.subscribe("late", random_cut(chance, shapes, source), serve=False)
        assert (await late.next()).version == last
        assert all(versions == sorted(set(versions)) for versions in seen.values()), seen


async def _until(replica: Replica, last: int, seen: list[int]) -> None:
    while not seen or seen[-1] < last:
        update = await replica.next()
        assert isinstance(update.version, int)
        seen.append(update.version)


@pytest.mark.ways("tcp", "local")
@pytest.mark.parametrize("seed", range(6))
async def test_a_random_fleet(site: Site, pair: str, seed: int) -> None:
    await play(site, pair, seed)


@pytest.mark.proof
@pytest.mark.ways("tcp", "local", each=True)
@pytest.mark.parametrize("seed", range(100, 200))
async def test_many_random_fleets(site: Site, pair: str, seed: int) -> None:
    await play(site, pair, seed)


async def test_a_subscriber_prefers_a_holder_of_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    zones = {"c": "east", "d": "east", "b": "west"}
    with open_site(Way.TCP) as site:
        at = site.at
        monkeypatch.setattr(
            site, "at", lambda place: at(place) | ({"ETHA_ZONE": zones[place]} if place in zones else {})
        )
        places = {"trainer": "a", "west": "b", "east": "c", "late": "d"}
        async with Fleet(site, "policy", {"w": (8, 3)}, where=lambda side, _: places[side]) as fleet:
            trainer = await fleet.publish(Cut())
            holders = [await fleet.subscribe(name, Cut(), mapped=True) for name in ("west", "east")]
            await trainer.put(1)
            for holder in holders:
                await holder.next()
            late = await fleet.subscribe("late", Cut(), serve=False)
            assert (await late.next()).source == "east", "without zones it would be the one that entered first"
