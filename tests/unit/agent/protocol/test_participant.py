"""The agreement on a transfer: GO, withdrawal, commit and abort, on one agent and on several."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from etha.agent.protocol.coordinator import Phase
from etha.agent.protocol.lane_queue import Recalled
from etha.agent.protocol.machine import ImpossibleMove
from etha.agent.protocol.participant import Moving
from etha.errors import PeerLostError, TransferAbortedError, TransferError, TransferTimeoutError
from etha.peer.messages import Commit, Declined, Failed, Go, Question, VerdictAnswer
from tests.examples import examples
from tests.unit.agent.protocol.agreement import World

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
    assert not any("coordinator" in world.errors[key].message for key in keys), "users know batches, not coordinators"
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
TestWalk.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@given(order=st.lists(st.integers(0, 5), max_size=200), kill=st.integers(0, 60))
@settings(max_examples=examples(300), deadline=None)
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


# ---- the coordinator is lost --------------------------------------------------------------------

FAN = {"t": ("a",), "i": ("b", "c")}
FOUR = {"t": ("a",), "i": ("b", "c", "d")}


def voted(agents: dict, *, done: tuple[str, ...] = ()) -> tuple[World, dict[str, tuple[str, int]]]:
    """All have moved their part; the votes of ``done`` have arrived, the others' are on the way."""
    world = World(agents)
    keys = {world.agent(member): world.call(member, verb) for member, verb in world.verbs()}
    while world.busy():
        world.deliver(*world.busy()[0])
    for agent in list(world.running):
        world.moved(agent)
    for agent in done:
        world.deliver(agent, "a")
    return world, keys


def outcome(world: World, key: tuple[str, int]) -> str:
    return "result" if key in world.results else world.errors[key].outcome


def test_of_two_agents_the_one_that_is_left_aborts_at_once_and_names_the_lost_ranks() -> None:
    world, keys = voted({"t": ("a", "a"), "i": ("b", "b")})
    world.lose("b", "a")
    error = world.errors[keys["b"]]
    assert isinstance(error, PeerLostError) and (error.reason, error.outcome) == ("died", "aborted")
    assert "the agent of t ranks 0-1 is gone" in error.message
    assert world.machines["b"].state is Moving.IDLE


@pytest.mark.parametrize("when", ["moving", "stopping", "spoilt"])
def test_who_has_not_voted_aborts_once_its_move_is_quiet(when: str) -> None:
    world = World(TWO)
    keys = everybody_calls(world)
    while world.busy():
        world.deliver(*world.busy()[0])
    if when != "moving":
        world.end(keys[2], expired=False)
    if when == "spoilt":
        world.moved("b", TransferError("stopped"))
    world.lose("b", "a")
    assert (keys[3] in world.waiting) == (when != "spoilt")
    if when != "spoilt":
        world.moved("b")
    assert outcome(world, keys[3]) == "aborted"


def test_survivors_commit_what_one_of_them_knows_to_be_committed() -> None:
    world, keys = voted(FAN, done=("b", "c"))
    world.deliver("a", "c")
    world.lose("b", "a")
    assert world.machines["b"].state is Moving.DOUBT and ("b", 1) in world.doubts
    world.drain()
    assert outcome(world, keys["b"]) == outcome(world, keys["c"]) == "result"


def test_survivors_that_know_nothing_abort_and_the_coordinator_does_not_commit() -> None:
    world, keys = voted(FAN, done=("b", "c"))
    world.lose("b", "a")
    world.deliver("b", "c")  # before COMMIT, which is on its way to c
    world.drain()
    assert outcome(world, keys["b"]) == outcome(world, keys["c"]) == "aborted"
    assert keys["a"] in world.waiting
    world.lose("a", "b")
    assert outcome(world, keys["a"]) == "unknown"


def test_when_all_decline_the_coordinator_aborts() -> None:
    world, keys = voted(FOUR, done=("b", "c", "d"))
    for agent in "bcd":
        world.links["a", agent].clear()
        world.perform(agent, world.machines[agent].hear("d" if agent != "d" else "b", Question(seq=1)))
        world.perform("a", world.machines["a"].hear(agent, Declined(seq=1, cause=TransferError("asked"))))
    assert outcome(world, keys["a"]) == "aborted"


def test_who_is_asked_before_its_vote_says_aborted_and_tells_the_coordinator() -> None:
    world = World(FAN)
    keys = [world.call(member, verb) for member, verb in world.verbs()]
    while world.busy():
        world.deliver(*world.busy()[0])
    world.perform("c", world.machines["c"].hear("b", Question(seq=1)))
    assert list(world.links["c", "b"]) == [VerdictAnswer(seq=1, verdict="aborted")]
    assert isinstance(world.links["c", "a"][0], Failed) and world.machines["c"].state is Moving.STOPPING
    world.drain()
    assert all(outcome(world, key) == "aborted" for key in keys)


def test_who_is_asked_before_go_came_does_not_begin() -> None:
    world = World(FAN)
    keys = [world.call(member, verb) for member, verb in world.verbs()]
    while not (world.links["a", "c"] and isinstance(world.links["a", "c"][-1], Go)):
        world.deliver(*next(link for link in world.busy() if link != ("a", "c") or world.machines["c"].booking is None))
    world.perform("c", world.machines["c"].hear("b", Question(seq=1)))
    assert list(world.links["c", "b"])[-1] == VerdictAnswer(seq=1, verdict="aborted")
    world.drain()
    assert all(outcome(world, key) == "aborted" for key in keys)
    assert "lost to other agents" in world.errors[keys[2]].message


def test_who_cannot_ask_any_more_does_not_know() -> None:
    world, keys = voted(FAN)
    world.lose("b", "c")
    world.lose("b", "a")
    error = world.errors[keys["b"]]
    assert isinstance(error, PeerLostError) and (error.reason, error.outcome) == ("died", "unknown")


def test_who_is_not_answered_within_the_time_does_not_know_and_takes_no_commit_later() -> None:
    world, keys = voted(FAN, done=("b", "c"))
    world.lose("b", "a")
    world.undecided("b", 1)
    assert outcome(world, keys["b"]) == "unknown"
    world.perform("b", world.machines["b"].hear("c", Question(seq=1)))
    assert world.links["b", "c"][-1] == VerdictAnswer(seq=1, verdict="fenced")


def test_a_timer_that_comes_too_late_changes_nothing() -> None:
    world, keys = voted(TWO)
    world.lose("b", "a")
    world.undecided("b", 1)
    assert outcome(world, keys["b"]) == "aborted"


def test_a_pair_that_breaks_up_in_doubt_goes_on_asking() -> None:
    world, keys = voted(FAN, done=("b", "c"))
    world.deliver("a", "c")
    world.lose("b", "a")
    world.perform("b", world.machines["b"].break_up(PeerLostError("the pair is lost", reason="died")))
    world.drain()
    assert outcome(world, keys["b"]) == "result"


def test_a_commit_that_comes_after_the_end_is_answered() -> None:
    world, _ = voted(FAN)
    world.perform("b", world.machines["b"].hear("c", Question(seq=1)))
    world.perform("b", world.machines["b"].hear("a", Commit(seq=1)))
    assert isinstance(world.links["b", "a"][-1], Declined)


def test_after_a_loss_no_transfer_begins_and_calls_still_end_at_their_deadline() -> None:
    world = World(FAN)
    keys = [world.call(member, verb) for member, verb in world.verbs()]
    world.lose("b", "c")
    world.drain()
    assert not world.results and not world.running
    for key in keys:
        world.end(key, expired=True)
    world.drain()
    assert all(outcome(world, key) == "withdrawn" for key in keys)


# ---- lanes --------------------------------------------------------------------------------------


def test_a_batch_on_one_agent_books_nothing() -> None:
    world = World(ONE)
    everybody_calls(world)
    world.drain()
    assert not world.lanes["a"].holders and len(world.results) == 4


def test_go_waits_for_the_lane_of_every_agent() -> None:
    world = World(FAN)
    other = World({"t": ("c",), "i": ("d",)}, batch="other", lanes=world.lanes, worlds=world.worlds)
    for member, verb in other.verbs():
        other.call(member, verb)
    while other.busy():
        other.deliver(*other.busy()[0])
    keys = [world.call(member, verb) for member, verb in world.verbs()]
    world.drain()
    assert set(other.running) == {"c", "d"} and not world.running
    other.drain()
    world.drain()
    assert all(key in world.results for key in keys)


def test_a_lane_is_given_back_when_ready_is_taken_back() -> None:
    world = World(TWO)
    world.lanes["b"].want("somebody", (-1, "z", "z"))
    world.worlds["somebody"] = world
    keys = everybody_calls(world)
    world.drain()
    assert world.machines["a"].coordinators["t"].state is Phase.BOOKING and world.lanes["a"].holders == {"b"}
    world.end(keys[3], expired=True)
    world.drain()
    assert outcome(world, keys[3]) == "withdrawn"
    assert not world.lanes["a"].holders and world.machines["b"].booking is None


def test_an_older_transfer_takes_a_lane_back_before_go_and_a_lost_coordinator_frees_it() -> None:
    world = World(TWO, now=lambda: 5)
    world.lanes["a"].want("elder", (1, "z", "z"))
    world.worlds["elder"] = world
    everybody_calls(world)
    world.drain()
    assert world.lanes["b"].holders == {"b"}  # granted there, while the elder has the lane of a
    world.route("b", [n for n in world.lanes["b"].want("elder", (1, "z", "z")) if isinstance(n, Recalled)])
    world.drain()
    assert world.lanes["b"].holders == {"elder"} and world.machines["b"].booking is not None
    world.lose("b", "a")
    assert world.machines["b"].booking is None


def test_a_lane_held_for_the_next_transfer_is_given_back_while_this_one_still_commits() -> None:
    """Otherwise the elder waits for a lane that its holder may get to use only after the elder."""
    world = World({"t": ("a",), "i": ("b", "c")}, held=True)
    coordinator = world.machines["a"].coordinators["t"]
    for member, verb in world.verbs():
        world.call(member, verb)
    while links := [link for link in world.busy() if link != ("c", "a") or coordinator.state is not Phase.COMMITTING]:
        world.deliver(*links[0])
        for agent in list(world.running):
            world.moved(agent)
    world.call(("i", 0), "recv")
    assert coordinator.state is Phase.COMMITTING and world.lanes["b"].holders == {"b"}
    world.worlds["elder"] = world
    world.route("b", [n for n in world.lanes["b"].want("elder", (1, "z", "z")) if isinstance(n, Recalled)])
    world.deliver("b", "a")  # READY
    world.deliver("b", "a")  # Recall
    assert coordinator.state is Phase.COMMITTING
    world.drain()
    assert world.lanes["b"].holders == {"elder"}
