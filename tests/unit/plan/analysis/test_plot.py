"""What a picture shows of a plan, and what is written to its file."""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from etha.errors import ConfigError
from etha.picture import PlanPicture, draw
from etha.plan import Layout, Plan, TensorSpec, build_agent_plan, build_plan
from etha.plan.analysis.plot import PictureNames, _last


def plan_of(source: Layout, target: Layout, *hosts: Sequence[str], shape: tuple[int, int] = (512, 512)) -> Plan:
    """Twelve tensors; ``hosts`` of source and target ranks."""
    here, there = (TensorSpec(shape, torch.bfloat16, layout) for layout in (source, target))
    names = [f"layer{i}" for i in range(12)]
    where = dict(zip(("source_hosts", "target_hosts"), hosts, strict=False))
    return build_agent_plan(dict.fromkeys(names, here), dict.fromkeys(names, there), **where)  # type: ignore[arg-type]


def four_to_two(target: Placement | None = None) -> Plan:
    """Over two hosts."""
    return plan_of(Layout((4,), [Shard(0)]), Layout((2,), [target or Shard(1)]), ["a"] * 4, ["b"] * 2)


def large(sources: int, targets: int, each: int = 8) -> Plan:
    """``each`` ranks a host."""
    hosts = [f"s{i // each}" for i in range(sources)], [f"t{i // each}" for i in range(targets)]
    return plan_of(Layout((sources,), [Shard(0)]), Layout((targets,), [Shard(1)]), *hosts)


def moved(picture: PlanPicture) -> int:
    return sum(arrow.nbytes for arrow in picture.arrows) + sum(node.inside for node in picture.nodes)


@pytest.mark.parametrize(
    "plan",
    [
        four_to_two(),
        four_to_two(Replicate()),
        plan_of(Layout((2,), [Shard(0)]), Layout((2,), [Shard(1)])),
        plan_of(Layout((4,), [Partial()]), Layout((2,), [Shard(0)]), list("aabb"), list("ab")),
        large(64, 32),
        large(256, 128, each=2),
    ],
)
def test_every_byte_of_the_plan_is_in_the_picture(plan: Plan) -> None:
    picture, stats = plan.picture(), plan.stats()
    assert moved(picture) == stats.total_bytes == sum(picture.nbytes)
    assert picture.bound == stats.bound_nic and picture.quality == stats.quality
    assert len(picture.arrows) <= 48 and len(picture.nodes) <= 32
    if stats.wire_bytes:
        assert picture.nics[0].load == max(stats.max_nic_egress, stats.max_nic_ingress)
        assert picture.nics[0].nodes
    assert PlanPicture.from_plain(picture.to_plain()) == picture


def test_a_small_plan_is_shown_rank_by_rank_inside_its_hosts() -> None:
    picture = four_to_two().picture()
    assert [(node.side, picture.hosts[node.host], node.label) for node in picture.nodes] == [
        *((0, "a", f"rank {rank}") for rank in range(4)),
        *((1, "b", f"rank {rank}") for rank in range(2)),
    ]
    assert len(picture.arrows) == 8 and {arrow.distance for arrow in picture.arrows} == {2}
    assert not picture.map, "the arrows show it all"


def test_a_host_with_both_sides_is_one_host() -> None:
    plan = plan_of(Layout((2,), [Shard(0)]), Layout((2,), [Shard(1)]), ["a", "b"], ["a", "c"])
    picture = plan.picture()
    assert picture.hosts == ("a", "b", "c")
    assert [node.host for node in picture.nodes] == [0, 1, 0, 2]


def test_a_large_plan_is_shown_by_hosts_with_a_map_of_ranks() -> None:
    picture = large(64, 32).picture()
    assert [node.label for node in picture.nodes if node.side == 1] == [f"ranks {i}-{i + 7}" for i in range(0, 32, 8)]
    assert picture.hosts[:3] == ("s0", "s1", "s2") and len(picture.hosts) == 12
    assert picture.map_size == (64, 32) and len(picture.map) == 64 * 32


def test_many_hosts_are_shown_together_in_the_order_of_their_ranks() -> None:
    picture = large(256, 128, each=4).picture()
    assert picture.hosts[0] == "s0 to 10" and picture.nodes[0].label == "ranks 0-43"
    assert picture.map_size == (64, 64)


def test_ties_are_told_and_names_are_the_callers() -> None:
    names = PictureNames(title="batch b", sides=("trainer", "inference"), hosts={"a": "node-a", "b": "node-b"})
    picture = four_to_two().picture(names)
    assert picture.alike == 1, "both targets take in the same"
    assert picture.nics[0].label == "node-b, inference rank 0"
    assert picture.hosts == ("node-a", "node-b") and picture.sides == ("trainer", "inference")


def texts(path: Path) -> str:
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


def test_an_svg_has_its_text_as_text_and_says_what_its_signs_mean(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    four_to_two().plot(path)
    shown = texts(path)
    for text in ("source", "4 ranks", "rank 3", "busiest NIC", "receives", "bytes between hosts", "bar: bytes sent"):
        assert text in shown, text
    assert "bound: in any plan some NIC carries" in shown and "here 1.00 times that" in shown
    before = path.read_bytes()
    four_to_two().plot(path)
    assert path.read_bytes() == before, "a picture can be kept under version control"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_any_name_of_a_host_can_be_drawn(suffix: str, tmp_path: Path) -> None:
    hosts = ["$x$ & <b>\\frac", "ホスト", "h" * 300, ""]
    names = PictureNames(title="t" * 500, sides=("a" * 100, "b" * 100))
    plan = plan_of(Layout((4,), [Shard(0)]), Layout((2,), [Shard(1)]), hosts, hosts[:2])
    draw(plan.picture(names), tmp_path / f"plan.{suffix}")
    if suffix == "svg":
        assert "$x$ &amp; &lt;b&gt;\\frac" in texts(tmp_path / "plan.svg") and "ホスト" in texts(tmp_path / "plan.svg")


def test_control_characters_of_a_name_do_not_spoil_the_file(tmp_path: Path) -> None:
    names = PictureNames(title="version \x1b[2J\x00\ufffe", sides=("a\x07", "b"), hosts={"a": "\x01"})
    draw(four_to_two().picture(names), tmp_path / "plan.svg")
    ElementTree.parse(tmp_path / "plan.svg")
    assert "version \\x1b[2J\\x00" in texts(tmp_path / "plan.svg")


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<?xml")])
def test_a_picture_is_written_as_its_suffix_says(suffix: str, begins: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{suffix}"
    large(32, 24).plot(path)
    assert path.read_bytes().startswith(begins)


def test_what_moves_nothing_or_stays_on_one_host_can_be_drawn(tmp_path: Path) -> None:
    build_plan({}, {}).plot(tmp_path / "none.svg")
    assert "nothing moves" in texts(tmp_path / "none.svg")
    plan_of(Layout((2,), [Shard(0)]), Layout((2,), [Shard(1)]), ["a"] * 2, ["a"] * 2).plot(tmp_path / "one.svg")
    assert "bytes inside hosts" in texts(tmp_path / "one.svg") and "NIC" not in texts(tmp_path / "one.svg")


@pytest.mark.parametrize("name", ["plan.jpg", "plan", "plan.svgz"])
def test_a_suffix_that_cannot_be_written_names_those_that_can(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its name must end in \.svg, \.png, \.pdf"):
        four_to_two().plot(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"sub-etha\[plot\]"):
        four_to_two().plot(tmp_path / "plan.png")


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [("train-12", "train-17", "-17"), ("node9", "node11", "11"), ("a", "b", "b"), ("x1a", "x1b", "x1b"), ("", "", "")],
)
def test_the_names_of_several_hosts_fit_above_their_box(first: str, last: str, shown: str) -> None:
    assert _last(first, last) == shown
