"""One, two and three agents agree whoever gives up, and when: what happened is the same for every worker."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import TransferAbortedError, TransferTimeoutError
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, stale, whole

pytestmark = pytest.mark.ways("far", "three", "tcp", "local", "host")

SHAPE = (4096, 4096)
MEMBERS = [("trainer", 0), ("trainer", 1), ("inference", 0), ("inference", 1)]


class Team:
    """Two trainers and two inference workers with one batch "b" of rows that become columns."""

    def __init__(self, sides: Sides, shape: tuple[int, ...]) -> None:
        self.sides, self.shape = sides, shape
        self.handles: dict[Member, Any] = {}
        full = whole(shape)
        self.base = {(side, rank): cut(full, 0 if side == "trainer" else 1, 2, rank) for side, rank in MEMBERS}
        self.tensors = {member: stale(base) for member, base in self.base.items()}

    async def register(self, **options: Any) -> None:
        await self.sides.meet(
            device_mesh=(2,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(1)]}
        )
        self.handles = await self.sides.register(
            "b", lambda side, rank: ({"w": self.tensors[side, rank]}, {"shapes": {"w": self.shape}, **options})
        )

    def held(self, member: Member, version: int) -> torch.Tensor:
        """What a worker holds of a version."""
        return self.base[member] + 1000.0 * version

    def start(self, member: Member, version: int, **options: Any) -> asyncio.Task[Any]:
        """The transfer of one worker."""
        if member[0] == "trainer":
            self.tensors[member].copy_(self.held(member, version))
            return asyncio.create_task(self.handles[member].transfer("send", version=version, **options))
        return asyncio.create_task(self.handles[member].transfer("recv", **options))

    def hold(self, version: int) -> bool:
        """Whether the targets hold that version, all of them."""
        return all(
            torch.equal(self.tensors["inference", rank], self.held(("inference", rank), version)) for rank in (0, 1)
        )


@pytest.mark.parametrize("who", MEMBERS, ids=lambda member: f"{member[0]}{member[1]}")
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_gives_up_before_go_consumes_nothing_elsewhere(site: Site, pair: str, who: Member, how: str) -> None:
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        team = Team(sides, (9, 8))
        await team.register()
        # One of the other side stays away until the end, so that there is no GO.
        absent = ("inference" if who[0] == "trainer" else "trainer", 1)
        others = {member: team.start(member, 1) for member in MEMBERS if member not in (who, absent)}
        early = team.start(who, 1, **({"timeout": 0.2} if how == "deadline" else {}))
        await sides.ask_all()
        if how == "cancel":
            early.cancel()
        [error] = await asyncio.gather(early, return_exceptions=True)
        if how == "cancel":
            assert isinstance(error, asyncio.CancelledError)
        else:
            assert isinstance(error, TransferTimeoutError) and error.outcome == "withdrawn", error
            # Of another agent it is known whether all its workers are ready, not which of them are.
            assert re.search(rf"not ready: {absent[0]} ranks? (0-)?1", error.message), error.message
        await sides.ask_all()
        assert not any(task.done() for task in others.values()), "the others wait on"
        results = await asyncio.gather(*others.values(), team.start(absent, 1), team.start(who, 1))
        assert {(result.seq, result.version) for result in results} == {(1, 1)}
        assert team.hold(1)


@pytest.mark.parametrize("who", MEMBERS, ids=lambda member: f"{member[0]}{member[1]}")
async def test_who_is_cancelled_after_go_aborts_for_all_and_atomic_targets_stay(
    site: Site, pair: str, who: Member
) -> None:
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        team = Team(sides, SHAPE)
        await team.register(atomic=True)
        results = await asyncio.gather(*(team.start(member, 1) for member in MEMBERS))
        assert {result.seq for result in results} == {1} and team.hold(1)
        tasks: dict[Member, asyncio.Task[Any]] = {}

        def progress(done: int, total: int) -> None:
            if done < total:
                tasks[who].cancel()

        for version in range(2, 42):
            tasks.update({member: team.start(member, version, progress=progress) for member in MEMBERS})
            ended = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
            others = [end for member, end in ended.items() if member != who]
            if isinstance(others[0], TransferAbortedError):
                break
            # The cancellation came after the last vote: all have the new version, as has the one who was cancelled.
            assert not any(isinstance(end, Exception) for end in others), ended
            assert team.hold(version)
        else:
            pytest.fail("40 transfers, and none was cancelled while its bytes moved")
        assert isinstance(ended[who], asyncio.CancelledError)
        for error in others:
            assert isinstance(error, TransferAbortedError) and error.outcome == "aborted" and not error.torn, ended
            assert f"of {who[0]} rank {who[1]} ended: it was cancelled" in error.message
        assert team.hold(version - 1), "an aborted transfer shows nothing of itself"
        results = await asyncio.gather(*(team.start(member, 99) for member in MEMBERS))
        [seq] = {result.seq for result in results}
        assert seq == version + 1 and team.hold(99), "the number of the aborted one is not given again"


async def test_every_worker_hears_of_the_bytes_the_offer_and_the_commit(site: Site, pair: str) -> None:
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        team = Team(sides, (1024, 512))
        await team.register(atomic=True)
        reported: dict[Member, list[tuple[int, int]]] = {member: [] for member in MEMBERS}
        paused: list[int] = []

        async def pause(rank: int) -> None:
            assert torch.all(team.tensors["inference", rank] == 77), "not before on_commit has returned"
            await asyncio.sleep(0)
            paused.append(rank)

        offers = [asyncio.create_task(team.handles["inference", rank].wait_offer()) for rank in (0, 1)]
        await sides.ask_all()
        assert not any(offer.done() for offer in offers)
        sending = [team.start(("trainer", 0), 1, progress=lambda *news: reported["trainer", 0].append(news))]
        await sides.ask_all()
        assert not any(offer.done() for offer in offers), "one of two trainers is not the side"
        sending.append(team.start(("trainer", 1), 1, progress=lambda *news: reported["trainer", 1].append(news)))
        for offer in await asyncio.gather(*offers):
            assert (offer.version, offer.bytes) == (1, 4 * 1024 * 512)
        receiving = [
            team.start(
                ("inference", rank),
                1,
                progress=lambda *news, rank=rank: reported["inference", rank].append(news),
                on_commit=lambda rank=rank: pause(rank),
            )
            for rank in (0, 1)
        ]
        results = await asyncio.gather(*sending, *receiving)
        assert sorted(paused) == [0, 1] and team.hold(1)
        for member, result in zip(MEMBERS, results, strict=True):
            assert result.bytes == 4 * 1024 * 512 // 2
            assert reported[member][-1] == (result.bytes, result.bytes), "progress ends with all bytes"
            other = "inference" if member[0] == "trainer" else "trainer"
            assert result.peers == ((other, 0), (other, 1))
