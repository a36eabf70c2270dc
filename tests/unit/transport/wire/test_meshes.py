"""The 24 mesh cases over two data planes: each element right, nothing crosses twice, staging within its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bench.mesh_cases import CASES, RANKS, MeshCase, held, ideal_bytes, numbers, part
from etha.plan import Layout, TensorSpec
from tests.unit.transport.agents import Job, Local, agents, make_plan, same, transfer

SHAPES = {"even": (64, 96), "uneven": (61, 37), "few rows": (3, 130)}
SOURCE, TARGET = ("a",) * RANKS, ("b",) * RANKS
STAGING = 24 << 20


def sources(layout: Layout, ranks: int) -> Local:
    return {r: {name: held(numbers(s), layout, r) for name, s in SHAPES.items()} for r in range(ranks)}


def targets(layout: Layout, ranks: int) -> tuple[Local, Local]:
    """What each rank must hold in the end, and the same full of what is wrong."""
    right = {r: {name: part(numbers(s), layout, r) for name, s in SHAPES.items()} for r in range(ranks)}
    return right, {r: {name: torch.full_like(x, -1) for name, x in tensors.items()} for r, tensors in right.items()}


async def move(source: Layout, target: Layout, ranks: tuple[int, int], private: bool) -> None:
    """A whole transfer from agent a to agent b, judged."""
    here, there = SOURCE[: ranks[0]], TARGET[: ranks[1]]
    specs = [{n: TensorSpec(s, torch.float32, layout) for n, s in SHAPES.items()} for layout in (source, target)]
    right, received = targets(target, ranks[1])
    job = Job(
        plan=make_plan(specs[0], specs[1], here, there), source_agents=here, target_agents=there, staging=STAGING,
        source=sources(source, ranks[0]), target=received, private=(private, private),
    )  # fmt: skip
    async with agents("ab", staging=STAGING) as at:
        await transfer(job, at)
        same(received, right)
        ideal = sum(ideal_bytes(specs[0][n], specs[1][n], here, there) for n in SHAPES)
        assert at["a"].plane.traffic["b"].sent == at["b"].plane.traffic["a"].received == ideal
        assert at["a"].plane.traffic["b"].received == at["b"].plane.traffic["a"].sent == 0
        assert max(at[name].plane.peak_staging for name in "ab") <= STAGING


@pytest.mark.slow
@pytest.mark.parametrize("private", [False, True], ids=["mapped", "private"])
@pytest.mark.parametrize("case", CASES, ids=[case.slug for case in CASES])
async def test_each_distinct_byte_crosses_once(case: MeshCase, private: bool) -> None:
    await move(case.source, case.target, (RANKS, RANKS), private)


@pytest.mark.parametrize("dim", [0, 1])
async def test_fsdp_over_tp_to_tp_crosses_once(dim: int) -> None:
    source = Layout((4, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    await move(source, Layout((1, 4), [Replicate(), Shard(dim)]), (8, 4), private=True)


# ---- the enumeration itself --------------------------------------------------------------------


def test_there_are_24_cases_of_8_ranks() -> None:
    assert len({case.name for case in CASES}) == 24
    assert all(len(case.layout(side).ranks.reshape(-1)) == RANKS for case in CASES for side in ("source", "target"))


@pytest.mark.parametrize("case", CASES, ids=[case.slug for case in CASES])
def test_contributions_add_up_and_the_others_are_parts(case: MeshCase) -> None:
    """Per cell, the local tensors of the ranks along the Partial axis sum to the cell, in any order."""
    whole, layout = numbers((12, 10)), case.source
    partial = [axis for axis, p in enumerate(layout.placements) if p.is_partial()]
    for rank in range(RANKS):
        at: list[Any] = [int(i[0]) for i in (layout.ranks == rank).nonzero()]
        for axis in partial:
            at[axis] = slice(None)
        row = layout.ranks[tuple(at)].reshape(-1).tolist()
        total = sum(held(whole, layout, r) for r in reversed(row))
        assert torch.equal(torch.as_tensor(total), part(whole, layout, rank))


def test_what_a_host_holds_already_does_not_cross() -> None:
    """Rows 0-1 and 2-3 of four on hosts a and b; both want all: each lacks the other's half, 2 x 2 rows x 5 x 4 B."""
    source = TensorSpec((4, 5), torch.float32, Layout((2,), [Shard(0)]))
    target = TensorSpec((4, 5), torch.float32, Layout.replicated(3))
    assert ideal_bytes(source, target, ["a", "b"], ["a", "b", "b"]) == 80
    assert ideal_bytes(source, target, ["a", "b"], ["a", "a", "a"]) == 40
    half = TensorSpec((4, 5), torch.bfloat16, Layout.replicated(3))
    assert ideal_bytes(source, half, ["c", "c"], ["a", "b", "b"]) == 80
