"""Hundreds of versions, and launches one after the other: neither processes nor Redis hold more afterwards."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import redis

from etha.store.keys import REGISTRATION_LEASE
from tests.flow.endurance.footprint import Footprint
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way

SHAPES = {"w": (64, 33), "b": (7,)}
ROWS, COLUMNS = Cut(world=2, dims={"w": 0}), Cut(world=2, dims={"w": 1})


async def footprints(clients: list[Any]) -> dict[str, Footprint]:
    """This process and its clients' agents."""
    gc.collect()
    agents = {(await client.status())["agent"]["pid"] for client in clients}
    return {str(pid): Footprint.of(pid) for pid in (os.getpid(), *sorted(agents))}


def keys(site: Site) -> set[str]:
    """The keys in Redis that do not end within an hour, as those of manifests do."""
    with redis.Redis.from_url(str(site.redis), decode_responses=True) as server:
        return {key for key in server.scan_iter() if not 0 < int(server.ttl(key)) <= REGISTRATION_LEASE}  # type: ignore[arg-type]


def grown(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """What has become more than 300 turns could leave: 8 MiB of memory, three of everything else (connections to Redis
    and threads of a pool come and go)."""
    found = []
    for pid, first in before.items():
        for what, count in first.all().items():
            slack = 8192 if what in ("rss", "private") else 3
            if (now := after[pid].all()[what]) > count + slack:
                found.append(f"{what} of {pid}: {count}, then {now}")
    return found


@pytest.mark.slow
async def test_three_hundred_versions_leave_nothing_behind() -> None:
    with open_site(Way.TCP) as site:
        async with Fleet(site, "p", SHAPES) as fleet:
            trainer = await fleet.publish(ROWS)
            first = await fleet.subscribe("first", COLUMNS, atomic=True)
            second = await fleet.subscribe("second", Cut(), mapped=True)
            third = await fleet.subscribe("third", Cut(), serve=False)
            everybody = [*trainer.clients, *first.clients, *second.clients, *third.clients]

            async def turn(version: int) -> None:
                await trainer.put(version)
                for replica in (first, second, third):
                    await replica.next()

            for version in range(1, 61):
                await turn(version)
            before, known = await footprints(everybody), keys(site)
            for version in range(61, 361):
                await turn(version)
            assert not grown(before, await footprints(everybody))
            assert len(keys(site)) <= len(known)


@pytest.mark.slow
async def test_launches_leave_nothing_behind() -> None:
    """Publishers and replicas that have left, in whatever order, are nowhere any more."""
    with open_site(Way.TCP) as site:
        async with Fleet(site, "p", SHAPES) as fleet:
            watching = await fleet.subscribe("watching", Cut(), serve=False)

            async def life(version: int) -> None:
                trainer = await fleet.publish(ROWS)
                replica = await fleet.subscribe("replica", COLUMNS, atomic=True)
                await trainer.put(version)
                for one in (replica, watching):
                    await one.next()
                for side in (trainer, replica) if version % 2 else (replica, trainer):
                    await side.close()
                    for client in side.clients:
                        await client.close()

            for version in range(1, 9):
                await life(version)
            before, known = await footprints(watching.clients), keys(site)
            for version in range(9, 31):
                await life(version)
            after = keys(site)
            assert len(after) <= len(known) + 4, sorted(after - known)
            assert not grown(before, await footprints(watching.clients))


@pytest.mark.parametrize("role", ["publisher", "subscriber"])
def test_a_blocking_client_that_nobody_keeps_is_collected_with_its_part_of_a_publication(
    site: Site, pair: str, role: str
) -> None:
    """Its name is free again, and the other side hears that it has left."""
    cut = Cut()

    def part(number: int) -> weakref.ref[object]:
        client = site.blocking("trainer", 0, timeout=60.0)
        held = cut.held(SHAPES, number, 0)
        if role == "publisher":
            client.publish(pair, held, **cut.options(SHAPES, 0)).put(number)
        else:
            client.subscribe(pair, held, subscriber="again", atomic=True, **cut.options(SHAPES, 0)).next(newer_than=0)
        return weakref.ref(client._aio)

    with site.blocking("inference", 0, timeout=60.0) as other:
        if role == "subscriber":
            publication = other.publish(pair, cut.held(SHAPES, 0, 0), **cut.options(SHAPES, 0))
            publication.put(0)
        for number in (1, 2, 3):
            dropped = part(number)
            gc.collect()
            assert dropped() is None
