"""What cannot work: every reason at once, with code, name, side and rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor._ops._embedding_ops import _MaskPartial  # type: ignore[attr-defined]
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from etha.errors import ConfigError, LayoutError, PlanError
from etha.plan import Layout, TensorSpec, build_plan, simulate, violations
from etha.plan.layouts.dtypes import castable, from_name, name_of, wire_dtype

F32 = torch.float32
SHARDED = Layout((2,), [Shard(0)])
WHOLE = Layout((2,), [Replicate()])


def codes(source: TensorSpec, target: TensorSpec) -> list[str]:
    return [v.code for v in violations({"w": source}, {"w": target})]


def test_all_are_listed_and_check_raises_them() -> None:
    source = {
        "only here": TensorSpec((4,), F32, WHOLE),
        "shape": TensorSpec((4,), F32, WHOLE),
        "dtype": TensorSpec((4,), torch.int64, WHOLE),
        "both": TensorSpec((4,), F32, Layout((2, 2), [Partial("sum"), Partial("max")])),
        "good": TensorSpec((4,), F32, WHOLE),
    }
    target = {
        "only there": TensorSpec((4,), F32, WHOLE),
        "shape": TensorSpec((5,), F32, WHOLE),
        "dtype": TensorSpec((4,), torch.int32, WHOLE),
        "both": TensorSpec((4,), F32, Layout((2,), [Partial("sum")])),
        "good": TensorSpec((4,), F32, SHARDED),
    }
    found = violations(source, target)
    assert sorted((v.code, v.name, v.side) for v in found) == [
        ("dtype", "dtype", "target"),
        ("missing_name", "only there", "source"),
        ("shape_mismatch", "shape", "target"),
        ("target_partial", "both", "target"),
        ("unknown_name", "only here", "source"),
        ("unsupported", "both", "source"),
    ]
    plan = build_plan(source, target)
    assert plan.violations == tuple(found)
    with pytest.raises(PlanError) as caught:
        plan.check()
    assert caught.value.violations == tuple(found)
    # What is good is still planned; nothing else has rows.
    rp = plan.for_rank("target", 0)
    assert {plan.names[i] for i in rp.tensor.tolist()} == {"good"}


def test_uncovered_elements_name_the_ranks_that_miss_them() -> None:
    source = TensorSpec((8,), F32, Layout((4,), [Shard(0)]), frozenset({0, 1, 3}))
    found = violations({"w": source}, {"w": TensorSpec((8,), F32, Layout((4,), [Shard(0)]))})
    assert [(v.code, v.rank) for v in found] == [("uncovered", 2)]
    assert "2 of 2 elements" in found[0].text
    assert codes(source, TensorSpec((8,), F32, Layout((4,), [Shard(0)]), frozenset({0, 1, 3}))) == []


def test_an_absent_replica_is_no_loss_and_an_absent_contribution_is() -> None:
    target = TensorSpec((8,), F32, SHARDED)
    hsdp = Layout((2, 2), [Replicate(), Shard(0)])
    assert codes(TensorSpec((8,), F32, hsdp, frozenset({0, 3})), target) == []
    assert codes(TensorSpec((8,), F32, hsdp, frozenset({0, 2})), target) == ["uncovered"]
    summed = Layout((2, 2), [Partial(), Replicate()])
    assert codes(TensorSpec((8,), F32, summed, frozenset({0, 2})), target) == []
    assert codes(TensorSpec((8,), F32, summed, frozenset({0, 3})), target) == ["uncovered", "uncovered"]


def test_present_ranks_alone_send_and_receive() -> None:
    """The default layout says Replicate over 4; each pipeline stage registers only what it has."""
    source = {
        "a": TensorSpec((6,), F32, Layout.replicated(4), frozenset({0})),
        "b": TensorSpec((6,), F32, Layout.replicated(4), frozenset({2, 3})),
    }
    target = {
        "a": TensorSpec((6,), F32, Layout((3,), [Shard(0)]), frozenset({0, 2})),
        "b": TensorSpec((6,), F32, Layout.replicated(3)),
    }
    plan = build_plan(source, target)
    plan.check()
    assert len(plan.for_rank("source", 1)) == 0
    assert [plan.names[i] for i in plan.for_rank("target", 1).tensor.tolist()] == ["b"]
    here = {0: {"a": torch.arange(6.0)}, 2: {"b": torch.ones(6)}, 3: {"b": torch.ones(6)}}
    there = {
        0: {"a": torch.zeros(2), "b": torch.zeros(6)},
        1: {"b": torch.zeros(6)},
        2: {"a": torch.zeros(2), "b": torch.zeros(6)},
    }
    simulate(plan, here, there)
    assert there[2]["a"].tolist() == [4, 5]
    assert all(there[r]["b"].tolist() == [1] * 6 for r in range(3))


@pytest.mark.parametrize(
    ("placements", "dtype", "fine"),
    [
        ([Partial("sum"), Partial("avg")], F32, True),
        ([Partial("sum"), Partial("max")], F32, False),
        ([Partial("sum"), _NormPartial(2)], F32, False),
        ([_NormPartial(2), _NormPartial(2)], F32, True),
        ([_NormPartial(2), _NormPartial(3)], F32, False),
        ([_MaskPartial(offset_shape=(4,), offset_dim=0), Replicate()], F32, False),
        ([Partial("avg"), Replicate()], torch.int64, False),
        ([Partial("sum"), Replicate()], torch.int64, True),
        ([Partial("max"), Replicate()], torch.bool, True),
        ([Partial("sum"), Replicate()], torch.bool, False),
        ([Partial("max"), Replicate()], torch.complex64, False),
        ([_NormPartial(2), Replicate()], torch.int32, False),
        ([Partial("band"), Replicate()], torch.int32, False),
        ([Partial("sum"), Replicate()], torch.uint32, False),
    ],
)
def test_which_partials_can_be_reduced(placements: list[object], dtype: torch.dtype, fine: bool) -> None:
    source = TensorSpec((4,), dtype, Layout((2, 2), placements))
    assert codes(source, TensorSpec((4,), dtype, WHOLE)) == ([] if fine else ["unsupported"])


def test_of_several_partial_layouts_one_is_reduced() -> None:
    """Each holds the whole tensor in its own way; the lowest ranks' one is taken, complete ones before."""
    summed, most, whole = Layout([0, 1], [Partial("sum")]), Layout([2, 3], [Partial("max")]), Layout([4], [Replicate()])
    target = {"w": TensorSpec((4,), F32, WHOLE)}
    plan = build_plan({"w": TensorSpec((4,), F32, [most, summed])}, target)
    plan.check()
    assert {slot.op for slot in plan.for_rank("source", 0).slots} == {"sum"}
    assert len(plan.for_rank("source", 2)) == 0
    plan = build_plan({"w": TensorSpec((4,), F32, [most, summed, whole])}, target)
    plan.check()
    assert set(plan.for_rank("target", 0).source.tolist()) == {4}


def test_target_partial_of_size_1_is_refused_too() -> None:
    assert codes(TensorSpec((4,), F32, WHOLE), TensorSpec((4,), F32, Layout((1,), [Partial()]))) == ["target_partial"]


def test_places_for_too_few_ranks_are_a_layout_error() -> None:
    spec = {"w": TensorSpec((4,), F32, WHOLE)}
    with pytest.raises(LayoutError, match="source_hosts names 1 ranks"):
        build_plan(spec, spec, source_hosts=["a"])


def test_places_in_one_text_are_a_config_error() -> None:
    """The text "ab" is no list of two ranks, although Python would go through it like one."""
    spec = {"w": TensorSpec((4,), F32, WHOLE)}
    with pytest.raises(ConfigError, match="target_agents='ab' must be a sequence"):
        build_plan(spec, spec, target_agents="ab")


def test_simulate_refuses_what_was_not_planned() -> None:
    spec = {"w": TensorSpec((4,), F32, SHARDED)}
    plan = build_plan(spec, spec)
    good = {r: {"w": torch.zeros(2)} for r in range(2)}
    for bad, code in (
        ({0: {"w": torch.zeros(2)}}, "missing_name"),
        ({**good, 1: {"w": torch.zeros(3)}}, "shape_mismatch"),
        ({**good, 1: {"w": torch.zeros(2, dtype=torch.float64)}}, "dtype"),
    ):
        with pytest.raises(PlanError) as caught:
            simulate(plan, bad, good)
        assert [(v.code, v.side, v.rank) for v in caught.value.violations] == [(code, "source", 1)]


@pytest.mark.parametrize(
    ("source", "target", "wire"),
    [
        ("float32", "bfloat16", "bfloat16"), ("bfloat16", "float32", "bfloat16"), ("bfloat16", "float16", "bfloat16"),
        ("float16", "bfloat16", "float16"), ("float64", "float32", "float32"), ("int8", "int64", "int8"),
        ("uint8", "uint16", "uint8"), ("bool", "bool", "bool"), ("float8_e4m3fn", "bfloat16", "float8_e4m3fn"),
        ("float32", "float8_e5m2", "float8_e5m2"), ("complex64", "complex64", "complex64"),
    ],
)  # fmt: skip
def test_the_narrower_dtype_travels(source: str, target: str, wire: str) -> None:
    a, b = from_name(source), from_name(target)
    assert castable(a, b) is None
    assert name_of(wire_dtype(a, b)) == wire


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("int64", "int32", "only get wider"), ("int32", "uint32", "signedness"), ("uint8", "int16", "signedness"),
        ("int32", "float32", "cannot be received"), ("float32", "int32", "cannot be received"),
        ("bool", "int8", "cannot be received"), ("complex64", "complex128", "cannot be received"),
        ("float8_e8m0fnu", "float32", "cannot be received"),
    ],
)  # fmt: skip
def test_what_is_not_cast_says_why(source: str, target: str, says: str) -> None:
    reason = castable(from_name(source), from_name(target))
    assert reason is not None and says in reason


def test_dtype_names_are_checked() -> None:
    for bad in ("float31", "__class__", 3):
        with pytest.raises(LayoutError):
            from_name(bad)  # type: ignore[arg-type]
