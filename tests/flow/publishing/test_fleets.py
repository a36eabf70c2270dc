"""Random fleets: every replica has its own layout and dtypes, and each version that it reports is exact."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

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
    """Some tensors of one to three dims, uneven; "again" shares the memory of "t0"."""
    shapes = {
        f"t{number}": tuple(chance.choice((1, 2, 3, 5, 8, 17)) for _ in range(chance.randint(1, 3)))
        for number in range(chance.randint(1, 5))
    }
    return shapes | ({"again": shapes["t0"]} if chance.random() < 0.4 else {})


def random_cut(chance: random.Random, shapes: Shapes, source: Cut | None = None) -> Cut:
    """A layout of a side of its own: a mesh of one or two axes, or, of a subscriber, regions."""
    dtypes = {}
    for name in shapes:
        base = source.dtype(name) if source else None
        dtypes[name] = chance.choice(DTYPES[base] if base else tuple(DTYPES))
    if source and chance.random() < 0.6:  # only such replicas can feed others
        dtypes = dict(source.dtypes)
    transposed = frozenset(name for name in shapes if chance.random() < 0.3)
    if source and chance.random() < 0.2:
        world = chance.randint(1, 2)
        regions = {
            name: [[random_runs(chance, size) for size in shape] for _ in range(world)]
            for name, shape in shapes.items()
        }
        return Cut(world=world, regions=regions, dtypes=dtypes)
    mesh = chance.choice(((1,), (2,), (3,), (2, 1), (1, 2), (2, 2)))
    dims: dict[str, tuple[int | None, ...]] = {
        name: tuple(chance.choice((None, *range(len(shape)))) for _ in mesh) for name, shape in shapes.items()
    }
    strided = set()
    for name, shape in shapes.items():
        even = [dim for dim, size in enumerate(shape) if size % math.prod(mesh) == 0]
        if len(mesh) == 2 and even and chance.random() < 0.5:  # as FSDP2 x TP has them
            dims[name] = (even[0], even[0])
            strided.add(name)
    tied: dict[str, str] = {}
    if "again" in shapes and (source is None or chance.random() < 0.5):
        tied["again"] = "t0"
        dims["again"], dtypes["again"] = dims["t0"], dtypes["t0"]
        strided = strided - {"again"} | ({"again"} if "t0" in strided else set())
    options: dict[str, Any] = {"dims": dims, "dtypes": dtypes, "strided": frozenset(strided), "transposed": transposed}
    return Cut(world=math.prod(mesh), mesh=mesh, tied=tied, **options)


def random_runs(chance: random.Random, size: int) -> list[tuple[int, int]]:
    """Some of the indices of a dim, as runs."""
    kept = sorted(chance.sample(range(size), chance.randint(1, size)))
    runs: list[tuple[int, int]] = []
    for index in kept:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


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
        last, count = chance.randint(2, 4), chance.randint(1, 6)
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
@pytest.mark.parametrize("seed", range(20))
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


@pytest.mark.ways("tcp", "local")
@pytest.mark.parametrize("tied", [True, False])
async def test_tied_tensors(site: Site, pair: str, tied: bool) -> None:
    """A replica whose tensors share memory receives from whoever has tied them, too, and not from others."""
    shapes = {"head": (6, 4), "embedding": (6, 4)}
    ties = {"embedding": "head"}
    async with Fleet(site, pair, shapes) as fleet:
        trainer = await fleet.publish(Cut(world=2, dims=dict.fromkeys(shapes, 0), tied=ties))
        apart = await fleet.subscribe("apart", Cut(tied=ties if tied else {}), mapped=True)
        await asyncio.gather(apart.next(), trainer.put(1, wait=1))
        replica = await fleet.subscribe("replica", Cut(world=2, dims=dict.fromkeys(shapes, 0), tied=ties), serve=False)
        update = await replica.next()
        assert (update.version, update.source) == (1, "apart" if tied else "trainer")
        assert replica.tensors[0]["head"] is replica.tensors[0]["embedding"]
