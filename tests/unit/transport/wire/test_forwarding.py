"""Target agents pass on what they receive: to the bit as ``simulate``, in any order of events; faults in between."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from etha.errors import PeerLostError
from etha.plan import Layout, TensorSpec, build_plan
from etha.plan.planner.rank_plan import FORWARD
from etha.transport.base import TransportPeer, WireRun
from etha.transport.wire.forwarding import Arrivals, ForwardingProgress, ForwardingTable, TensorPlace
from etha.transport.wire.routing import account
from tests.examples import examples, parts
from tests.unit.transport.agents import Agent, Gate, Job, agents, same, transfer
from tests.unit.transport.relaying import Crossed, Played, copies, relayed_job

ORDERS = st.lists(st.integers(0, 1 << 30), max_size=200)


@pytest.mark.parametrize("seed", parts(examples(40), 20))
async def test_random_relays_equal_simulate(seed: int) -> None:
    job = relayed_job(seed)
    job.streams, job.bucket_size = 2, 1 << (10 + seed % 12)
    expected = job.expected()
    async with agents(job.agents, streams=2) as at:
        await transfer(job, at)
    same(job.target, expected)


def test_many_of_the_random_jobs_pass_something_on() -> None:
    def passed(seed: int) -> bool:
        plan = relayed_job(seed).plan
        ranks = range(len(plan.topology.target_host))
        return any(bool((plan.for_rank("target", rank).kind == FORWARD).any()) for rank in ranks)

    assert sum(passed(seed) for seed in range(40)) >= 15


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 10_000), order=ORDERS, chains=st.sampled_from([1, 1, 2, None]))
def test_every_order_of_events_ends(seed: int, order: list[int], chains: int | None) -> None:
    """Whatever stream is slow: a piece that can go is always there until all have come."""
    job = relayed_job(seed, chains=chains)
    job.streams, job.bucket_size = 1 + seed % 3, 1 << (6 + seed % 12)
    assert play(job, order).over


def play(job: Job, order: list[int]) -> Played:
    """All that can happen, each time the one that ``order`` picks; the last where it picks none."""
    played = Played({name: job.wire(name) for name in job.agents})
    turn = 0
    while moves := played.moves():
        moves[order[turn % len(order)] % len(moves) if order else -1]()
        turn += 1
    return played


def crossed(turns: list[int], rows: int = 64) -> Job:
    """Small tensors, so that many share a span, each round four hosts from another one."""
    job = copies((rows, 64), 4, tensors=len(turns), relay_bytes=0)
    job.plan = Crossed(job.plan, turns)
    return job


@settings(max_examples=examples(60), deadline=None)
@given(
    turns=st.lists(st.integers(0, 3), min_size=2, max_size=9),
    order=ORDERS,
    streams=st.integers(1, 3),
    bucket=st.integers(10, 20),
)
def test_chains_that_cross_never_wait_in_a_ring(turns: list[int], order: list[int], streams: int, bucket: int) -> None:
    job = crossed(turns)
    job.streams, job.bucket_size = streams, 1 << bucket
    assert play(job, order).over


@pytest.mark.parametrize("rows", [64, 1024])
async def test_chains_that_cross_over_real_streams(rows: int) -> None:
    job = crossed([0, 2, 1, 3, 3, 1, 0, 2], rows)
    async with agents(job.agents) as at:
        runs = await opened(job, at)
        async with asyncio.timeout(30):
            await asyncio.gather(*(at[name].transport.run(run) for name, run in runs.items()))
        for host in range(4):
            given = {peer for peer, t in at[f"t{host}"].plane.traffic.items() if t.sent}
            assert given == {f"t{(host + 1) % 4}"}, "a ring of agents"
    full = {k: torch.cat([job.source[r][k] for r in range(2)]) for k in job.plan.names}
    same(job.target, dict.fromkeys(range(4), full))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        ((1024, 512), None),
        ((1031, 517), None),
        ((700, 1000), (torch.float32, torch.bfloat16)),
        ((2048, 1024), (torch.int8, torch.int32)),
    ],
)
async def test_a_source_host_sends_one_copy(shape: tuple[int, int], dtypes: object, ranks: int) -> None:
    job = copies(shape, 4, ranks, dtypes=dtypes)  # type: ignore[arg-type]
    wire = min(t.itemsize for t in (job.source[0]["w0"], job.target[0]["w0"]))
    once = shape[0] * shape[1] * wire
    async with agents(job.agents) as at:
        await transfer(job, at)
        assert sum(t.sent for t in at["s"].plane.traffic.values()) == once
        for host in range(4):
            assert sum(t.received for t in at[f"t{host}"].plane.traffic.values()) == once
    same(job.target, job.expected())


@pytest.mark.parametrize("private", [(False, False), (True, True)])
async def test_reduced_results_are_passed_on_to_the_bit(private: tuple[bool, bool]) -> None:
    job = copies((1500, 700), 4, partial=3, private=private)
    async with agents(job.agents) as at:
        await transfer(job, at)
        sent = sum(t.sent for t in at["s"].plane.traffic.values())
        assert sent == 1500 * 700 * 4
    same(job.target, job.expected())


def test_floats_that_widen_are_sent_by_the_source() -> None:
    job = copies((1024, 1024), 3, dtypes=(torch.bfloat16, torch.float32))
    assert not any(ForwardingTable(job.plan, job.routing(name)).given for name in job.agents)


def test_accounts_count_what_a_rank_gets_and_not_what_it_passes_on() -> None:
    job = copies((1024, 1024), 3)
    found = {}
    for name in job.agents:
        nbytes, peers = account(job.plan, job.routing(name))
        found |= nbytes
        if name != "s":
            assert all(peers[member] for member in peers)
    whole = 1024 * 1024 * 4
    assert found["source", 0] + found["source", 1] == whole
    assert all(found["target", rank] == whole for rank in range(3))


def chain_programs(job: Job) -> list[str]:
    """Target agents in the order of the one chain."""
    given = {name: [*ForwardingTable(job.plan, job.routing(name)).given] for name in job.agents if name != "s"}
    [first] = set(given) - {peer for some in given.values() for peer in some}
    order = [first]
    while given[order[-1]]:
        [following] = given[order[-1]]
        order.append(following)
    return order


def test_a_piece_is_passed_on_before_the_tensor_has_come() -> None:
    """Pipelined by pieces: the first of the last host goes when little has come to the first host."""
    job = copies((4096, 1024), 4)
    played = Played({name: job.wire(name) for name in job.agents})
    last = chain_programs(job)[-1]
    total = sum(len(lane[3]) for lane in played.lanes if lane[0] == "s")

    def come(name: str) -> int:
        return sum(n for n, lane in zip(played.got, played.lanes, strict=True) if lane[1] == name)

    # Events at the far end first: whatever can go further does.
    while not come(last):
        played.moves()[-1]()
    sent = sum(n for n, lane in zip(played.sent, played.lanes, strict=True) if lane[0] == "s")
    assert sent <= 1 + total // 4


async def opened(job: Job, at: dict[str, Agent]) -> dict[str, WireRun]:
    runs = {name: WireRun(program=job.wire(name), seq=1) for name in job.agents}
    for name, run in runs.items():
        await at[name].transport.open(
            [TransportPeer(agent=p, address=at[p].address_for(name)) for p in run.program.sends]
        )
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "drop", "close"])
async def test_a_relay_that_ends_in_the_middle_ends_who_waits_for_it(how: str) -> None:
    """Who is left hears of it or is stopped by the coordinator; nobody's thread stays, and the next run is exact."""
    job = copies((4096, 4096), 4)  # more than the kernel buffers, so that nobody is done before the middle ends
    chain = chain_programs(job)
    async with agents(job.agents) as at:
        runs = await opened(job, at)
        middle = chain[1]
        begun = asyncio.Event()
        tasks = {
            name: asyncio.ensure_future(at[name].transport.run(runs[name], lambda done: begun.set()))
            for name in job.agents
            if name != middle
        }
        await begun.wait()
        assert not tasks[chain[2]].done()
        if how == "abort":
            gate = Gate(lambda: at[middle].transport.stop(ValueError("no")))
            run = dataclasses.replace(runs[middle], guards={("target", int(middle[1:])): gate})
            with pytest.raises(ValueError, match="no"):
                await at[middle].transport.run(run)
        elif how == "drop":
            for name in (chain[0], chain[2]):
                at[name].plane.drop(middle)
        else:
            await at[middle].plane.close()
            at[chain[2]].plane.drop(middle)  # as a lost link does: no stream of it has begun with the run here
        async with asyncio.timeout(30):
            with pytest.raises(PeerLostError):
                await tasks[chain[0]]
            if how == "abort":  # the middle may have ended before any of its streams to the next had begun
                at[chain[2]].transport.stop(PeerLostError("told", reason="died"))
            with pytest.raises(PeerLostError):
                await tasks[chain[2]]
            for name in ("s", chain[3]):  # as the coordinator's ABORT does
                at[name].transport.stop(PeerLostError("told", reason="died"))
            sent, last = await asyncio.gather(tasks["s"], tasks[chain[3]], return_exceptions=True)
            assert isinstance(last, PeerLostError)
            assert isinstance(sent, PeerLostError) or sent == runs["s"].program.total, "or it had sent all of it"
        if how != "close":
            for held in job.target.values():
                held["w0"].zero_()
            await transfer(job, at, seq=2)
            same(job.target, job.expected())


def test_a_ledger_is_ready_once_all_have_come() -> None:
    progress = ForwardingProgress()
    assert progress.ready(()) and not progress.ready((0,))
    progress.lay((0, 2))
    assert progress.ready((0, 2)) and not progress.ready((0, 1))


def test_arrivals_number_only_what_is_asked_for() -> None:
    here, there = TensorPlace(0, 0, ()), TensorPlace(0, 1, ())
    arrivals = Arrivals({here})
    assert arrivals.mark([(there, ((0, 4),))]) == -1
    assert [arrivals.mark([(here, ((i, i + 2),))]) for i in (0, 2, 4)] == [0, 1, 2]
    assert arrivals.before(here, ((1, 3),)) == (0, 1)
    assert arrivals.before(here, ((2, 4),)) == (1,)
    assert arrivals.seen == {here, there}


def test_streams_begin_in_the_order_of_the_rounds() -> None:
    """In each round every sender has another receiver; what follows a chain comes after what was its own."""
    source = TensorSpec((8, 8), torch.float32, Layout((4,), [Shard(0)]))
    target = TensorSpec((8, 8), torch.float32, Layout((4,), [Shard(1)]))
    here, there = tuple(f"s{i}" for i in range(4)), tuple(f"t{i}" for i in range(4))
    plan = build_plan({"t": source}, {"t": target}, source_agents=here, target_agents=there)
    held = {r: {"t": torch.rand(2, 8)} for r in range(4)}
    job = Job(plan, here, there, held, {r: {"t": torch.zeros(8, 2)} for r in range(4)})
    sends = [list(job.wire(name).sends) for name in here]
    assert sends == [[f"t{(rank + turn) % 4}" for turn in range(4)] for rank in range(4)]
