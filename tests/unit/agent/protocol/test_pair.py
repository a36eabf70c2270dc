"""A pair as one agent sees it: let in, formed, lost, formed again; every caller is answered once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etha.agent.protocol.effects import Answer, Fail, Member
from etha.agent.protocol.machine import ImpossibleMove
from etha.agent.protocol.pair import Broken, Formed, Join, JoinRequest, Leave, Missed, PairMachine, PairPhase, Sever
from etha.errors import AgentUnavailableError, ConfigError, PeerLostError, RedisUnavailableError, RendezvousTimeoutError
from etha.store.records import PairView, SideView
from etha.store.records import RankHolder as Holder
from tests.examples import examples

WORLDS = {"t": 2, "i": 1}
MEMBERS: list[Member] = [("t", 0), ("t", 1), ("i", 0)]


class Redis:
    """What the store would hold and answer: joins complete an epoch, a leave of a formed pair loses it."""

    def __init__(self) -> None:
        self.state, self.epoch, self.reason = "forming", 0, None
        self.members: dict[Member, Holder] = {}

    def join(self, asked: JoinRequest) -> PairView:
        known = self.members.get((asked.side, asked.rank))
        if self.state == "formed" and known is not None and known.is_same(asked.holder):
            return self.view()
        if self.state == "formed":
            self.state, self.reason = "lost", "relaunched"
        self.members[asked.side, asked.rank] = replace(asked.holder, epoch=self.epoch + 1)
        if all(m in self.members and self.members[m].epoch == self.epoch + 1 for m in MEMBERS):
            self.state, self.epoch, self.reason = "formed", self.epoch + 1, None
        return self.view()

    def leave(self, leave: Leave) -> None:
        known = self.members.get((leave.side, leave.rank))
        if known is not None and known.is_same(leave.holder):
            del self.members[leave.side, leave.rank]
            if self.state == "formed":
                self.state, self.reason = "lost", leave.reason

    def sever(self, epoch: int) -> None:
        if (self.state, self.epoch) == ("formed", epoch):
            self.state, self.reason = "lost", "died"

    def restored(self, back: Collection[Member]) -> PairView:
        """After data loss, agents have put back only these ranks of a formed pair so far."""
        view = self.view()
        sides = {
            name: replace(side, members={r: h for r, h in side.members.items() if (name, r) in back})
            for name, side in view.sides.items()
        }
        return replace(view, sides=sides)

    def view(self) -> PairView:
        sides = {
            side: SideView(
                world_size=world if any(s == side for s, _ in self.members) else None,
                members={r: h for (s, r), h in sorted(self.members.items()) if s == side},
            )
            for side, world in WORLDS.items()
        }
        return PairView(name="p", state=self.state, epoch=self.epoch, reason=self.reason, sides=sides)  # type: ignore[arg-type]


class World:
    """One agent, its store (asked in order, as the shell does) and its callers."""

    def __init__(self) -> None:
        self.pair, self.redis = PairMachine("p", "redis://here"), Redis()
        self.todo: deque[Join | Leave | Sever] = deque()
        self.meeting: list[int] = []
        self.missed: list[int] = []
        self.pids = dict.fromkeys(MEMBERS, 1)
        self.waiting: dict[tuple[str, int], Member] = {}
        self.answers: dict[tuple[str, int], int] = {}
        self.errors: dict[tuple[str, int], Any] = {}
        self.calls = 0

    def holder(self, member: Member) -> Holder:
        agent = "a" if member[0] == "t" else "b"
        return Holder(agent=agent, host="h", pid=100 * (MEMBERS.index(member) + 1) + self.pids[member], start=1)

    def ask(self, member: Member, *, give_up: bool = False) -> tuple[str, int]:
        self.calls += 1
        key = (f"{member[0]}{member[1]}", self.calls)
        self.waiting[key] = member
        other = "i" if member[0] == "t" else "t"
        world = WORLDS[member[0]]
        asked = JoinRequest(
            key=key,
            side=member[0],
            rank=member[1],
            remote=other,
            world_size=world,
            launch=None,
            holder=self.holder(member),
            give_up=give_up,
        )
        self.perform(self.pair.ask(asked))
        return key

    def step(self, *, refuse: bool = False, severed: bool = False) -> None:
        """The store takes the oldest request. ``severed``: another agent ends the epoch before the view is read."""
        match self.todo.popleft():
            case Join(asked=asked) if refuse:
                self.perform(self.pair.refused(asked.key, ConfigError("held")))
            case Join(asked=asked):
                self.redis.join(asked)
                if severed:
                    self.redis.sever(self.redis.epoch)
                view = self.redis.view()
                if asked.key not in self.waiting:  # as the shell does
                    leave = Leave(side=asked.side, rank=asked.rank, holder=asked.holder, reason="closed")
                    self.redis.leave(leave)
                self.perform(self.pair.joined(asked.key, view))
            case Leave() as leave:
                self.redis.leave(leave)
            case Sever(epoch=epoch):
                self.redis.sever(epoch)

    def meet(self) -> None:
        """The agents of the oldest epoch that was formed are linked."""
        self.perform(self.pair.met(self.meeting.pop(0)))

    def look(self) -> None:
        self.perform(self.pair.viewed(self.redis.view()))

    def drain(self) -> None:
        while self.todo or self.meeting:
            self.step() if self.todo else self.meet()
        self.look()
        while self.todo or self.meeting:
            self.step() if self.todo else self.meet()

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Join() | Leave() | Sever():
                    self.todo.append(effect)
                case Answer(call=key, message=message):
                    assert self.waiting.pop(key), f"{key} answered twice"
                    assert message.epoch == self.pair.epoch and self.pair.state is PairPhase.FORMED
                    self.answers[key] = message.epoch
                case Fail(call=key, error=error):
                    assert self.waiting.pop(key), f"{key} answered twice"
                    self.errors[key] = error
                case Formed(epoch=epoch):
                    assert epoch == self.pair.epoch
                    self.meeting.append(epoch)
                case Missed(epoch=epoch):
                    assert epoch > max(self.missed, default=0), "told twice"
                    self.missed.append(epoch)
                case Broken(epoch=epoch, error=error):
                    assert epoch == self.pair.epoch and "call init_pair and register_tensors again" in error.message


def formed_world() -> tuple[World, PairView]:
    """All have come; what Redis says then."""
    world = World()
    for member in MEMBERS:
        world.ask(member)
    world.drain()
    assert world.pair.view is not None
    return world, world.pair.view


def test_all_come_and_the_pair_forms() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    world.drain()
    assert [world.answers[key] for key in keys] == [1, 1, 1]
    assert world.pair.error(1) is None
    again = world.ask(("t", 0))
    world.drain()
    assert world.answers[again] == 1, "a no-op at the current epoch"


def test_a_deadline_says_who_is_missing_and_frees_the_rank() -> None:
    world = World()
    key = world.ask(("t", 1))
    world.drain()
    world.perform(world.pair.expire(key, cancelled=False))
    error = world.errors[key]
    assert isinstance(error, RendezvousTimeoutError) and error.missing == {"t": (0,), "i": (0,)}
    assert error.message == "init_pair of 'p' by t rank 1 ended at its deadline; missing: t rank 0; everybody of i"
    world.drain()
    assert ("t", 1) not in world.redis.members


def test_who_gives_up_at_the_same_moment_is_not_named() -> None:
    world = World()
    keys = {member: world.ask(member) for member in MEMBERS[:2]}
    world.drain()
    [first, second] = keys
    already = world.pair.missing(world.pair.waiting[keys[second]])
    world.perform(world.pair.expire(keys[first], cancelled=False))
    world.drain()  # Redis says that it has left
    world.perform(world.pair.expire(keys[second], cancelled=False, already=already))
    for key in keys.values():
        error = world.errors[key]
        assert isinstance(error, RendezvousTimeoutError) and error.missing == already, error.missing


def test_redis_tells_whose_agents_are_gone() -> None:
    """An agent may have no link to the lost one, and hear of it from Redis before a hub tells."""
    world, formed = formed_world()
    lost = replace(formed, state="lost", reason="died", error="the agent of i rank 0 is gone", culprits=(("i", 0),))
    [broken] = [e for e in world.pair.viewed(lost) if isinstance(e, Broken)]
    assert broken.error.reason == "died" and broken.error.culprits == (("i", 0),)


def test_who_was_displaced_hears_relaunched_however_the_next_epoch_ended() -> None:
    world, formed = formed_world()
    later = replace(formed, epoch=2, state="lost", reason="closed", error="t rank 0 was closed", sides={})
    [broken] = [e for e in world.pair.viewed(later) if isinstance(e, Broken)]
    assert (broken.epoch, broken.error.reason) == (1, "relaunched")
    error = world.pair.error(1)
    assert error is not None and error.reason == "relaunched"


def test_a_call_of_an_older_epoch_hears_relaunched_when_the_newer_one_has_closed() -> None:
    world, formed = formed_world()
    world.pair.viewed(replace(formed, epoch=2))
    world.pair.viewed(replace(formed, epoch=2, state="lost", reason="closed", error="t rank 0 was closed", sides={}))
    for epoch, reason in ((1, "relaunched"), (2, "closed")):
        error = world.pair.error(epoch)
        assert error is not None and error.reason == reason


def test_a_deadline_before_redis_answered_is_redis_fault() -> None:
    world = World()
    key = world.ask(("t", 1))
    world.perform(world.pair.expire(key, cancelled=False))
    assert isinstance(world.errors[key], RedisUnavailableError)
    assert "before Redis at redis://here had answered" in world.errors[key].message


def test_a_call_that_is_cancelled_early_says_nothing_about_redis() -> None:
    world = World()
    key = world.ask(("t", 1))
    world.perform(world.pair.expire(key, cancelled=True))
    assert isinstance(world.errors[key], RendezvousTimeoutError)
    assert "was cancelled before Redis had let it join" in world.errors[key].message


def test_a_death_breaks_the_epoch_before_redis_says_so() -> None:
    world = World()
    for member in MEMBERS:
        world.ask(member)
    world.drain()
    world.perform(world.pair.depart("t", 1, world.holder(("t", 1)), "died"))
    lost = world.pair.error(1)
    assert isinstance(lost, PeerLostError) and lost.reason == "died" and lost.outcome == "withdrawn"
    assert "t rank 1 died (pid 201 on h)" in lost.message and "epoch 1" in lost.message
    world.drain()
    world.pids["t", 1] += 1
    keys = [world.ask(member) for member in MEMBERS]
    world.drain()
    assert {world.answers[key] for key in keys} == {2}
    assert "this batch belongs to epoch 1" in world.pair.error(1).message  # type: ignore[union-attr]


def test_nobody_is_let_in_before_the_agents_have_met() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    while world.todo:
        world.step()
    assert world.pair.state is PairPhase.FORMED and not world.answers
    world.meet()
    assert [world.answers[key] for key in keys] == [1, 1, 1]


def test_agents_that_cannot_meet_form_another_epoch_until_they_can() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    for epoch in range(1, 6):
        while world.todo:
            world.step()
        assert world.redis.epoch == epoch and world.meeting == [epoch] and not world.answers
        world.perform(world.pair.unmet(world.meeting.pop(), AgentUnavailableError("no link to b")))
        assert not world.errors and world.pair.state is PairPhase.LOST
        assert world.missed == list(range(1, epoch + 1)), "the shell makes a longer pause after each"
    world.drain()
    assert {world.answers[key] for key in keys} == {6}


def test_an_agent_that_only_hears_that_others_could_not_meet_pauses_too() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    for epoch in (1, 2, 3):
        while world.todo:
            world.step()
        world.redis.sever(epoch)
        world.meeting.clear()
        world.look()
        assert not world.errors and world.missed[-1] == epoch
    world.drain()
    assert {world.answers[key] for key in keys} == {4} and world.missed == [1, 2, 3]


@pytest.mark.parametrize("paused", [True, False])
def test_a_deadline_while_no_epoch_lasts_says_why(paused: bool) -> None:
    world = World()
    key, *_ = [world.ask(member) for member in MEMBERS]
    while world.todo:
        world.step()
    world.perform(world.pair.unmet(world.meeting.pop(), AgentUnavailableError("no link to b")))
    if not paused:
        for _ in "the end of the epoch", "i0", "t0":
            world.step()
    world.perform(world.pair.expire(key, cancelled=False, paused=paused))
    error = world.errors[key]
    assert isinstance(error, AgentUnavailableError)
    assert "both sides had come, but the epoch was over at once: no link to b" in error.message
    assert ("; missing now: " in error.message) is not paused


def test_agents_whose_settings_do_not_fit_form_another_epoch_once_and_then_say_so() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    while world.todo:
        world.step()
    world.perform(world.pair.unmet(world.meeting.pop(), ConfigError("one encrypts")))
    assert not world.errors and world.pair.state is PairPhase.LOST
    while world.todo:
        world.step()
    assert world.redis.epoch == 2 and world.meeting == [2] and not world.answers
    world.perform(world.pair.unmet(world.meeting.pop(), ConfigError("one encrypts, again")))
    assert {world.errors[key].message for key in keys} == {"one encrypts, again"}
    world.drain()
    keys = [world.ask(member) for member in MEMBERS]
    world.drain()
    assert {world.answers[key] for key in keys} == {3}


def test_an_epoch_that_was_over_before_its_last_caller_saw_it_is_followed_by_another() -> None:
    """The last caller completes an epoch with a dead agent, and another agent has found that out by then."""
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    while len(world.todo) > 1:
        world.step()
    world.step(severed=True)
    assert not world.errors and world.redis.view().state == "lost"
    world.drain()
    assert {world.answers[key] for key in keys} == {2}


@pytest.mark.parametrize("how", ["death", "link", "view"])
def test_an_epoch_that_ends_before_anybody_was_let_in_is_followed_by_another(how: str) -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS[:2]]
    dead = world.ask(("i", 0))
    while world.todo:
        world.step()
    match how:
        case "death":
            world.perform(world.pair.depart("i", 0, world.holder(("i", 0)), "died"))
            del world.waiting[dead]
        case "link":
            world.perform(world.pair.on_agent_lost("b", "no beats"))
        case "view":
            world.redis.sever(1)
            world.look()
    assert not world.errors and not world.answers
    world.meeting.clear()
    world.drain()
    if how == "death":
        assert not world.answers, "they wait for the next one"
        world.pids["i", 0] += 1
        world.ask(("i", 0))
        world.drain()
    assert {world.answers[key] for key in keys} == {2}


def test_a_deadline_while_agents_link_says_so() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    while world.todo:
        world.step()
    world.perform(world.pair.expire(keys[0], cancelled=False))
    assert (
        isinstance(world.errors[keys[0]], AgentUnavailableError) and "had not linked" in world.errors[keys[0]].message
    )


def test_a_lost_link_names_the_ranks_behind_it_and_all_may_come_again() -> None:
    world = World()
    for member in MEMBERS:
        world.ask(member)
    world.drain()
    world.perform(world.pair.on_agent_lost("stranger", "no beats"))
    assert world.pair.error(1) is None
    world.perform(world.pair.on_agent_lost("b", "no beats"))
    lost = world.pair.error(1)
    assert isinstance(lost, PeerLostError) and lost.reason == "died"
    assert "the agent of i rank 0 is gone (no beats)" in lost.message
    keys = [world.ask(member) for member in MEMBERS]
    world.drain()
    assert {world.answers[key] for key in keys} == {2}


def test_who_comes_again_before_redis_knows_of_the_loss_is_not_forgotten() -> None:
    world = World()
    for member in MEMBERS:
        world.ask(member)
    world.drain()
    world.perform(world.pair.on_agent_lost("b", "no beats"))
    world.todo.clear()  # Redis was away
    keys = [world.ask(member) for member in MEMBERS]
    world.drain()
    assert {world.answers[key] for key in keys} == {2}


def dies(world: World, member: Member, call: tuple[str, int]) -> None:
    """The caller's process ends while its call waits."""
    world.waiting.pop(call)
    world.perform(world.pair.depart(*member, world.holder(member), "died"))
    world.drain()


def test_a_call_that_gives_up_hears_that_everybody_of_the_other_side_has_left() -> None:
    world = World()
    waits = world.ask(("t", 0), give_up=True)
    world.drain()
    assert waits not in world.errors, "nobody has come yet"
    call = world.ask(("i", 0))
    world.drain()
    dies(world, ("i", 0), call)
    error = world.errors[waits]
    assert isinstance(error, PeerLostError) and (error.reason, error.outcome) == ("died", "withdrawn")
    assert "everybody of i has left before both sides were complete" in error.message
    assert not world.redis.members


def test_a_call_that_gives_up_waits_while_somebody_of_the_other_side_does() -> None:
    world = World()
    waits = world.ask(("i", 0), give_up=True)
    first = world.ask(("t", 0))
    world.drain()
    dies(world, ("t", 0), first)
    assert waits in world.errors
    waits, first = world.ask(("i", 0)), world.ask(("t", 1))
    world.drain()
    dies(world, ("t", 1), first)
    assert waits not in world.errors, "it does not give up"
    world.ask(("t", 0))
    world.ask(("t", 1))
    world.drain()
    assert world.answers[waits] == 1


def test_who_is_evicted_hears_it() -> None:
    world = World()
    key = world.ask(("t", 0))
    world.drain()
    world.redis.members["t", 0] = replace(world.redis.members["t", 0], pid=99)
    world.look()
    assert isinstance(world.errors[key], PeerLostError) and world.errors[key].reason == "relaunched"
    assert "t rank 0 was evicted by a newer launch of its side" in world.errors[key].message


def test_who_waits_joins_again_when_redis_has_forgotten_it() -> None:
    world = World()
    key = world.ask(("t", 0))
    world.drain()
    del world.redis.members["t", 0]
    world.look()
    assert key not in world.errors
    world.drain()
    assert ("t", 0) in world.redis.members
    for member in MEMBERS[1:]:
        world.ask(member)
    world.drain()
    assert world.answers[key] == 1


def test_an_older_view_is_ignored() -> None:
    world = World()
    old = world.redis.view()
    for member in MEMBERS:
        world.ask(member)
    world.drain()
    assert world.pair.viewed(old) == [] and world.pair.state is PairPhase.FORMED


@pytest.mark.parametrize("back", [MEMBERS[:1], MEMBERS[1:], []])
def test_ranks_that_their_agents_put_back_later_stay_known(back: list[Member]) -> None:
    """A registration in between would be planned for too few ranks."""
    world = World()
    for member in MEMBERS:
        world.ask(member)
    world.drain()
    assert world.pair.viewed(world.redis.restored(back)) == []
    assert sorted(world.pair.members()) == sorted(MEMBERS)


def test_an_epoch_that_was_not_seen_before_redis_lost_it_forms_once_all_are_back() -> None:
    world = World()
    keys = [world.ask(member) for member in MEMBERS]
    for asked in [world.todo.popleft() for _ in MEMBERS]:
        assert isinstance(asked, Join)
        world.redis.join(asked.asked)
        world.perform(world.pair.joined(asked.asked.key, world.redis.restored(MEMBERS[:1])))
    assert world.pair.state is PairPhase.FORMING and not world.meeting
    world.drain()
    assert [world.answers[key] for key in keys] == [1, 1, 1]


def test_an_impossible_move_tells_the_story() -> None:
    with pytest.raises(ImpossibleMove, match="pair p: FORMING -> LOST is impossible; so far: FORMING"):
        PairMachine("p").move(PairPhase.LOST)


class Walk(RuleBasedStateMachine):
    """Any order of callers, deaths, deadlines, refusals, and answers and views of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(member=st.sampled_from(MEMBERS))
    def ask(self, member: Member) -> None:
        self.world.ask(member)

    @rule()
    def all_come(self) -> None:
        for member in MEMBERS:
            self.world.ask(member)
        self.world.drain()

    @precondition(lambda self: self.world.todo)
    @rule(refuse=st.integers(0, 5), severed=st.integers(0, 3))
    def store(self, refuse: int, severed: int) -> None:
        self.world.step(refuse=refuse == 0, severed=severed == 0)

    @rule()
    def look(self) -> None:
        self.world.look()

    @precondition(lambda self: self.world.redis.state == "formed")
    @rule(back=st.sets(st.sampled_from(MEMBERS)))
    def look_while_ranks_are_put_back(self, back: set[Member]) -> None:
        self.world.perform(self.world.pair.viewed(self.world.redis.restored(back)))

    @precondition(lambda self: self.world.meeting)
    @rule(fails=st.integers(0, 3))
    def meet(self, fails: int) -> None:
        world = self.world
        if fails == 0:
            world.perform(world.pair.unmet(world.meeting.pop(0), AgentUnavailableError("no link")))
        else:
            world.meet()

    @rule()
    def lose(self) -> None:
        self.world.perform(self.world.pair.on_agent_lost("b", "no beats"))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data(), cancelled=st.booleans())
    def expire(self, data: st.DataObject, cancelled: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.waiting)))
        self.world.perform(self.world.pair.expire(key, cancelled=cancelled))

    @rule(member=st.sampled_from(MEMBERS), died=st.booleans())
    def depart(self, member: Member, died: bool) -> None:
        world = self.world
        for key in [key for key, who in world.waiting.items() if who == member]:
            del world.waiting[key]  # its worker is gone: nobody waits for an answer
        world.perform(world.pair.depart(*member, world.holder(member), "died" if died else "closed"))
        world.pids[member] += died

    @invariant()
    def consistent(self) -> None:
        pair = self.world.pair
        assert set(pair.waiting) == set(self.world.waiting)
        assert pair._inside <= set(pair.waiting)
        assert pair.epoch <= self.world.redis.epoch
        assert (pair.error(pair.epoch) is None) == (pair.state is PairPhase.FORMED)
        if pair.state is PairPhase.LOST:
            assert pair.lost is not None
        if pair.state is PairPhase.FORMED:
            assert sorted(pair.members()) == sorted(MEMBERS), "an epoch lacks some of its ranks"

    def teardown(self) -> None:
        world = self.world
        world.drain()
        for key, member in world.waiting.items():
            epoch = world.redis.members[member].epoch
            assert epoch == world.redis.epoch + 1, f"{key} is in epoch {epoch}, and waits for another"
        for key in sorted(world.waiting):
            if key in world.waiting:
                world.perform(world.pair.expire(key, cancelled=False))
        assert not world.waiting, "a caller without an exit"
        world.drain()
        keys = [world.ask(member) for member in MEMBERS]
        world.drain()
        assert {world.answers.get(key) for key in keys} == {world.pair.epoch}, "the pair does not form any more"


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


def test_a_deadline_after_agents_could_not_link_says_why_they_could_not() -> None:
    world = World()
    key, *_ = [world.ask(member) for member in MEMBERS]
    while world.todo:
        world.step()
    world.perform(world.pair.unmet(world.meeting.pop(), AgentUnavailableError("this agent is full")))
    while world.todo:
        world.step()
    world.perform(world.pair.expire(key, cancelled=False))
    assert "had not linked yet; the epoch before was over at once: this agent is full" in world.errors[key].message
