"""Groups of every plan against a strict model of NCCL: all that can happen, in any order, until all has gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from etha.errors import ConfigError
from etha.plan import Layout, TensorSpec
from etha.transport.nccl.schedule import MessageGroup, NcclSchedule, make_rounds
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.flows import WireProgram
from etha.transport.wire.forwarding import LAST
from etha.transport.wire.nccl_messages import GROUP, MessageCut, device_cut, order, waves
from tests.examples import examples
from tests.unit.transport.agents import Job, make_plan
from tests.unit.transport.relaying import Crossed, copies, relayed_job
from tests.unit.transport.tcp.test_transport import partial, random_job

ORDERS = st.lists(st.integers(0, 1 << 30), max_size=100)


def small(job: Job, **options: int) -> MessageCut:
    """A cut of messages so small that little jobs have many groups."""
    return replace(device_cut(job.agents, job.staging), **{"wave": 1024, **options})


def programs(job: Job, cut: MessageCut) -> dict[str, WireProgram]:
    job.private = (False, False)
    found = {}
    for name in job.agents:
        # Mapped views stand for a card's: what lies where is the same.
        sources, targets = job.views_of(name)
        found[name] = compile_wire(job.plan, job.routing(name), sources, targets, staging=job.staging, cut=cut)
    return found


class Strict:
    """Agents that issue group after group; a message goes when both of its ends are issued, in order and of one size.

    A group is done once all of its messages have gone; an agent issues the next one when what it hangs on is done.
    """

    def __init__(self, rounds: Mapping[str, NcclSchedule]) -> None:
        self.rounds = rounds
        self.at = dict.fromkeys(rounds, -1)
        self.open: dict[str, int] = dict.fromkeys(rounds, 0)
        self.sent: dict[tuple[str, str], deque[tuple[str, int]]] = {}
        self.got: dict[tuple[str, str], deque[tuple[str, int]]] = {}

    def moves(self) -> Iterator[str]:
        """Agents that can issue their next group."""
        for name, rounds in self.rounds.items():
            if self.open[name] == 0 and self.at[name] + 1 < len(rounds.groups):
                yield name

    def issue(self, name: str) -> None:
        self.at[name] += 1
        group: MessageGroup = self.rounds[name].groups[self.at[name]]
        assert len(group.sends) + len(group.receives) <= GROUP
        assert group.after < self.at[name]
        self.open[name] = len(group.sends) + len(group.receives)
        for message in group.sends:
            self.sent.setdefault((name, message.peer), deque()).append((name, message.span.wire))
            self._meet(name, message.peer)
        for message in group.receives:
            self.got.setdefault((message.peer, name), deque()).append((name, message.span.wire))
            self._meet(message.peer, name)

    def _meet(self, sender: str, receiver: str) -> None:
        sent, got = (both.setdefault((sender, receiver), deque()) for both in (self.sent, self.got))
        while sent and got:
            assert sent[0][1] == got[0][1], "the two ends of a message have different sizes"
            self.open[sent.popleft()[0]] -= 1
            self.open[got.popleft()[0]] -= 1

    @property
    def over(self) -> bool:
        done = all(self.at[name] + 1 == len(rounds.groups) for name, rounds in self.rounds.items())
        return done and not any(self.open.values()) and not any(map(len, (*self.sent.values(), *self.got.values())))


def play(job: Job, cut: MessageCut, order: list[int]) -> Strict:
    found = programs(job, cut)
    for name, program in found.items():
        for peer, flow in program.sends.items():
            assert flow.digest == found[peer].receives[name].digest
            assert [s.key for s in flow.lanes[0]] == [s.key for s in found[peer].receives[name].lanes[0]]
    strict = Strict({name: make_rounds(program) for name, program in found.items()})
    turn = 0
    while moves := list(strict.moves()):
        strict.issue(moves[order[turn % len(order)] % len(moves) if order else -1])
        turn += 1
    return strict


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10_000), order=ORDERS, chains=st.sampled_from([1, 1, 2, None]))
def test_relays_never_wait_in_a_ring(seed: int, order: list[int], chains: int | None) -> None:
    job = relayed_job(seed, chains=chains)
    # Some jobs are of a megabyte and more: no job has many thousand pieces, which say no more and take minutes.
    least = sum(tensor.nbytes for held in job.target.values() for tensor in held.values()) // 1024
    limit, chunk = max(least, 1 << (8 + seed % 9)), max(least, 1 << (8 + seed % 7))
    cut = small(job, limit=limit, chunk=chunk, straight=256, most=1 + seed % 4, wave=1 << seed % 14)
    assert play(job, replace(cut, chunk=min(cut.chunk, cut.limit)), order).over


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10_000), order=ORDERS)
def test_random_plans_never_wait_in_a_ring(seed: int, order: list[int]) -> None:
    job = random_job(seed, partial=0.6)
    job.staging = 512 << 10
    try:
        played = play(job, small(job, limit=4096, chunk=2048, straight=512, part=4096, most=1 + seed % 3), order)
    except ConfigError:
        return  # one part is more than a wave holds
    assert played.over


@pytest.mark.parametrize("turns", [(0, 1, 2, 3), (2, 0, 3, 1, 1, 2)])
def test_chains_that_cross_never_wait_in_a_ring(turns: tuple[int, ...]) -> None:
    job = copies((64, 64), 4, tensors=len(turns), relay_bytes=0)
    job.plan = Crossed(job.plan, turns)
    for pick in range(8):
        assert play(job, small(job, limit=4096, chunk=1024, straight=512), [pick, 3 * pick + 1, 7]).over


@pytest.mark.parametrize("agents_of", [("ab", "ab"), ("aabb", "abb"), ("abca", "cab"), ("ab", "cc")])
def test_reductions_in_many_waves_never_wait_in_a_ring(agents_of: tuple[str, str]) -> None:
    job = partial(20, (64, 48), *agents_of, staging=128 << 10)
    cut = small(job, limit=8 << 10, chunk=8 << 10, straight=1024, part=8 << 10)
    found = programs(job, cut)
    assert max(part.wave for program in found.values() for part in program.parts) >= 3
    assert play(job, cut, [3, 1, 4, 1, 5]).over


def test_what_is_reduced_travels_beside_what_is_sent() -> None:
    """Contributions of a wave go before the results of the one before it."""
    assert [order(stage, 0, (0,)) for stage in (0, 3, 2, 6, 5)] == [(0, 0), (0, 2), (0, 3), (0, 4), (0, 5)]


def test_small_tensors_share_a_wave_and_the_next_hop_goes_with_the_next_wave() -> None:
    cut = replace(device_cut("ab", 64 << 20), wave=100)
    found = waves([10, 80, 10, 50, 300, 1], cut)
    assert found == (0, 0, 0, 1, 1, 2)
    assert order(1, 3, found) == (1, 1) == order(LAST + (2 << 16) + 1, 2, found)


def test_little_tensors_travel_in_one_message() -> None:
    spec = TensorSpec((64,), torch.float32, Layout((1,), [Replicate()]))
    names = [f"t{i:03}" for i in range(200)]
    held, blank = ({0: {k: torch.rand(64) for k in names}} for _ in range(2))
    plan = make_plan(dict.fromkeys(names, spec), dict.fromkeys(names, spec), ("a",), ("b",))
    job = Job(plan, ("a",), ("b",), held, blank)
    for program in programs(job, device_cut("ab", job.staging)).values():
        [flow] = [*program.sends.values(), *program.receives.values()]
        assert len(flow.lanes[0]) == 1 and len(make_rounds(program).groups) == 2


def crowd(agents: int) -> Job:
    """Every agent sends a row of its rows to every one."""
    names = tuple(f"a{i:03}" for i in range(agents))
    source = TensorSpec((agents, agents), torch.float32, Layout((agents,), [Shard(0)]))
    target = TensorSpec((agents, agents), torch.float32, Layout((agents,), [Shard(1)]))
    plan = make_plan({"t": source}, {"t": target}, names, names)
    held = {r: {"t": torch.rand(1, agents)} for r in range(agents)}
    blank = {r: {"t": torch.zeros(agents, 1)} for r in range(agents)}
    return Job(plan, names, names, held, blank)


@pytest.mark.parametrize(
    "agents", [3, pytest.param(130, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.proof)]
)
def test_groups_of_more_than_256_operations_are_cut_alike_at_both_ends(agents: int) -> None:
    job = crowd(agents)
    played = play(job, device_cut(job.agents, job.staging), [5, 0, 11])
    assert played.over
    groups = [len(r.groups) for r in played.rounds.values()]
    assert max(groups) == (2 if agents == 3 else 3)


def test_colours_are_the_same_at_both_ends_and_met_once() -> None:
    cut = replace(device_cut([f"a{i}" for i in range(40)], 256 << 20), most=GROUP // 2)
    for one in cut.members:
        met = [cut.colour(one, other) for other in cut.members]
        assert sorted(met) == list(range(40))
        assert met == [cut.colour(other, one) for other in cut.members]


def test_a_relayed_tensor_goes_on_while_the_next_one_comes() -> None:
    job = copies((64, 64), 3, tensors=4, relay_bytes=0)
    found = {name: make_rounds(program) for name, program in programs(job, small(job)).items()}
    busy = [g for rounds in found.values() for g in rounds.groups if g.sends and g.receives]
    assert len(busy) >= 3, "agents that receive a tensor while they pass on the one before"


def test_the_ring_fits_its_share_of_the_staging() -> None:
    source = TensorSpec((64 << 10, 64), torch.float32, Layout((1,), [Replicate()]))
    target = TensorSpec((64 << 10, 64), torch.bfloat16, Layout((1,), [Replicate()]))
    for staging in (8 << 20, 64 << 20):
        held = {0: {"t": torch.zeros(64 << 10, 64)}}
        blank = {0: {"t": torch.zeros(64 << 10, 64, dtype=torch.bfloat16)}}
        job = Job(make_plan({"t": source}, {"t": target}, ("a",), ("b",)), ("a",), ("b",), held, blank, staging=staging)
        for program in programs(job, device_cut(job.agents, staging)).values():
            rounds = make_rounds(program)
            assert 0 < rounds.slot * 3 <= staging * 3 // 8
