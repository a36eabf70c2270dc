"""`make proof`: the agreement of three agents with two faults at once, and of four; the suite walks one fault each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.agent.protocol.walking import Walk

AB, AC, BC = ("a", "b"), ("a", "c"), ("b", "c")
FAN = {"t": ("a",), "i": ("b", "c")}
GATHER = {"t": ("a", "b"), "i": ("c",)}
CHAIN = {"t": ("a", "b"), "i": ("b", "c")}


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("agents", [FAN, GATHER, CHAIN], ids=["fan", "gather", "chain"])
def test_three_agents_any_links_lost_and_one_crashed(agents: dict[str, Any]) -> None:
    assert Walk(agents, made=True, cuts=(AB, AC, BC), crash=("a", "b", "c")).go().states > 250_000


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_two_agents_and_two_transfers_with_every_fault_at_once() -> None:
    walk = Walk({"t": ("a",), "i": ("b",)}, calls_each=2, cuts=(AB,), crash=("a", "b"), ends=2, fails=1, breaks=1)
    assert walk.go().states > 300_000


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_four_agents_whose_doubt_ends_at_any_time() -> None:
    four = {"t": ("a",), "i": ("b", "c", "d")}
    assert Walk(four, moved=True, cuts=(AB,)).go().states > 700_000
    assert Walk(four, moved=True, crash=("a",)).go().states > 300_000
