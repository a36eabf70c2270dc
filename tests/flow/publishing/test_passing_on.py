"""A replica passes on what it still receives: all get every element, and nobody gets what does not come whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping

import pytest
import torch

import etha
from tests.flow.publishing.fleets import Cut, Fleet, Publisher, Replica, Shapes
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way

SHAPES: Shapes = {"embed": (512, 512), "up": (256, 700), "bias": (1030,), "scale": ()}
#: Bytes a second of the publisher: a version of SHAPES takes about a second and a half.
SLOW = 1.2e6
#: Each side has a host of its own, but "near", which has that of the trainer and another agent.
PLACES = {"trainer": "a", "near": "a2", "first": "b", "second": "c", "third": "d"}
LAYOUTS = {
    "first": Cut(world=2, dims={"embed": 1, "up": 0, "bias": 0}),
    "second": Cut(dims={}, transposed=frozenset({"up"})),
    "third": Cut(world=2, dims={"embed": 0, "up": 1}),
}


@pytest.fixture
def site() -> Iterator[Site]:
    with open_site(Way.TCP) as found:
        yield found


@pytest.fixture
def whole_only() -> Iterator[Site]:
    """Agents that pass on nothing."""
    with open_site(Way.TCP) as found:
        at = found.at
        found.at = lambda place: {**at(place), "ETHA_PASS_ON": "0"}  # type: ignore[method-assign]
        yield found


def fleet_of(site: Site, pair: str) -> Fleet:
    return Fleet(site, pair, SHAPES, where=lambda side, rank: PLACES.get(side, "b"))


class Round:
    """All replicas ask for the next version, in any order. ``log``: whose bytes have begun to come, and who has all."""

    def __init__(self, trainer: Publisher, replicas: Mapping[str, Replica]) -> None:
        self.log: list[str] = []
        self._moved = asyncio.Condition()
        self._trainer = trainer
        self.tasks = {name: asyncio.ensure_future(self._next(name, one)) for name, one in replicas.items()}

    async def _next(self, name: str, replica: Replica) -> etha.Update:
        def progress(done: int, total: int) -> None:
            if 0 < done < total and f"{name} moves" not in self.log:
                self.log.append(f"{name} moves")
                tells.append(asyncio.ensure_future(self._tell()))

        tells: list[asyncio.Task[None]] = []
        found = await replica.next(progress=progress)
        self.log.append(f"{name} holds")
        await asyncio.gather(*tells)
        return found

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def until_moving(self, count: int) -> str:
        """Return once bytes come to so many replicas: the one that gets them from the publisher."""
        async with self._moved:
            await self._moved.wait_for(lambda: sum(line.endswith("moves") for line in self.log) >= count)
        states = await self._trainer.publications[0].subscribers()
        [head] = [one.name for one in states if one.source == "trainer" and one.state == "receiving"]
        assert f"{head} holds" not in self.log
        return head

    async def all(self, version: int) -> dict[str, str]:
        """All hold it; from whom each has it."""
        updates = await asyncio.gather(*self.tasks.values())
        assert {update.version for update in updates} == {version}
        return dict(zip(self.tasks, (update.source for update in updates), strict=True))


async def replicas_of(fleet: Fleet, *names: str) -> dict[str, Replica]:
    return {name: await fleet.subscribe(name, LAYOUTS[name], atomic=True) for name in names or LAYOUTS}


async def slow_trainer(fleet: Fleet) -> Publisher:
    return await fleet.publish(Cut(world=2, dims={"embed": 0, "up": 0}), fan_out=1, max_rate=SLOW)


def row(sources: Mapping[str, str]) -> list[str]:
    """The replicas in the order in which one has fed the other."""
    found = ["trainer"]
    while after := [name for name, source in sources.items() if source == found[-1]]:
        assert len(after) == 1, sources
        found += after
    return found[1:]


async def test_a_row_of_replicas_in_other_layouts_receives_at_once(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        trainer = await slow_trainer(fleet)
        replicas = await replicas_of(fleet)
        for version in (1, 2, 3):
            one = Round(trainer, replicas)
            await trainer.put(version)
            order = row(await one.all(version))
            assert sorted(order) == sorted(LAYOUTS)
            # What one has cut by columns and the next by rows comes tensor by tensor.
            assert one.log.index(f"{order[1]} moves") < one.log.index(f"{order[0]} holds"), one.log


async def test_what_comes_as_a_difference_is_passed_on(site: Site, pair: str) -> None:
    at = site.at
    site.at = lambda place: {**at(place), "ETHA_DIFFERENCES": "always"}  # type: ignore[method-assign]
    async with fleet_of(site, pair) as fleet:
        trainer = await slow_trainer(fleet)
        replicas = await replicas_of(fleet, "first", "second")
        for version in (1, 2, 3):
            one = Round(trainer, replicas)
            await trainer.put(version)
            assert sorted(row(await one.all(version))) == ["first", "second"]


async def test_if_what_is_passed_on_does_not_come_it_is_fetched_elsewhere(site: Site, pair: str) -> None:
    """Who is fed by the publisher gives up in the middle: the others get all from elsewhere, and no place is lost."""
    async with fleet_of(site, pair) as fleet:
        trainer = await slow_trainer(fleet)
        replicas = await replicas_of(fleet)
        for version in (1, 2, 3):
            one = Round(trainer, replicas)
            kept = {name: [tensors_of(held) for held in replica.tensors] for name, replica in replicas.items()}
            await trainer.put(version)
            head = await one.until_moving(2)
            one.tasks.pop(head).cancel()
            for name, replica in replicas.items():
                for held, before in zip(replica.tensors, kept[name], strict=True):
                    same = all(torch.equal(held[tensor], before[tensor]) for tensor in held)
                    assert same, "nothing changes before all of it has come"
            assert head not in (await one.all(version)).values()
            assert (await replicas[head].next()).version == version
        assert {one.state for one in await trainer.publications[0].subscribers()} == {"current"}


def tensors_of(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in held.items()}


async def test_an_agent_that_dies_takes_only_its_own_replica_along(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        trainer = await slow_trainer(fleet)
        replicas = await replicas_of(fleet)
        agents = {name: (await one.clients[0].status())["agent"]["pid"] for name, one in replicas.items()}
        one = Round(trainer, replicas)
        await trainer.put(1)
        head = await one.until_moving(2)
        os.kill(agents[head], signal.SIGKILL)
        with pytest.raises(etha.EthaError):
            await one.tasks.pop(head)
        assert head not in (await one.all(1)).values()


async def test_agents_that_pass_on_nothing_serve_what_they_hold(whole_only: Site, pair: str) -> None:
    async with fleet_of(whole_only, pair) as fleet:
        trainer = await slow_trainer(fleet)
        one = Round(trainer, await replicas_of(fleet, "first", "second"))
        await trainer.put(1)
        order = row(await one.all(1))
        assert f"{order[1]} moves" not in one.log[: one.log.index(f"{order[0]} holds")]


async def agent_killed_in_a_hop(fleet: Fleet, number: signal.Signals) -> Round:
    """The trainer sends its first version to "second", whose agent gets this signal meanwhile."""
    trainer = await slow_trainer(fleet)
    [replica] = (await replicas_of(fleet, "second")).values()
    agent = (await replica.clients[0].status())["agent"]["pid"]
    one = Round(trainer, {"second": replica})
    await trainer.put(1)
    await one.until_moving(1)
    os.kill(agent, number)
    return one


async def test_a_version_that_comes_while_its_agent_is_told_to_stop_is_returned(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        one = await agent_killed_in_a_hop(fleet, signal.SIGTERM)
        assert await one.all(1) == {"second": "trainer"}


async def test_a_deadline_while_a_hop_is_prepared_is_a_deadline(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        trainer = await slow_trainer(fleet)
        await trainer.put(1)
        for number in range(8):
            replica = await fleet.subscribe(f"late-{number}", LAYOUTS["second"], atomic=True)
            with pytest.raises(etha.TransferTimeoutError):
                await replica.subscriptions[0].next(timeout=0.004 * 2**number)


async def test_next_says_that_its_subscription_was_closed(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        await slow_trainer(fleet)
        replica = await fleet.subscribe("second", LAYOUTS["second"], atomic=True)
        waits = asyncio.ensure_future(replica.subscriptions[0].next())
        await asyncio.sleep(0)  # it has begun
        await replica.subscriptions[0].close()
        with pytest.raises(etha.ConfigError, match="was closed while next"):
            await waits


async def test_a_lost_agent_is_said_with_what_a_subscriber_does_about_it(site: Site, pair: str) -> None:
    async with fleet_of(site, pair) as fleet:
        one = await agent_killed_in_a_hop(fleet, signal.SIGKILL)
        with pytest.raises(etha.AgentLostError, match="call subscribe again") as caught:
            await one.tasks["second"]
        assert "init_pair" not in str(caught.value)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_broken_hop_goes_on_from_another_holder(site: Site, pair: str, atomic: bool, encrypted: bool) -> None:
    """What has come is not sent again, although the other one has another layout."""
    at = site.at
    site.at = lambda place: {**at(place), "ETHA_ENCRYPT": str(int(encrypted))}  # type: ignore[method-assign]
    async with fleet_of(site, pair) as fleet:
        trainer = await fleet.publish(Cut(world=2, dims={"embed": 0, "up": 0}), max_rate=SLOW / 4)
        agent = (await trainer.clients[0].status())["agent"]["pid"]
        near = await fleet.subscribe("near", LAYOUTS["first"], atomic=True)
        second = await fleet.subscribe("second", LAYOUTS["second"], atomic=atomic, mapped=not atomic)
        halfway = asyncio.Event()

        def progress(done: int, total: int) -> None:
            if 2 * done >= total:
                halfway.set()

        await trainer.put(1)
        following = asyncio.ensure_future(second.next(progress=progress))
        await halfway.wait()
        assert (await near.next()).source == "trainer"
        os.kill(agent, signal.SIGKILL)
        update = await following
        assert update.source == "near"
        assert 0 < update.wire_bytes < 0.95 * update.bytes, (update.wire_bytes, update.bytes)
