"""From what ranks registered to layouts and global shapes, with a clear reason where that fails."""

from __future__ import annotations

import random

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from etha.plan import Layout, TensorSpec, infer_global_shape, merge_layouts, resolve_strided, shape_violations
from tests.unit.plan.truth import random_truth

FSDP_TP = Layout((4, 2), [_StridedShard(0, split_factor=2), Shard(0)])


def test_equal_descriptions_are_one_layout() -> None:
    layouts, wrong = merge_layouts("w", "trainer", {r: Layout((4,), [Shard(0)]) for r in range(4)})
    assert layouts == (Layout((4,), [Shard(0)]),) and not wrong


def test_rows_of_a_mesh_are_replicas_of_each_other() -> None:
    even, odd = Layout([0, 2], [Shard(0)]), Layout([1, 3], [Shard(0)])
    layouts, wrong = merge_layouts("norm", "trainer", {3: odd, 0: even, 2: even, 1: odd})
    assert layouts == (even, odd) and not wrong


def test_tied_weights_on_two_stages() -> None:
    first, last = Layout([0, 1], [Shard(0)]), Layout([6, 7], [Shard(1)])
    assert merge_layouts("embed", "trainer", {0: first, 1: first, 6: last, 7: last}) == ((first, last), [])


def test_overlapping_descriptions_are_refused() -> None:
    _, wrong = merge_layouts("w", "trainer", {0: Layout((2,), [Shard(0)]), 1: Layout((2,), [Shard(1)])})
    assert [(v.code, v.side) for v in wrong] == [("layout", "trainer")]
    assert "rank 0 says" in wrong[0].text and "rank 1 says" in wrong[0].text


def test_a_rank_outside_of_its_own_layout_is_refused() -> None:
    _, wrong = merge_layouts("w", "trainer", {5: Layout((2,), [Shard(0)])})
    assert [(v.code, v.rank) for v in wrong] == [("layout", 5)]


def test_the_global_shape_follows_from_all_local_ones() -> None:
    rng = random.Random(7)
    for _ in range(300):
        ndim = rng.choice([0, 1, 2, 3])
        shape = tuple(rng.choice([0, 1, 3, 5, 8, 9, 16]) for _ in range(ndim))
        truth = random_truth(rng, rng.sample(range(12), rng.choice([1, 2, 4, 6, 8])), ndim, None)
        local = {r: tuple(len(kept) for kept in truth.indices(shape, r)) for r in truth.ranks}
        assert infer_global_shape(truth.layout(), local) == (shape, None)


def test_auto_infers_under_the_reading_that_fits() -> None:
    literal = FSDP_TP.with_reading("literal")
    local = {r: literal.local_shape((9,), r) for r in range(8)}
    assert infer_global_shape(FSDP_TP, local) == ((9,), None)
    assert resolve_strided(FSDP_TP, (9,), local) == literal


def test_auto_takes_the_order_reading_unless_sizes_contradict() -> None:
    local = {r: FSDP_TP.local_shape((9,), r) for r in range(8)}
    assert resolve_strided(FSDP_TP, (9,), local).strided == "order"
    assert resolve_strided(FSDP_TP, (9,), dict.fromkeys(range(8), (99,))).strided == "order"
    plain = Layout((4,), [Shard(0)])
    assert resolve_strided(plain, (9,), {}) is plain
    forced = FSDP_TP.with_reading("literal")
    assert resolve_strided(forced, (9,), local) is forced


def test_an_absent_rank_leaves_the_shape_open_only_where_it_matters() -> None:
    layout = Layout((4,), [Shard(0)])
    assert infer_global_shape(layout, {0: (3,), 1: (3,), 3: (2,)}) == ((11,), None)
    shape, why = infer_global_shape(layout, {0: (3,), 1: (3,)})
    assert shape is None and why is not None and "shapes=" in why and "all fit" in why
    assert infer_global_shape(Layout.replicated(4), {2: (7, 1)}) == ((7, 1), None)


def test_contradictions_say_which_ranks() -> None:
    shape, why = infer_global_shape(Layout.replicated(2), {0: (4,), 1: (5,)})
    assert shape is None and why is not None and "rank 0 holds 4 and rank 1 5" in why
    shape, why = infer_global_shape(Layout((2,), [Shard(0)]), {0: (1,), 1: (3,)})
    assert shape is None and why is not None and "no size gives these parts" in why
    shape, why = infer_global_shape(Layout((2,), [Shard(0)]), {0: (1,), 1: (1, 1)})
    assert shape is None and why is not None and "rank 1" in why
    shape, why = infer_global_shape(Layout((2,), [Shard(0)]), {5: (1,)})
    assert shape is None and why is not None and "not in the mesh" in why
    assert infer_global_shape(Layout((2,), [Shard(1)]), {0: (1,)})[0] is None
    assert infer_global_shape(Layout((2,), [Shard(0)]), {}) == (None, "no rank holds it")


def test_local_shapes_are_compared_on_every_rank() -> None:
    spec = TensorSpec((9,), torch.float32, FSDP_TP)
    literal = FSDP_TP.with_reading("literal")
    found = shape_violations("w", "trainer", spec, {r: literal.local_shape((9,), r) for r in range(8)})
    assert [(v.code, v.rank) for v in found] == [("shape_mismatch", 6), ("shape_mismatch", 7)]
    assert "(1,)" in found[0].text and "(0,)" in found[0].text
    assert [v.code for v in shape_violations("w", "trainer", spec, {8: (1,)})] == ["layout"]


def test_replicate_beside_a_shard() -> None:
    layout = Layout((2, 2), [Replicate(), Shard(1)])
    assert infer_global_shape(layout, {r: layout.local_shape((3, 5), r) for r in range(4)}) == ((3, 5), None)


def test_a_rank_outside_of_its_own_mesh_is_told_what_to_write() -> None:
    of_one = Layout((1,), [Replicate()])
    _, wrong = merge_layouts("w", "source", {0: of_one, 1: of_one})
    [violation] = wrong
    assert violation.rank == 1 and "write device_mesh=(N,) for N ranks" in violation.text
    assert "init_pair(..., ranks={torch rank: rank of the side})" in violation.text
