"""Receivers that expect a version take no other one: a send may be left over from a claim that is over."""

from __future__ import annotations

import random

import pytest

from tests.unit.agent.protocol.agreement import World
from tests.unit.agent.protocol.test_participant import MEMBERS, ONE, THREE, TWO

SOURCES = [member for member in MEMBERS if member[0] == "t"]
TARGETS = [member for member in MEMBERS if member[0] != "t"]
WORLDS = pytest.mark.parametrize("agents", [ONE, TWO, THREE], ids=["one", "two", "three"])


@WORLDS
@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_send_of_an_earlier_claim_is_not_taken(agents: dict, first: str) -> None:
    world = World(agents)
    stale, keys = [], []
    for verb in (first, "recv" if first == "send" else "send"):
        if verb == "send":
            stale = [world.call(member, "send", 126) for member in SOURCES]
        else:
            keys = [world.call(member, "recv", expects=127) for member in TARGETS]
        world.drain()
    assert not world.results and not world.errors
    for key in stale:
        world.end(key, expired=False)
    world.drain()
    new = [world.call(member, "send", 127) for member in SOURCES]
    world.drain()
    assert set(world.errors) == set(stale)
    assert {world.results[key] for key in [*new, *keys]} == {1}


@WORLDS
def test_a_send_without_a_version_is_not_taken(agents: dict) -> None:
    world = World(agents)
    for member in SOURCES:
        world.call(member, "send")
    for member in TARGETS:
        world.call(member, "recv", expects=1)
    world.drain()
    assert not world.results and not world.errors


@WORLDS
def test_ranks_that_expect_different_versions_wait_for_each_other(agents: dict) -> None:
    world = World(agents)
    first, *rest = TARGETS
    ahead = world.call(first, "recv", expects=2)
    behind = [world.call(member, "recv", expects=1) for member in rest]
    old = [world.call(member, "send", 1) for member in SOURCES]
    world.drain()
    assert not world.results and not world.errors
    for key in [*behind, *old]:
        world.end(key, expired=False)
    world.drain()
    keys = [world.call(member, "recv", expects=2) for member in rest]
    new = [world.call(member, "send", 2) for member in SOURCES]
    world.drain()
    assert {world.results[key] for key in [ahead, *keys, *new]} == {1}


@WORLDS
@pytest.mark.parametrize("seed", range(60))
def test_in_any_order_nobody_receives_what_it_does_not_expect(agents: dict, seed: int) -> None:
    """Each rank asks for the version that is the newest then, and takes back what is older at its own pace."""
    world, chance, newest = World(agents), random.Random(seed), 1
    calls: dict[tuple[str, int], tuple[tuple[str, int], int]] = {}
    versions: dict[int, set[int]] = {}  # of the calls that one transfer has served
    for _ in range(350):
        newest += chance.random() < 0.05
        for member in MEMBERS:
            if member in calls:
                key, version = calls[member]
                if key in world.waiting:
                    if version < newest and chance.random() < 0.1:
                        world.end(key, expired=False)
                    continue
                if key in world.results:
                    versions.setdefault(world.results[key], set()).add(version)
            if member[0] == "t":
                calls[member] = world.call(member, "send", newest), newest
            else:
                calls[member] = world.call(member, "recv", expects=newest), newest
        if busy := world.busy():
            world.deliver(*chance.choice(busy))
        elif world.running:
            world.moved(chance.choice(sorted(world.running)))
    assert versions and all(len(each) == 1 for each in versions.values())
