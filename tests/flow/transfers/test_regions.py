"""Sides that keep irregular parts, as the loaders of an inference engine do: exact, and not a byte more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.errors import RegistrationError
from tests.flow.jobs import Job
from tests.flow.sides import Sides
from tests.flow.sites import Site
from tests.flow.truth import cut, picked, stale, whole
from tests.flow.ways import Way

SHAPES: dict[str, tuple[int, ...]] = {
    "qkv": (11, 6),
    "experts": (4, 5, 3),
    "embed": (13, 4),
    "norm": (7,),
    "gap": (9, 2),
    "scale": (),
    "listed": (9, 5),
    "L" * 500: (6,),
}
Runs = list[list[tuple[int, int]]]
#: Of each name what rank 0 and rank 1 keep: overlaps, gaps, the same, nothing, and all that there is.
KEPT: dict[str, tuple[Any, Any]] = {
    "qkv": ([[(0, 2), (5, 9)], [(0, 3), (4, 6)]], [[(1, 6), (8, 11)], [(2, 5)]]),
    "experts": ([[(0, 2)], [(0, 5)], [(0, 3)]], [[(1, 2), (3, 4)], [(1, 2), (4, 5)], [(0, 1), (2, 3)]]),
    "embed": ([[(0, 13)], [(0, 4)]], [[], [(0, 4)]]),
    "norm": ([[(1, 3), (4, 7)]], [[(1, 3), (4, 7)]]),
    "gap": ([[(0, 1)], [(0, 2)]], [[(8, 9)], [(1, 2)]]),
    "scale": ([], []),
    # Rank 0 keeps three products, which overlap; rank 1 a list of one.
    "listed": (
        [[[(0, 2), (4, 5)], [(1, 3)]], [[(3, 9)], [(0, 1), (4, 5)]], [[(8, 9)], [(0, 5)]]],
        [[[(1, 8)], [(2, 4)]]],
    ),
    "L" * 500: ([[[(0, 1)]], [[(2, 5)]]], [[(1, 2), (4, 6)]]),
}
DTYPE = {"experts": torch.bfloat16, "listed": torch.float16}


def train(rank: int, world: int, pair: str) -> list[int]:
    """FSDP-like: rows, of which the last rank has fewer, or none."""
    with etha.TensorBusClient(timeout=30) as client:
        client.init_pair(pair, "trainer", "inference", world, (world,), [Shard(0)], rank=rank)
        mine = {n: cut(whole(s, 1), 0, world, rank) if s else whole(s, 1) for n, s in SHAPES.items()}
        with client.register_tensors(
            "b", mine, pair_name=pair, placements={"scale": [Replicate()]}, shapes=SHAPES
        ) as handle:
            sent = [handle.transfer("send").bytes]
            for name, shape in SHAPES.items():
                mine[name].copy_(cut(whole(shape, 2), 0, world, rank) if shape else whole(shape, 2))
            return [*sent, handle.transfer("send").bytes]


def infer(rank: int, world: int, pair: str, atomic: bool) -> list[int]:
    with etha.TensorBusClient(timeout=30) as client:
        client.init_pair(pair, "inference", "trainer", world, rank=rank)
        wanted = [
            {n: picked(whole(s, version), KEPT[n][rank]).to(DTYPE.get(n, torch.float32)) for n, s in SHAPES.items()}
            for version in (1, 2)
        ]
        mine = {name: stale(tensor) for name, tensor in wanted[0].items()}
        received = []
        with client.register_tensors(
            "b",
            mine,
            pair_name=pair,
            shapes=SHAPES,
            regions={name: kept[rank] for name, kept in KEPT.items()},
            atomic=atomic,
            verify="full",
        ) as handle:
            for version in wanted:
                received.append(handle.transfer("recv").bytes)
                for name, tensor in mine.items():
                    assert torch.equal(tensor, version[name]), (name, tensor, version[name])
        assert received == [sum(t.numel() * t.itemsize for t in mine.values())] * 2
        return received


@pytest.mark.ways(Way.LOCAL, Way.TCP, Way.HOST)
@pytest.mark.parametrize("atomic", [False, True])
def test_three_shards_into_overlapping_regions_of_two_ranks(guests: Job, pair: str, atomic: bool) -> None:
    workers = [*guests.side("trainer", train, 3, pair), *guests.side("inference", infer, 2, pair, atomic)]
    *sent, first, second = guests.results(workers)
    assert first != second
    assert [sum(turn) for turn in zip(*sent, strict=True)] == [a + b for a, b in zip(first, second, strict=True)]


async def registered(site: Site, pair: str, **inference: Any) -> list[Any]:
    """What two trainers of rows and two ranks that keep ``region`` are told."""
    async with Sides(site, pair, trainer=2, inference=2) as sides:
        await sides.meet(device_mesh=(2,), trainer={"placements": [Shard(0)]})

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            if side == "trainer":
                return {"w": torch.zeros(4, 3)}, {"direction": inference.get("trainer")}
            runs = inference["regions"][rank]
            local = torch.zeros([sum(b - a for a, b in dim) for dim in runs])
            return {"w": local}, {"regions": {"w": runs}, "shapes": {"w": (8, 3)}, "direction": inference.get("way")}

        return list((await sides.register("b", given)).values())


INSIDE: Runs = [[(1, 3), (6, 8)], [(0, 3)]]


async def test_a_region_beyond_the_shape_is_told_to_all(site: Site, pair: str) -> None:
    answers = await registered(site, pair, regions=[INSIDE, [[(6, 9)], [(0, 3)]]])
    assert all(isinstance(answer, RegistrationError) for answer in answers)
    found = {v for answer in answers for v in answer.violations}
    assert {(v.code, v.name, v.side, v.rank) for v in found} == {("layout", "w", "inference", 1)}
    assert all("reaches to 9 in dim 0, where the tensor has 8" in v.text for v in found)


async def test_a_gap_that_the_other_side_wants_is_told_to_all(site: Site, pair: str) -> None:
    answers = await registered(site, pair, regions=[INSIDE, INSIDE], way="send")
    assert all(isinstance(answer, RegistrationError) for answer in answers)
    found = {v for answer in answers for v in answer.violations}
    assert {(v.code, v.name, v.side, v.rank) for v in found} == {("uncovered", "w", "trainer", r) for r in (0, 1)}
    assert {v.text.partition("among them ")[2] for v in found} == {"[0:1,3:4 x 0:3]", "[4:6 x 0:3]"}


async def test_a_direction_that_lacks_elements_is_refused_by_its_first_transfer(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), trainer={"placements": [Replicate()]})
        mine = {"trainer": torch.arange(8.0), "inference": torch.zeros(3)}
        options = {"trainer": {}, "inference": {"regions": {"w": [[(1, 3), (6, 7)]]}, "shapes": {"w": (8,)}}}
        handles = await sides.register("b", lambda side, rank: ({"w": mine[side]}, options[side]))
        with pytest.raises(RegistrationError, match=r"5 of 8 elements are held by no source rank .*\[0:1,3:6,7:8\]"):
            await handles["inference", 0].transfer("send")
        await sides.move(handles)
        assert mine["inference"].tolist() == [1.0, 2.0, 6.0]


EXPERT: Runs = [[(0, 5)], [(0, 3)]]
#: Of each name what three ranks hold that send it: overlaps, gaps, lists of products, nothing; together all.
HELD: dict[str, tuple[Any, Any, Any]] = {
    "qkv": ([[(0, 7)], [(0, 6)]], [[(5, 11)], [(0, 4)]], [[(6, 11)], [(2, 6)]]),
    "experts": ([[(0, 1), (2, 3)], *EXPERT], [[(1, 2), (3, 4)], *EXPERT], [[], *EXPERT]),
    "embed": (
        [[[(0, 5)], [(0, 4)]], [[(9, 13)], [(0, 4)]]],
        [[(0, 13)], [(1, 2)]],
        [[[(4, 9)], [(0, 4)]], [[(0, 9)], [(3, 4)]]],
    ),
    "norm": ([[(0, 7)]], [[(0, 7)]], [[(2, 3)]]),
    "scale": ([], [], []),
    "listed": (
        [[[(0, 2), (4, 5)], [(1, 3)]], [[(2, 9)], [(0, 5)]]],
        [[[(0, 4)], [(0, 1)]], [[(0, 2)], [(2, 5)]]],
        [[(0, 9)], [(0, 5)]],
    ),
}


def hold(rank: int, world: int, pair: str) -> list[int]:
    """An engine that sends what its loaders have kept."""
    with etha.TensorBusClient(timeout=30) as client:
        client.init_pair(pair, "inference", "trainer", world, rank=rank)
        regions = {name: held[rank] for name, held in HELD.items()}
        mine = {name: picked(whole(SHAPES[name], 1), runs) for name, runs in regions.items()}
        shapes = {name: SHAPES[name] for name in HELD}
        with client.register_tensors(
            "b", mine, pair_name=pair, shapes=shapes, regions=regions, verify="full"
        ) as handle:
            sent = [handle.transfer("send").bytes]
            for name, runs in regions.items():
                mine[name].copy_(picked(whole(SHAPES[name], 2), runs))
            return [*sent, handle.transfer("send", snapshot=True).result(30).bytes]


def take_in(rank: int, world: int, pair: str, atomic: bool) -> list[int]:
    """A trainer's ranks, rows of all, that receive it."""
    with etha.TensorBusClient(timeout=30) as client:
        client.init_pair(pair, "trainer", "inference", world, (world,), [Shard(0)], rank=rank)
        shapes = {name: SHAPES[name] for name in HELD}
        dtypes = {"listed": torch.float16}

        def wanted(version: int) -> dict[str, torch.Tensor]:
            return {
                n: (cut(whole(s, version), 0, world, rank) if s else whole(s, version)).to(dtypes.get(n, torch.float32))
                for n, s in shapes.items()
            }

        mine = {name: stale(tensor) for name, tensor in wanted(1).items()}
        placements = {"scale": [Replicate()]}
        with client.register_tensors(
            "b", mine, pair_name=pair, placements=placements, shapes=shapes, atomic=atomic
        ) as handle:
            received = []
            for version in (1, 2):
                received.append(handle.transfer("recv").bytes)
                for name, tensor in wanted(version).items():
                    assert torch.equal(mine[name], tensor), (name, mine[name], tensor)
        assert received == [sum(t.numel() * t.itemsize for t in mine.values())] * 2
        return received


@pytest.mark.ways(Way.LOCAL, Way.TCP, Way.HOST)
@pytest.mark.parametrize("atomic", [False, True])
def test_three_ranks_send_the_regions_that_they_hold(guests: Job, pair: str, atomic: bool) -> None:
    workers = [*guests.side("inference", hold, 3, pair), *guests.side("trainer", take_in, 2, pair, atomic)]
    *sent, first, second = guests.results(workers)
    assert [sum(turn) for turn in zip(*sent, strict=True)] == [a + b for a, b in zip(first, second, strict=True)]


async def test_other_ranks_may_not_use_the_name_of_a_part(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), trainer={"placements": [Replicate()]})
        mine = {
            "trainer": {"w": torch.arange(8.0), "w [product 1]": torch.zeros(2)},
            "inference": {"w": torch.zeros(3)},
        }
        kept = {"regions": {"w": [[[(1, 3)]], [[(6, 7)]]]}, "shapes": {"w": (8,)}}
        options: dict[str, Any] = {"trainer": {}, "inference": kept}
        answers = await sides.register("b", lambda side, rank: (mine[side], options[side]))
        with pytest.raises(RegistrationError, match=r"trainer rank 0.* has the name of a part of 'w' on another rank"):
            raise answers["inference", 0]


async def test_a_local_tensor_of_another_shape_than_its_region(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), trainer={"placements": [Replicate()]})
        mine = {"trainer": torch.arange(8.0), "inference": torch.zeros(4)}
        options = {"trainer": {}, "inference": {"regions": {"w": [[(1, 3), (6, 7)]]}, "shapes": {"w": (8,)}}}
        answers = await sides.register("b", lambda side, rank: ({"w": mine[side]}, options[side]))
        assert "its local shape is (4,), but its layout gives it (3,) of (8,)" in answers["trainer", 0].message


@pytest.mark.ways(Way.TCP)
@pytest.mark.timeout(240)
async def test_equal_regions_of_several_hosts_leave_the_source_once(site: Site, pair: str) -> None:
    """Ranks 0 to 2 keep the same 2.1 MB and pass it on; rank 3 keeps two products of its own."""
    full = torch.randn(1100, 600)
    same: Runs = [[(0, 300), (500, 1080)], [(0, 600)]]
    own = [[[(7, 400)], [(1, 300), (400, 401)]], [[(1099, 1100)], [(0, 600)]]]
    kept: list[Any] = [same, same, same, own]
    async with Sides(
        site, pair, inference=4, where=lambda side, rank: "s" if side == "trainer" else "wxyz"[rank]
    ) as sides:
        await sides.meet(trainer={"device_mesh": (1,), "placements": [Replicate()]}, timeout=60)
        mine = [stale(picked(full, runs)) for runs in kept]

        def given(side: str, rank: int) -> tuple[Any, dict[str, Any]]:
            if side == "trainer":
                return {"w": full}, {"timeout": 60}
            return {"w": mine[rank]}, {"regions": {"w": kept[rank]}, "shapes": {"w": (1100, 600)}, "timeout": 60}

        handles = await sides.register("b", given)
        before = await sides.clients["trainer", 0].status()
        results = await sides.move(handles, timeout=60)
        after = await sides.clients["trainer", 0].status()
        assert all(torch.equal(tensor, picked(full, runs)) for tensor, runs in zip(mine, kept, strict=True))
        assert [results["inference", r].bytes for r in range(4)] == [t.numel() * 4 for t in mine]
        sent = [sum(link["bytes_sent"] for link in s["agent"]["links"]) for s in (before, after)]
        assert sent[1] - sent[0] == 4 * (mine[0].numel() + mine[3].numel())
