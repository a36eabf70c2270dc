"""One registration on one agent: everybody comes, plans are agreed on, everybody is told once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.distributed.tensor.placement_types import Shard

from etha.agent.protocol.capabilities import Capabilities, Terms
from etha.agent.protocol.effects import Answer, Fail, Member
from etha.agent.protocol.evaluation import Evaluation
from etha.agent.protocol.machine import ImpossibleMove
from etha.agent.protocol.registration import (
    BatchRegistration,
    Declare,
    EnrolAgain,
    EvaluateRoster,
    RegistrationState,
    Stand,
    Unenroll,
)
from etha.errors import PeerLostError, ProtocolError, RegistrationError, RendezvousTimeoutError, Violation
from etha.plan import Layout, TensorSpec, build_agent_plan
from tests.examples import examples

ONE = {"t": ("a", "a"), "i": ("a",)}
TWO = {"t": ("a", "a"), "i": ("b",)}
BAD = Violation(code="dtype", name="w", side="t", rank=None, text="no")


def evaluation(refused: tuple[Violation, ...] = ()) -> Evaluation:
    return Evaluation(
        sides=("i", "t"),
        plans={},
        digests={"t": "1234"},
        violations={"i": refused, "t": refused},
        refused=refused,
        atomic=False,
        bucket_size=None,
        verify=None,
        seq=4,
        tensors=1,
        sizes={},
    )


def verdict(digest: str | None = None, **more: Any) -> str:
    found = Capabilities(
        digest=evaluation().digest if digest is None else digest, **{"staging": 100, "streams": 4, **more}
    )
    return found.to_text()


class World:
    """The machine of agent ``a``, a roster, and what callers were told."""

    def __init__(self, agents: dict[str, tuple[str, ...]]) -> None:
        self.agents = agents
        self.everybody: list[Member] = [(s, r) for s, ranks in agents.items() for r in range(len(ranks))]
        self.locals = [(s, r) for s, r in self.everybody if agents[s][r] == "a"]
        self.batch = BatchRegistration("'b' of pair 'p'", me="a", agents=agents)
        self.entries: dict[Member, str] = {}
        self.verdicts: dict[str, str] = {}
        self.newest = 0
        self.complete = False
        self.waiting: dict[tuple[str, int], Member] = {}
        self.expect: dict[tuple[str, int], Any] = {}
        self.stood = 0
        self.evaluating = False
        self.calls = 0

    def enter(self, member: Member) -> tuple[str, int]:
        self.calls += 1
        key = (f"{member[0]}{member[1]}", self.calls)
        self.publish(member)
        self.waiting[key] = member
        self.perform(self.batch.enrolled(key, member))
        return key

    def publish(self, member: Member) -> None:
        self.entries[member] = "{}"
        self.complete = self.complete or len(self.entries) == len(self.everybody)

    def look(self) -> None:
        waiting = frozenset(self.batch.waiting)
        self.perform(self.batch.rostered(dict(self.entries), dict(self.verdicts), self.newest, waiting))

    def plan(self, refused: bool = False) -> None:
        self.evaluating = False
        mine = Capabilities.from_text("a", verdict())
        self.perform(self.batch.evaluated(evaluation((BAD,) if refused else ()), mine))

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Answer(call=key):
                    assert self.waiting.pop(key), f"{key} answered twice"
                    assert self.batch.state is RegistrationState.REGISTERED
                    self.expect[key] = effect.message
                case Fail(call=key, error=error):
                    assert self.waiting.pop(key), f"{key} answered twice"
                    self.expect[key] = error
                case EnrolAgain(call=key):
                    assert self.waiting.pop(key), f"{key} answered, and entered again"
                    self.expect[key] = effect
                case EvaluateRoster(entries=entries):
                    assert set(entries) == set(self.everybody) and not self.evaluating
                    self.evaluating = True
                case Declare(verdict=text):
                    self.verdicts["a"] = text
                case Stand(terms=terms):
                    self.stood += 1
                    self.terms = terms
                case Unenroll(member=member):
                    if not self.complete:
                        self.entries.pop(member, None)


def test_everybody_comes_and_is_told() -> None:
    world = World(ONE)
    keys = [world.enter(member) for member in world.everybody]
    world.look()
    world.plan()
    assert [world.expect[key].seq for key in keys] == [4, 4, 4] and world.stood == 1


@pytest.mark.parametrize("nccl", [("", ""), ("yes", ""), ("0" * 256, "yes")], ids=["none", "one", "both"])
def test_only_agents_without_nccl_carry_for_each_other(nccl: tuple[str, str]) -> None:
    """All agents know of each other's NCCL only once they have planned; the digests stay those that were compared."""
    part = TensorSpec((4096, 512), torch.float32, Layout([0], [Shard(0)]))
    rest = TensorSpec((2,), torch.float32, Layout((2,), [Shard(0)]))
    plan = build_agent_plan(
        {"w": part, "x": TensorSpec((2,), torch.float32, Layout([0], [Shard(0)]))},
        {"w": part, "x": rest},
        source_hosts=["s"],
        target_hosts=["t", "t"],
        source_agents=["s"],
        target_agents=["a", "b"],
    )
    assert plan.carries
    batch = BatchRegistration("'b' of pair 'p'", me="a", agents={"t": ("a",), "i": ("b",)})
    mine, theirs = (verdict(nccl=found) for found in nccl)
    entries: dict[Member, str] = {("t", 0): "{}", ("i", 0): "{}"}
    batch.enrolled(("t0", 1), ("t", 0))
    batch.rostered(entries, {}, 0, frozenset(batch.waiting))
    batch.evaluated(replace(evaluation(), plans={"t": plan}), Capabilities.from_text("a", mine))
    effects = batch.rostered(entries, {"a": mine, "b": theirs}, 0, frozenset(batch.waiting))
    [stand] = [effect for effect in effects if isinstance(effect, Stand)]
    assert stand.evaluation.plans["t"].carries != all(nccl)
    assert stand.evaluation.plans["t"] is (plan.uncarried() if all(nccl) else plan)
    assert stand.evaluation.digests == evaluation().digests


def test_two_agents_compare_their_plans() -> None:
    world = World(TWO)
    keys = [world.enter(member) for member in world.locals]
    world.publish(("i", 0))
    world.look()
    world.plan()
    assert world.batch.state is RegistrationState.AGREEING and set(world.waiting) == set(keys)
    world.verdicts["b"] = verdict()
    world.look()
    assert world.batch.state is RegistrationState.REGISTERED and not world.waiting


def test_all_agents_move_on_the_same_terms() -> None:
    world = World(TWO)
    for member in world.locals:
        world.enter(member)
    world.publish(("i", 0))
    world.look()
    world.verdicts["b"] = verdict(reads=("a", "stranger"), staging=70, streams=9, seq=12)
    world.plan()
    world.look()
    assert world.terms == Terms(reads=frozenset({("b", "a")}), staging=70, streams=4, seq=12)
    shares = Capabilities.from_text("a", verdict(reads=("b",), shared=True))
    other = Capabilities.from_text("b", verdict(reads=("a",)))
    assert Terms.of({"a": shares, "b": other}).reads == {("a", "b")}, "what is written is not read by others"


@pytest.mark.parametrize(
    "text", ["", "d", "d []", "d [[], 0, 1, 1, 0]", "d [[1], false, 1, 1, 0]", "d [[], false, 0, 1, 0]"]
)
def test_a_verdict_that_is_none_fails_the_registration(text: str) -> None:
    world = World(TWO)
    keys = [world.enter(member) for member in world.locals]
    world.publish(("i", 0))
    world.look()
    world.plan()
    world.verdicts["b"] = text
    world.look()
    assert all(isinstance(world.expect[key], ProtocolError) and "agent b" in world.expect[key].message for key in keys)


def test_plans_that_differ_are_refused_by_name() -> None:
    world = World(TWO)
    keys = [world.enter(member) for member in world.locals]
    world.publish(("i", 0))
    world.look()
    world.plan()
    world.verdicts["b"] = verdict("other")
    world.look()
    error = world.expect[keys[0]]
    assert isinstance(error, RegistrationError) and [v.code for v in error.violations] == ["plan_mismatch"]
    assert "agents a and b computed different plans; run the same version of Etha on all" in error.message
    assert world.batch.state is RegistrationState.CLOSED, "nobody here holds it"


def test_a_refusal_reaches_everybody_with_all_reasons() -> None:
    world = World(ONE)
    keys = [world.enter(member) for member in world.everybody]
    world.look()
    world.plan(refused=True)
    for key in keys:
        assert isinstance(world.expect[key], RegistrationError) and world.expect[key].violations == (BAD,)
        assert "batch 'b' of pair 'p' cannot be registered, 1 reason:" in world.expect[key].message


def test_a_deadline_lists_who_is_missing_but_never_oneself() -> None:
    world = World(ONE)
    key = world.enter(("t", 1))
    world.perform(world.batch.expire(key, cancelled=False))  # before the roster was read
    error = world.expect[key]
    assert isinstance(error, RendezvousTimeoutError) and error.missing == {"i": (0,), "t": (0,)}
    assert error.message == (
        "register_tensors of batch 'b' of pair 'p' by t rank 1 ended at its deadline; missing: i rank 0; t rank 0"
    )
    assert world.batch.state is RegistrationState.CLOSED and not world.entries


def test_a_deadline_does_not_list_who_gives_up_at_the_same_moment() -> None:
    world = World(ONE)
    key = world.enter(("t", 1))
    world.publish(("i", 0))
    world.look()
    already = frozenset(world.batch.absent)
    del world.entries["i", 0]
    world.look()
    assert world.batch.absent > already
    world.perform(world.batch.expire(key, cancelled=False, already=already))
    error = world.expect[key]
    assert isinstance(error, RendezvousTimeoutError) and error.missing == {"t": (0,)}


def test_a_rank_whose_entry_is_lost_enters_again() -> None:
    world = World(TWO)
    keys = [world.enter(member) for member in world.locals]
    world.look()
    assert not world.expect
    world.entries.clear()
    world.look()
    assert [world.expect[key] for key in keys] == [EnrolAgain(call=key) for key in keys]
    assert world.batch.state is RegistrationState.CLOSED


def test_a_rank_that_waits_in_an_older_generation_follows_the_others() -> None:
    world = World(TWO)
    key = world.enter(world.locals[0])
    world.newest = 1
    world.look()
    assert isinstance(world.expect[key], EnrolAgain)


def test_who_has_read_all_entries_goes_on_until_somebody_enters_again() -> None:
    world = World(TWO)
    keys = [world.enter(member) for member in world.locals]
    world.publish(("i", 0))
    world.look()
    world.entries.clear()
    world.look()
    world.plan()
    world.look()
    assert world.batch.state is RegistrationState.AGREEING
    world.newest = 1
    world.look()
    assert [world.expect[key] for key in keys] == [EnrolAgain(call=key) for key in keys]


def test_a_lost_pair_ends_every_caller_and_refuses_more() -> None:
    world = World(ONE)
    lost = PeerLostError("i rank 0 died", reason="died")
    first = world.enter(("t", 0))
    world.perform(world.batch.break_up(lost))
    second = world.enter(("t", 1))
    assert world.expect == {first: lost, second: lost}
    assert world.batch.state is RegistrationState.CLOSED and not world.batch.open, "nobody was told that it stands"


def test_a_batch_that_stood_is_lost_until_all_who_hold_it_have_left() -> None:
    world = World(ONE)
    for member in world.everybody[:2]:
        world.enter(member)
    world.publish(("i", 0))
    world.look()
    world.plan()
    lost = PeerLostError("i rank 0 cannot take part", reason="closed")
    assert world.batch.holders == set(world.everybody[:2])
    world.perform(world.batch.break_up(lost))
    late = world.enter(("i", 0))
    assert world.expect[late] == lost and world.batch.holders == set(world.everybody[:2])
    for member in world.everybody[:2]:
        assert world.batch.state is RegistrationState.LOST
        world.perform(world.batch.close(member))
    assert world.batch.state is RegistrationState.CLOSED


def test_an_impossible_move_tells_the_story() -> None:
    world = World(ONE)
    with pytest.raises(ImpossibleMove, match="batch 'b' of pair 'p': ENROLLING -> REGISTERED is impossible"):
        world.batch.move(RegistrationState.REGISTERED)


class Walk(RuleBasedStateMachine):
    """Any order of ranks, looks, plans, refusals, verdicts, deadlines, closes and losses."""

    @initialize(agents=st.sampled_from([ONE, TWO]))
    def begin(self, agents: dict[str, tuple[str, ...]]) -> None:
        self.world = World(agents)

    @precondition(lambda self: self.world.batch.state is not RegistrationState.CLOSED)
    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        world = self.world
        free = [m for m in world.everybody if m not in world.waiting.values() and m not in world.batch.open]
        free = [m for m in free if not (world.complete and m in world.entries)]
        if free:
            member = data.draw(st.sampled_from(free))
            world.enter(member) if member in world.locals else world.publish(member)

    @rule()
    def look(self) -> None:
        self.world.look()

    @precondition(lambda self: self.world.evaluating)
    @rule(how=st.sampled_from(["plan", "plan", "refused", "failed"]))
    def plan(self, how: str) -> None:
        if how == "failed":
            self.world.evaluating = False
            self.world.perform(self.world.batch.failed(ProtocolError("Redis: odd")))
        else:
            self.world.plan(how == "refused")

    @rule(same=st.booleans())
    def verdict(self, same: bool) -> None:
        if "i" in self.world.agents and self.world.agents["i"] == ("b",) and self.world.complete:
            self.world.verdicts.setdefault("b", verdict(None if same else "other"))

    @precondition(lambda self: self.world.waiting)
    @rule(data=st.data(), cancelled=st.booleans())
    def expire(self, data: st.DataObject, cancelled: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.waiting)))
        self.world.perform(self.world.batch.expire(key, cancelled=cancelled))

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        world = self.world
        member = data.draw(st.sampled_from(world.locals))
        for key in [key for key, who in world.waiting.items() if who == member]:
            del world.waiting[key]  # its client is closed: nobody waits for an answer
        world.perform(world.batch.close(member))

    @rule(newest=st.integers(0, 1))
    def empty(self, newest: int) -> None:
        """Redis loses its data, and somebody may have entered anew."""
        self.world.entries.clear()
        self.world.verdicts.clear()
        self.world.newest = newest

    @rule()
    def lose(self) -> None:
        self.world.perform(self.world.batch.break_up(PeerLostError("gone", reason="died")))

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "world"):
            return
        world, batch = self.world, self.world.batch
        assert set(batch.waiting) == set(world.waiting)
        assert set(batch.waiting.values()) <= batch.open
        assert world.stood <= 1 and (batch.state is not RegistrationState.REGISTERED or world.stood == 1)
        if batch.state in (
            RegistrationState.REGISTERED,
            RegistrationState.REFUSED,
            RegistrationState.LOST,
            RegistrationState.CLOSED,
        ):
            assert not batch.waiting, "somebody waits for what will not come"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for key in sorted(world.waiting):
            if key in world.waiting:
                world.perform(world.batch.expire(key, cancelled=False))
        assert not world.waiting, "a caller without an exit"
        for member in world.locals:
            world.perform(world.batch.close(member))
        assert not world.batch.open
        assert world.batch.state is RegistrationState.CLOSED or not world.calls


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


# ---- several agents, and a Redis that may lose its data: whatever the order, all ranks meet ------

THREE = {"t": ("a", "b"), "i": ("c", "c")}
RANKS: list[Member] = [(side, rank) for side, ranks in THREE.items() for rank in range(len(ranks))]


class BatchInRedis:
    """What enroll.lua, verdict.lua and the putting back of batches do to one batch, in one epoch."""

    def __init__(self) -> None:
        self.lose()

    def lose(self) -> None:
        self.generation, self.state = 0, ""
        self.entries: dict[int, dict[Member, str]] = {}
        self.verdicts: dict[int, dict[str, str]] = {}

    def enroll(self, member: Member, known: int) -> int:
        generation = max(self.generation, known)
        if not (self.state == "registering" and self.generation == generation):
            self.generation, self.state = generation + 1, "registering"
        entries = self.entries.setdefault(self.generation, {})
        entries[member] = "{}"
        if len(entries) == len(RANKS):
            self.state = "registered"
        return self.generation

    def restore(self, generation: int) -> None:
        self.generation = max(self.generation, generation)


class EnrollingAgent:
    """One agent: its machines by generation, its ranks' calls, and what it remembers for Redis."""

    def __init__(self, name: str, redis: BatchInRedis) -> None:
        self.name, self.redis = name, redis
        self.known = 0
        self.machines: dict[int, BatchRegistration] = {}
        self.verdicts: dict[int, str] = {}
        self.planning: list[BatchRegistration] = []
        self.entering = [member for member in RANKS if THREE[member[0]][member[1]] == name]
        self.answered: dict[Member, int] = {}
        self.answers: list[tuple[BatchRegistration, Any, Any, int, frozenset[Any]]] = []

    def enter(self) -> None:
        member = self.entering.pop(0)
        self.known = generation = self.redis.enroll(member, self.known)
        self.verdicts = {number: text for number, text in self.verdicts.items() if number == generation}
        machine = self.machines.get(generation)
        if machine is None:
            machine = BatchRegistration("b", me=self.name, agents=THREE, generation=generation)
            self.machines[generation] = machine
        self.perform(machine, machine.enrolled((f"{member[0]}{member[1]}", generation), member))

    def read(self) -> None:
        """Ask Redis. The answer is on its way until ``look``."""
        for generation, machine in self.machines.items():
            waiting = frozenset(machine.waiting)
            entries = dict(self.redis.entries.get(generation, {}))
            if machine.state is not RegistrationState.ENROLLING:
                entries = {member: text for member, text in entries.items() if member in machine.waiting.values()}
            verdicts = dict(self.redis.verdicts.get(generation, {}))
            self.answers.append((machine, entries, verdicts, self.redis.generation, waiting))

    def look(self) -> None:
        answers, self.answers = self.answers, []
        for machine, entries, verdicts, newest, waiting in answers:
            self.perform(machine, machine.rostered(entries, verdicts, newest, waiting))

    def plan(self) -> None:
        machine = self.planning.pop(0)
        mine = Capabilities(digest=evaluation().digest, staging=100, streams=4)
        self.perform(machine, machine.evaluated(evaluation(), mine))

    def restore(self) -> None:
        self.redis.restore(self.known)
        for generation, text in self.verdicts.items():
            self.redis.verdicts.setdefault(generation, {})[self.name] = text

    def perform(self, machine: BatchRegistration, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case EnrolAgain(call=(name, _)):
                    self.entering.append((name[0], int(name[1:])))
                case EvaluateRoster():
                    self.planning.append(machine)
                case Declare(verdict=text):
                    self.verdicts[machine.generation] = text
                    self.redis.verdicts.setdefault(machine.generation, {})[self.name] = text
                case Answer(call=(name, _)):
                    member = (name[0], int(name[1:]))
                    assert member not in self.answered, "answered twice"
                    self.answered[member] = machine.generation
                case Fail(error=error):
                    raise AssertionError(f"nobody gave up, but {error}")
        if machine.state is RegistrationState.CLOSED and self.machines.get(machine.generation) is machine:
            del self.machines[machine.generation]

    def possible(self) -> Iterator[Callable[[EnrollingAgent], None]]:
        if self.entering:
            yield EnrollingAgent.enter
        if self.planning:
            yield EnrollingAgent.plan
        if self.answers:
            yield EnrollingAgent.look
        elif any(machine.state is not RegistrationState.REGISTERED for machine in self.machines.values()):
            yield EnrollingAgent.read


@pytest.mark.parametrize("losses", range(4))
def test_all_ranks_meet_in_one_generation_whatever_redis_loses(losses: int) -> None:
    for seed in range(examples(500)):
        meet_whatever_is_lost(Random(seed), losses)


def meet_whatever_is_lost(random: Random, losses: int) -> None:
    """One order of steps. Agents that were started anew remember no generation, others have been through some."""
    redis, story = BatchInRedis(), list[str]()
    agents = [EnrollingAgent(name, redis) for name in "abc"]
    for agent in agents:
        agent.known = random.randrange(4)
        story.append(f"{agent.name} knows {agent.known}")
    forgotten: set[str] = set()

    def do(agent: EnrollingAgent, step: Callable[[EnrollingAgent], None]) -> None:
        story.append(f"{agent.name} {step.__name__}")
        step(agent)
        if step is EnrollingAgent.restore:
            forgotten.discard(agent.name)

    while steps := [
        (agent, step)
        for agent in agents
        for step in [*agent.possible(), *([EnrollingAgent.restore] if agent.name in forgotten else [])]
    ]:
        if losses and random.random() < 0.15:
            losses -= 1
            redis.lose()
            story.append("Redis loses its data")
            forgotten = {agent.name for agent in agents}
        elif len(story) > 400:
            break
        else:
            do(*random.choice(steps))
    answers = {member: generation for agent in agents for member, generation in agent.answered.items()}
    taken = "; ".join(story[:60])
    assert sorted(answers) == sorted(RANKS), f"still waiting: {sorted(set(RANKS) - set(answers))} after {taken}"
    assert len(set(answers.values())) == 1, f"ranks were answered in different generations: {answers} after {taken}"
