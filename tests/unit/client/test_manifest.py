"""Both forms of a registration become one list of named entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.client.arguments.world import RankInfo
from etha.client.manifest import PairDefaults, TensorManifest, build_manifest
from etha.client.memory.cpu import CpuMemory
from etha.errors import ConfigError, LayoutError
from etha.plan import Layout

SHARDED = (Shard(0),)


def pair(name: str = "p", mesh: Any = (2,), placements: Any = SHARDED, ranks: Any = None) -> PairDefaults:
    place = RankInfo(rank=0, world_size=2, launch=None, ranks=ranks)
    return PairDefaults(name=name, place=place, mesh=mesh, placements=placements)


def build(tensors: Any, *, pairs: Any = None, pair_name: str | None = None, **options: Any) -> TensorManifest:
    pairs = {p.name: p for p in pairs or [pair()]}
    options = {"placements": None, "shapes": None, **options}
    return build_manifest(tensors, pair_name=pair_name, pairs=pairs, home=CpuMemory(), **options)


def test_a_list_is_matched_by_position_within_each_pair() -> None:
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = build([(one, "p"), (two, "q"), (three, "p")], pairs=[pair("p"), pair("q")])
    assert found.form == "list" and found.pairs == ("p", "q")
    assert [(item.name, item.pair) for item in found.items] == [("p[0]", 0), ("q[0]", 1), ("p[1]", 0)]


def test_a_mapping_takes_own_placements_before_the_defaults() -> None:
    found = build(
        {"w": torch.zeros(2), "v": torch.zeros(2)}, pair_name="p", placements={"v": [Replicate()]}, shapes={"w": (4,)}
    )
    w, v = found.items
    assert w.layout == Layout((2,), [Shard(0)]) and w.shape == (4,)
    assert v.layout == Layout((2,), [Replicate()]) and v.shape is None


def test_placements_and_shapes_may_name_tensors_of_other_ranks() -> None:
    assert build({}, pair_name="p", placements={"w": [Shard(0)]}, shapes={"w": (4,)}).items == ()


def test_meshes_are_in_ranks_of_the_torch_world() -> None:
    shifted = pair(mesh=torch.tensor([4, 5]), ranks={4: 0, 5: 1})
    assert build({"w": torch.zeros(2)}, pairs=[shifted], pair_name="p").items[0].layout == Layout((2,), [Shard(0)])
    with pytest.raises(
        LayoutError,
        match=r"tensor 'w': the mesh names ranks \[4, 5\] outside the side's 2; give .*expected_world_size= .*ranks=",
    ):
        build({"w": torch.zeros(2)}, pairs=[pair(mesh=torch.tensor([4, 5]))], pair_name="p")


def test_what_is_no_form_at_all() -> None:
    for tensors, options, text in (
        ({"w": torch.zeros(1)}, {}, "needs pair_name="),
        ([torch.zeros(1)], {}, r"tensors\[0\] is not a \(tensor, pair_name\) tuple"),
        ([(torch.zeros(1), "q")], {}, r"pairs \['q'\] are not formed in this client"),
        ([(torch.zeros(1), "p")], {"pair_name": "q"}, "pair_name='q' but the list names the pairs"),
    ):
        with pytest.raises(ConfigError, match=text):
            build(tensors, **options)
    with pytest.raises(LayoutError, match="tensor 'w' is a plain tensor and has no layout"):
        build({"w": torch.zeros(1)}, pairs=[pair(placements=None)], pair_name="p")
    place = RankInfo(rank=0, world_size=1, launch=None, ranks=None)
    with pytest.raises(LayoutError, match=r"give placements=\{'w': \[...\]\} and device_mesh= with publication 'p'$"):
        build({"w": torch.zeros(1)}, pairs=[PairDefaults.of_publication("p", place, (1,))], pair_name="p")


def test_the_order_of_a_mapping_does_not_matter_but_a_lists_does() -> None:
    v, w = torch.zeros(2), torch.zeros(2)
    assert build({"v": v, "w": w}, pair_name="p").same_tensors(build({"w": w, "v": v}, pair_name="p"))
    assert not build([(v, "p"), (w, "p")]).same_tensors(build([(w, "p"), (v, "p")]))


def test_one_memory_under_several_names_is_told() -> None:
    w, v = torch.zeros(2, 3), torch.zeros(2, 3)
    found = build({"a": w, "v": v, "b": torch.nn.Parameter(w), "c": w[:, :2]}, pair_name="p")
    assert {item.name: item.tied for item in found.items} == {"a": None, "v": None, "b": "a", "c": None}
    empty = torch.zeros(0, 3)
    assert all(item.tied is None for item in build({"a": empty, "b": empty}, pair_name="p").items)


def test_the_same_tensors_again() -> None:
    w = torch.nn.Parameter(torch.zeros(4))
    first = build({"w": w}, pair_name="p")
    assert first.same_tensors(build({"w": w}, pair_name="p"))
    for other in ({"v": w}, {"w": torch.zeros(4)}, {"w": w[:2]}, {}):
        assert not first.same_tensors(build(other, pair_name="p"))
    assert not first.same_tensors(build({"w": w}, pair_name="p", placements={"w": [Replicate()]}))
    assert not first.items[0].local.requires_grad and first.items[0].local.data_ptr() == w.data_ptr()


def test_a_region_is_the_layout_of_this_rank_alone() -> None:
    region = {"w": [[(0, 1), (3, 5)], [(2, 4)]]}
    found = build({"w": torch.zeros(3, 2), "v": torch.zeros(2)}, pair_name="p", regions=region, shapes={"w": (6, 4)})
    w, v = found.items
    assert w.layout == Layout.region([[(0, 1), (3, 5)], [(2, 4)]], [0]) and w.shape == (6, 4)
    assert v.layout == Layout((2,), [Shard(0)])


def test_equal_regions_are_one_layout() -> None:
    names = ["a", "b", "c"]
    found = build(
        {n: torch.zeros(2) for n in names},
        pair_name="p",
        regions={name: [[(1, 3)]] for name in names},
        shapes=dict.fromkeys(names, (4,)),
    )
    assert len({id(item.layout) for item in found.items}) == 1


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"regions": {"w": [[(0, 2)]]}}, LayoutError, r"tensor 'w' holds a region .* give shapes=\{'w': \(\.\.\.\)\}"),
        ({"regions": {"w": [[(0, 2)]]}, "shapes": {"v": (4,)}}, LayoutError, "tensor 'w' holds a region"),
        ({"regions": {"w": [[(2, 2)]]}, "shapes": {"w": (4,)}}, LayoutError, "tensor 'w': dim 0 of a region: the run"),
        ({"regions": {"x": [[(0, 2)]]}, "shapes": {"x": (4,)}}, ConfigError, "'x': ...} is of no tensor"),
        (
            {"regions": {"w": [[(0, 2)]]}, "shapes": {"w": (4,)}, "placements": {"w": [Shard(0)]}},
            ConfigError,
            "both regions",
        ),
    ],
)
def test_regions_that_say_too_little_or_too_much(options: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        build({"w": torch.zeros(2)}, pair_name="p", **options)


def test_a_list_of_products_is_registered_as_parts_of_a_flat_tensor() -> None:
    flat = torch.arange(10.0)
    found = build(
        {"w": flat, "v": torch.zeros(1)},
        pair_name="p",
        regions={"w": [[[(0, 2)], [(0, 1), (3, 4)]], [[], [(0, 4)]], [[(1, 4)], [(2, 4)]]], "v": [[[(1, 2)]]]},
        shapes={"w": (6, 4), "v": (4,)},
    )
    assert [(item.name, item.of) for item in found.items] == [
        ("w", None), ("w [product 1]", "w"), ("w [product 2]", "w"), ("v", None),
    ]  # fmt: skip
    assert [tuple(item.local.shape) for item in found.items] == [(2, 2), (0, 4), (3, 2), (1,)]
    assert all(item.owner is flat for item in found.items[:3])
    assert found.items[2].local.tolist() == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
    found.items[2].local.fill_(-1)
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, *[-1.0] * 6]
    assert found.refusals == ()


def test_a_list_of_products_fills_its_tensor() -> None:
    lists = {"w": [[[(0, 2)]], [[(1, 2)]]]}
    for wrong in (torch.zeros(4), torch.zeros(1, 3), torch.zeros(6)[::2]):
        with pytest.raises(LayoutError, match=r"tensor 'w': a list of 2 products lies in one flat .* shape \(3,\)"):
            build({"w": wrong}, pair_name="p", regions=lists, shapes={"w": (4,)})
    with pytest.raises(LayoutError, match="tensor 'w': dim 0 of a region"):
        build({"w": torch.zeros(3)}, pair_name="p", regions={"w": [[[(0, 2)]], [[(2, 1)]]]}, shapes={"w": (4,)})
    with pytest.raises(ConfigError, match="name of a part"):
        build({"w": torch.zeros(3), "w [product 1]": torch.zeros(4)}, pair_name="p", regions=lists, shapes={"w": (4,)})
