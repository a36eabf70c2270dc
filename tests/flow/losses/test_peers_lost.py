"""Agents and workers of a pair over several agents are killed: everybody hears who it was, and a relaunch transfers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.errors import AgentLostError, PeerLostError
from tests.flow.acts import die_half_way, init, is_old, recv, register, register_large, send, transfer
from tests.flow.puppets import Stage, together
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, stale, whole
from tests.seconds import within

#: Seconds within which all have heard of a dead agent; survivors ask each other for up to one of them.
SOON = 2.5
SMALL, LARGE = (7, 6), (8192, 4096)


async def open_batch(
    sides: Sides, shape: tuple[int, ...], **options: Any
) -> tuple[dict[Member, Any], dict[Member, Any]]:
    """Batch "b": the trainers' rows, turned in memory, become the other side's columns; (handles, tensors)."""
    # An agent that was killed has to start again.
    await sides.meet(
        device_mesh=(2,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(1)]}, timeout=60
    )
    full = whole(shape)
    tensors = {
        (side, rank): cut(full, 0, 2, rank).T.contiguous().T if side == "trainer" else stale(cut(full, 1, 2, rank))
        for side, rank in sides.members
    }
    handles = await sides.register(
        "b", lambda side, rank: ({"w": tensors[side, rank]}, {"shapes": {"w": shape}, "timeout": 60, **options})
    )
    for handle in handles.values():
        assert not isinstance(handle, Exception), handle
    return handles, tensors


async def moves(sides: Sides, shape: tuple[int, ...], handles: dict[Member, Any], tensors: dict[Member, Any]) -> int:
    """The next transfer is exact everywhere; its seq."""
    results = await sides.move(handles)
    for (side, rank), result in results.items():
        assert not isinstance(result, Exception), (side, rank, result)
        if side == "inference":
            assert torch.equal(tensors[side, rank], cut(whole(shape), 1, 2, rank))
    [seq] = {result.seq for result in results.values()}
    return int(seq)


async def agent_of(sides: Sides, member: Member) -> int:
    pid: int = (await sides.clients[member].status())["agent"]["pid"]
    return pid


def check(sides: Sides, victim: Member, found: dict[Member, Any], outcome: str) -> None:
    """Workers of the killed agent have lost it; the others are told whom they have lost."""
    place = sides.site.way.place
    for member, error in found.items():
        if place(*member) == place(*victim):
            assert isinstance(error, AgentLostError), (member, error)
        else:
            assert isinstance(error, PeerLostError), (member, error)
            assert error.reason == "died" and error.outcome == outcome, (member, error)
            assert re.search(rf"{victim[0]} ranks? {victim[1]}", error.message), error.message
            assert "missed" not in error.message, "a death ends a connection; nobody waits for beats"
            assert sides.pair in error.message and "call init_pair and register_tensors again" in error.message


@pytest.mark.ways("tcp", "host", "three")
@pytest.mark.parametrize("victim", ["trainer", "inference"])
async def test_an_agent_killed_while_calls_wait(rough: Site, pair: str, victim: str) -> None:
    async with Sides(rough, pair, trainer=2, inference=2, timeout=30) as sides:
        handles, tensors = await open_batch(sides, SMALL)
        assert await moves(sides, SMALL, handles, tensors) == 1
        # Rank 1 of the trainer does not come, so that the others wait.
        waiting = {
            member: asyncio.ensure_future(handle.transfer("send" if member[0] == "trainer" else "recv"))
            for member, handle in handles.items()
            if member != ("trainer", 1)
        }
        await sides.ask_all()
        killed = time.monotonic()
        os.kill(await agent_of(sides, (victim, 0)), signal.SIGKILL)
        found = await asyncio.gather(*waiting.values(), return_exceptions=True)
        assert time.monotonic() - killed < within(SOON)
        check(sides, (victim, 0), dict(zip(waiting, found, strict=True)), "withdrawn")
        for formed in sides.pairs.values():
            assert await formed.lost == "died"
        late = await sides.move(handles)
        check(sides, (victim, 0), late, "withdrawn")
        handles, tensors = await open_batch(sides, SMALL)
        assert {formed.epoch for formed in sides.pairs.values()} == {2}
        assert await moves(sides, SMALL, handles, tensors) == 2


@pytest.mark.ways("tcp", "host", "three")
@pytest.mark.parametrize("victim", ["trainer", "inference"])
async def test_an_agent_killed_while_bytes_move(rough: Site, pair: str, victim: str) -> None:
    async with Sides(rough, pair, trainer=2, inference=2, timeout=30) as sides:
        for epoch, atomic in enumerate((False, True), 1):
            handles, tensors = await open_batch(sides, LARGE, atomic=atomic)
            assert {formed.epoch for formed in sides.pairs.values()} == {epoch}
            pid = await agent_of(sides, (victim, 0))
            killed: list[float] = []

            def kill(done: int, total: int, pid: int = pid, killed: list[float] = killed) -> None:
                if done < total / 2 and not killed:
                    killed.append(time.monotonic())
                    os.kill(pid, signal.SIGKILL)

            found = await sides.move(handles, progress=kill)
            assert killed, "nobody has seen the transfer half done"
            assert time.monotonic() - killed[0] < within(SOON)
            check(sides, (victim, 0), found, "aborted")
            for member, error in found.items():
                if isinstance(error, PeerLostError):
                    assert not (error.torn and (atomic or member[0] == "trainer"))
                    assert error.torn or member[0] == "trainer" or torch.all(tensors[member] == 77)
                if member[0] == "inference" and atomic:
                    assert torch.all(tensors[member] == 77), "an atomic target holds the old version"
        handles, tensors = await open_batch(sides, SMALL)
        assert await moves(sides, SMALL, handles, tensors) == 3, "the numbers of the aborted ones are not given again"


@pytest.mark.ways("tcp", "host", "three")
@pytest.mark.parametrize("victim", ["trainer", "inference"])
def test_a_worker_killed_half_way_and_launched_again(stage: Stage, victim: str) -> None:
    sides = {side: stage.side(side, 2) for side in ("trainer", "inference")}
    everybody = [puppet for puppets in sides.values() for puppet in puppets]
    together(everybody, init)
    together(everybody, register_large, {"atomic": True})
    dying = sides[victim][1]
    others = [puppet for puppet in everybody if puppet is not dying]
    for puppet in others:
        puppet.begin(transfer)
    dying.begin(die_half_way)
    killed = dying.worker.expect("half way")
    for puppet in others:
        failed = puppet.fails()
        assert (failed.kind, failed.reason, failed.data["outcome"]) == ("PeerLostError", "died", "aborted"), failed
        assert f"{victim} rank 1" in failed.text
        assert failed.at - killed < within(SOON)
        assert puppet not in sides["inference"] or puppet.do(is_old)
    sides[victim][1] = stage.puppet(victim, 1, 2)
    everybody = [puppet for puppets in sides.values() for puppet in puppets]
    assert together(everybody, init) == [2] * 4
    together(everybody, register)
    for puppet in sides["trainer"]:
        puppet.begin(send, 5)
    assert together(sides["inference"], recv) == [(2, 5)] * 2
    assert [puppet.ends() for puppet in sides["trainer"]] == [2, 2]


@pytest.mark.ways("three")
async def test_an_agent_that_has_no_part_in_a_pair_may_die(rough: Site, pair: str) -> None:
    """The trainers' agents serve a second pair with another agent: that one's death is nothing to the first."""
    async with Sides(rough, pair, trainer=2, inference=2, timeout=30) as sides:
        handles, tensors = await open_batch(sides, SMALL)
        async with Sides(rough, f"other.{pair}", where=lambda side, rank: "a" if side == "trainer" else "d") as other:
            await other.meet(device_mesh=(1,), placements=[Replicate()])
            os.kill(await agent_of(other, ("inference", 0)), signal.SIGKILL)
            assert await other.pairs["trainer", 0].lost == "died"
            assert await moves(sides, SMALL, handles, tensors) == 1
            assert not any(formed.lost.is_set() for formed in sides.pairs.values())
