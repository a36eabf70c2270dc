"""Deaths: whoever is left goes on, and what was published is not lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import etha
from etha.client.subscription import HOP_START
from etha.store.keys import AGENT_LEASE
from etha.store.registry import Store
from tests.flow.jobs import Job
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.publishing.lives import publisher, replica
from tests.flow.sites import Site

SMALL, LARGE = 1000, 8 << 20
SHAPES = {"w": (SMALL,)}


@pytest.fixture
def job(site: Site) -> Iterator[Job]:
    with Job(site.env) as job:
        yield job


@pytest.mark.ways("tcp", "local")
def test_a_dead_publisher_s_version_is_kept_until_somebody_else_has_it(site: Site, pair: str, job: Job) -> None:
    trainer = job.start(publisher, pair, SMALL, at=("trainer", 0))
    assert trainer.expect("published") == 0
    for version in (7, 8):
        trainer.go("put", version)
        assert trainer.expect("put") == version - 6
    trainer.kill()
    with pytest.raises(AssertionError):
        trainer.result()
    first = job.start(replica, pair, "first", SMALL, at=("first", 0), atomic=True)
    assert first.expect("held") == (2, 8, 8.0, "trainer")
    second = job.start(replica, pair, "second", SMALL, at=("second", 0))
    assert second.expect("held")[:3] == (2, 8, 8.0)
    third = job.start(replica, pair, "third", SMALL, at=("third", 0))
    assert third.expect("held")[:3] == (2, 8, 8.0)


@pytest.mark.ways("tcp", "local")
async def test_a_closed_publisher_s_version_is_kept_for_those_who_want_its_dtypes(site: Site, pair: str) -> None:
    """A replica of a narrower dtype has all elements, and may not feed one of the publisher's."""
    async with Fleet(site, pair, {"w": (64,)}) as fleet:
        trainer = await fleet.publish(Cut())
        narrow = await fleet.subscribe("narrow", Cut(dtypes={"w": torch.bfloat16}), atomic=True)
        await trainer.put(1)
        await narrow.next()
        await trainer.close()
        late = await fleet.subscribe("late", Cut(), atomic=True)
        assert (await late.next(timeout=10)).source == "trainer"


@pytest.mark.ways("tcp", "local")
def test_a_publisher_of_another_size_goes_on_with_the_next_number(site: Site, pair: str, job: Job) -> None:
    trainer = job.start(publisher, pair, SMALL, at=("trainer", 0))
    trainer.go("put", 1)
    assert trainer.expect("put") == 1
    first = job.start(replica, pair, "first", SMALL, at=("first", 0))
    assert first.expect("held") == (1, 1, 1.0, "trainer")
    trainer.kill()
    second = job.start(replica, pair, "second", SMALL, at=("second", 0))
    assert second.expect("held") == (1, 1, 1.0, "first")
    trainers = [job.start(publisher, pair, SMALL, rank, 2, at=("trainer", rank)) for rank in range(2)]
    assert [one.expect("published") for one in trainers] == [1, 1]
    for one in trainers:
        one.go("put", 5)
    assert [one.expect("put") for one in trainers] == [2, 2]
    for one in (first, second):
        assert one.expect("held")[:3] == (2, 5, 5.0)


@pytest.mark.ways("tcp", "local")
def test_a_replica_that_dies_costs_nobody_anything(site: Site, pair: str, job: Job) -> None:
    """One is killed while it receives, and one while it serves."""
    trainer = job.start(publisher, pair, LARGE, at=("trainer", 0))
    options: list[dict[str, bool]] = [{"atomic": True}, {"atomic": True}, {"serve": False}, {"serve": False}]
    replicas = [
        job.start(replica, pair, f"replica-{i}", LARGE, at=(f"replica-{i}", 0), **more)
        for i, more in enumerate(options)
    ]
    for one in replicas:
        one.expect("subscribed")
    trainer.go("put", 1)
    trainer.expect("put")
    replicas[0].expect("moving")
    replicas[0].kill()
    for one in replicas[1:]:
        assert one.expect("held")[:3] == (1, 1, 1.0)
    trainer.kill()
    late = job.start(replica, pair, "late", LARGE, at=("late", 0))
    late.expect("moving")
    replicas[1].kill()  # nobody else has the version, and its agent holds the memory
    assert late.expect("held")[:3] == (1, 1, 1.0)


@pytest.mark.ways("tcp", "local")
def test_the_publisher_is_killed_while_hops_run(site: Site, pair: str, job: Job) -> None:
    """Its agent sends on without it."""
    trainer = job.start(publisher, pair, LARGE, at=("trainer", 0))
    replicas = [job.start(replica, pair, f"replica-{i}", LARGE, at=(f"replica-{i}", 0)) for i in range(3)]
    for one in replicas:
        one.expect("subscribed")
    trainer.go("put", 3)
    replicas[0].expect("moving")
    trainer.kill()
    for one in replicas:
        assert one.expect("held")[:3] == (1, 3, 3.0)


@pytest.mark.ways("tcp", "local")
async def test_a_rank_of_a_replica_dies_and_the_replica_comes_again(site: Site, pair: str, job: Job) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        other = await fleet.subscribe("other", Cut(), serve=False)
        await trainer.put(1)
        ranks = [job.start(replica, pair, "pair", SMALL, rank, 2, at=("pair", rank)) for rank in range(2)]
        await asyncio.to_thread(lambda: [one.expect("held") for one in ranks])
        ranks[1].kill()
        assert (await other.next()).version == 1
        await trainer.put(2)
        assert (await other.next()).version == 2
        with pytest.raises(etha.PeerLostError, match="pair"):  # a subscriber is all of its ranks
            await asyncio.to_thread(ranks[0].result)
        again = [job.start(replica, pair, "pair", SMALL, rank, 2, at=("pair", rank)) for rank in range(2)]
        found = await asyncio.to_thread(lambda: [one.expect("held") for one in again])
        assert {one[1] for one in found} == {2}


@pytest.mark.ways("tcp")
async def test_the_publisher_s_agent_is_killed(rough: Site, pair: str) -> None:
    """Replicas feed each other, and the next launch of the publisher, behind another agent, goes on."""
    async with Fleet(rough, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(world=2, dims={"w": 0}))
        first = await fleet.subscribe("first", Cut(), atomic=True)
        await trainer.put(1)
        await first.next()
        os.kill((await trainer.clients[0].status())["agent"]["pid"], signal.SIGKILL)
        with pytest.raises(etha.AgentLostError, match="publish again"):
            await trainer.put(2)
        late = await fleet.subscribe("late", Cut(world=2, dims={"w": 0}), serve=False)
        update = await late.next()
        assert (update.version, update.source) == (1, "first")
        again = await fleet.publish(Cut())
        assert (await again.put(3)).seq == 2
        for one in (first, late):
            assert (await one.next()).version == 3


@pytest.mark.ways("tcp")
async def test_a_replica_s_agent_is_killed_while_it_serves(rough: Site, pair: str) -> None:
    def where(side: str, rank: int) -> str:
        return {"trainer": "a", "serving": "s"}.get(side, "b")

    async with Fleet(rough, pair, SHAPES, where=where) as fleet:
        trainer = await fleet.publish(Cut())
        serving = await fleet.subscribe("serving", Cut(), atomic=True)
        other = await fleet.subscribe("other", Cut(), serve=False)
        await trainer.put(1)
        await serving.next()
        await trainer.close()
        assert (await other.next()).source == "serving"
        os.kill((await serving.clients[0].status())["agent"]["pid"], signal.SIGKILL)
        again = await fleet.publish(Cut())
        await again.put(2)
        assert (await other.next()).version == 2
        with pytest.raises(etha.AgentLostError, match="subscribe again"):
            await serving.subscriptions[0].next()


@pytest.mark.ways("tcp", "local")
async def test_a_replica_that_leaves_before_a_hop_from_it_has_begun(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was sent to it is told at once, and asks somebody else."""
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        serving = await fleet.subscribe("serving", Cut(), atomic=True)
        other = await fleet.subscribe("other", Cut(), serve=False)
        await asyncio.gather(serving.next(), trainer.put(1, wait=1))
        (client,) = other.clients
        join, sources = client.join_hop, []

        async def join_late(name: str, defaults: Any, side: str, remote: str, *, timeout: float) -> Any:
            sources.append(remote)
            if remote == "serving":
                await serving.close()
            return await join(name, defaults, side, remote, timeout=timeout)

        monkeypatch.setattr(client, "join_hop", join_late)
        assert (await other.next(timeout=HOP_START - 5)).source == "trainer"
        assert sources == ["serving", "trainer"]


@pytest.mark.ways("tcp")
async def test_the_agent_of_one_rank_is_killed(rough: Site, pair: str) -> None:
    """The other ranks of its side, which wait behind other agents, are told, also in a call without a deadline."""

    def where(side: str, rank: int) -> str:
        return "ab"[rank]

    async with Fleet(rough, pair, SHAPES, where=where) as fleet:
        trainer = await fleet.publish(Cut(world=2, dims={"w": 0}))
        replica = await fleet.subscribe("replica", Cut(world=2, dims={"w": 0}), atomic=True)
        await trainer.put(1)
        await replica.next()
        waiting = asyncio.ensure_future(replica.subscriptions[0].next(timeout=math.inf))
        ahead = asyncio.ensure_future(trainer.put_rank(0, 2))
        await asyncio.wait({ahead})
        behind = asyncio.ensure_future(trainer.publications[0].put(3, timeout=math.inf))
        os.kill((await replica.clients[1].status())["agent"]["pid"], signal.SIGKILL)
        async with asyncio.timeout(3 * AGENT_LEASE):
            with pytest.raises(etha.PeerLostError, match=r"the agent of rank 1 of replica .* does not answer"):
                await waiting
            with pytest.raises(etha.PeerLostError, match=r"the agent of rank 1 of trainer .* does not answer"):
                await behind


@pytest.mark.ways("tcp")
@pytest.mark.parametrize("launch", [None, "run-7.0"])
@pytest.mark.parametrize("how", ["closed", "agent killed"])
async def test_the_same_process_publishes_again(
    rough: Site, pair: str, launch: str | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts its puts anew, also while its dead agent is not given up yet, and also in the same launch of a job."""
    if launch is not None:
        at = rough.at
        monkeypatch.setattr(rough, "at", lambda place: at(place) | {"ETHA_LAUNCH_ID": launch})
    async with Fleet(rough, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", Cut(), atomic=True)
        await trainer.put(1)
        await trainer.put(2)
        (client,), (held,) = trainer.clients, trainer.tensors
        if how == "closed":
            await trainer.close()
        else:
            os.kill((await client.status())["agent"]["pid"], signal.SIGKILL)
            with pytest.raises(etha.AgentLostError, match="publish again"):
                await trainer.publications[0].put(3)
        trainer.publications = [await client.publish(pair, held, **Cut().options(SHAPES, 0))]
        assert (await trainer.put(3)).seq >= 3
        update = await replica.next()
        assert (update.version, update.source) == (3, "trainer")
        (client,), (held,) = replica.clients, replica.tensors
        if how == "closed":
            await replica.close()
        else:
            os.kill((await client.status())["agent"]["pid"], signal.SIGKILL)
            with pytest.raises(etha.AgentLostError, match="subscribe again"):
                await replica.subscriptions[0].next()
        replica.subscriptions = [
            await client.subscribe(pair, held, subscriber="replica", atomic=True, **Cut().options(SHAPES, 0))
        ]
        assert (await replica.next()).version == 3
        await trainer.put(4)
        assert (await replica.next()).version == 4


@pytest.mark.ways("tcp")
async def test_the_agent_of_a_rank_is_killed_while_it_waits_for_the_others(rough: Site, pair: str) -> None:
    """Nobody takes what it had registered for that of the next launch, which has other layouts."""
    rows, whole = Cut(world=2, dims={"w": 0}), Cut(world=2)

    async with Fleet(rough, pair, SHAPES) as fleet, contextlib.AsyncExitStack() as stack:
        trainer = await fleet.publish(Cut())
        await trainer.put(1)
        dying, *clients = [
            await stack.enter_async_context(rough.client("replica", rank, place=place))
            for rank, place in ((0, "a2"), (0, "b"), (1, "b"))
        ]

        def enter(client: etha.AsyncTensorBusClient, cut: Cut, rank: int) -> asyncio.Task[etha.AsyncSubscription]:
            held = cut.held(SHAPES, 0, rank)
            entering = client.subscribe(
                pair, held, subscriber="replica", atomic=True, timeout=60, **cut.options(SHAPES, rank)
            )
            return asyncio.ensure_future(entering)

        async def until_waiting(ranks: set[int]) -> None:
            async with (
                await Store.open(str(rough.redis), "default", timeout=10) as store,
                asyncio.timeout(30),
                store.changes(store.keys.publication_ranks(pair, "replica")) as changed,
            ):
                while set(await store.publications.waiting(pair, "replica")) != ranks:
                    await changed()

        waiting = enter(dying, rows, 0)
        await until_waiting({0})
        os.kill((await dying.status())["agent"]["pid"], signal.SIGKILL)
        with pytest.raises(etha.AgentLostError):
            await waiting
        second = enter(clients[1], whole, 1)
        await until_waiting({0, 1})
        first = enter(clients[0], whole, 0)
        subscriptions = await asyncio.gather(first, second)
        assert {one.version for one in await asyncio.gather(*(each.next() for each in subscriptions))} == {1}
