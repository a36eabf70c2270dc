"""A complete roster becomes the plans of both directions, or every reason why not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.agent.protocol.evaluation import Evaluation, Where, describe_side, evaluate
from etha.agent.protocol.records import Described, Manifest, Record
from etha.bus.messages import Refusal
from etha.plan import Layout

SHARDED, WHOLE = Layout((2,), [Shard(0)]), Layout((2,), [Replicate()])


def tensor(
    layout: Layout = WHOLE,
    shape: tuple[int, ...] | None = (4,),
    local: tuple[int, ...] | None = None,
    dtype: str = "float32",
    pair: str = "p",
) -> Described:
    return Described(pair=pair, dtype=dtype, layout=layout, shape=shape, local=local)


class Roster:
    """Sides ``t`` and ``i`` of two ranks each; ``rank`` adds what one of them registered."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], Record] = {}
        self.manifests: dict[str, Manifest] = {}

    def rank(self, side: str, rank: int, refusals: tuple[Refusal, ...] = (), given: Any = None, **tensors: Any) -> None:
        plain = {"direction": None, "bucket_size": None, "atomic": False, "verify": None, "seq": 0}
        options = {"form": "map", **plain, **(given or {})}
        digest = f"{side}{rank}"
        self.manifests[digest] = Manifest(tensors=tensors, refusals=refusals)
        self.records[side, rank] = Record(manifest=digest, pairs=("p",), **options)

    def sides(self, trainer: Any, inference: Any, **given: Any) -> Roster:
        for rank in (0, 1):
            self.rank("t", rank, given=given.get("t"), **trainer)
            self.rank("i", rank, given=given.get("i"), **inference)
        return self

    def evaluate(self) -> Evaluation:
        where = Where(agents={"t": ["a", "a"], "i": ["a", "a"]}, hosts={"t": ["h", "h"], "i": ["h", "h"]})
        return evaluate(self.records, self.manifests, where)


def codes(violations: Any) -> set[tuple[str, str, str, int | None]]:
    return {(v.code, v.name, v.side, v.rank) for v in violations}


def test_both_directions_are_planned() -> None:
    found = Roster().sides({"w": tensor(SHARDED)}, {"w": tensor()}).evaluate()
    assert set(found.plans) == {"t", "i"} and not found.refused
    assert found.nbytes("t") == 2 * 16 and found.nbytes("i") == 16
    assert found.tensors == 1 and found.digest.count(":") == 2


def test_every_agent_finds_the_same_whatever_the_order() -> None:
    roster = Roster().sides({f"w{i}": tensor(SHARDED) for i in range(5)}, {f"w{i}": tensor() for i in range(5)})
    first = roster.evaluate()
    for seed in range(5):
        dice = random.Random(seed)
        shuffled = Roster()
        shuffled.records = dict(dice.sample(sorted(roster.records.items()), len(roster.records)))
        shuffled.manifests = {
            key: Manifest(tensors=dict(dice.sample(sorted(m.tensors.items()), len(m.tensors))), refusals=())
            for key, m in roster.manifests.items()
        }
        assert shuffled.evaluate().digest == first.digest


@pytest.mark.parametrize(
    ("t", "i", "refused"),
    [
        (None, None, False),
        ("send", "recv", False),
        ("recv", None, True),
        (None, "send", True),
        ("both", None, True),
        (None, "both", True),
    ],
)
def test_only_a_direction_that_somebody_asked_for_is_proven(t: str | None, i: str | None, refused: bool) -> None:
    partial = Layout((2,), [Partial()])
    roster = Roster().sides({"w": tensor(partial)}, {"w": tensor()}, t={"direction": t}, i={"direction": i})
    found = roster.evaluate()
    assert "t" in found.plans and "i" not in found.plans
    assert codes(found.violations["i"]) == {("target_partial", "w", "t", None)}
    assert bool(found.refused) == refused


def test_nobody_asked_and_neither_works() -> None:
    found = Roster().sides({"w": tensor()}, {"v": tensor()}).evaluate()
    assert codes(found.refused) == {
        ("unknown_name", "w", "t", None),
        ("missing_name", "v", "t", None),
        ("unknown_name", "v", "i", None),
        ("missing_name", "w", "i", None),
    }


def tied(roster: Roster, *digests: str) -> Roster:
    for digest in digests:
        roster.manifests[digest] = replace(roster.manifests[digest], ties={"w": "v"})
    return roster


@pytest.mark.parametrize(
    ("ties", "refused"),
    [
        ("t0 t1 i0 i1", {}),
        ("t0 t1", {}),
        ("t0 t1 i1", {}),
        ("i0 i1", {0, 1}),
        ("i1", {1}),
        ("t0 i0 i1", {0, 1}),
    ],
)
def test_names_tied_on_a_target_are_tied_on_every_rank_of_the_source(ties: str, refused: set[int]) -> None:
    roster = Roster().sides({"v": tensor(), "w": tensor()}, {"v": tensor(), "w": tensor()}, t={"direction": "send"})
    found = tied(roster, *ties.split()).evaluate()
    assert codes(found.refused) == {("double_write", "w", "i", rank) for rank in refused}


def test_an_empty_shard_is_tied_to_anything() -> None:
    held = {"v": tensor(SHARDED, (1,)), "w": tensor(SHARDED, (1,))}
    roster = Roster().sides(held, {"v": tensor(shape=(1,)), "w": tensor(shape=(1,))}, t={"direction": "send"})
    assert not tied(roster, "t0", "i0", "i1").evaluate().refused


def test_names_tied_on_both_sides_are_cut_alike() -> None:
    other = tensor(Layout([1, 0], [Shard(0)]))
    for source, target in ((other, tensor(SHARDED)), (tensor(SHARDED), other)):
        roster = Roster().sides(
            {"v": tensor(SHARDED), "w": source}, {"v": tensor(SHARDED), "w": target}, t={"direction": "send"}
        )
        found = tied(roster, "t0", "t1", "i0", "i1").evaluate()
        assert codes(found.refused) == {("double_write", "w", "i", 0), ("double_write", "w", "i", 1)}


def test_options_of_some_ranks_count_for_all() -> None:
    roster = Roster().sides({"w": tensor()}, {"w": tensor()})
    roster.rank("t", 1, given={"bucket_size": 1 << 20, "seq": 7}, w=tensor())
    roster.rank("i", 0, given={"bucket_size": 1 << 16, "atomic": True, "direction": "recv"}, w=tensor())
    found = roster.evaluate()
    assert (found.bucket_size, found.atomic, found.seq) == (1 << 16, True, 7)
    roster.rank("i", 0, w=tensor())
    roster.rank("t", 0, given={"atomic": True, "direction": "send"}, w=tensor())
    assert not roster.evaluate().atomic, "who only sends has nothing to keep whole"


def test_the_strongest_verification_of_any_rank_counts() -> None:
    roster = Roster().sides({"w": tensor()}, {"w": tensor()})
    assert roster.evaluate().verify is None
    roster.rank("t", 1, given={"verify": "sample"}, w=tensor())
    assert roster.evaluate().verify == "sample"
    roster.rank("i", 0, given={"verify": "full", "direction": "recv"}, w=tensor())
    assert roster.evaluate().verify == "full"


def test_a_refused_tensor_is_not_also_unknown_or_uncovered() -> None:
    meta = Refusal(code="unsupported", name="w", text="a meta tensor", target_only=False)
    roster = Roster().sides({"w": tensor(SHARDED)}, {"w": tensor()})
    roster.rank("t", 1, refusals=(meta,))
    found = roster.evaluate()
    assert codes(found.violations["t"]) == {("unsupported", "w", "t", 1)}
    roster.rank("t", 0, refusals=(meta,))
    assert codes(roster.evaluate().violations["t"]) == {("unsupported", "w", "t", 0), ("unsupported", "w", "t", 1)}


def test_what_only_a_target_may_not_be_is_told_with_the_rest() -> None:
    alias = Refusal(code="alias", name="w", text="it overlaps", target_only=True)
    roster = Roster().sides({"w": tensor()}, {"w": tensor(shape=(5,))})
    roster.rank("i", 1, refusals=(alias,), w=tensor(shape=(5,)))
    found = roster.evaluate()
    assert codes(found.violations["t"]) == {("alias", "w", "i", 1), ("shape_mismatch", "w", "i", None)}
    assert codes(found.violations["i"]) == {("shape_mismatch", "w", "t", None)}


def test_shapes_that_differ_are_told_once_with_the_names_of_the_sides() -> None:
    roster = Roster().sides({"w": tensor()}, {"w": tensor(shape=(5,))})
    (found,) = roster.evaluate().refused
    assert found.code == "shape_mismatch" and found.text == "shape (5,) on i and shape (4,) on t"


def test_a_name_belongs_to_one_pair_and_a_list_meets_lists() -> None:
    roster = Roster().sides({"w": tensor()}, {"w": tensor(pair="q")}, t={"form": "list"})
    found = codes(roster.evaluate().refused)
    assert {("pair", "w", "t", 0), ("form", "", "t", 0), ("form", "", "t", 1)} <= found


@pytest.mark.parametrize(
    ("first", "second", "code", "text"),
    [
        (tensor(dtype="float32"), tensor(dtype="float64"), "dtype", "float32 and float64"),
        (tensor(shape=(4,)), tensor(shape=(5,)), "shape_mismatch", r"[(4,), (5,)]"),
        (tensor(SHARDED), tensor(WHOLE), "layout", "must be equal or over disjoint ranks"),
        (tensor(shape=None, local=(2,)), tensor(shape=None, local=(3,)), "shape_mismatch", "cannot be told"),
        (tensor(SHARDED, (4,)), tensor(SHARDED, (4,), local=(3,)), "shape_mismatch", "local shape is (3,)"),
    ],
)
def test_ranks_of_one_side_that_disagree(first: Described, second: Described, code: str, text: str) -> None:
    manifests = {0: Manifest(tensors={"w": first}, refusals=()), 1: Manifest(tensors={"w": second}, refusals=())}
    _, [violation] = describe_side("t", manifests)
    assert (violation.code, violation.name, violation.side) == (code, "w", "t") and text in violation.text


def test_replicas_over_disjoint_ranks_are_one_tensor() -> None:
    manifests = {
        rank: Manifest(tensors={"w": tensor(Layout([rank], [Replicate()]), None, (4,))}, refusals=()) for rank in (0, 1)
    }
    specs, wrong = describe_side("t", manifests)
    assert not wrong and specs["w"].shape == (4,) and len(specs["w"].layouts) == 2
    other = {**manifests, 1: Manifest(tensors={"w": tensor(Layout([1], [Replicate()]), None, (5,))}, refusals=())}
    _, [violation] = describe_side("t", other)
    assert "its replicas have the different shapes [(4,), (5,)]" in violation.text


def kept(rank: int, *runs: tuple[int, int], shape: tuple[int, ...] | None = (4,), local: Any = None) -> Described:
    return tensor(Layout.region([runs], [rank]), shape, local)


def test_ranks_that_keep_regions_send_if_they_hold_all_that_is_wanted() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, w=tensor(SHARDED))
    roster.rank("i", 0, w=kept(0, (0, 1), (3, 4)))
    roster.rank("i", 1, w=kept(1, (0, 3)))
    found = roster.evaluate()
    assert set(found.plans) == {"t", "i"} and not found.refused
    assert found.nbytes("t") == 2 * 4 + 3 * 4 and found.nbytes("i") == 4 * 4
    found.plans["t"].check()
    found.plans["i"].check()
    assert found.plans["t"].target["w"].layouts == tuple(
        Layout.region([runs], [rank]) for rank, runs in enumerate([[(0, 1), (3, 4)], [(0, 3)]])
    )


def test_a_direction_in_which_regions_lack_what_is_wanted_is_refused() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, w=tensor(SHARDED))
    roster.rank("i", 0, w=kept(0, (0, 1), (2, 3)))
    roster.rank("i", 1, w=kept(1, (0, 2)))
    found = roster.evaluate()
    assert set(found.plans) == {"t"} and not found.refused
    assert codes(found.violations["i"]) == {("uncovered", "w", "t", 1)}
    assert "among them [3:4]" in found.violations["i"][0].text


def test_ranks_that_keep_the_same_are_one_layout() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, w=tensor(SHARDED))
        roster.rank("i", rank, w=kept(rank, (1, 3)))
    assert roster.evaluate().plans["t"].target["w"].layouts == (Layout.region([[(1, 3)]], [0, 1]),)


def part(rank: int, *runs: tuple[int, int]) -> Described:
    return replace(kept(rank, *runs), of="w")


def test_parts_are_planned_from_the_tensor_of_which_they_are_parts() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, w=tensor(SHARDED))
    roster.rank("i", 0, **{"w": kept(0, (0, 1)), "w [product 1]": part(0, (2, 4)), "w [product 2]": part(0, (0, 4))})
    roster.rank("i", 1, **{"w": kept(1, (0, 3)), "w [product 1]": part(1, (3, 4))})
    found = roster.evaluate()
    assert not found.refused and found.tensors == 1 and found.nbytes("t") == 4 * (1 + 2 + 4 + 3 + 1)
    assert found.parts == {"w [product 1]": "w", "w [product 2]": "w"}
    plan = found.plans["t"]
    plan.check()
    assert plan.names == ("w", "w [product 1]", "w [product 2]")
    assert plan.source["w [product 2]"] is plan.source["w"]
    assert plan.target["w [product 2]"].holders() == [0]
    back = found.plans["i"]
    back.check()
    assert back.names == ("w",) and found.nbytes("i") == 4 * 4
    assert [spec.holders() for spec in (back.source["w"], *back.source["w"].products)] == [[0, 1], [0, 1], [0]]


@pytest.mark.parametrize(
    ("ties", "runs", "why"),
    [
        ({"w": "v", "w [product 1]": "v [product 1]"}, (2, 4), ""),
        ({"w": "v"}, (2, 4), "in different memory"),
        ({"w": "v", "w [product 1]": "v [product 1]"}, (1, 3), "gives different elements of them"),
        ({"w": "v"}, None, "in different memory"),
    ],
)
def test_names_that_a_target_ties_are_tied_in_all_products_of_a_source(ties: Any, runs: Any, why: str) -> None:
    """The source's rank 0 holds "v" and "w" as lists of two products, rank 1 all of both as one memory."""
    roster = Roster()
    lists = {"v": kept(0, (0, 2)), "w": kept(0, (0, 2)), "v [product 1]": replace(part(0, (2, 4)), of="v")}
    if runs is not None:
        lists["w [product 1]"] = part(0, runs)
    given = {"direction": "send"}
    roster.rank("t", 0, given=given, **lists)
    roster.rank("t", 1, given=given, v=kept(1, (0, 4)), w=kept(1, (0, 4)))
    for rank in (0, 1):
        roster.rank("i", rank, v=tensor(), w=tensor())
    roster.manifests["t0"] = replace(roster.manifests["t0"], ties=ties)
    found = tied(roster, "t1", "i0", "i1").evaluate()
    assert codes(found.refused) == ({("double_write", "w", "i", rank) for rank in (0, 1)} if why else set())
    assert all(why in v.text for v in found.refused)


def test_what_is_no_part_of_a_list_is_refused() -> None:
    """No client registers it: another agent's worker may."""
    for name, other in (
        ("w [product 2]", part(0, (2, 4))),
        ("w [product 1]", replace(part(0, (2, 4)), dtype="bfloat16")),
    ):
        roster = Roster()
        for rank in (0, 1):
            roster.rank("t", rank, w=tensor(SHARDED))
        roster.rank("i", 0, **{"w": kept(0, (0, 1)), name: other})
        assert {(v.code, v.name, v.side) for v in roster.evaluate().refused} >= {("layout", name, "i")}


def test_equal_lists_of_many_tensors_are_planned_once() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, **{name: tensor(SHARDED) for name in "ab"})
    lists = {name: kept(0, (0, 2)) for name in "ab"} | {
        f"{n} [product 1]": replace(kept(0, (1, 4)), of=n) for n in "ab"
    }
    roster.rank("i", 0, **lists)
    plan = roster.evaluate().plans["i"]
    assert plan.names == ("a", "b") and len(plan.classes) == 1


def test_a_part_of_what_the_source_lacks_is_told_by_its_tensor_alone() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, given={"direction": "send"}, v=tensor(SHARDED))
        roster.rank("i", rank, **{"v": tensor(), "w": kept(rank, (0, 1)), "w [product 1]": part(rank, (2, 4))})
    assert codes(roster.evaluate().refused) == {("missing_name", "w", "t", None)}


def test_a_tensor_with_the_name_of_a_part_is_refused() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, **{"w": tensor(SHARDED), "w [product 1]": tensor(SHARDED)})
        roster.rank("i", rank, **{"w": kept(rank, (0, 1)), "w [product 1]": part(rank, (2, 4))})
    found = {(v.name, v.side, v.rank): v.text for v in roster.evaluate().violations["t"]}
    assert found.keys() == {("w [product 1]", "t", 0), ("w [product 1]", "t", 1)}
    assert all("name of a part of 'w'" in text for text in found.values())


def test_regions_that_do_not_lie_in_the_tensor_or_do_not_fill_their_own() -> None:
    roster = Roster()
    for rank in (0, 1):
        roster.rank("t", rank, given={"direction": "send"}, w=tensor(SHARDED), v=tensor(SHARDED), u=tensor(SHARDED))
    roster.rank("i", 0, w=kept(0, (0, 5)), v=kept(0, (0, 2), local=(3,)), u=kept(0, (0, 2), shape=None, local=(2,)))
    roster.rank("i", 1, w=kept(1, (0, 4)), v=kept(1, (2, 4)), u=kept(1, (2, 4)))
    found = {(v.code, v.name, v.rank): v.text for v in roster.evaluate().refused if v.side == "i"}
    assert found.keys() == {("layout", "w", 0), ("shape_mismatch", "v", 0), ("layout", "u", 0)}
    assert "rank 0 reaches to 5 in dim 0, where the tensor has 4" in found["layout", "w", 0]
    assert "local shape is (3,)" in found["shape_mismatch", "v", 0]
    assert "shapes=" in found["layout", "u", 0]
