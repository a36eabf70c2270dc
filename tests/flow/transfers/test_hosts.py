"""One pair over several hosts and agents: which way its bytes take, sources on two hosts, staging within its budget."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tests.flow.sides import Member, Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, stale, whole
from tests.flow.ways import Way

#: What an agent may use beside its workers' own memory.
STAGING = 256 << 20


def part(tensor: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    """What ``rank`` of two holds; of a Partial sum rank 1 all but one, rank 0 what is missing."""
    if isinstance(placement, Partial):
        return torch.ones_like(tensor) if rank == 0 else tensor - 1
    return cut(tensor, placement.dim, 2, rank) if isinstance(placement, Shard) else tensor.clone()


Cases = dict[str, tuple[tuple[int, ...], Placement, Placement]]
CASES: Cases = {
    "gathered": ((13, 7), Shard(0), Replicate()),
    "gathered, large": ((1031, 517), Shard(0), Replicate()),
    "reduced": ((9, 5), Partial(), Shard(0)),
    "reduced, large": ((1031, 513), Partial(), Shard(0)),
    "turned": ((6, 10), Shard(0), Shard(1)),
    "turned, uneven, large": ((1027, 999), Shard(0), Shard(1)),
    "as it is": ((1000, 300), Shard(0), Shard(0)),
}


async def exact(sides: Sides, batch: str, cases: Cases, versions: int = 2, **options: Any) -> dict[Member, Any]:
    """Two trainers and two inference workers: every version arrives to the bit; the handles."""
    await sides.meet(device_mesh=(2,))
    truths = {
        (side, rank): {
            name: part(whole(shape), (s if side == "trainer" else t), rank) for name, (shape, s, t) in cases.items()
        }
        for side, rank in sides.members
    }
    tensors = {
        member: {name: tensor.clone() if member[0] == "trainer" else stale(tensor) for name, tensor in held.items()}
        for member, held in truths.items()
    }
    shapes = {name: shape for name, (shape, _, _) in cases.items()}

    def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
        places = {name: [s if side == "trainer" else t] for name, (_, s, t) in cases.items()}
        direction = "send" if side == "trainer" else "recv"
        return tensors[side, rank], {"placements": places, "shapes": shapes, "direction": direction, **options}

    handles = await sides.register(batch, given)
    for version in range(versions):
        results = await sides.move(handles, trainer={"version": version})
        for member, result in results.items():
            assert not isinstance(result, Exception), (member, result)
            assert (result.seq, result.version) == (version + 1, version)
            assert result.peak_staging <= STAGING
            if member[0] == "inference":
                for name, tensor in tensors[member].items():
                    assert torch.equal(tensor, truths[member][name]), (member, name)
                    tensor.fill_(77)
    return handles


def batch_in(status: dict[str, Any], pair: str) -> dict[str, Any]:
    """The line of ``status`` about the one batch of a pair."""
    [line] = [b for b in status["batches"] if b["pair"] == pair]
    return dict(line)


# ---- which way ------------------------------------------------------------------------------------


@pytest.mark.ways(*Way, each=True)
async def test_status_says_which_way_the_bytes_take(site: Site, way: Way, pair: str) -> None:
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        await exact(sides, "b", {"w": ((8, 6), Shard(0), Shard(1))})
        seen = {member: await client.status() for member, client in sides.clients.items()}
        for status in seen.values():
            line = batch_in(status, pair)
            assert (line["transport"], line["seq"], line["version"], line["state"]) == (
                way.transport,
                2,
                1,
                "registered",
            )
        agents = {member: status["agent"] for member, status in seen.items()}
        assert len({agent["id"] for agent in agents.values()}) == {"local": 1, "three": 3}.get(way, 2)
        assert len({agent["host"] for agent in agents.values()}) == {"tcp": 2, "three": 3}.get(way, 1)
        shown = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", "from etha.cli import main; main()", "status", "--json"],
            env={**os.environ, **site.env("inference", 1)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert batch_in(json.loads(shown.stdout), pair)["transport"] == way.transport


# ---- sources on two hosts -------------------------------------------------------------------------


@pytest.mark.ways("three")
@pytest.mark.parametrize("case", CASES)
async def test_sources_on_two_hosts_targets_on_a_third(site: Site, pair: str, case: str) -> None:
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        await exact(sides, "b", {case: CASES[case]})


def spread(text: str) -> Callable[[str, int], str]:
    """ "ab>ca": the trainers at a and b, the inference workers at c and a."""
    sources, targets = text.split(">")
    return lambda side, rank: (sources if side == "trainer" else targets)[rank]


@pytest.mark.ways("three", "host")
@pytest.mark.parametrize("places", ["aa>bb", "ab>ab", "ab>ba", "ab>ac", "aa>bc", "ab>cc"])
async def test_workers_of_both_sides_anywhere(site: Site, pair: str, places: str) -> None:
    """Some bytes stay with one agent, some cross to the next, in one batch of all layouts."""
    async with Sides(site, pair, trainer=2, inference=2, where=spread(places)) as sides:
        await exact(sides, "b", CASES)


# ---- staging --------------------------------------------------------------------------------------


@pytest.mark.ways("tcp", "host")
async def test_more_than_the_staging_budget_passes_through_it(site: Site, way: Way, pair: str) -> None:
    """288 MiB in pieces of 512 bytes, too short to go from tensor to tensor."""
    rows, columns = 294_912, 1024
    truth = torch.arange(rows).to(torch.uint8)[:, None].expand(rows, columns)
    async with Sides(site, pair, trainer=2, inference=2, timeout=60) as sides:
        await sides.meet(device_mesh=(2,), trainer={"placements": [Shard(0)]}, inference={"placements": [Shard(1)]})
        tensors = {
            (side, rank): cut(truth, 0, 2, rank)
            if side == "trainer"
            else torch.zeros(rows, columns // 2, dtype=torch.uint8)
            for side, rank in sides.members
        }
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side, rank]}, {}))
        results = await sides.move(handles)
        for member, result in results.items():
            assert not isinstance(result, Exception), (member, result)
            assert result.peak_staging <= STAGING
            assert way != "tcp" or result.peak_staging > 0
        assert sum(results["trainer", rank].bytes for rank in (0, 1)) == rows * columns > STAGING
        for rank in (0, 1):
            assert torch.equal(tensors["inference", rank], cut(truth, 1, 2, rank))
