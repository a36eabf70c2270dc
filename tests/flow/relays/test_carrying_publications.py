"""Replicas whose agents carry for each other pass on what they still receive, carried rows too, to others who carry."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

import etha
from tests.flow.publishing.fleets import Cut, Fleet, Publisher, Replica, Shapes
from tests.flow.publishing.test_passing_on import Round, row
from tests.flow.relays.test_carrying import WAY
from tests.flow.sites import Site, open_site

pytestmark = pytest.mark.timeout(240)

SHAPES: Shapes = {"rows": (5, 1 << 17), "columns": (1 << 17, 5), "bias": (1030,)}
#: Bytes a second of the publisher: a version of SHAPES takes two and a half seconds.
SLOW = 2e6
#: Each replica has a host of three agents. Its last rank holds one row, or column, of five, and the others two each.
PLACES = {"trainer": "ss", "first": ("x", "x2", "x3"), "second": ("z", "z2", "z3")}
LAYOUTS = {
    "first": Cut(world=3, dims={"rows": 0, "columns": 0}),
    "second": Cut(world=3, dims={"rows": 1, "columns": 1}),
}
CARRIER = 2


@pytest.fixture
def site() -> Iterator[Site]:
    with open_site(WAY) as found:  # type: ignore[arg-type]
        yield found


def fleet_of(site: Site, pair: str) -> Fleet:
    return Fleet(site, pair, SHAPES, where=lambda side, rank: PLACES[side][rank])


async def members(fleet: Fleet) -> tuple[Publisher, dict[str, Replica]]:
    """The publisher serves one replica at once, and slowly, so the other one is fed by that."""
    trainer = await fleet.publish(Cut(world=2, dims={"rows": 1, "columns": 0}), fan_out=1, max_rate=SLOW)
    return trainer, {name: await fleet.subscribe(name, cut, atomic=True) for name, cut in LAYOUTS.items()}


async def handed_on(replica: Replica) -> int:
    """Bytes that agents of a replica have sent to each other."""
    agents = [(await client.status())["agent"] for client in replica.clients]
    ours = {one["id"] for one in agents}
    return sum(link["bytes_sent"] for one in agents for link in one["links"] if link["agent"] in ours)


async def test_carried_rows_are_passed_on_to_those_who_carry(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        trainer, replicas = await members(fleet)
        met: set[tuple[str, ...]] = set()
        for version in (1, 2, 3):
            before = {name: await handed_on(one) for name, one in replicas.items()}
            one = Round(trainer, replicas)
            await trainer.put(version)
            order = tuple(row(await one.all(version)))
            assert sorted(order) == sorted(LAYOUTS)
            if order in met:  # else they have to meet first, which may take as long as the version
                assert one.log.index(f"{order[1]} moves") < one.log.index(f"{order[0]} holds"), one.log
            met.add(order)
            for name, replica in replicas.items():
                assert await handed_on(replica) - before[name] > 1 << 17, (name, version)


async def test_a_carrier_dies_while_what_it_carries_is_passed_on(site: Site, pair: str) -> None:
    """Its replica's calls end, the other replica gets the version from the publisher, and what is put next as well."""
    async with fleet_of(site, pair) as fleet:
        trainer, replicas = await members(fleet)
        met: set[str] = set()
        for version in (1, 2, 3):
            one = Round(trainer, replicas)
            await trainer.put(version)
            head = await one.until_moving(1)
            if head in met:  # once the two have met, the other one is fed meanwhile
                break
            await one.all(version)
            met.add(head)
        assert await one.until_moving(2) == head
        [other] = LAYOUTS.keys() - {head}
        os.kill((await replicas[head].clients[CARRIER].status())["agent"]["pid"], signal.SIGKILL)
        with pytest.raises((etha.AgentLostError, etha.PeerLostError)):
            await one.tasks[head]
        update = await one.tasks[other]
        assert (update.version, update.source) == (version, "trainer")
        await asyncio.gather(*(client.close() for client in replicas[head].clients))
        await trainer.put(version + 1)
        update = await replicas[other].next()
        assert (update.version, update.source) == (version + 1, "trainer")
        again = await fleet.subscribe(head, LAYOUTS[head], atomic=True)
        assert (await again.next()).version == version + 1
