"""Regions: what a loader takes of a tensor, whatever its runs."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from etha.errors import LayoutError, PlanError
from etha.plan import CARRY, Layout, TensorSpec, build_plan, infer_global_shape, merge_layouts, simulate, violations
from etha.plan.layouts.region import MAX_RUNS, part_name
from tests.unit.plan.prove import plan_of
from tests.unit.plan.truth import Loaded, random_case, runs_of, take

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


def filled(spec: TensorSpec, full: torch.Tensor, name: str = "w") -> dict[int, dict[str, torch.Tensor]]:
    """What each rank of a source holds of ``full``."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for number, part in enumerate((spec, *spec.products)):
        for rank in part.ranks():
            owned = next(o for one in part.layouts if (o := one.owned(spec.shape, rank)) is not None)
            indices = [[i for start, stop in runs for i in range(start, stop)] for runs in owned]
            found.setdefault(rank, {})[part_name(name, number)] = take(full, indices)
    return found


def test_regions_send_what_they_hold_together() -> None:
    """Rows 0 to 5 are held by rank 0, 4 to 9 by rank 1, and a column of all rows by rank 2."""
    here = TensorSpec(
        SHAPE,
        F32,
        [
            Layout.region([[(0, 6)], [(0, 6)]], [0]),
            Layout.region([[(4, 10)], [(0, 6)]], [1]),
            Layout.region([[(0, 10)], [(5, 6)]], [2]),
        ],
    )
    plan = build_plan({"w": here}, {"w": rows()})
    plan.check()
    full = torch.arange(60.0).reshape(SHAPE)
    got = {r: {"w": torch.full(rows().local_shape(r) or (), -1.0)} for r in range(3)}
    simulate(plan, filled(here, full), got)
    assert torch.equal(torch.cat([got[r]["w"] for r in range(3)]), full)
    assert plan.stats().total_bytes == 60 * 4  # no element twice
    sent = [int(plan.for_rank("source", rank).nbytes.sum()) // 4 for rank in range(3)]
    # Of the 20 elements that only rank 0 holds it sends all, and so on; of those that several hold, its share.
    assert sent[0] >= 20 and sent[1] >= 20 and sum(sent) == 60
    assert build_plan({"w": here}, {"w": rows()}).digest() == plan.digest()


def test_ranks_that_overlap_share_what_they_both_hold() -> None:
    """2 MiB, of which the middle MiB is held by both ranks: each sends half of that, and its own half MiB."""
    n = 1 << 19
    here = TensorSpec((n,), F32, [Layout.region([[(0, 3 * n // 4)]], [0]), Layout.region([[(n // 4, n)]], [1])])
    plan = build_plan({"w": here}, {"w": TensorSpec((n,), F32, Layout((1,), [Replicate()]))})
    plan.check()
    assert [int(plan.for_rank("source", rank).nbytes.sum()) for rank in (0, 1)] == [2 * n, 2 * n]


def test_many_tensors_share_out_what_is_too_small_to_be_cut() -> None:
    here = TensorSpec((8,), F32, [Layout.region([[(0, 6)]], [0]), Layout.region([[(2, 8)]], [1])])
    names = [f"w{i}" for i in range(10)]
    plan = build_plan(
        dict.fromkeys(names, here), dict.fromkeys(names, TensorSpec((8,), F32, Layout((1,), [Replicate()])))
    )
    plan.check()
    assert [int(plan.for_rank("source", rank).nbytes.sum()) for rank in (0, 1)] == [160, 160]


def test_a_holder_nearby_is_preferred() -> None:
    here = TensorSpec((4,), F32, [Layout.region([[(0, 3)]], [0]), Layout.region([[(1, 4)]], [1])])
    there = TensorSpec((4,), F32, Layout((2,), [Replicate()]))
    plan = build_plan({"w": here}, {"w": there}, source_hosts=["a", "b"], target_hosts=["a", "b"], fan_out="direct")
    plan.check()
    for rank in (0, 1):
        rp = plan.for_rank("target", rank)
        assert {(int(s), int(n)) for s, n in zip(rp.source, rp.nbytes, strict=True)} == {(rank, 12), (1 - rank, 4)} or (
            {int(s): int(rp.nbytes[rp.source == s].sum()) for s in rp.source} == {rank: 12, 1 - rank: 4}
        )


def test_a_rank_may_hold_several_products() -> None:
    one, two = Layout.region([[(0, 4)]], [0]), Layout.region([[(2, 3), (6, 8)]], [0])
    here = TensorSpec((8,), F32, one, products=(TensorSpec((8,), F32, two),))
    there = TensorSpec((8,), F32, Layout.region([[(1, 4), (7, 8)]], [0]))
    plan = build_plan({"w": here}, {"w": there})
    plan.check()
    got = {0: {"w": torch.zeros(4)}}
    simulate(plan, filled(here, torch.arange(8.0)), got)
    assert got[0]["w"].tolist() == [1.0, 2.0, 3.0, 7.0]
    assert plan.digest() != build_plan({"w": TensorSpec((8,), F32, one)}, {"w": there}).digest()


def test_an_idle_neighbour_carries_what_further_products_hold() -> None:
    one, two = Layout.region([[(0, 100)]], [0]), Layout.region([[(100, 8192)]], [0])
    here = TensorSpec((8192,), F32, one, products=(TensorSpec((8192,), F32, two),))
    small = TensorSpec((64,), F32, Layout.region([[(0, 64)]], [0]))
    there = {
        "w": TensorSpec((8192,), F32, Layout([0], [Replicate()])),
        "x": TensorSpec((64,), F32, Layout([1], [Replicate()])),
    }
    plan = build_plan({"w": here, "x": small}, there, source_hosts=["s"], target_hosts=["t", "t"], relay_bytes=0)
    rows_ = plan.for_rank("target", 1)
    carried = {int(rows_.region(i).product) for i in range(len(rows_)) if rows_.kind[i] == CARRY}
    assert 1 in carried
    plan.check()
    full = torch.arange(8192.0)
    got = {0: {"w": torch.zeros(8192)}, 1: {"x": torch.zeros(64)}}
    source = filled(here, full)
    source[0]["x"] = torch.ones(64)
    simulate(plan, source, got)
    assert torch.equal(got[0]["w"], full)


def test_products_are_of_one_tensor() -> None:
    one = Layout.region([[(0, 4)]], [0])
    for other in (TensorSpec((9,), F32, one), TensorSpec((8,), BF16, one)):
        with pytest.raises(LayoutError, match="a product of another tensor"):
            TensorSpec((8,), F32, one, products=(other,))


def test_a_gap_that_is_wanted_names_the_tensor_and_the_box() -> None:
    here = TensorSpec(SHAPE, F32, KEPT)
    found = violations({"w": here}, {"w": rows()})
    assert [(v.code, v.name, v.side, v.rank) for v in found] == [("uncovered", "w", "target", r) for r in range(3)]
    assert [v.text.partition(" are held")[0] for v in found] == [
        "10 of 24 elements",
        "6 of 24 elements",
        "8 of 12 elements",
    ]
    assert found[0].text.endswith("among them [0:1 x 2:4]") and found[1].text.endswith("among them [4:5 x 0:1,5:6]")
    with pytest.raises(PlanError, match="among them"):
        build_plan({"w": here}, {"w": rows()}).check()
    # A gap that nobody wants is none.
    assert (
        violations({"w": here}, {"w": TensorSpec(SHAPE, F32, Layout.region([[(5, 6), (8, 9)], [(0, 2)]], [0]))}) == []
    )


def test_elements_that_no_present_rank_holds_are_named_in_order() -> None:
    here = TensorSpec((20,), F32, [Layout.region([[(0, 1), (2, 3), (4, 5), (6, 7), (8, 20)]], [0])])
    (found,) = violations({"w": here}, {"w": TensorSpec((20,), F32, Layout((1,), [Replicate()]))})
    assert found.text.endswith(
        "4 of 20 elements are held by no source rank that registered it, among them [1:2,3:4,5:6,7:8]"
    )
    here = TensorSpec((20,), F32, [Layout.region([[(2 * i, 2 * i + 1) for i in range(10)]], [0])])
    (found,) = violations({"w": here}, {"w": TensorSpec((20,), F32, Layout((1,), [Replicate()]))})
    assert found.text.endswith("among them [1:2,3:4,5:6,7:8,...]")


def test_regions_beside_contributions_are_refused() -> None:
    mixed = [Layout([0, 1], [Partial("sum")]), Layout.region([[(0, 6)]], [2])]
    there = TensorSpec((6,), F32, Layout((1,), [Replicate()]))
    found = violations({"w": TensorSpec((6,), F32, mixed)}, {"w": there})
    assert [(v.code, v.side, v.rank) for v in found] == [("unsupported", "source", 2)]
    # Beside a whole replica contributions do not matter, as without regions.
    whole = [*mixed, Layout([3], [Replicate()])]
    assert violations({"w": TensorSpec((6,), F32, whole)}, {"w": there}) == []


def test_regions_that_cut_a_tensor_into_too_many_pieces_are_refused() -> None:
    rng = random.Random(1)
    parts = [Layout.region([runs_of(sorted(rng.sample(range(600), 300))) for _ in range(3)], [r]) for r in range(12)]
    parts.append(Layout.region([[(0, 600)]] * 3, [12]))
    there = TensorSpec((600, 600, 600), F32, Layout((1,), [Replicate()]))
    (found,) = violations({"w": TensorSpec((600, 600, 600), F32, parts)}, {"w": there})
    assert (found.code, found.side) == ("unsupported", "source") and "its 13 regions cut it into" in found.text


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


def test_random_cases_send_from_regions_of_every_sort() -> None:
    cases = [case for case in map(random_case, range(300)) if any(isinstance(t, Loaded) for t in case.source)]
    assert len(cases) > 50
    assert sum(bool(case.products) for case in cases) > 20
    assert any(not isinstance(t, Loaded) for case in cases for t in case.source)
    assert any(isinstance(t, Loaded) for case in cases for t in case.target)
    crowds = [klass.crowds.tolist() for case in cases for klass in plan_of(case).classes]
    assert sum(len(some) > 1 for some in crowds) > 20
    assert len({plan_of(case).digest() for case in cases}) == len(cases)
