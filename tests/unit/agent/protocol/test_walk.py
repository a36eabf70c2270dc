"""The agreement over two, three and four agents, by exhaustion: every order of messages, every fault, every deadline.

Each walk checks in every state that no call has a result while another of its transfer was told "aborted", that
each call is answered once, and that "unknown" comes only from who has lost somebody or waited in vain; and wherever
nothing has to happen any more, that nobody is left in a transfer, past its deadline or with a lane.
"""

from __future__ import annotations

from typing import Any

import pytest

from etha.agent.protocol.coordinator import Coordinator, Phase, Settle
from etha.agent.protocol.participant import Moving, Participant
from etha.peer.messages import Committed, VerdictAnswer
from tests.unit.agent.protocol.walking import HubWalk, Violation, Walk

TWO = {"t": ("a",), "i": ("b",)}
FAN = {"t": ("a",), "i": ("b", "c")}
GATHER = {"t": ("a", "b"), "i": ("c",)}
CHAIN = {"t": ("a", "b"), "i": ("b", "c")}
FOUR = {"t": ("a",), "i": ("b", "c", "d")}
AB, AC, BC = ("a", "b"), ("a", "c"), ("b", "c")

three = pytest.mark.parametrize("agents", [FAN, GATHER, CHAIN], ids=["fan", "gather", "chain"])


def test_two_agents_with_every_fault_at_once() -> None:
    walk = Walk(TWO, ends=2, fails=2, cuts=(AB,), crash=("a", "b"), breaks=1).go()
    assert walk.states > 20_000
    assert {("result", "result"), ("aborted", "aborted"), ("unknown", "result")} <= walk.outcomes


def test_two_agents_whose_lanes_come_late_and_are_recalled() -> None:
    assert Walk(TWO, ends=1, cuts=(AB,), crash=("a", "b"), recalls=2).go().states > 4_000


def test_two_agents_whose_lanes_are_held_with_ready_and_recalled() -> None:
    walk = Walk(TWO, held=True, ends=2, cuts=(AB,), crash=("a", "b"), recalls=2).go()
    assert walk.states > 4_000
    assert {("result", "result"), ("withdrawn", "withdrawn"), ("aborted", "aborted")} <= walk.outcomes


@pytest.mark.slow
def test_two_agents_with_lanes_held_and_a_second_transfer_behind_the_first() -> None:
    walk = Walk(TWO, held=True, calls_each=2, ends=1, fails=1, recalls=1).go()
    assert walk.states > 4_000
    assert ("result",) * 4 in walk.outcomes


@pytest.mark.slow
@three
def test_three_agents_whose_calls_come_and_go_with_lanes_held(agents: dict[str, Any]) -> None:
    assert Walk(agents, held=True, ends=1, recalls=1).go().states > 5_000


def test_two_agents_and_a_second_transfer_behind_the_first() -> None:
    walk = Walk(TWO, calls_each=2, ends=1, fails=1, cuts=(AB,), crash=("a", "b")).go()
    assert walk.states > 20_000
    assert ("result",) * 4 in walk.outcomes


@pytest.mark.slow
@three
def test_three_agents_one_of_which_crashes_and_any_deadline(agents: dict[str, Any]) -> None:
    walk = Walk(agents, made=True, crash=("a", "b", "c"), ends=1, fails=1, eager=False).go()
    assert walk.states > 90_000
    # A crash alone leaves nobody in doubt for good: who lives can ask who knows.
    assert not any("unknown" in outcome for outcome in walk.outcomes)


@pytest.mark.slow
@three
def test_three_agents_one_of_which_crashes_and_doubt_ends_at_any_time(agents: dict[str, Any]) -> None:
    walk = Walk(agents, made=True, crash=("a", "b", "c"), breaks=1).go()
    assert walk.states > 10_000
    assert any("unknown" in outcome for outcome in walk.outcomes)


@pytest.mark.slow
@three
@pytest.mark.parametrize("link", [AB, AC, BC], ids="-".join)
def test_three_agents_that_lose_one_link_and_any_deadline(agents: dict[str, Any], link: tuple[str, str]) -> None:
    assert Walk(agents, made=True, cuts=(link,), ends=1).go().states > 10_000


@pytest.mark.slow
@three
@pytest.mark.parametrize("frozen", ["a", "b", "c"])
def test_three_agents_one_of_which_is_frozen_and_thaws(agents: dict[str, Any], frozen: str) -> None:
    cuts = tuple(link for link in (AB, AC, BC) if frozen in link)
    assert Walk(agents, made=True, cuts=cuts).go().states > 5_000


@pytest.mark.slow
@three
def test_three_agents_whose_calls_come_and_go(agents: dict[str, Any]) -> None:
    assert Walk(agents, ends=1, recalls=1).go().states > 5_000


def test_four_agents_and_a_link_of_the_coordinator() -> None:
    walk = Walk(FOUR, moved=True, cuts=(AB,), eager=False).go()
    assert walk.states > 40_000
    assert {outcome[1:] for outcome in walk.outcomes} == {("aborted",) * 3, ("result",) * 3}


# ---- agents that are not all linked -------------------------------------------------------------

AD, HUBS = ("a", "d"), ("a", "b")
TWICE_TWO = {"t": ("a", "c"), "i": ("b", "d")}


@pytest.mark.parametrize(
    ("agents", "given"),
    [
        (FOUR, {"moved": True, "crash": ("a",)}),
        (FOUR, {"moved": True, "crash": ("b",)}),
        (FOUR, {"moved": True, "crash": ("c",)}),
        (FOUR, {"moved": True, "cuts": (AD,)}),
        pytest.param(FOUR, {"moved": True, "cuts": (AC, AD)}, marks=pytest.mark.slow),
        pytest.param(TWICE_TWO, {"made": True, "crash": HUBS}, marks=pytest.mark.slow),
    ],
    ids=["coordinator", "other hub", "no hub", "link", "two links", "a hub at any time"],
)
def test_agents_that_speak_through_hubs_end_as_if_all_were_linked(
    agents: dict[str, Any], given: dict[str, Any]
) -> None:
    """One of them crashes, or links of the coordinator are cut: nobody is in doubt who would not be with more links."""
    assert (
        HubWalk(agents, eager=False, hubs=HUBS, **given).go().outcomes
        == Walk(agents, eager=False, **given).go().outcomes
    )


@pytest.mark.slow
@pytest.mark.parametrize(("crash", "cut"), [("a", BC), ("b", AC)])
def test_a_hub_crashes_and_a_link_of_the_other_is_cut(crash: str, cut: tuple[str, str]) -> None:
    assert HubWalk(FOUR, moved=True, crash=(crash,), cuts=(cut,), eager=False, hubs=HUBS).go().states > 50_000


@pytest.mark.slow
def test_an_answer_through_one_hub_only_is_lost_with_it() -> None:
    first = HubWalk(FOUR, moved=True, cuts=(AC, AD), eager=False, hubs=HUBS, through_all=False).go()
    assert ("result", "result", "result", "unknown") in first.outcomes


def test_who_does_not_answer_an_agent_that_only_a_hub_has_lost_leaves_it_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Participant, "_may_pass", lambda self, agent, message: agent not in self.lost_agents)
    walk = HubWalk(FOUR, moved=True, cuts=(AD,), eager=False, hubs=HUBS).go()
    assert ("result", "result", "result", "unknown") in walk.outcomes


# ---- the walk sees what it is there for ---------------------------------------------------------


def commit_in_doubt(self: Participant, agent: str, seq: int) -> None:
    if self.current is not None and self.state is Moving.DOUBT:
        self.move(Moving.COMMITTED)
        self._tell(agent, Committed(seq=seq))
        self._finish("committed", None)
    else:
        commit(self, agent, seq)


def answer_without_a_fence(self: Participant, agent: str, seq: int) -> None:
    if self.current is not None and self.state is Moving.VOTED and self.current.coordinator != self.me:
        self._tell(agent, VerdictAnswer(seq=seq, verdict="fenced"))
    else:
        question(self, agent, seq)


def answer_and_go_on_moving(self: Participant, agent: str, seq: int) -> None:
    if self.current is not None and self.state is Moving.MOVING and self.current.coordinator != self.me:
        self._tell(agent, VerdictAnswer(seq=seq, verdict="aborted"))
    else:
        question(self, agent, seq)


def settle_without_an_acknowledgement(self: Coordinator, agent: str) -> list[Any]:
    self._awaited.discard(agent)
    if self._awaited:
        return []
    self.move(Phase.COLLECTING)
    return [(self.me, Settle(seq=self.seq, outcome="committed", cause=None)), *self._next()]


commit, question = Participant._commit, Participant._question


@pytest.mark.parametrize(
    ("owner", "name", "changed", "walk"),
    [
        (Participant, "_commit", commit_in_doubt, Walk(FOUR, moved=True, cuts=(AB,), eager=False)),
        (Participant, "_question", answer_without_a_fence, Walk(FAN, made=True, cuts=(AB,))),
        (Participant, "_question", answer_and_go_on_moving, Walk(FAN, made=True, cuts=(AB,))),
        (Coordinator, "_settle", settle_without_an_acknowledgement, Walk(TWO, cuts=(AB,))),
        (Coordinator, "_settle", settle_without_an_acknowledgement, Walk(FAN, made=True, cuts=(AB,))),
    ],
    ids=["no fence", "fenced in word only", "aborted in word only", "old rule of two", "old rule of three"],
)
def test_without_one_of_its_rules_the_agreement_breaks(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, changed: Any, walk: Walk
) -> None:
    monkeypatch.setattr(owner, name, changed)
    with pytest.raises(Violation, match="a result, and elsewhere aborted"):
        walk.go()
