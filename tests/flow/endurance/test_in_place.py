"""Targets in the memory of sources, in processes of both sides, while other agents of the host receive from these, too.

Nobody's target may be written before everybody has read what lies there; the truth is enumerated (``sharing.py``).
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.errors import RegistrationError
from tests.flow.endurance.sharing import BATCHES, NEIGHBOURS, TURNS, World
from tests.flow.sides import Sides
from tests.flow.sites import Site

hows = pytest.mark.parametrize("how", NEIGHBOURS, ids=lambda how: how.replace(" ", "-"))


async def play(site: Site, how: str, worlds: range, transfers: int) -> int:
    name = "".join(word[0] for word in how.split())
    return sum([await World(site, f"{name}-{n}", where=NEIGHBOURS[how]).play(transfers) for n in worlds])


@pytest.mark.ways("host")
@hows
async def test_in_place_beside_other_receiving_agents(site: Site, how: str) -> None:
    assert await play(site, how, range(2), 20) == 40


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.ways("host")
@hows
async def test_in_place_beside_other_receiving_agents_at_length(site: Site, how: str) -> None:
    assert await play(site, how, range(1000, 1025), BATCHES * TURNS) == 25 * BATCHES * TURNS


@pytest.mark.ways("host")
@pytest.mark.parametrize("direction", ["recv", None])
async def test_two_agents_for_one_processes_sides_are_refused_where_several_receive(
    site: Site, pair: str, direction: str | None
) -> None:
    """One would write the target while the other still reads the source that lies there."""
    rows = torch.arange(64.0).reshape(8, 8)
    held = {"trainer": [rows], "inference": [torch.zeros(8, 8), rows]}

    def given(side: str, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        options: dict[str, object] = {"direction": direction if side == "inference" else None}
        return {"w": held[side][rank].T if side == "trainer" else held[side][rank]}, options

    def where(side: str, rank: int) -> str:
        return "a" if side == "trainer" or rank == 0 else "b"

    async with Sides(site, pair, inference=2, where=where) as sides:
        await sides.meet(
            trainer={"device_mesh": (1,), "placements": [Shard(0)]},
            inference={"device_mesh": (2,), "placements": [Replicate()]},
        )
        found = await sides.register("b", given)
        if direction is None:  # the other one works, and this one is refused before a byte moves
            found = await sides.move(found)
        for error in found.values():
            assert isinstance(error, RegistrationError), error
            [violation] = error.violations
            assert (violation.code, violation.name, violation.side, violation.rank) == (
                "shared_memory",
                "w",
                "inference",
                1,
            )
            assert "by another agent, and several agents receive: let one agent serve" in violation.text
        assert torch.equal(rows, torch.arange(64.0).reshape(8, 8))


@pytest.mark.ways("host")
async def test_with_shadows_two_agents_for_one_processes_sides_are_fine(site: Site, pair: str) -> None:
    rows = torch.arange(64.0).reshape(8, 8)
    held = {"trainer": [rows.T], "inference": [torch.zeros(8, 8), rows]}
    wanted = rows.T.clone()
    async with Sides(
        site, pair, inference=2, where=lambda side, rank: "a" if side == "trainer" or rank == 0 else "b"
    ) as sides:
        await sides.meet(
            trainer={"device_mesh": (1,), "placements": [Shard(0)]},
            inference={"device_mesh": (2,), "placements": [Replicate()]},
        )
        handles = await sides.register("b", lambda side, rank: ({"w": held[side][rank]}, {"atomic": True}))
        for answer in (await sides.move(handles)).values():
            assert not isinstance(answer, Exception), answer
        assert all(torch.equal(tensor, wanted) for tensor in held["inference"])
