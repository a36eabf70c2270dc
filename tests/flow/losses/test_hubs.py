"""Agents that are too many to be all linked: each has links where it needs them, and hears of everybody's end.

Ranks 0 of both sides are the hubs. Between ranks 1 and 2 there are links only where data flows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.config import Settings
from etha.errors import AgentLostError, PeerLostError
from etha.events import gather
from tests.faults.agents import ask, run_agent
from tests.flow.jobs import Job
from tests.flow.nursery import MESH
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, environment, private_directory, stop_all
from tests.flow.truth import cut, stale, whole
from tests.flow.ways import Way
from tests.processes import send_signal
from tests.seconds import within
from tests.unit.store.server import Server, served

pytestmark = pytest.mark.ways("far", each=True)

SHAPE = (9, 12)
#: Seconds within which all have heard of an agent that was killed, and of one that stands still and misses three beats.
SOON, LATER = 2.5, 8.0


class Cast:
    """Three trainers with rows and three others with rows or columns; a batch "b"."""

    def __init__(self, sides: Sides, dim: int) -> None:
        self.sides, self.dim, self.handles = sides, dim, dict[Member, Any]()
        self.held = {
            (side, rank): cut(whole(SHAPE), 0, 3, rank) if side == "trainer" else stale(cut(whole(SHAPE), dim, 3, rank))
            for side, rank in sides.members
        }

    async def begin(self) -> None:
        await self.sides.meet(
            device_mesh=(3,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(self.dim)]}
        )
        self.handles = await self.sides.register(
            "b", lambda side, rank: ({"w": self.held[side, rank]}, {"shapes": {"w": SHAPE}})
        )
        assert not [found for found in self.handles.values() if isinstance(found, Exception)], self.handles

    async def move(self) -> None:
        found = await self.sides.move(self.handles)
        assert not [end for end in found.values() if isinstance(end, Exception)], found
        for rank in range(3):
            assert torch.equal(self.held["inference", rank], cut(whole(SHAPE), self.dim, 3, rank))
            self.held["inference", rank].fill_(77)

    async def pid(self, member: Member) -> int:
        status = await self.sides.clients[member].status()
        return int(status["agent"]["pid"])

    async def links(self) -> dict[Member, set[Member]]:
        """Who is linked with whom."""
        found = {member: await client.status() for member, client in self.sides.clients.items()}
        names = {status["agent"]["id"]: member for member, status in found.items()}
        return {
            member: {names[link["agent"]] for link in status["agent"]["links"] if link["agent"] in names}
            for member, status in found.items()
        }

    def wait_all(self) -> dict[Member, asyncio.Task[Any]]:
        """All but the last rank of the source call, so nothing can begin."""
        last = ("trainer", 2)
        return {
            member: asyncio.create_task(handle.transfer("send" if member[0] == "trainer" else "recv", timeout=60))
            for member, handle in self.handles.items()
            if member != last
        }


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents are too many to be linked for no reason."""
    monkeypatch.setenv(MESH, "1")


@contextlib.contextmanager
def served_site() -> Iterator[tuple[Site, Server]]:
    """A site and a Redis of its own."""
    with private_directory() as directory, served(directory) as server, contextlib.ExitStack() as stack:
        stack.callback(stop_all, str(directory))
        stack.callback(server.signal, signal.SIGCONT)
        yield Site(Way.FAR, directory, server.url), server


@contextlib.asynccontextmanager
async def cast(site: Site, pair: str, dim: int) -> AsyncIterator[Cast]:
    """A batch that is registered and has moved once."""
    async with Sides(site, pair, trainer=3, inference=3) as sides:
        found = Cast(sides, dim)
        await found.begin()
        await found.move()
        yield found


async def test_links_are_where_data_flows(rough: Site, pair: str) -> None:
    t, i = ([(side, rank) for rank in range(3)] for side in ("trainer", "inference"))
    hubs = {t[0], i[0]}
    async with Sides(rough, pair, trainer=3, inference=3) as sides:
        rows = Cast(sides, 0)
        await sides.meet(device_mesh=(3,), placements=[Shard(0)])
        everybody = set(sides.members)
        before = await rows.links()
        for member in sides.members:
            assert before[member] == (everybody if member in hubs else hubs) - {member}
    async with cast(rough, f"{pair}.rows", 0) as rows:
        found = await rows.links()
        assert found[t[1]] == hubs | {i[1]} and found[i[2]] == hubs | {t[2]}
    async with cast(rough, f"{pair}.columns", 1) as columns:
        found = await columns.links()
        assert found[t[1]] >= set(i) and found[i[2]] >= set(t) and t[2] not in found[t[1]]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("away", [False, True], ids=["with Redis", "without Redis"])
async def test_everybody_hears_of_an_agent_that_is_lost(how: signal.Signals, away: bool, pair: str) -> None:
    """Those too that have no link to it, and while Redis does not answer, because the hubs tell."""
    victim = ("inference", 2)
    with served_site() as (site, server):
        async with cast(site, pair, 0) as rows:
            pid = await rows.pid(victim)
            assert victim not in (await rows.links())["trainer", 1]
            waiting = rows.wait_all()
            await rows.sides.ask_all()
            if away:
                server.signal(signal.SIGSTOP)
            send_signal(pid, how)
            others = [task for member, task in waiting.items() if member != victim]
            async with asyncio.timeout(within(SOON if how == signal.SIGKILL else LATER)):
                ends = await asyncio.gather(*others, return_exceptions=True)
            for end in ends:
                assert isinstance(end, PeerLostError) and end.outcome == "withdrawn", end
                assert "inference rank 2" in end.message and end.culprits == (victim,), end
            if away:
                server.signal(signal.SIGCONT)
            send_signal(pid, signal.SIGKILL)
            end = await asyncio.gather(waiting[victim], return_exceptions=True)
            assert isinstance(end[0], AgentLostError)


async def test_a_hub_dies_and_the_next_epoch_has_another(rough: Site, pair: str) -> None:
    async with cast(rough, pair, 0) as rows:
        waiting = rows.wait_all()
        await rows.sides.ask_all()
        os.kill(await rows.pid(("trainer", 0)), signal.SIGKILL)
        async with asyncio.timeout(within(SOON)):
            ends = dict(zip(waiting, await asyncio.gather(*waiting.values(), return_exceptions=True), strict=True))
        for member, end in ends.items():
            assert isinstance(end, AgentLostError if member == ("trainer", 0) else PeerLostError), (member, end)
        again = Cast(rows.sides, 0)
        await again.begin()
        await again.move()


@pytest.mark.parametrize("both", [False, True], ids=["one hub", "both hubs"])
async def test_who_has_voted_learns_the_end_through_the_other_hub(both: bool, pair: str) -> None:
    """The coordinator dies when all have voted, so the others ask each other. Without any hub they cannot."""
    dead = [("trainer", 0), ("inference", 0)] if both else [("trainer", 0)]
    with served_site() as (site, _), Job(site.env) as job:
        coordinator = job.start(run_agent, at=("trainer", 0))
        coordinator.expect("ready")
        async with cast(site, pair, 0) as rows:
            links = await rows.links()
            assert ("inference", 2) not in links["trainer", 1] and ("trainer", 2) not in links["trainer", 1]
            ask(coordinator, "hold")
            moves = {
                member: asyncio.create_task(handle.transfer("send" if member[0] == "trainer" else "recv"))
                for member, handle in rows.handles.items()
            }
            await asyncio.to_thread(coordinator.expect, "voted")
            for pid in [await rows.pid(member) for member in dead]:
                send_signal(pid, signal.SIGSTOP)  # both are away before either is missed
            for member in dead:
                send_signal(coordinator.pid if member[0] == "trainer" else pid, signal.SIGKILL)
            async with asyncio.timeout(within(SOON)):
                ends = dict(zip(moves, await asyncio.gather(*moves.values(), return_exceptions=True), strict=True))
        for member, end in ends.items():
            if member in dead:
                assert isinstance(end, AgentLostError), (member, end)
            else:
                assert isinstance(end, PeerLostError), (member, end)
                assert end.outcome == ("unknown" if both else "aborted"), (member, end)
                assert both or "trainer rank 0" in end.message, end


async def test_a_coordinator_that_stands_still_after_the_votes_is_no_hub_to_ask_through(pair: str) -> None:
    """It is the first hub, and those who notice it first ask others who have not noticed yet."""
    coordinating = ("inference", 0)
    with served_site() as (site, _), Job(site.env) as job:
        coordinator = job.start(run_agent, at=coordinating)
        coordinator.expect("ready")
        async with Sides(site, pair, trainer=3, inference=3) as sides:
            for rank in range(3):  # links that were begun one after the other miss beats one after the other
                ends = [("trainer", rank), ("inference", 0), ("inference", rank)]
                for number, (side, other) in enumerate(itertools.pairwise(ends)):
                    name = f"{pair}.{rank}.{number}"
                    if side != other:
                        await asyncio.gather(
                            sides.clients[side].init_pair(name, "a", "b", 1, (1,), [Replicate()], rank=0),
                            sides.clients[other].init_pair(name, "b", "a", 1, (1,), [Replicate()], rank=0),
                        )
            rows = Cast(sides, 0)
            await rows.begin()
            ask(coordinator, "hold")
            moves = {
                member: asyncio.create_task(handle.transfer("recv" if member[0] == "trainer" else "send"))
                for member, handle in rows.handles.items()
            }
            await asyncio.to_thread(coordinator.expect, "voted")
            send_signal(coordinator.pid, signal.SIGSTOP)
            others = {member: move for member, move in moves.items() if member != coordinating}
            async with asyncio.timeout(within(LATER)):
                found = dict(zip(others, await asyncio.gather(*others.values(), return_exceptions=True), strict=True))
            send_signal(coordinator.pid, signal.SIGKILL)
            await asyncio.gather(moves[coordinating], return_exceptions=True)
        for member, end in found.items():
            assert isinstance(end, PeerLostError) and end.outcome == "aborted", (member, end)


async def test_a_rank_that_closes_ends_the_calls_of_all(site: Site, pair: str) -> None:
    """What agents without a link say to each other goes through a hub."""
    async with cast(site, pair, 0) as rows:
        waiting = rows.wait_all()
        await rows.sides.ask_all()
        await rows.handles["trainer", 2].close()
        ends = await asyncio.gather(*waiting.values(), return_exceptions=True)
        assert all(isinstance(end, PeerLostError) and "trainer rank 2" in end.message for end in ends), ends


async def test_events_of_an_agent_without_a_link_are_told_through_a_hub(pair: str) -> None:
    with served_site() as (site, _):
        async with cast(site, pair, 0) as rows:
            with environment(site.env("trainer", 1)):
                settings = Settings.from_env()
            found = await gather(settings, since=0.0, failed=False, timeout=60.0)
            assert not found.notes, found.notes
            moved = [one for one in found.happenings if "committed" in one.text]
            assert {one.host for one in moved} == {
                site.way.host(site.way.place(*member)) for member in rows.sides.members
            }


async def test_encrypted_data_between_agents_that_have_not_met(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_site() as (site, _):
        monkeypatch.setattr(site, "at", lambda place: Site.at(site, place) | {"ETHA_ENCRYPT": "1"})
        async with cast(site, pair, 1) as columns:
            await columns.move()


async def test_partial_sums_cross_between_agents_without_links(site: Site, pair: str) -> None:
    parts = {rank: whole(SHAPE, rank) for rank in range(3)}
    async with Sides(site, pair, trainer=3, inference=3) as sides:
        await sides.meet(device_mesh=(3,), trainer={"placements": [Partial()]}, inference={"placements": [Replicate()]})
        held = {m: parts[m[1]] if m[0] == "trainer" else torch.zeros(SHAPE) for m in sides.members}
        handles = await sides.register("b", lambda *m: ({"w": held[m]}, {"shapes": {"w": SHAPE}}))
        found = await sides.move(handles)
        assert not [end for end in found.values() if isinstance(end, Exception)], found
        assert all(torch.equal(held["inference", rank], parts[0] + parts[1] + parts[2]) for rank in range(3))
