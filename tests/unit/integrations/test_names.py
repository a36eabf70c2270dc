"""Names mapped by ordered regex replacements that a JSON file can hold."""

from __future__ import annotations

import json

import pytest

from etha.errors import ConfigError
from etha.integrations.names import rename

NAMES = ["decoder.0.mlp.fc1.weight", "decoder.0.mlp.fc2.weight", "decoder.11.norm.scale", "head.weight"]


def test_without_rules_names_stay_as_they_are() -> None:
    assert rename(NAMES, None) == rename(NAMES, {}) == {name: name for name in NAMES}


def test_rules_apply_in_order_each_to_what_the_one_before_left() -> None:
    rules = json.loads(
        r'{"^decoder\\.(\\d+)": "model.layers.\\1", "^model\\.layers\\.(?P<n>\\d+)\\.norm\\.scale$":'
        r' "model.layers.\\g<n>.norm.weight", "fc1": "up", "fc2": "down"}'
    )
    assert list(rename(NAMES, rules).values()) == [
        "model.layers.0.mlp.up.weight",
        "model.layers.0.mlp.down.weight",
        "model.layers.11.norm.weight",
        "head.weight",
    ]
    with pytest.raises(ConfigError, match=r"model\\\\.layers"):
        rename(NAMES, dict(reversed(rules.items())))


def test_a_rule_matches_anywhere_and_as_often_as_it_occurs() -> None:
    assert rename(["a.block.block.w"], {"block": "b"}) == {"a.block.block.w": "a.b.b.w"}


def test_a_rule_that_matches_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'\^encoder' -> 'model' matches none of the 4 names \('decoder.0.mlp.fc1"):
        rename(NAMES, {"head": "lm_head", "^encoder": "model"})
    with pytest.raises(ConfigError, match="'x' -> 'y' matches none of no names at all"):
        rename([], {"x": "y"})


def test_a_rule_for_a_name_that_is_not_used_is_no_mistake() -> None:
    assert rename(["embedding.w"], {"^head": "lm_head"}, unused=["head.w"]) == {"embedding.w": "embedding.w"}


def test_two_names_that_become_one_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'decoder.0.mlp.fc1.weight' and 'decoder.0.mlp.fc2.weight' both become"):
        rename(NAMES, {r"fc\d": "fc"})


def test_a_name_may_become_what_an_unused_one_was() -> None:
    assert rename(["head.w"], {"^head": "embedding"}, unused=["embedding.w"]) == {"head.w": "embedding.w"}


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"(": "x"}, r"'\(' -> 'x' cannot be used"),
        ({"head": r"\1"}, "'head' -> .* cannot be used: invalid group reference"),
        ({"absent": r"\g<layer>"}, "'absent' -> .* cannot be used: unknown group name"),
        ({"head": None}, "'head' -> None is not text to text"),
        ({3: "x"}, "3 -> 'x' is not text to text"),
        ([("head", "x")], "is not a mapping"),
        ({"^head.*": ""}, "leave nothing of 'head.weight'"),
        ({"^head": "x" * 500}, "1 to 500 bytes"),
    ],
)
def test_rules_that_cannot_be_used(rules: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rename(NAMES, rules)  # type: ignore[arg-type]
