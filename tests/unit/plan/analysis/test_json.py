"""Sides as JSON: what the files say, what ``describe`` writes, and the fifteen pairs of the benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from etha.commands.planfile import read_plan
from etha.errors import ConfigError, LayoutError, PlanError
from etha.plan import Layout, build_plan, describe, side_from_plain
from etha.plan.analysis.json import expand, layout_to_plain

F32 = {"shape": [1], "dtype": "float32"}
BENCH = Path(__file__).resolve().parents[4] / "bench"


def test_a_range_in_a_name_is_one_tensor_for_each_number() -> None:
    assert expand("w") == ["w"]
    assert expand("a.{8..10}.w") == ["a.8.w", "a.9.w", "a.10.w"]
    assert expand("{0..1}.{3..4}") == ["0.3", "0.4", "1.3", "1.4"]
    assert expand("{2..1}") == [] and expand("{a..b}") == ["{a..b}"]
    with pytest.raises(LayoutError, match="more than"):
        expand("{0..9999999}.{0..9999999}")


def test_tensors_take_named_layouts_their_own_or_the_sides() -> None:
    side = side_from_plain(
        {
            "mesh": [2],
            "placements": ["R"],
            "layouts": {
                "row": {"mesh": [[1], [0]], "placements": ["S(1)", "R"]},
                "late": {"mesh": {"shape": [2], "first": 2}, "placements": ["S(0)"]},
            },
            "hosts": {"name": "node{}", "ranks": 2},
            "agents": ["a", "b", "c", "d"],
            "tensors": {
                "default": {"shape": [4, 4], "dtype": "float32"},
                "own": {"shape": [4, 4], "dtype": "float32", "placements": ["P(avg)"]},
                "row.{0..1}": {"shape": [4, 4], "dtype": "float32", "layout": "row"},
                "both": {"shape": [4, 4], "dtype": "bfloat16", "layout": ["row", "late"]},
            },
        }
    )  # fmt: skip
    assert list(side.specs) == ["default", "own", "row.0", "row.1", "both"]
    assert side.specs["default"].layout == Layout.replicated(2)
    assert side.specs["own"].layout == Layout((2,), [Partial("avg")])
    row, late = Layout([[1], [0]], [Shard(1), Replicate()]), Layout([2, 3], [Shard(0)])
    assert side.specs["row.0"].layout == row and side.specs["row.0"].layout is side.specs["row.1"].layout
    assert side.specs["both"].layouts == (row, late)
    assert side.hosts == ["node0", "node0", "node1", "node1"] and side.agents == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("side", "reason"),
    [
        ({"tensors": {"w": {"shape": [1], "dtype": "float32", "layout": "no"}}}, "'w'.*'no'"),
        ({"layouts": [1]}, "layouts"),
        ({"hosts": {"name": "node", "ranks": 8}}, "hosts"),
        ({"hosts": [1]}, "hosts"),
        ({"mesh": [1], "placements": "R", "tensors": {"w": F32}}, "list"),
        ({"mesh": [1], "placements": ["R"], "tensors": dict.fromkeys(["w.{0..1}", "w.1"], F32)}, "twice"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_named(side: dict[str, object], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        side_from_plain(side)


LAYOUTS = [
    Layout((2, 3), [Replicate(), Shard(0)]),
    Layout([4, 5, 6], [Shard(0)]),
    Layout([2, 0, 1], [Partial("max")]),
    Layout([[5, 0], [1, 7]], [_StridedShard(0, split_factor=2), Shard(0)], strided="literal"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_described_layout_reads_back(layout: Layout) -> None:
    side = describe({"w": torch.zeros(6, 4, dtype=torch.float16), "step": 3}, layouts=layout, hosts=["h"] * 8)
    back = side_from_plain(json.loads(json.dumps(side)))
    assert back.specs["w"].layout == layout and back.hosts == ["h"] * 8
    assert back.specs["w"].shape == (6, 4) and back.specs["w"].dtype is torch.float16
    assert set(back.specs) == {"w"}
    assert layout_to_plain(layout)["placements"]


def test_a_state_dict_of_dtensors_describes_itself(tmp_path: Path) -> None:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        full = torch.zeros(9, 4)
        state = {
            "w": distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None),
            "v": distribute_tensor(full, mesh, [Shard(1), Replicate()], src_data_rank=None),
            "norm": torch.ones(4),
        }
        side = describe(state, layouts={"norm": Layout.replicated(4)})
    finally:
        dist.destroy_process_group()
    assert side["tensors"]["w"]["shape"] == [9, 4]
    source, target = tmp_path / "source.json", tmp_path / "target.json"
    source.write_text(json.dumps(side))
    target.write_text('{"mesh": [2], "placements": ["R"]}')
    plan = read_plan(source, target)
    plan.check()
    assert plan.names == ("norm", "v", "w")
    assert plan.source["w"].layout == Layout((2, 2), [Replicate(), Shard(0)])


def test_what_cannot_be_described_says_why() -> None:
    with pytest.raises(LayoutError, match="'w' is no DTensor"):
        describe({"w": torch.zeros(1)})
    with pytest.raises(LayoutError, match="range"):
        describe({"w.{0..1}": torch.zeros(1)}, layouts=Layout.replicated(1))


def test_regions_are_told_by_their_runs_and_ranks() -> None:
    one = {"region": [[[0, 2], [5, 9]], [[0, 4]]], "ranks": [0, 2]}
    other = {"region": [[], [[0, 4]]], "ranks": [1]}
    shape = {"shape": [9, 4], "dtype": "float32"}
    side = side_from_plain(
        {
            "layouts": {"one": one, "other": other},
            "tensors": {"a": {**shape, "regions": [one, other]}, "b": {**shape, "layout": ["one", "other"]}},
        }
    )
    layouts = (Layout.region([[(0, 2), (5, 9)], [(0, 4)]], [0, 2]), Layout.region([[], [(0, 4)]], [1]))
    assert side.specs["a"].layouts == side.specs["b"].layouts == layouts
    assert [layout_to_plain(layout) for layout in layouts] == [one, other]
    source = side_from_plain({"mesh": [3], "placements": ["S(0)"], "tensors": dict.fromkeys("ab", shape)})
    build_plan(source.specs, side.specs).check()
    # They send, too, to whoever wants no other elements.
    wanted = {"a": {**shape, "regions": [{"region": [[[1, 2], [5, 6]], [[1, 4]]], "ranks": [0]}]}}
    wanted["b"] = wanted["a"]
    build_plan(side.specs, side_from_plain({"tensors": wanted}).specs).check()
    with pytest.raises(PlanError, match=r"among them \[2:3 x 0:4\]"):
        build_plan(side.specs, source.specs).check()
    for wrong in (
        {"region": [[[0, 2]]]},
        {"region": [[[2, 0]]], "ranks": [0]},
        {"region": [[[0, 12]], []], "ranks": [0]},
    ):
        with pytest.raises(LayoutError, match="tensor 'a'"):
            side_from_plain({"tensors": {"a": {**shape, "regions": [wrong]}}})


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(BENCH))
    import pairs  # type: ignore[import-not-found]

    yield pairs
    for name in ("pairs", "models"):
        sys.modules.pop(name, None)


def test_the_files_of_the_benchmark_are_those_of_its_models(pairs: object) -> None:
    """`python bench/pairs.py` writes them."""
    totals = {1: 16.06, 3: 141.11, 6: 61.06, 8: 1342.05, 10: 2052.82}  # GB in bf16, as published
    for pair in pairs.PAIRS:  # type: ignore[attr-defined]
        files, sides = pairs.paths(pair), pairs.sides(pair)  # type: ignore[attr-defined]
        assert [path.read_text() for path in files] == [pairs.text(side) for side in sides]  # type: ignore[attr-defined]
        plan = read_plan(*files)
        assert plan.violations == () and plan.source.keys() == plan.target.keys()
        if pair.number in totals:
            elements = sum(torch.Size(spec.shape).numel() for spec in plan.source.values())
            assert round(elements * 2 / 1e9, 2) == totals[pair.number]


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"hosts": 3}')
    with pytest.raises(ConfigError, match=r"a\.json: .*hosts"):
        read_plan(path, path)
