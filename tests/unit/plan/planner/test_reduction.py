"""Partial sources: reduced once, in one order, with the same bits at every holder, work divided."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from etha.plan import CONTRIBUTE, RESULT, Layout, TensorSpec, build_plan, simulate

PERMUTED = [5, 2, 7, 0, 3, 6, 1, 4]


def run(
    mesh: list[int],
    table: list[int],
    placements: list[Placement],
    dtype: torch.dtype,
    target: TensorSpec,
    seed: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(random contributions in C-order over the Partial axes, every target's local tensor)."""
    shape = target.shape
    layout = Layout(torch.tensor(table).reshape(mesh), placements)
    axes = [a for a, p in enumerate(placements) if isinstance(p, Partial)]
    count = 1
    for a in axes:
        count *= mesh[a]
    gen = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        parts = [(torch.randn(shape, generator=gen) * 3).to(dtype) for _ in range(count)]
    else:
        parts = [torch.randint(-100, 100, shape, generator=gen).to(dtype) for _ in range(count)]
    source = {}
    for where, rank in zip(itertools.product(*(range(m) for m in mesh)), table, strict=True):
        index = 0
        for a in axes:
            index = index * mesh[a] + where[a]
        owned = layout.owned(shape, rank)
        assert owned is not None
        local = parts[index]
        for dim, runs in enumerate(owned):
            local = local.index_select(dim, torch.tensor([i for a, b in runs for i in range(a, b)], dtype=torch.long))
        source[rank] = {"w": local.clone()}
    plan = build_plan({"w": TensorSpec(shape, dtype, layout)}, {"w": target})
    plan.check()
    got = {r: {"w": torch.zeros(target.local_shape(r) or (), dtype=target.dtype)} for r in target.holders()}
    simulate(plan, source, got)
    return parts, [got[r]["w"] for r in sorted(got)]


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, n: int = 3) -> TensorSpec:
    return TensorSpec(shape, dtype, Layout.replicated(n))


def in_order(parts: list[torch.Tensor], accumulate: torch.dtype) -> torch.Tensor:
    total = parts[0].to(accumulate)
    for part in parts[1:]:
        total = total + part.to(accumulate)
    return total


LAYOUTS: list[tuple[list[int], list[Placement]]] = [
    ([2, 4], [Replicate(), Partial()]),
    ([2, 4], [Partial(), Replicate()]),
    ([2, 2, 2], [Partial(), Replicate(), Partial()]),
    ([2, 2, 2], [Partial(), Shard(0), Partial()]),
    ([8], [Partial()]),
]


@pytest.mark.parametrize(("mesh", "placements"), LAYOUTS)
@pytest.mark.parametrize("table", [list(range(8)), PERMUTED])
def test_the_sum_has_the_same_bits_everywhere_in_coordinate_order(
    mesh: list[int], placements: list[Placement], table: list[int]
) -> None:
    parts, got = run(mesh, table, placements, torch.float32, whole((64, 33)))
    expected = in_order(parts, torch.float32)
    assert all(torch.equal(local, expected) for local in got)


def test_low_precision_is_accumulated_in_float32_and_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for out in (dtype, torch.float32):
            parts, got = run([8], PERMUTED, [Partial()], dtype, whole((16, 9), out))
            assert torch.equal(got[0], in_order(parts, torch.float32).to(dtype).to(out))
    # A float32 sum for a bfloat16 target is rounded once, to what travels.
    parts, got = run([8], PERMUTED, [Partial()], torch.float32, whole((16, 9), torch.bfloat16))
    assert torch.equal(got[0], in_order(parts, torch.float32).to(torch.bfloat16))


def test_integers_and_doubles_accumulate_in_their_own_dtype() -> None:
    parts, got = run([8], PERMUTED, [Partial()], torch.int64, whole((5, 5), torch.int64))
    assert torch.equal(got[0], in_order(parts, torch.int64))
    parts, got = run([8], PERMUTED, [Partial()], torch.float64, whole((5, 5), torch.float64))
    assert torch.equal(got[0], in_order(parts, torch.float64))


def test_sum_with_avg_is_one_sum_and_one_division() -> None:
    parts, got = run([2, 3], [4, 0, 2, 5, 1, 3], [Partial("sum"), Partial("avg")], torch.float32, whole((9, 7)))
    assert torch.equal(got[0], in_order(parts, torch.float32) / 3)
    parts, got = run([2, 3], list(range(6)), [Partial("avg"), Partial("avg")], torch.float32, whole((9, 7)))
    assert torch.equal(got[2], in_order(parts, torch.float32) / 6)


def test_max_min_product_and_norm() -> None:
    parts, got = run([2, 2], [*PERMUTED[3:5], 7, 5], [Partial("max"), Shard(1)], torch.float32, whole((4, 5)))
    assert torch.equal(got[0], torch.maximum(*parts))
    parts, got = run([3], [2, 0, 1], [Partial("min")], torch.int32, whole((4, 5), torch.int32))
    assert torch.equal(got[0], torch.stack(parts).min(dim=0).values)
    parts, got = run([3], [2, 0, 1], [Partial("product")], torch.float32, whole((4, 5)))
    assert torch.equal(got[0], parts[0] * parts[1] * parts[2])
    parts, got = run([3], [2, 0, 1], [_NormPartial(2)], torch.float32, whole((4, 5)))
    assert torch.equal(got[0], in_order([p**2 for p in parts], torch.float32) ** 0.5)
    parts, got = run([3], [2, 0, 1], [_NormPartial(4)], torch.float32, whole((4, 5)))
    assert torch.allclose(got[0], torch.stack(parts).abs().pow(4).sum(0).pow(0.25))
    parts, got = run([1], [0], [_NormPartial(2)], torch.float32, whole((4, 5)))
    assert torch.equal(got[0], (parts[0] ** 2) ** 0.5)


def test_every_holder_of_two_target_layouts_gets_the_same_buffer() -> None:
    parts = [Layout([0, 1, 2], [Shard(0)]), Layout([3, 5], [Replicate()])]
    target = TensorSpec((7, 6), torch.float32, parts)
    values, got = run([2, 4], PERMUTED, [Replicate(), Partial()], torch.float32, target)
    expected = in_order(values, torch.float32)
    assert torch.equal(torch.cat(got[:3]), expected)
    assert torch.equal(got[3], expected) and torch.equal(got[4], expected)


def test_the_work_is_divided_evenly_over_the_peers() -> None:
    """PLANNING section 5 and bound 5: each of the K P peers owns 1/(K P) of the cell."""
    shape = (512, 64)
    layout = Layout(torch.tensor(PERMUTED).reshape(2, 4), [Replicate(), Partial()])
    plan = build_plan({"w": TensorSpec(shape, torch.float32, layout)}, {"w": whole(shape)})
    plan.check()
    total = 512 * 64 * 4
    for rank in range(8):
        rp = plan.for_rank("source", rank)
        owned = [slot for slot in rp.slots if slot.owner == rank]
        assert [slot.shape for slot in owned] == [(64, 64)]
        into = (rp.kind == CONTRIBUTE) & (rp.target == rank)
        assert rp.index[into].tolist() == [0, 1, 2, 3]
        assert int(rp.nbytes[(rp.kind == CONTRIBUTE) & (rp.source == rank)].sum()) == 4 * total // 8
        assert int(rp.nbytes[rp.kind == RESULT].sum()) == 3 * total // 8
        # Results wait for the last contribution, each contribution for the one before it.
        chain = rp.depends[into].tolist()
        first = int(into.nonzero()[0][0])
        assert chain == [-1, first, first + 1, first + 2]
        assert set(rp.depends[rp.kind == RESULT].tolist()) == {first + 3}


def test_contributions_come_from_the_owners_replica_row() -> None:
    table = torch.tensor(PERMUTED).reshape(2, 4)
    plan = build_plan(
        {"w": TensorSpec((64, 64), torch.float32, Layout(table, [Replicate(), Partial()]))}, {"w": whole((64, 64))}
    )
    for rank in range(8):
        rp = plan.for_rank("source", rank)
        row = next(r for r in table.tolist() if rank in r)
        assert rp.source[(rp.kind == CONTRIBUTE) & (rp.target == rank)].tolist() == row


def test_small_tensors_take_turns_among_the_peers() -> None:
    names = [f"norm{i}" for i in range(8)]
    source = TensorSpec((32,), torch.float32, Layout((2, 2), [Partial(), Replicate()]))
    plan = build_plan(dict.fromkeys(names, source), dict.fromkeys(names, whole((32,))))
    plan.check()
    owners = [slot.owner for r in range(4) for slot in plan.for_rank("source", r).slots if slot.owner == r]
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_size_1_axes_are_no_reduction() -> None:
    source = TensorSpec((4, 4), torch.bfloat16, Layout((1, 2), [Partial("avg"), Shard(0)]))
    rp = build_plan({"w": source}, {"w": whole((4, 4), torch.bfloat16)}).for_rank("target", 0)
    assert set(rp.kind.tolist()) == {0}


def test_topology_changes_no_bit() -> None:
    rng = random.Random(0)
    layout = Layout(torch.tensor(PERMUTED).reshape(2, 4), [Replicate(), Partial()])
    gen = torch.Generator().manual_seed(1)
    parts = [torch.randn(31, 17, generator=gen) for _ in range(4)]
    source = {r: {"w": parts[PERMUTED.index(r) % 4]} for r in range(8)}
    seen = []
    for _ in range(4):
        agents = [rng.choice("abc") for _ in range(11)]
        plan = build_plan(
            {"w": TensorSpec((31, 17), torch.float32, layout)},
            {"w": whole((31, 17))},
            source_agents=agents[:8],
            target_agents=agents[8:],
        )
        got = {r: {"w": torch.zeros(31, 17)} for r in range(3)}
        simulate(plan, source, got)
        seen += [got[r]["w"] for r in range(3)]
    assert all(torch.equal(value, seen[0]) for value in seen)
