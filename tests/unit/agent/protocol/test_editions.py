"""Snapshots in the agreement: ranks that are one ahead of others, and a newer one that takes an older one's place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from etha.agent.protocol.participant import Moving
from etha.errors import TransferError
from tests.examples import examples
from tests.unit.agent.protocol.agreement import World
from tests.unit.agent.protocol.test_participant import MEMBERS, ONE, THREE, TWO

SOURCES = [member for member in MEMBERS if member[0] == "t"]
TARGETS = [member for member in MEMBERS if member[0] != "t"]
WORLDS = pytest.mark.parametrize("agents", [ONE, TWO, THREE], ids=["one", "two", "three"])


def offer(world: World, edition: str, members: list = SOURCES) -> list:
    return [world.call(member, "send", edition=edition) for member in members]


def receive(world: World) -> list:
    return [world.call(member, "recv") for member in TARGETS]


@WORLDS
def test_a_late_receiver_gets_the_newest(agents: dict) -> None:
    world = World(agents)
    old = offer(world, "n1")
    world.drain()
    for member in SOURCES:
        world.supersede(member)
    world.drain()
    assert {world.errors[key].outcome for key in old} == {"withdrawn"}
    assert all("superseded" in world.errors[key].message for key in old)
    new = offer(world, "n2")
    keys = receive(world)
    world.drain()
    assert {world.results[key] for key in [*new, *keys]} == {1}


@WORLDS
def test_a_rank_that_is_one_ahead_waits_for_the_others(agents: dict) -> None:
    world = World(agents)
    first, *rest = SOURCES
    old = offer(world, "n1")
    world.drain()
    world.supersede(first)
    world.drain()
    ahead = world.call(first, "send", edition="n2")
    keys = receive(world)
    world.drain()
    assert not world.results and set(world.errors) == {old[0]}
    for member in rest:
        world.supersede(member)
    world.drain()
    behind = offer(world, "n2", rest)
    world.drain()
    assert {world.results[key] for key in [ahead, *behind, *keys]} == {1}


@WORLDS
def test_labels_of_two_snapshots_are_no_conflict(agents: dict) -> None:
    world = World(agents)
    first, *rest = SOURCES
    ahead = world.call(first, "send", 2, edition="v2")
    behind = [world.call(member, "send", 1, edition="v1") for member in rest]
    receive(world)
    world.drain()
    assert not world.errors and not world.results
    for member in rest:
        world.supersede(member)
    world.drain()
    again = [world.call(member, "send", 2, edition="v2") for member in rest]
    world.drain()
    assert set(world.errors) == set(behind)
    assert {world.results[key] for key in [ahead, *again]} == {1}


@WORLDS
def test_a_snapshot_beside_a_plain_send_is_refused(agents: dict) -> None:
    world = World(agents)
    first, *rest = SOURCES
    keys = [world.call(first, "send", edition="n1"), *(world.call(member, "send") for member in rest)]
    world.drain()
    assert {world.errors[key].outcome for key in keys} == {"withdrawn"}
    assert all("snapshot" in world.errors[key].message for key in keys)


def gone_ahead() -> tuple[World, list, list]:
    """GO is said and has not reached the agent of t rank 1 yet."""
    world = World(THREE)
    old = offer(world, "n1")
    keys = receive(world)
    while world.machines["a"].state is Moving.IDLE:
        world.deliver(*world.busy()[0])
    assert world.machines["b"].state is Moving.IDLE
    return world, old, keys


def test_go_overtakes_a_newer_snapshot() -> None:
    world, old, keys = gone_ahead()
    world.supersede(("t", 1))
    world.drain()
    assert {world.results[key] for key in [*old, *keys]} == {1}


def test_what_yields_to_go_no_longer_does_once_it_is_cancelled() -> None:
    world, old, keys = gone_ahead()
    world.supersede(("t", 1))
    world.end(old[1], expired=False)
    world.drain()
    assert {world.errors[key].outcome for key in [*old, *keys]} == {"aborted"}


def test_what_moves_is_not_superseded() -> None:
    world, old, keys = gone_ahead()
    world.supersede(("t", 0))
    world.drain()
    assert {world.results[key] for key in [*old, *keys]} == {1}


class Walk(RuleBasedStateMachine):
    """Ranks that take snapshots each at its own pace, over any order of messages, ends and failures."""

    @initialize(agents=st.sampled_from([ONE, TWO, THREE]))
    def begin(self, agents: dict) -> None:
        self.world = World(agents)
        self.taken = dict.fromkeys(SOURCES, 0)
        self.editions: dict = {}

    @rule(member=st.sampled_from(SOURCES))
    def snapshot(self, member: tuple[str, int]) -> None:
        if self.offered(member):
            self.world.supersede(member)
        else:
            self.taken[member] += 1
            edition = f"n{self.taken[member]}"
            self.editions[self.world.call(member, "send", edition=edition)] = edition

    @rule(member=st.sampled_from(TARGETS))
    def receive(self, member: tuple[str, int]) -> None:
        self.world.call(member, "recv")

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data(), expired=st.booleans())
    def end(self, data: st.DataObject, expired: bool) -> None:
        self.world.end(data.draw(st.sampled_from(sorted(self.world.waiting))), expired=expired)

    @precondition(lambda self: self.world.busy())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.world.deliver(*data.draw(st.sampled_from(self.world.busy())))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), fail=st.booleans())
    def moved(self, data: st.DataObject, fail: bool) -> None:
        agent = data.draw(st.sampled_from(sorted(self.world.running)))
        self.world.moved(agent, TransferError("disk on fire") if fail else None)

    @invariant()
    def no_transfer_mixes_snapshots(self) -> None:
        if hasattr(self, "world"):
            mixed: dict[int, set[str]] = {}
            for key, seq in self.world.results.items():
                if key in self.editions:
                    mixed.setdefault(seq, set()).add(self.editions[key])
            assert all(len(found) == 1 for found in mixed.values()), mixed

    def offered(self, member: tuple[str, int]) -> bool:
        return any(self.world.calls[key] == member for key in self.world.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.drain()
        for key in sorted(world.waiting):
            if key in world.waiting and world.calls[key] in TARGETS:
                world.end(key, expired=True)
                world.drain()
        for member in SOURCES:  # all catch up with the newest
            world.supersede(member)
            world.drain()
            assert not self.offered(member), "a snapshot that does not make way"
        newest = offer(world, f"n{max(self.taken.values()) + 1}")
        keys = receive(world)
        world.drain()
        assert len({world.results[key] for key in [*newest, *keys]}) == 1, "the batch does not serve any more"
        assert not world.waiting
        assert all(machine.state is Moving.IDLE for machine in world.machines.values())


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
