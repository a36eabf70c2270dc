"""Wrong arguments of the planner are ConfigErrors that name the argument, its value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import ConfigError, LayoutError
from etha.plan import Layout, TensorSpec, build_agent_plan, build_plan, simulate, violations


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


SPEC = TensorSpec((4, 4), torch.float32, Layout((2,), [Shard(0)]))
SIDES: dict[str, Any] = {"source": {"w": SPEC}, "target": {"w": TensorSpec((4, 4), torch.float32, SPEC.layout)}}
SPECS = [
    (None, "=None must be a mapping of names to TensorSpecs"),
    (5, "=5 must be a mapping of names to TensorSpecs"),
    ("w", "='w' must be a mapping of names to TensorSpecs"),
    ([SPEC], r"=\[TensorSpec\(.*\.\.\. must be a mapping of names to TensorSpecs"),
    (SPEC, r"=TensorSpec\(.*\.\.\. must be a mapping of names to TensorSpecs"),
    (Unprintable(), "=a Unprintable must be a mapping of names to TensorSpecs"),
    ({"w": 3}, r"\['w'\]=3 must be a TensorSpec"),
    ({"w": torch.zeros(1)}, r"\['w'\]=tensor\(\[0\.\]\) must be a TensorSpec"),
    ({"w": Layout((2,), [Shard(0)])}, r"\['w'\]=Layout\(.* must be a TensorSpec"),
    ({3: SPEC}, " has the name 3: names are of type str"),
]
PLACES = [5, "ab", ["a", 3], [["x"], ["y"]], (None, None), {"a": 0, "b": 1}, {"a", "b"}, torch.tensor([1, 2])]
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"fan_out": "tree"}, "fan_out='tree' must be 'relay' or 'direct'"),
    ({"fan_out": None}, "fan_out=None must be 'relay' or 'direct'"),
    ({"fan_out": ["relay"]}, r"fan_out=\['relay'\] must be 'relay' or 'direct'"),
    ({"relay_bytes": "1"}, "relay_bytes='1' must be a number of bytes, 0 or more"),
    ({"relay_bytes": None}, "relay_bytes=None must be a number of bytes"),
    ({"relay_bytes": True}, "relay_bytes=True must be a number of bytes"),
    ({"relay_bytes": 1.5}, r"relay_bytes=1\.5 must be a number of bytes"),
    ({"relay_bytes": -(10**5000)}, "relay_bytes=a int must be a number of bytes"),
    ({"carry": 1}, "carry=1 must be True or False"),
]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(("value", "text"), SPECS, ids=lambda value: type(value).__name__)
def test_what_a_side_holds(side: str, value: Any, text: str) -> None:
    for function in (build_plan, build_agent_plan, violations):
        with pytest.raises(ConfigError, match=f"^{side}{text}"):
            function(**{**SIDES, side: value})


@pytest.mark.parametrize("what", ["source_hosts", "target_hosts", "source_agents", "target_agents"])
@pytest.mark.parametrize("value", PLACES, ids=lambda value: type(value).__name__)
def test_where_ranks_live(what: str, value: Any) -> None:
    for function in (build_plan, build_agent_plan):
        with pytest.raises(ConfigError, match=rf"^{what}=.* must be a sequence of a str for each rank"):
            function(**SIDES, **{what: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=[text[:20] for _, text in OPTIONS])
def test_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        build_plan(**SIDES, **options)


def test_what_is_right_is_taken() -> None:
    for places in (["a", "b"], ("a", "b"), np.array(["a", "b"]), None):
        assert not build_plan(**SIDES, source_hosts=places, target_agents=places).violations  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="source_hosts names 1 ranks"):
        build_plan(**SIDES, source_hosts=["a"])


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "=None must be a mapping of ranks to their tensors"),
        ([], r"=\[\] must be a mapping of ranks"),
        ({0: 3}, r"\[0\]=3 must be a mapping"),
        ({0: {"w": 3}}, r"\[0\]\['w'\]=3 must be a tensor"),
    ],
)
def test_what_is_simulated(side: str, value: Any, text: str) -> None:
    held: dict[str, Any] = {name: {rank: {"w": torch.zeros(2, 4)} for rank in (0, 1)} for name in SIDES}
    plan = build_plan(**SIDES)
    simulate(plan, **held)
    with pytest.raises(ConfigError, match=f"^{side}{text}"):
        simulate(plan, **{**held, side: value})
    with pytest.raises(ConfigError, match="plan is a dict, not a Plan"):
        simulate({}, **held)  # type: ignore[arg-type]
