"""The agreement on a transfer: GO, withdrawal, commit and abort, on one agent and on several."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from etha.agent.machine import ImpossibleMove
from etha.agent.transfer import Moving
from etha.errors import PeerLostError, TransferAbortedError, TransferError, TransferTimeoutError

from .agreement import World

ONE = {"t": ("a", "a"), "i": ("a", "a")}
TWO = {"t": ("a", "a"), "i": ("b", "b")}
THREE = {"t": ("a", "b"), "i": ("b", "c")}
MEMBERS = [("t", 0), ("t", 1), ("i", 0), ("i", 1)]


def everybody_calls(world: World, version: int | None = None) -> list[tuple[str, int]]:
    return [world.call(m, "send" if m[0] == "t" else "recv", version if m == ("t", 0) else None) for m in MEMBERS]


@pytest.mark.parametrize("agents", [ONE, TWO, THREE])
def test_all_wait_then_go_then_commit(agents: dict) -> None:
    world = World(agents)
    for seq in (1, 2):
        keys = everybody_calls(world)
        world.drain()
        assert {world.results[key] for key in keys} == {seq}


@pytest.mark.parametrize("agents", [ONE, TWO, THREE])
def test_the_other_direction_goes_on_with_the_same_numbers(agents: dict) -> None:
    world = World(agents)
    everybody_calls(world)
    world.drain()
    keys = [world.call(m, "recv" if m[0] == "t" else "send") for m in MEMBERS]
    world.drain()
    assert {world.results[key] for key in keys} == {2}


@pytest.mark.parametrize("agents", [ONE, TWO, THREE])
def test_a_deadline_before_go_consumes_nothing_and_names_who_was_missing(agents: dict) -> None:
    world = World(agents)
    keys = [world.call(m, "send" if m[0] == "t" else "recv") for m in MEMBERS[:3]]
    world.drain()
    world.end(keys[2], expired=True)
    world.drain()
    error = world.errors[keys[2]]
    assert isinstance(error, TransferTimeoutError) and error.outcome == "withdrawn"
    assert "i rank 1" in error.message
    assert set(world.errors) == {keys[2]}
    last = [world.call(m, "recv") for m in MEMBERS[2:]]
    world.drain()
    assert {world.results[key] for key in [*keys[:2], *last]} == {1}


@pytest.mark.parametrize("agents", [ONE, TWO, THREE])
def test_both_sides_sending_fails_at_once(agents: dict) -> None:
    world = World(agents)
    keys = [world.call(m, "send") for m in MEMBERS]
    world.drain()
    assert all("both sides send" in world.errors[key].message for key in keys)
    everybody_calls(world)
    world.drain()
    assert len(world.results) == 4


def test_labels_that_disagree_are_refused() -> None:
    for agents in (ONE, THREE):
        world = World(agents)
        keys = [world.call(m, "send" if m[0] == "t" else "recv", m[1] + 1 if m[0] == "t" else None) for m in MEMBERS]
        world.drain()
        assert "different versions" in world.errors[keys[0]].message
        assert "different versions" in world.errors[keys[1]].message


@pytest.mark.parametrize("agents", [ONE, TWO, THREE])
def test_a_failure_on_one_agent_aborts_for_all_with_the_first_cause(agents: dict) -> None:
    world = World(agents)
    keys = everybody_calls(world)
    while world.busy():
        world.deliver(*world.busy()[0])
    world.moved("a", PeerLostError("t rank 1 died", reason="died"))
    world.drain()
    for key in keys:
        error = world.errors[key]
        assert isinstance(error, PeerLostError) and "t rank 1 died" in error.message and error.outcome == "aborted"
    assert world.errors[keys[2]].torn and not world.errors[keys[0]].torn


@pytest.mark.parametrize("agents", [ONE, TWO, THREE])
def test_a_cancel_after_go_aborts_for_all(agents: dict) -> None:
    world = World(agents)
    keys = everybody_calls(world)
    while world.busy():
        world.deliver(*world.busy()[0])
    world.end(keys[3], expired=False)
    world.drain()
    assert all(isinstance(world.errors[key], TransferAbortedError) for key in keys)
    assert all(machine.state is Moving.IDLE for machine in world.machines.values())


def test_an_impossible_move_tells_the_story() -> None:
    machine = World(ONE).machines["a"]
    with pytest.raises(ImpossibleMove, match=r"IDLE -> VOTED is impossible; so far: IDLE"):
        machine.move(Moving.VOTED)


def test_queued_calls_are_taken_oldest_first() -> None:
    world = World(ONE)
    first = [world.call(("t", 0), "send", 1), world.call(("t", 0), "send", 2)]
    for member in MEMBERS[1:]:
        world.call(member, "send" if member[0] == "t" else "recv")
    world.drain()
    assert world.results[first[0]] == 1 and first[1] in world.waiting


class Walk(RuleBasedStateMachine):
    """Any calls, ends, failures and deaths of links' order: nothing is answered twice or both ways."""

    @initialize(agents=st.sampled_from([ONE, TWO, THREE]), atomic=st.booleans())
    def begin(self, agents: dict, atomic: bool) -> None:
        self.world = World(agents, atomic)

    @rule(member=st.sampled_from(MEMBERS), flip=st.integers(0, 9))
    def call(self, member: tuple[str, int], flip: int) -> None:
        verb = "send" if (member[0] == "t") != (flip == 0) else "recv"
        self.world.call(member, verb)

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
    def atomic_is_never_torn(self) -> None:
        if hasattr(self, "world") and self.world.atomic:
            assert not any(getattr(error, "torn", False) for error in self.world.errors.values())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.drain()
        for key in sorted(world.waiting):
            if key in world.waiting:
                world.end(key, expired=True)
                world.drain()
        assert not world.waiting, "a call without an exit"
        assert all(machine.state is Moving.IDLE for machine in world.machines.values())
        keys = everybody_calls(world)
        world.drain()
        assert len({world.results[key] for key in keys}) == 1, "the batch does not serve any more"


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(order=st.lists(st.integers(0, 5), max_size=200), kill=st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_broken_pair_ends_every_call(order: list[int], kill: int) -> None:
    world = World(THREE)
    everybody_calls(world)
    error = PeerLostError("t rank 0 died", reason="died")
    for step, choice in enumerate(order):
        if step == kill:
            break
        moves = [("link", x) for x in world.busy()] + [("move", x) for x in sorted(world.running)]
        if not moves:
            break
        kind, what = moves[choice % len(moves)]
        world.deliver(*what) if kind == "link" else world.moved(what)
    for name, machine in world.machines.items():
        world.perform(name, machine.break_up(error))
    world.drain()
    assert not world.waiting
