"""One source host, four target hosts: the source sends one copy, targets pass it on, one of them dies in between."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.errors import AgentLostError, EthaError, PeerLostError
from tests.flow.acts import init
from tests.flow.jobs import tell
from tests.flow.puppets import Stage, together
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, stale, whole
from tests.seconds import within

pytestmark = pytest.mark.timeout(240)

LARGE = (4096, 4096)
#: Seconds within which all have heard of a dead worker or agent; five agents share this machine.
SOON = 2 * 1.0


class Five(StrEnum):
    """A way with one host for the trainer and one for each rank of the inference side."""

    FIVE = "five"

    def place(self, side: str, rank: int) -> str:
        """Where a worker lives."""
        return "s" if side == "trainer" else "wxyz"[rank]

    def host(self, place: str) -> str:
        """The host of a place."""
        return f"host-{place}"


#: Of the fixtures ``site`` and ``rough``.
WAY = Five.FIVE


async def traffic(sides: Sides) -> dict[str, tuple[int, int]]:
    """(sent, received) of the agent of each place, payload of data streams."""
    found = {}
    for member, client in sides.clients.items():
        links = (await client.status())["agent"]["links"]
        sent, received = (sum(link[f"bytes_{way}"] for link in links) for way in ("sent", "received"))
        found[sides.site.way.place(*member)] = sent, received
    return found


async def opened(sides: Sides, sources: dict[int, Any], make: Any, **options: Any) -> tuple[dict[Member, Any], Any]:
    """Batch "b" from ``sources`` to a copy on each of the four; (handles, tensors of the targets)."""
    targets = {rank: make() for rank in range(4)}
    handles = await sides.register(
        "b",
        lambda side, rank: ({"w": sources[rank] if side == "trainer" else targets[rank]}, {"timeout": 60, **options}),
    )
    for handle in handles.values():
        assert not isinstance(handle, Exception), handle
    return handles, targets


CASES = {
    "even": ((2048, 1024), torch.float32, torch.float32),
    "uneven": ((1031, 517), torch.float32, torch.float32),
    "three dims": ((7, 331, 253), torch.float32, torch.float32),
    "narrowed": ((1500, 1001), torch.float32, torch.bfloat16),
    "widened integers": ((1111, 1013), torch.int16, torch.int64),
    "large": (LARGE, torch.float32, torch.float32),
}


@pytest.mark.parametrize("verify", [None, pytest.param("full", marks=pytest.mark.proof)])
@pytest.mark.parametrize("case", CASES)
async def test_the_source_sends_one_copy_and_every_element_arrives(
    site: Site, pair: str, case: str, verify: str | None
) -> None:
    shape, here, there = CASES[case]
    full = whole(shape, dtype=here)
    async with Sides(site, pair, trainer=2, inference=4, timeout=60) as sides:
        await sides.meet(trainer={"device_mesh": (2,), "placements": [Shard(0)]},
                         inference={"device_mesh": (4,), "placements": [Replicate()]})  # fmt: skip
        sources = {rank: cut(full, 0, 2, rank) for rank in range(2)}
        handles, targets = await opened(
            sides, sources, lambda: stale(full.to(there)), shapes={"w": shape}, verify=verify
        )
        for atomic_round in range(2):
            before = await traffic(sides)
            results = await sides.move(handles)
            after = await traffic(sides)
            once = full.numel() * min(here.itemsize, there.itemsize)
            for (side, rank), result in results.items():
                assert not isinstance(result, Exception), (side, rank, result)
                assert result.seq == atomic_round + 1
                if side == "inference":
                    assert torch.equal(targets[rank], full.to(there)), f"rank {rank} does not hold what was sent"
                    assert result.bytes == once
                    targets[rank].fill_(77)
            assert sum(results["trainer", rank].bytes for rank in range(2)) == once
            assert after["s"][0] - before["s"][0] == once, "the source has sent exactly one copy"
            for place in "wxyz":
                assert after[place][1] - before[place][1] == once, "and every host has taken in one"


async def test_what_is_small_comes_from_the_source_itself(site: Site, pair: str) -> None:
    full = whole((64, 33))
    async with Sides(site, pair, trainer=1, inference=4) as sides:
        await sides.meet(trainer={"device_mesh": (1,), "placements": [Shard(0)]},
                         inference={"device_mesh": (4,), "placements": [Replicate()]})  # fmt: skip
        handles, targets = await opened(sides, {0: full}, lambda: stale(full))
        before = await traffic(sides)
        await sides.move(handles)
        after = await traffic(sides)
        assert after["s"][0] - before["s"][0] == 4 * full.nbytes
        assert all(torch.equal(found, full) for found in targets.values())


async def test_what_was_reduced_is_sent_once_atomic_and_verified(site: Site, pair: str) -> None:
    full = whole((1001, 1003))
    async with Sides(site, pair, trainer=2, inference=4, timeout=60) as sides:
        await sides.meet(trainer={"device_mesh": (2,), "placements": [Partial("sum")]},
                         inference={"device_mesh": (4,), "placements": [Replicate()]})  # fmt: skip
        handles, targets = await opened(
            sides, {0: full, 1: full * 2}, lambda: stale(full), atomic=True, verify="full", shapes={"w": (1001, 1003)}
        )
        before = await traffic(sides)
        results = await sides.move(handles)
        after = await traffic(sides)
        assert not [found for found in results.values() if isinstance(found, Exception)], results
        assert after["s"][0] - before["s"][0] == full.nbytes
        assert all(torch.equal(found, full + full * 2) for found in targets.values())


# ---- one of them dies ---------------------------------------------------------------------------


async def chain(sides: Sides, handles: dict[Member, Any]) -> list[int]:
    """Inference ranks in the order in which they pass on, told by the peers of one transfer."""
    results = await sides.move(handles)
    above: dict[int | None, int] = {}
    for rank in range(4):
        giver = [peer for side, peer in results["inference", rank].peers if side == "inference"]
        above[giver[0] if giver else None] = rank
    order, at = [], None
    while (at := above.get(at)) is not None:
        order.append(at)
    assert len(order) == 4, above
    return order


@pytest.mark.parametrize(
    "place", [pytest.param(0, marks=pytest.mark.proof), 1, pytest.param(3, marks=pytest.mark.proof)]
)
async def test_a_relay_agent_killed_in_between(rough: Site, pair: str, place: int) -> None:
    full = whole(LARGE)
    async with Sides(rough, pair, trainer=1, inference=4, timeout=30) as sides:
        meshes: dict[str, Any] = {
            "trainer": {"device_mesh": (1,), "placements": [Shard(0)]},
            "inference": {"device_mesh": (4,), "placements": [Replicate()]},
        }
        await sides.meet(**meshes, timeout=60)
        handles, targets = await opened(sides, {0: full.T.contiguous().T}, lambda: stale(full), atomic=place == 1)
        victim = (await chain(sides, handles))[place]
        for found in targets.values():
            found.fill_(77)
        pid = (await sides.clients["inference", victim].status())["agent"]["pid"]
        killed: list[float] = []
        heard: dict[Member, float] = {}

        def kill(done: int, total: int) -> None:
            if 0 < done < total and not killed:
                killed.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

        async def one(member: Member, handle: Any) -> Any:
            try:
                return await handle.transfer("send" if member[0] == "trainer" else "recv", progress=kill)
            except EthaError as error:
                heard[member] = time.monotonic()
                return error

        calls = await asyncio.gather(*(one(*item) for item in handles.items()))
        answers = dict(zip(handles, calls, strict=True))
        assert killed, "nobody has seen the transfer half done"
        for member, error in answers.items():
            assert isinstance(error, EthaError), (member, error)
            assert heard[member] - killed[0] < within(SOON), (member, heard[member] - killed[0])
            if member == ("inference", victim):
                assert isinstance(error, AgentLostError), error
                continue
            assert isinstance(error, PeerLostError), (member, error)
            assert (error.reason, error.outcome) == ("died", "aborted"), error
            assert re.search(rf"inference ranks? {victim}", error.message), error.message
            if place == 1 and member[0] == "inference":
                assert torch.all(targets[member[1]] == 77), "an atomic target holds the old version"
        for formed in sides.pairs.values():
            assert await formed.lost == "died"
        await sides.meet(**meshes, timeout=60)
        handles, targets = await opened(sides, {0: full}, lambda: stale(full))
        results = await sides.move(handles)
        assert {result.seq for result in results.values()} == {3}
        assert all(torch.equal(found, full) for found in targets.values())


def register_copies(me: SimpleNamespace) -> None:
    """Batch "b": the trainer's tensor, turned in memory, becomes a copy on each of the others."""
    full = whole(LARGE)
    me.tensor = full.T.contiguous().T if me.side == "trainer" else stale(full)
    placement = Shard(0) if me.side == "trainer" else Replicate()
    me.handle = me.client.register_tensors("b", {"w": me.tensor}, pair_name=me.pair, placements={"w": [placement]})


def move(me: SimpleNamespace) -> tuple[int, list[tuple[str, int]]]:
    """One transfer, every element compared; seq and peers."""
    result = me.handle.transfer("send" if me.side == "trainer" else "recv")
    assert torch.equal(me.tensor, whole(LARGE))
    if me.side == "inference":
        me.tensor.fill_(77)
    return result.seq, list(result.peers)


def die_in_between(me: SimpleNamespace) -> None:
    """Killed with the first progress of a transfer."""

    def progress(done: int, total: int) -> None:
        if 0 < done < total:
            tell("half way", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    me.handle.transfer("recv", progress=progress)
    raise AssertionError("the transfer has ended before there was any progress")


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_a_worker_of_a_relay_killed_in_between_and_launched_again(stage: Stage, place: int) -> None:
    sides = {"trainer": stage.side("trainer", 1), "inference": stage.side("inference", 4)}
    everybody = [puppet for puppets in sides.values() for puppet in puppets]
    together(everybody, init)
    together(everybody, register_copies)
    moved = together(everybody, move)
    above = {next((p for side, p in moved[1 + r][1] if side == "inference"), -1): r for r in range(4)}
    victim = above[-1]
    for _ in range(place):
        victim = above[victim]
    dying = sides["inference"][victim]
    others = [puppet for puppet in everybody if puppet is not dying]
    for puppet in others:
        puppet.begin(move)
    dying.begin(die_in_between)
    killed = dying.worker.expect("half way")
    for puppet in others:
        failed = puppet.fails()
        assert (failed.kind, failed.reason, failed.data["outcome"]) == ("PeerLostError", "died", "aborted"), failed
        assert f"inference rank {victim}" in failed.text
        assert failed.at - killed < within(SOON)
    for puppet in sides["inference"]:
        puppet.kill()
    fresh = stage.side("inference", 4)
    everybody = [*sides["trainer"], *fresh]
    together(everybody, init)
    together(everybody, register_copies)
    assert {seq for seq, _ in together(everybody, move)} == {3}
