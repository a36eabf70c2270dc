"""Regions: what a loader takes of a tensor, whatever its runs."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from etha.errors import LayoutError, PlanError
from etha.plan import Layout, TensorSpec, build_plan, infer_global_shape, merge_layouts, simulate, violations
from etha.plan.layouts.region import MAX_RUNS
from tests.unit.plan.prove import plan_of
from tests.unit.plan.truth import Loaded, random_case

F32, BF16 = torch.float32, torch.bfloat16
SHAPE = (10, 6)
#: Rank 0 and rank 1 overlap, rank 2 keeps nothing, rank 3 keeps what rank 0 keeps; row 9 is nobody's.
KEPT = [
    Layout.region([[(1, 3), (5, 9)], [(0, 2), (4, 6)]], [0, 3]),
    Layout.region([[(2, 6)], [(1, 5)]], [1]),
    Layout.region([[], [(0, 6)]], [2]),
]


def rows(ranks: int = 3) -> TensorSpec:
    return TensorSpec(SHAPE, F32, Layout((ranks,), [Shard(0)]))


def test_a_region_says_what_each_of_its_ranks_keeps() -> None:
    one = KEPT[0]
    assert one.owned(SHAPE, 3) == [[(1, 3), (5, 9)], [(0, 2), (4, 6)]]
    assert one.owned(SHAPE, 1) is None
    assert one.local_shape(SHAPE, 0) == (6, 4)
    assert KEPT[2].local_shape(SHAPE, 2) == (0, 6)
    assert Layout.region([], [5]).local_shape((), 5) == ()


def test_a_region_survives_every_way_out_and_in() -> None:
    for one in KEPT:
        for back in (Layout.from_plain(one.to_plain()), pickle.loads(pickle.dumps(one))):
            assert back == one and hash(back) == hash(one) and back.digest() == one.digest()
    same = Layout.region([[(1, 2), (2, 3), (5, 9)], [(0, 2), (4, 6)]], [0, 3])
    assert same == KEPT[0]
    others = [KEPT[0], *KEPT[1:], Layout.region([[(1, 3)], [(0, 2)]], [0, 3]), Layout((2,), [Replicate()])]
    assert len({one.digest() for one in others}) == len(set(others)) == 5
    assert KEPT[0].translate({0: 7, 3: 8}) == Layout.region([[(1, 3), (5, 9)], [(0, 2), (4, 6)]], [7, 8])
    assert repr(KEPT[0]) == "Layout.region([1:3,5:9 x 0:2,4:6], ranks=[0, 3])"


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([[(3, 3)]], "3:3 is empty"),
        ([[(4, 2)]], "4:2 is empty"),
        ([[(0, 4), (2, 6)]], "2:6 is not behind 0:4"),
        ([[(4, 6), (0, 2)]], "0:2 is not behind 4:6"),
        ([[(-1, 2)]], r"\(-1, 2\) is not"),
        ([[(0, 1.5)]], "is not a"),
        ([[(True, 2)]], "is not a"),
        ([[(0, 1 << 62)]], "is not a"),
        ([[(0, 1, 2)]], "is not a"),
        ([[7]], "7 is not a"),
        (["ab"], "dim 0 of a region is a sequence"),
        ([7], "dim 0 of a region is a sequence"),
        (7, "for each tensor dim"),
        ([[(0, 1)]] * 65, "65 dims"),
        ([[(2 * i, 2 * i + 1) for i in range(MAX_RUNS + 1)]], f"{MAX_RUNS + 1} runs: {MAX_RUNS} at most"),
    ],
)
def test_what_is_no_region_is_refused_from_users_and_from_peers(runs: object, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        Layout.region(runs, [0])  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=why):
        Layout.from_plain({"mesh": {"shape": [1], "ranks": None}, "region": runs})


@pytest.mark.parametrize(
    "plain",
    [
        {"mesh": {"shape": [1, 1], "ranks": None}, "region": [[[0, 1]]]},
        {"mesh": {"shape": [1], "ranks": None}, "region": [[[0, 1]]], "placements": [["R"]]},
        {"mesh": {"shape": [1], "ranks": None}, "region": [[[0, 1]]], "strided": "literal"},
        {"mesh": {"shape": [2], "ranks": [0, 0]}, "region": [[[0, 1]]]},
        {"region": [[[0, 1]]]},
    ],
)
def test_a_region_is_over_a_flat_list_of_ranks_and_nothing_else(plain: object) -> None:
    with pytest.raises(LayoutError):
        Layout.from_plain(plain)


def test_a_region_beyond_the_tensor_names_both_numbers() -> None:
    with pytest.raises(LayoutError, match=r"ranks \[0, 3\] reaches to 9 in dim 0, where the tensor has 8"):
        TensorSpec((8, 6), F32, KEPT[0])
    with pytest.raises(LayoutError, match=r"rank 1 has 2 dims, the tensor's shape \(10, 6, 2\) has 3"):
        TensorSpec((10, 6, 2), F32, KEPT[1])
    with pytest.raises(LayoutError, match="reaches to 6 in dim 1"):
        KEPT[0].local_shape((10, 5), 0)
    with pytest.raises(LayoutError, match="reaches to 6"):
        KEPT[0].owned((10, 5), 0)


def test_each_rank_gets_its_part_and_no_byte_more() -> None:
    there = TensorSpec(SHAPE, BF16, [*KEPT, Layout([[4]], [Replicate(), Replicate()])])
    plan = build_plan({"w": rows()}, {"w": there})
    plan.check()
    full = torch.arange(60.0).reshape(SHAPE)
    got = {r: {"w": torch.full(there.local_shape(r) or (), -1.0, dtype=BF16)} for r in range(5)}
    simulate(plan, {r: {"w": full[4 * r : 4 * r + 4].clone()} for r in range(3)}, got)
    wanted = full[[1, 2, 5, 6, 7, 8]][:, [0, 1, 4, 5]].to(BF16)
    assert torch.equal(got[0]["w"], wanted) and torch.equal(got[3]["w"], wanted)
    assert torch.equal(got[1]["w"], full[2:6, 1:5].to(BF16))
    assert torch.equal(got[4]["w"], full.to(BF16))
    # In bytes: 24 elements twice, 16, none, 60.
    assert plan.stats().total_bytes == 2 * (24 + 24 + 16 + 60)
    assert not len(plan.for_rank("target", 2))
    assert "4 [1:3,5:9" not in plan.explain() and "2 [1:3,5:9 x 0:2,4:6]" in plan.explain()


def test_ranks_that_keep_the_same_are_replicas_that_pass_on() -> None:
    apart = TensorSpec(SHAPE, F32, [Layout.region([[(0, 9)], [(0, 6)]], [r]) for r in range(4)])
    one = TensorSpec(SHAPE, F32, Layout.region([[(0, 9)], [(0, 6)]], [0, 1, 2, 3]))
    for there in (apart, one):
        plan = build_plan({"w": rows()}, {"w": there}, target_hosts=["a", "a", "b", "b"], relay_bytes=0)
        plan.check()
        assert plan.stats().wire_bytes == 2 * 9 * 6 * 4  # once into each host


def test_partial_sources_are_reduced_into_regions() -> None:
    here = TensorSpec((6,), F32, Layout((2,), [Partial("sum")]))
    there = TensorSpec((6,), F32, [Layout.region([[(0, 1), (3, 5)]], [0]), Layout.region([[(4, 6)]], [1])])
    plan = build_plan({"w": here}, {"w": there})
    plan.check()
    got = {0: {"w": torch.zeros(3)}, 1: {"w": torch.zeros(2)}}
    simulate(plan, {0: {"w": torch.arange(6.0)}, 1: {"w": torch.ones(6)}}, got)
    assert got[0]["w"].tolist() == [1.0, 4.0, 5.0] and got[1]["w"].tolist() == [5.0, 6.0]


def test_only_elements_that_somebody_keeps_have_to_be_held() -> None:
    here = TensorSpec(SHAPE, F32, Layout((5,), [Shard(0)]), frozenset({0, 1, 2}))  # rows 6 to 9 are not there
    inside, beyond = Layout.region([[(1, 6)], [(0, 6)]], [0]), Layout.region([[(5, 9)], [(0, 2)]], [1])
    assert violations({"w": here}, {"w": TensorSpec(SHAPE, F32, inside)}) == []
    (found,) = violations({"w": here}, {"w": TensorSpec(SHAPE, F32, [inside, beyond])})
    assert (found.code, found.rank, found.text[:6]) == ("uncovered", 1, "6 of 8")


def test_regions_receive_only() -> None:
    found = violations({"w": TensorSpec(SHAPE, F32, KEPT)}, {"w": rows()})
    assert [(v.code, v.side, v.rank) for v in found] == [("layout", "source", r) for r in (0, 3, 1, 2)]
    assert all(v.text.startswith("regions receive only: ") for v in found)
    with pytest.raises(PlanError, match="regions receive only"):
        build_plan({"w": TensorSpec(SHAPE, F32, KEPT)}, {"w": rows()}).check()


def test_a_region_does_not_tell_the_global_shape() -> None:
    shape, why = infer_global_shape(KEPT[0], {0: (6, 4)})
    assert shape is None and why is not None and "shapes=" in why


def test_ranks_that_describe_equal_regions_are_merged() -> None:
    by_rank = {r: Layout.region([[(0, 4)]], [r]) for r in (0, 1, 3)} | {2: Layout.region([[(2, 4)]], [2])}
    layouts, wrong = merge_layouts("w", "target", by_rank)
    assert wrong == [] and layouts == (Layout.region([[(0, 4)]], [0, 1, 3]), Layout.region([[(2, 4)]], [2]))


def test_random_cases_have_regions_of_every_sort() -> None:
    cases = [case for case in map(random_case, range(300)) if any(isinstance(t, Loaded) for t in case.target)]
    assert len(cases) > 60
    regions = [(case, t) for case in cases for t in case.target if isinstance(t, Loaded)]
    assert any(len(t.ranks) > 1 for _, t in regions)
    assert any(not isinstance(t, Loaded) for case in cases for t in case.target)
    assert any(t.partial() for case in cases for t in case.source)
    assert sum(all(t.kept) for _, t in regions) > 100 and any([] in t.kept for _, t in regions)
    runs = [len(kept.runs) for _, t in regions for kept in t.layout().kept or ()]
    assert sum(n > 1 for n in runs) > 100
    assert len({plan_of(case).digest() for case in cases}) == len(cases)
