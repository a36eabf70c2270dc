"""What a rank owns: every case of PLANNING section 1, by numbers written out by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.distributed.tensor._ops._embedding_ops import _MaskPartial  # type: ignore[attr-defined]
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from etha.errors import LayoutError
from etha.plan import Layout, TensorSpec


def rows(layout: Layout, n: int, ranks: int) -> list[list[int]]:
    """Indices of a 1-d tensor of n elements that each rank owns."""
    out = []
    for rank in range(ranks):
        owned = layout.owned((n,), rank)
        assert owned is not None
        out.append([i for start, stop in owned[0] for i in range(start, stop)])
    return out


def test_even_shards() -> None:
    assert rows(Layout((4,), [Shard(0)]), 8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_uneven_shards_follow_chunk_with_an_empty_tail() -> None:
    layout = Layout((4,), [Shard(0)])
    assert rows(layout, 5, 4) == [[0, 1], [2, 3], [4], []]
    assert [layout.local_shape((5, 3), r) for r in range(4)] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert layout.owned((5, 3), 3) == [[], [(0, 3)]]


def test_dim_smaller_than_the_mesh() -> None:
    assert rows(Layout((4,), [Shard(0)]), 2, 4) == [[0], [1], [], []]


def test_size_0_and_0_d() -> None:
    assert Layout((3,), [Shard(0)]).local_shape((0, 4), 2) == (0, 4)
    assert Layout((3,), [Replicate()]).local_shape((), 1) == ()
    assert Layout((3,), [Replicate()]).owned((), 1) == []
    with pytest.raises(LayoutError, match="shards dim 0 of a tensor of 0 dims"):
        Layout((3,), [Shard(0)]).owned((), 0)


def test_nested_shards_are_chunks_of_chunks() -> None:
    assert rows(Layout((2, 2), [Shard(0), Shard(0)]), 5, 4) == [[0, 1], [2], [3], [4]]


def test_several_sharded_dims() -> None:
    layout = Layout((2, 3), [Shard(1), Shard(0)])
    assert layout.owned((3, 5), 4) == [[(1, 2)], [(3, 5)]]


def test_negative_dims_are_the_same_layout_of_that_tensor() -> None:
    assert Layout((2,), [Shard(-1)]).owned((3, 4), 1) == Layout((2,), [Shard(1)]).owned((3, 4), 1)


def test_fsdp_x_tp_even() -> None:
    layout = Layout((2, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    assert rows(layout, 8, 4) == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert rows(layout.with_reading("literal"), 8, 4) == rows(layout, 8, 4)


def test_fsdp_x_tp_uneven_has_two_readings() -> None:
    layout = Layout((4, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    physical = rows(layout, 9, 8)
    assert physical[6:] == [[], [8]]
    assert rows(layout.with_reading("order"), 9, 8) == physical
    assert rows(layout.with_reading("literal"), 9, 8)[6:] == [[8], []]


def test_a_lone_strided_shard_is_read_literally() -> None:
    layout = Layout((2,), [_StridedShard(0, split_factor=3)])
    assert rows(layout, 7, 2) == [[0, 1, 3, 4, 6], [2, 5]]


def test_undecodable_nest_is_read_literally() -> None:
    layout = Layout((2, 2), [_StridedShard(0, split_factor=3), Shard(0)])
    assert (
        rows(layout, 12, 4)
        == rows(layout.with_reading("literal"), 12, 4)
        == [[0, 1, 4], [5, 8, 9], [2, 3, 6], [7, 10, 11]]
    )


def test_two_strided_axes() -> None:
    """EP x TP x FSDP: the cuts apply from the last axis to the first."""
    layout = Layout((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)])
    got = rows(layout, 16, 8)
    for rank in range(8):
        a, b, c = rank >> 2, rank >> 1 & 1, rank & 1
        assert got[rank] == [8 * c + 4 * b + 2 * a, 8 * c + 4 * b + 2 * a + 1]


def test_a_factor_above_the_size_costs_nothing_of_the_factor() -> None:
    layout = Layout((2,), [_StridedShard(0, split_factor=1 << 40)])
    assert rows(layout, 3, 2) == [[0, 1, 2], []]


def test_hsdp_replicates_over_its_first_axis() -> None:
    layout = Layout((2, 3), [Replicate(), Shard(0)])
    assert rows(layout, 6, 6) == [[0, 1], [2, 3], [4, 5]] * 2


def test_size_1_axes_cut_nothing() -> None:
    layout = Layout((1, 2, 1), [Shard(0), Shard(0), _StridedShard(0, split_factor=5)])
    assert rows(layout, 5, 2) == [[0, 1, 2], [3, 4]]


def test_partial_holds_everything_of_its_cell() -> None:
    layout = Layout((2, 2), [Partial("avg"), Shard(0)])
    assert rows(layout, 4, 4) == [[0, 1], [2, 3]] * 2


def test_norm_partial_is_told_apart_by_type() -> None:
    plain = Layout((2, 2), [_NormPartial(3), Partial("sum")]).to_plain()
    assert plain["placements"] == [["NP", 3.0], ["P", "sum"]]
    assert isinstance(Layout.from_plain(plain).placements[0], _NormPartial)


@pytest.mark.parametrize(
    ("order", "instead"), [(float("inf"), "max"), (float("-inf"), "min"), (0, "sum"), ("inf", "max")]
)
def test_norms_that_torch_excludes_say_so_and_what_to_give(order: float | str, instead: str) -> None:
    with pytest.raises(LayoutError, match=rf"torch itself excludes the orders.*give Partial\('{instead}'\)"):
        Layout((2,), [_NormPartial(order)])  # type: ignore[arg-type]


def test_mask_partial_is_carried_to_be_refused_by_the_check() -> None:
    assert Layout((2,), [_MaskPartial(offset_shape=(4,), offset_dim=0)]).to_plain()["placements"] == [["MP"]]


def test_permuted_and_non_contiguous_ranks() -> None:
    layout = Layout([[7, 2], [5, 11]], [Shard(0), Replicate()])
    assert layout.owned((4,), 5) == layout.owned((4,), 11) == [[(2, 4)]]
    assert layout.owned((4,), 0) is None
    assert 7 in layout and 0 not in layout
    with pytest.raises(LayoutError, match="rank 3 is not in the mesh"):
        layout.local_shape((4,), 3)


def test_mesh_forms_are_the_same_layout() -> None:
    table = [[0, 1], [2, 3]]
    forms = [(2, 2), table, torch.tensor(table), np.array(table), torch.Size([2, 2])]
    layouts = {Layout(form, [Shard(0), Replicate()]) for form in forms}
    assert len(layouts) == 1
    assert len({layout.digest() for layout in layouts}) == 1
    assert Layout((3,), [Replicate()]) == Layout.replicated(3)


def test_plain_data_round_trips() -> None:
    for layout in (
        Layout([[3, 1], [0, 9]], [_StridedShard(1, split_factor=2), Shard(-1)], strided="literal"),
        Layout((2, 2), [Partial("max"), Replicate()]),
    ):
        plain = layout.to_plain()
        assert Layout.from_plain(plain) == layout
        assert Layout.from_plain(plain).digest() == layout.digest()
        assert Layout.from_plain(plain).placements == layout.placements
        assert pickle.loads(pickle.dumps(layout)) == layout  # in tests alone: nothing pickles on a socket
    assert Layout((4,), [Replicate()]).to_plain()["mesh"] == {"shape": [4], "ranks": None}


GOOD = {"mesh": {"shape": [2], "ranks": None}, "placements": [["R"]], "strided": "auto"}


@pytest.mark.parametrize(
    "plain",
    [
        None, [], {}, {**GOOD, "more": 1}, {**GOOD, "strided": "both"}, {**GOOD, "strided": 1},
        {**GOOD, "placements": "R"},
        {**GOOD, "placements": []}, {**GOOD, "placements": [["Q"]]}, {**GOOD, "placements": [["S", True]]},
        {**GOOD, "placements": [["S", 10**9]]}, {**GOOD, "placements": [["SS", 0, 0]]},
        {**GOOD, "placements": [["P", "xyz"]]},
        {**GOOD, "placements": [["NP", 0]]}, {**GOOD, "placements": [["NP", float("inf")]]},
        {**GOOD, "placements": [["S"]]},
        {**GOOD, "mesh": {"shape": [0], "ranks": None}}, {**GOOD, "mesh": {"shape": [2], "ranks": [0]}},
        {**GOOD, "mesh": {"shape": [2], "ranks": [0, 0]}}, {**GOOD, "mesh": {"shape": [2], "ranks": [0, -1]}},
        {**GOOD, "mesh": {"shape": [2], "ranks": [0, 1.5]}}, {**GOOD, "mesh": {"shape": [2], "ranks": [0, 2**70]}},
        {**GOOD, "mesh": {"shape": [2**40], "ranks": None}}, {**GOOD, "mesh": {"shape": [2.0], "ranks": None}},
        {**GOOD, "mesh": {"shape": [2], "ranks": None, "x": 0}}, {**GOOD, "mesh": [2]},
    ],
)  # fmt: skip
def test_untrusted_plain_data_is_refused(plain: object) -> None:
    with pytest.raises(LayoutError):
        Layout.from_plain(plain)


@pytest.mark.parametrize(
    ("mesh", "placements", "says"),
    [
        ((2, 2), [Shard(0)], "1 placements for a mesh of 2 axes"),
        ((0,), [Shard(0)], "not a positive size"),
        ([0, 0], [Shard(0)], "names a rank twice"),
        ([0.5, 1], [Shard(0)], "integer ranks"),
        ([[0, 1], [2]], [Shard(0)], "no table of ranks"),
        ([-1, 0], [Shard(0)], "ranks of a mesh"),
        ((2,), Shard(0), "one placement per mesh axis"),
        ((2,), ["Shard(0)"], "'Shard.0.' is not a placement .*: give torch's own, such as Shard.0. or Replicate"),
        ((2,), [_StridedShard(0, split_factor=0)], "not a placement"),
    ],
)
def test_malformed_layouts_say_what_is_wrong(mesh: object, placements: object, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Layout(mesh, placements)


def test_translate_maps_the_table() -> None:
    layout = Layout([[0, 2], [1, 3]], [Shard(0), Replicate()]).translate({0: 4, 1: 5, 2: 6, 3: 7})
    assert layout.ranks.tolist() == [[4, 6], [5, 7]]
    assert Layout([1, 0], [Shard(0)]).translate({0: 1, 1: 0}) == Layout((2,), [Shard(0)])
    with pytest.raises(LayoutError, match="rank 1 of the mesh has no rank in the side"):
        Layout((2,), [Shard(0)]).translate({0: 0})


def test_tensor_spec_checks_itself() -> None:
    row = Layout([0, 2], [Shard(0)])
    other = Layout([1, 3], [Shard(0)])
    spec = TensorSpec((4, 4), torch.float32, [row, other])
    assert spec.holders() == [0, 1, 2, 3]
    assert spec.local_shape(3) == (2, 4)
    assert spec.local_shape(4) is None
    assert TensorSpec((4,), torch.float32, row, frozenset({2})).holders() == [2]
    with pytest.raises(LayoutError, match="ranks \\[2\\] are in more than one"):
        TensorSpec((4, 4), torch.float32, [row, Layout([2], [Replicate()])])
    with pytest.raises(LayoutError, match="shards dim 0"):
        TensorSpec((), torch.float32, row)
    with pytest.raises(LayoutError, match="cannot be moved"):
        TensorSpec((4,), torch.qint8, row)
    with pytest.raises(LayoutError, match="not a shape"):
        TensorSpec((-1,), torch.float32, row)


def test_strided_runs_are_bounded() -> None:
    layout = Layout((2,), [_StridedShard(0, split_factor=1 << 30)])
    with pytest.raises(LayoutError, match="runs in one dim"):
        layout.local_shape((1 << 40,), 0)


def test_a_strided_shard_that_is_a_subclass_of_shard_stays_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11; in 2.13 it is a class of its own."""

    class Older(Shard):
        split_factor = 2

    monkeypatch.setattr("torch.distributed.tensor.placement_types._StridedShard", Older)
    assert Layout((2, 2), [Older(0), Shard(0)]).to_plain()["placements"] == [["SS", 0, 2], ["S", 0]]
