"""Redis loses all it has while ranks register a batch: they meet all the same, and what they move is right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import PeerLostError
from etha.store.connect import Client
from etha.store.registry import Store
from tests.flow.conftest import forget_environment
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, open_site
from tests.flow.truth import cut, stale, whole
from tests.flow.ways import Way
from tests.unit.store.server import served

SHAPE = (9, 8)
MEMBERS = [("trainer", 0), ("trainer", 1), ("inference", 0), ("inference", 1)]


@pytest.fixture(params=[Way.LOCAL, Way.TCP, Way.THREE, Way.FAR], ids=str)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site whose Redis the test empties."""
    forget_environment(monkeypatch)
    with served(tmp_path) as server, open_site(request.param, server.url) as site:
        yield site


class Team:
    """Two ranks on each side, rows that become columns, and a look into their Redis."""

    def __init__(self, sides: Sides, store: Store) -> None:
        self.sides, self._store = sides, store
        self.base = {(s, r): cut(whole(SHAPE), 0 if s == "trainer" else 1, 2, r) for s, r in MEMBERS}
        self.tensors = {member: stale(base) for member, base in self.base.items()}

    async def meet(self) -> None:
        placements = {side: {"placements": [Shard(dim)]} for dim, side in enumerate(("trainer", "inference"))}
        await self.sides.meet(device_mesh=(2,), **placements)

    def register(self, member: Member) -> asyncio.Task[Any]:
        """A rank begins to register. Without a deadline: whoever waits in vain does so until the test's end."""
        coroutine = self.sides.clients[member].register_tensors(
            "b", {"w": self.tensors[member]}, pair_name=self.sides.pair, shapes={"w": SHAPE}, timeout=None
        )
        return asyncio.create_task(coroutine)

    async def until_entered(self, ranks: int) -> None:
        """Wait until Redis has this many ranks' entries."""
        async with self._store.changes(self._store.keys.batch(self.sides.pair, "b")) as changed:
            while sum(map(len, (await self._store.batches.registering(self.sides.pair, "b")).values())) < ranks:
                await changed()

    async def empty(self) -> None:
        """Redis loses all it has."""

        async def flush(client: Client) -> None:
            await client.flushall()

        await self._store._session.connection.call("flush", flush, 5)

    async def move(self, handles: dict[Member, Any], version: int) -> None:
        """One transfer, and what everybody holds after it."""
        for member in MEMBERS[:2]:
            self.tensors[member].copy_(self.base[member] + 1000 * version)
        found = await self.sides.move(handles, timeout=20)
        assert all(result.seq for result in found.values()), found
        for member in MEMBERS[2:]:
            assert torch.equal(self.tensors[member], self.base[member] + 1000 * version), member


@contextlib.asynccontextmanager
async def met(home: Site, pair: str, seconds: float) -> AsyncIterator[tuple[Team, Store]]:
    """A pair that has formed, for so many seconds."""
    async with (
        asyncio.timeout(seconds),
        Sides(home, pair, trainer=2, inference=2) as sides,
        await Store.open(home.redis or "", "default", timeout=10) as store,
    ):
        team = Team(sides, store)
        await team.meet()
        yield team, store


@pytest.mark.parametrize("entered", [1, 2, 3])
async def test_ranks_that_wait_for_others_meet_them(home: Site, pair: str, entered: int) -> None:
    async with met(home, pair, 60) as (team, _):
        for version in (1, 2):
            calls = {member: team.register(member) for member in MEMBERS[:entered]}
            await team.until_entered(entered)
            await team.empty()
            calls |= {member: team.register(member) for member in MEMBERS[entered:]}
            handles = {member: await call for member, call in calls.items()}
            await team.move(handles, version)
            await asyncio.gather(*(handle.close() for handle in handles.values()))


async def test_redis_is_emptied_whenever_it_tells_of_a_change(home: Site, pair: str) -> None:
    """Also between the last entry and the verdicts, of which some agents have read all and others have not."""
    async with met(home, pair, 100) as (team, store):
        for turn in range(8):
            async with store.changes(store.keys.batch(pair, "b"), ticks=False) as changed:
                await changed()  # that it is subscribed
                calls = {member: team.register(member) for member in MEMBERS}
                for _ in range(turn):
                    change = asyncio.ensure_future(changed())
                    await asyncio.wait({change, *calls.values()}, return_when=asyncio.FIRST_COMPLETED)
                    change.cancel()
                await team.empty()
            handles = {member: await call for member, call in calls.items()}
            await team.move(handles, turn + 1)
            await asyncio.gather(*(handle.close() for handle in handles.values()))


@pytest.mark.parametrize("entered", [1, 3])
async def test_a_rank_gives_up_when_redis_has_lost_its_entry_and_comes_again(
    home: Site, pair: str, entered: int
) -> None:
    """Its agent cannot know whether all had come, so the registration ends for all; the next one is another."""
    async with met(home, pair, 60) as (team, _):

        async def until_registered(member: Member) -> Any:
            while True:
                try:
                    return await team.register(member)
                except PeerLostError as error:
                    assert "register it again" in error.message

        for version in (1, 2, 3):
            first = team.register(MEMBERS[0])
            waiting = [asyncio.create_task(until_registered(member)) for member in MEMBERS[1:entered]]
            await team.until_entered(entered)
            await team.empty()
            first.cancel()
            await asyncio.wait({first})
            waiting += [asyncio.create_task(until_registered(member)) for member in MEMBERS[entered:]]
            await team.until_entered(3)
            handles = dict(zip(MEMBERS, await asyncio.gather(until_registered(MEMBERS[0]), *waiting), strict=True))
            await team.move(handles, version)
            await asyncio.gather(*(handle.close() for handle in handles.values()))
