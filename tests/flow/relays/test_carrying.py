"""Agents of one host carry for each other: real agents, against enumerated truth; a carrier dies in between."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from etha.errors import AgentLostError, EthaError, PeerLostError
from etha.plan import CARRY, DELIVER, Layout, Plan, TensorSpec, build_agent_plan
from etha.plan.planner.rank_plan import inside_target
from tests.flow.acts import init
from tests.flow.jobs import tell
from tests.flow.puppets import Stage, together
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, picked, stale, whole
from tests.seconds import within

pytestmark = pytest.mark.timeout(240)

#: Seconds within which all have heard of a dead worker or agent; five agents share this machine.
SOON = 2 * 1.0
#: The place of each rank of the inference side.
PLACES = ("x", "x2", "x3", "y")


class Box(StrEnum):
    """A way with one host for the trainer, and two for the inference side, of which one has three agents."""

    BOX = "box"

    def place(self, side: str, rank: int) -> str:
        """Where a worker lives."""
        return "s" if side == "trainer" else PLACES[rank]

    def host(self, place: str) -> str:
        """The host of a place: "x" and "x2" are two agents of one."""
        return f"host-{place[0]}"


#: Of the fixtures ``site`` and ``rough``.
WAY = Box.BOX


Runs = list[list[tuple[int, int]]]
#: (shape, dtype of the source, of the target, placement over two ranks, placement over four or what some ranks keep)
Case = tuple[tuple[int, ...], torch.dtype, torch.dtype, Placement, Placement | dict[int, Runs]]
F32, BF16 = torch.float32, torch.bfloat16
#: A batch in which most tensors are carried, and everything else that agents do is beside them.
CASES: dict[str, Case] = {
    "rows": ((5, 1 << 18), F32, F32, Shard(0), Shard(0)),
    "columns": ((1 << 17, 5), F32, BF16, Shard(0), Shard(1)),
    "widened": ((5, 300_001), torch.int16, torch.int64, Shard(1), Shard(0)),
    "one rank's": ((701, 1003), F32, F32, Shard(0), {0: [[(0, 701)], [(0, 1003)]]}),
    "with gaps": ((2000, 300), F32, F32, Shard(1), {1: [[(3, 900), (1000, 1999)], [(0, 7), (40, 290)]]}),
    "copied": ((600, 1000), F32, F32, Shard(0), Replicate()),
    "reduced": ((600, 1000), F32, F32, Partial("sum"), Shard(0)),
    "small": ((7, 3), F32, F32, Shard(0), Shard(1)),
}
CARRIED = ("rows", "columns", "widened", "one rank's", "with gaps")


def given(case: Case, rank: int, version: int = 0) -> torch.Tensor:
    """What a trainer rank holds: of a sum, the parts whose sum it is."""
    shape, here, _, placement, _ = case
    full = whole(shape, version, here)
    if isinstance(placement, Partial):
        return torch.ones_like(full) if rank == 0 else full - 1
    assert isinstance(placement, Shard)
    return cut(full, placement.dim, 2, rank)


def wanted(case: Case, rank: int, version: int = 0) -> torch.Tensor | None:
    """What an inference rank must hold; None if nothing of it is registered."""
    shape, here, there, _, kept = case
    full = whole(shape, version, here).to(there)
    if isinstance(kept, dict):
        return picked(full, kept[rank]) if rank in kept else None
    return cut(full, kept.dim, 4, rank) if isinstance(kept, Shard) else full


def planned(cases: dict[str, Case], agents: list[str], hosts: list[str]) -> Plan:
    """The plan of a batch, of which agents are the trainers' and then the inference side's."""
    source, target = {}, {}
    for name, (shape, here, there, placement, kept) in cases.items():
        source[name] = TensorSpec(shape, here, Layout((2,), [placement]))
        some = [Layout.region(runs, ranks=[rank]) for rank, runs in kept.items()] if isinstance(kept, dict) else []
        layouts = some or [Layout((4,), [kept])]  # type: ignore[list-item]
        target[name] = TensorSpec(shape, there, layouts if len(layouts) > 1 else layouts[0])
    return build_agent_plan(
        source, target, source_agents=agents[:2], target_agents=agents[2:], source_hosts=hosts[:2],
        target_hosts=hosts[2:],
    )  # fmt: skip


def carried(plan: Plan) -> dict[int, int]:
    """Bytes that each rank carries for others."""
    found = {}
    for rank in range(4):
        rp = plan.for_rank("target", rank)
        found[rank] = int(rp.nbytes[rp.kind == CARRY].sum())
        assert found[rank] == int(rp.nbytes[(rp.kind == DELIVER) & (rp.source == rank)].sum())
    return found


async def plan_of(sides: Sides, cases: dict[str, Case]) -> Plan:
    """The plan that the agents of a batch make."""
    agents = [(await client.status())["agent"]["id"] for client in sides.clients.values()]
    way = sides.site.way
    return planned(cases, agents, [way.host(way.place(*member)) for member in sides.members])


def handed_on(plan: Plan, rank: int) -> int:
    """Bytes that a rank's agent sends to others of its side."""
    rp = plan.for_rank("target", rank)
    return int(rp.nbytes[inside_target(rp.kind) & (rp.source == rank)].sum())


async def opened(sides: Sides, cases: dict[str, Case], **options: Any) -> tuple[dict[Member, Any], dict[Member, Any]]:
    """Batch "b"; (handles, tensors)."""
    shapes = {name: case[0] for name, case in cases.items()}
    held: dict[Member, dict[str, torch.Tensor]] = {}
    for side, rank in sides.members:
        mine = {name: given(c, rank) if side == "trainer" else wanted(c, rank) for name, c in cases.items()}
        held[side, rank] = {
            name: found if side == "trainer" else stale(found) for name, found in mine.items() if found is not None
        }

    def one(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
        mine = held[side, rank]
        kept = {name: cases[name][3 if side == "trainer" else 4] for name in mine}
        return mine, {
            "placements": {name: [found] for name, found in kept.items() if not isinstance(found, dict)},
            "regions": {name: found[rank] for name, found in kept.items() if isinstance(found, dict)},
            "shapes": {name: shapes[name] for name in mine},
            "direction": "send" if side == "trainer" else "recv",
            "timeout": 60,
            **options,
        }

    handles = await sides.register("b", one)
    for member, handle in handles.items():
        assert not isinstance(handle, Exception), (member, handle)
    return handles, held


MESHES: dict[str, Any] = {"trainer": {"device_mesh": (2,)}, "inference": {"device_mesh": (4,)}}


async def traffic(sides: Sides) -> dict[int, tuple[int, int]]:
    """(sent, received) of the agent of each inference rank, payload of data streams."""
    found = {}
    for (side, rank), client in sides.clients.items():
        links = (await client.status())["agent"]["links"]
        if side == "inference":
            found[rank] = tuple(sum(link[f"bytes_{way}"] for link in links) for way in ("sent", "received"))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "options", [{}, {"atomic": True}, {"verify": "full"}, {"verify": "sample", "atomic": True}], ids=str
)
async def test_every_element_arrives_through_carriers(site: Site, pair: str, options: dict[str, Any]) -> None:
    async with Sides(site, pair, trainer=2, inference=4, timeout=60) as sides:
        await sides.meet(**MESHES, timeout=60)
        handles, held = await opened(sides, CASES, **options)
        plan = await plan_of(sides, CASES)
        through = carried(plan)
        assert any(through.values()) and not through[3]
        rows = plan.for_rank("source", 0)
        assert {plan.names[i] for i in np.unique(rows.tensor[rows.kind == CARRY])} == {*CARRIED}
        for version in (1, 2):
            for (side, rank), mine in held.items():
                for name, tensor in mine.items() if side == "trainer" else ():
                    tensor.copy_(given(CASES[name], rank, version))
            before = await traffic(sides)
            results = await sides.move(handles, trainer={"snapshot": version == 2})
            after = await traffic(sides)
            assert [after[rank][0] - before[rank][0] for rank in range(4)] == [handed_on(plan, r) for r in range(4)]
            for (side, rank), result in results.items():
                assert not isinstance(result, Exception), (side, rank, result)
                if side == "inference":
                    for name, tensor in held[side, rank].items():
                        assert torch.equal(tensor, wanted(CASES[name], rank, version)), (name, rank)  # type: ignore[arg-type]
                        tensor.fill_(77)


async def test_a_rank_without_the_tensor_brings_a_third_of_it(site: Site, pair: str) -> None:
    """Rank 0 alone holds it; its agent and two others of its host take in a third each, and account for what is
    theirs."""
    cases: dict[str, Case] = {
        "one rank's": ((3000, 1024), F32, F32, Shard(0), {0: [[(0, 3000)], [(0, 1024)]]}),
        "small": ((7, 8), F32, F32, Shard(0), Shard(1)),
    }
    whole_bytes = 3000 * 1024 * 4
    async with Sides(site, pair, trainer=2, inference=4, timeout=60) as sides:
        await sides.meet(**MESHES, timeout=60)
        handles, held = await opened(sides, cases)
        through = carried(await plan_of(sides, cases))
        before = await traffic(sides)
        results = await sides.move(handles)
        after = await traffic(sides)
        for rank in (1, 2):
            assert "one rank's" not in held["inference", rank]
            assert 0.3 < through[rank] / whole_bytes < 0.34
            assert after[rank][0] - before[rank][0] == through[rank], "handed on"
            assert after[rank][1] - before[rank][1] - through[rank] == results["inference", rank].bytes == 7 * 2 * 4
        assert after[0][1] - before[0][1] == results["inference", 0].bytes == whole_bytes + 7 * 2 * 4
        assert set(results["inference", 0].peers) == {
            ("trainer", 0), ("trainer", 1), ("inference", 1), ("inference", 2)
        }  # fmt: skip
        assert sum(results["trainer", rank].bytes for rank in (0, 1)) == whole_bytes + 7 * 8 * 4
        assert torch.equal(held["inference", 0]["one rank's"], whole((3000, 1024)))


# ---- a carrier dies -----------------------------------------------------------------------------

#: Columns, of which ranks 0 and 1 hold two each and rank 2 one. They are packed from short runs, which takes a while.
LARGE: dict[str, Case] = {"columns": ((1 << 22, 5), F32, F32, Shard(0), Shard(1))}
CARRIER = 2


@pytest.mark.parametrize("atomic", [True, False])
async def test_a_carrier_agent_killed_in_between(rough: Site, pair: str, atomic: bool) -> None:
    async with Sides(rough, pair, trainer=2, inference=4, timeout=30) as sides:
        await sides.meet(**MESHES, timeout=60)
        handles, held = await opened(sides, LARGE, atomic=atomic)
        assert carried(await plan_of(sides, LARGE))[CARRIER] > 1 << 20
        pid = (await sides.clients["inference", CARRIER].status())["agent"]["pid"]
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

        answers = dict(zip(handles, await asyncio.gather(*(one(*item) for item in handles.items())), strict=True))
        assert killed, "nobody has seen the transfer half done"
        for member, error in answers.items():
            assert isinstance(error, EthaError), (member, error)
            assert heard[member] - killed[0] < within(SOON), (member, heard[member] - killed[0])
            if member == ("inference", CARRIER):
                assert isinstance(error, AgentLostError), error
                continue
            assert isinstance(error, PeerLostError), (member, error)
            assert (error.reason, error.outcome) == ("died", "aborted"), error
            assert re.search(rf"inference ranks? {CARRIER}", error.message), error.message
            if atomic and member[0] == "inference":
                assert torch.all(held[member]["columns"] == 77), "an atomic target holds the old version"
        for formed in sides.pairs.values():
            assert await formed.lost == "died"
        await sides.meet(**MESHES, timeout=60)
        handles, held = await opened(sides, LARGE)
        results = await sides.move(handles)
        assert {result.seq for result in results.values()} == {2}
        for rank in range(4):
            assert torch.equal(held["inference", rank]["columns"], wanted(LARGE["columns"], rank))  # type: ignore[arg-type]


def register_columns(me: SimpleNamespace) -> None:
    """Batch "b": five columns, of which the ranks of the inference side hold two, two, one and none."""
    case = LARGE["columns"]
    me.tensor = given(case, me.rank) if me.side == "trainer" else stale(wanted(case, me.rank))  # type: ignore[arg-type]
    me.handle = me.client.register_tensors(
        "b",
        {"w": me.tensor},
        pair_name=me.pair,
        placements={"w": [Shard(0 if me.side == "trainer" else 1)]},
        shapes={"w": case[0]},
    )


def move_columns(me: SimpleNamespace) -> int:
    """One transfer, every element compared; its seq."""
    result = me.handle.transfer("send" if me.side == "trainer" else "recv")
    if me.side == "inference":
        assert torch.equal(me.tensor, wanted(LARGE["columns"], me.rank))  # type: ignore[arg-type]
        me.tensor.fill_(77)
    return int(result.seq)


def die_in_between(me: SimpleNamespace) -> None:
    """Killed with the first progress of a transfer."""

    def progress(done: int, total: int) -> None:
        if 0 < done < total:
            tell("half way", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    me.handle.transfer("recv", progress=progress)
    raise AssertionError("the transfer has ended before there was any progress")


def test_a_worker_of_a_carrier_killed_in_between_and_launched_again(stage: Stage) -> None:
    sides = {"trainer": stage.side("trainer", 2), "inference": stage.side("inference", 4)}
    everybody = [puppet for puppets in sides.values() for puppet in puppets]
    together(everybody, init)
    together(everybody, register_columns)
    assert {*together(everybody, move_columns)} == {1}
    dying = sides["inference"][CARRIER]
    others = [puppet for puppet in everybody if puppet is not dying]
    for puppet in others:
        puppet.begin(move_columns)
    dying.begin(die_in_between)
    killed = dying.worker.expect("half way")
    for puppet in others:
        failed = puppet.fails()
        assert (failed.kind, failed.reason, failed.data["outcome"]) == ("PeerLostError", "died", "aborted"), failed
        assert f"inference rank {CARRIER}" in failed.text
        assert failed.at - killed < within(SOON)
    for puppet in sides["inference"]:
        puppet.kill()
    everybody = [*sides["trainer"], *stage.side("inference", 4)]
    together(everybody, init)
    together(everybody, register_columns)
    assert {*together(everybody, move_columns)} == {3}
