"""Only what has changed travels between hosts: few bytes, and every bit of every version right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import pytest
import torch

from tests.flow.publishing.fleets import Cut, Fleet, Replica, Shapes
from tests.flow.sites import Site, open_site
from tests.flow.truth import cut
from tests.flow.ways import Way

SHAPES: Shapes = {"embed": (700, 512), "up": (512, 1030), "bias": (1030,), "scale": ()}

#: What all bytes of a version come to: what both ranks of a host keep crosses once.
WHOLE = 0.99


@lru_cache(maxsize=64)
def bits(shape: tuple[int, ...], version: int, dtype: torch.dtype, share: float) -> torch.Tensor:
    """Random bits, NaNs and signed zeros among them, of which each version changes ``share`` at random places."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    chance = torch.Generator().manual_seed(hash((shape, version)) % 2**31)
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    fresh = torch.randint(low, high, shape, generator=chance, dtype=integer)
    fresh[torch.rand(shape, generator=chance) < 0.2] = 0
    fresh[torch.rand(shape, generator=chance) < 0.2] = low  # -0.0
    if version <= 1:
        return fresh
    before = bits(shape, version - 1, dtype, share)
    return torch.where(torch.rand(shape, generator=chance) < share, fresh, before)


@dataclass(frozen=True, kw_only=True)
class FewChanges(Cut):
    """A side whose versions differ in few elements."""

    share: float = 0.01

    def held(self, shapes: Shapes, version: int, rank: int, source: Cut | None = None) -> dict[str, torch.Tensor]:
        found = {}
        for name, shape in shapes.items():
            dtype = (source or self).dtype(name)
            full = bits(shape, version, dtype, self.share).view(dtype)
            full, dim = full.to(self.dtype(name)), self.dims.get(name)
            found[name] = full.clone() if dim is None else cut(full, dim, self.world, rank)
        return found


def check(replica: Replica, version: int) -> None:
    """Every rank holds the version, bit by bit."""
    for rank, held in enumerate(replica.tensors):
        expected = replica.cut.held(replica.fleet.shapes, version, rank, replica.fleet.cut)
        for name, tensor in held.items():
            wanted = expected[name]
            if tensor.dtype != (replica.fleet.cut or replica.cut).dtype(name):
                nan = wanted.isnan()
                assert torch.equal(tensor.isnan(), nan)
                tensor, wanted = tensor.masked_fill(nan, 0), wanted.masked_fill(nan, 0)
            assert torch.equal(
                tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8),
                wanted.view(torch.uint8) if wanted.dim() else wanted.reshape(1).view(torch.uint8),
            ), f"rank {rank}, {name}, version {version}"


async def receive(replica: Replica) -> float:
    """The next version on all ranks, checked; the bytes that came over the wire for each byte of payload."""
    updates = await asyncio.gather(*(one.next() for one in replica.subscriptions))
    assert len({update.seq for update in updates}) == 1
    version = updates[0].version
    assert isinstance(version, int)
    check(replica, version)
    return updates[0].wire_bytes / sum(update.bytes for update in updates)


@pytest.fixture
def site() -> Iterator[Site]:
    """Two hosts whose agents send differences whatever it costs."""
    with open_site(Way.TCP) as found:
        at = found.at
        found.at = lambda place: {**at(place), "ETHA_DIFFERENCES": "always"}  # type: ignore[method-assign]
        yield found


@pytest.fixture
def plain() -> Iterator[Site]:
    """Two hosts as they are."""
    with open_site(Way.TCP) as found:
        yield found


def sides(share: float, dtype: torch.dtype, target: torch.dtype) -> tuple[FewChanges, FewChanges]:
    """A trainer of two ranks, and a replica of two in another layout."""
    source = FewChanges(
        world=2, dims={"embed": 0, "up": 0, "bias": 0}, dtypes=dict.fromkeys(SHAPES, dtype), share=share
    )
    return source, FewChanges(
        world=2, dims={"embed": 1, "up": 0, "bias": None}, dtypes=dict.fromkeys(SHAPES, target), share=share
    )


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.025), (0.1, 0.22), (1.0, 1.01)])
async def test_a_replica_that_follows_gets_what_has_changed(site: Site, pair: str, share: float, most: float) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        source, target = sides(share, torch.bfloat16, torch.bfloat16)
        trainer = await fleet.publish(source)
        replica = await fleet.subscribe("replica", target, atomic=True)
        await trainer.put(1)
        assert await receive(replica) > WHOLE
        for version in range(2, 6):
            await trainer.put(version)
            assert await receive(replica) <= most
        # What it holds is in no slot any more, so it gets all of the version.
        await trainer.put(6)
        await trainer.put(7)
        assert await receive(replica) > WHOLE
        await trainer.put(8)
        assert await receive(replica) <= most


@pytest.mark.parametrize("mapped", [True, False])
async def test_differences_of_what_is_cast(site: Site, pair: str, mapped: bool) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        source, target = sides(0.01, torch.float32, torch.bfloat16)
        trainer = await fleet.publish(source)
        replica = await fleet.subscribe("replica", target, atomic=not mapped, mapped=mapped)
        for version in range(1, 5):
            await trainer.put(version)
            share = await receive(replica)
            assert share <= 0.05 if version > 1 else share > WHOLE


async def test_what_came_as_a_difference_is_passed_on_whole(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        source, target = sides(0.01, torch.bfloat16, torch.bfloat16)
        trainer = await fleet.publish(source, fan_out=1)
        first = await fleet.subscribe("first", target, atomic=True)
        for version in (1, 2, 3):
            await trainer.put(version)
            await receive(first)
        await trainer.close()
        second = await fleet.subscribe("second", source, atomic=True)
        (update, _) = await asyncio.gather(*(one.next() for one in second.subscriptions))
        assert (update.version, update.source) == (3, "first")
        check(second, 3)


async def test_a_replica_that_has_changed_its_tensors_gets_all_bytes(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        source, target = sides(0.01, torch.bfloat16, torch.bfloat16)
        trainer = await fleet.publish(source)
        replica = await fleet.subscribe("replica", target, mapped=True)
        for version in (1, 2):
            await trainer.put(version)
            share = await receive(replica)
        assert share <= 0.025
        for held in replica.tensors:
            held["up"].add_(1)
        await trainer.put(3)
        assert await receive(replica) > WHOLE
        await trainer.put(4)
        assert await receive(replica) <= 0.025


async def test_wider_targets_and_sums_get_all_bytes(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        source, target = sides(0.01, torch.bfloat16, torch.float32)
        trainer = await fleet.publish(source)
        replica = await fleet.subscribe("replica", target, atomic=True)
        for version in (1, 2, 3):
            await trainer.put(version)
            assert await receive(replica) >= 0.5  # a byte of the wire's dtype for two of the payload


async def test_a_cancelled_update_is_followed_by_all_bytes(site: Site, pair: str) -> None:
    chance = random.Random(3)
    async with Fleet(site, pair, SHAPES) as fleet:
        source, target = sides(0.05, torch.bfloat16, torch.bfloat16)
        trainer = await fleet.publish(source, slots=3)
        replica = await fleet.subscribe("replica", target, atomic=True)
        await trainer.put(1)
        await receive(replica)
        ended = 0
        for version in range(2, 20):
            await trainer.put(version)
            calls = [asyncio.ensure_future(one.next()) for one in replica.subscriptions]
            for _ in range(chance.randrange(0, 60)):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            held = {one.version for one in replica.subscriptions}
            if held != {version}:
                ended += 1
                await asyncio.gather(*(one.next() for one in replica.subscriptions))
            check(replica, version)
        assert ended


async def test_one_that_is_fast_enough_gets_all_bytes(plain: Site, pair: str) -> None:
    """Loopback carries more than a connection on which comparing is worth a try, or the difference has been faster."""
    small: Shapes = {"w": (64, 64)}
    async with Fleet(plain, pair, small) as fleet:
        source = FewChanges(world=1, dims={"w": 0}, dtypes={"w": torch.bfloat16})
        trainer = await fleet.publish(source)
        replica = await fleet.subscribe("replica", source, atomic=True)
        for version in (1, 2, 3):
            await trainer.put(version)
            assert await receive(replica) > WHOLE


def test_the_truth_changes_as_little_as_it_says() -> None:
    one, other = (bits((700, 512), version, torch.bfloat16, 0.01) for version in (4, 5))
    assert 0.005 < float((one != other).float().mean()) < 0.01
    assert prod(one.shape) == 700 * 512 and one.view(torch.bfloat16).isnan().any()
