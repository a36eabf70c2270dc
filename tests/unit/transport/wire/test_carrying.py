"""Agents of a host carry for each other: to the bit as ``simulate``, through rings of any size, in any order of events;
faults in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from etha.config import MIN_STAGING, STAGING
from etha.errors import PeerLostError, ProtocolError
from etha.plan import Layout, TensorSpec, build_plan
from etha.plan.planner.rank_plan import CARRY, DELIVER
from etha.transport.arrival import ArrivingVersion
from etha.transport.base import TransportPeer, WireRun
from etha.transport.tcp.streams import ReceiveStream
from etha.transport.wire import carrying
from etha.transport.wire.carrying import RING, CarryingTable, RingPlace, RingProgress, places, ring_bytes
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.differences import may_differ
from etha.transport.wire.flows import CHUNK, WireProgram
from etha.transport.wire.nccl_messages import device_cut
from etha.transport.wire.routing import account, exchanging
from etha.transport.wire.worker_rows import worker_stretches
from tests.examples import examples, parts
from tests.unit.transport.agents import Agent, Gate, Job, agents, same, transfer
from tests.unit.transport.relaying import Played, relayed_job
from tests.unit.transport.tcp.test_differences import base_of, change, cloned
from tests.unit.transport.wire.test_forwarding import ORDERS, opened, play

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=60)


# ---- the ring -----------------------------------------------------------------------------------


@given(sizes=SIZES, more=st.integers(0, 100))
def test_no_two_pieces_are_at_one_place_at_once(sizes: list[int], more: int) -> None:
    """A piece is received once all that lie where it will lie have gone; it waits for none that comes later."""
    ring = max(sizes) + more
    found = list(places(sizes, ring))
    assert [(p.number, p.nbytes) for p in found] == [*enumerate(sizes)]
    for place in found:
        assert place.at >= 0 and place.at + place.nbytes <= ring
        assert place.behind <= place.number
        for other in found[place.behind : place.number]:
            assert other.at + other.nbytes <= place.at or place.at + place.nbytes <= other.at


def test_a_ring_is_used_again_from_its_start() -> None:
    assert list(places([4, 4, 4, 6, 2], 10)) == [
        RingPlace(0, 0, 4, 0),
        RingPlace(1, 4, 4, 0),
        RingPlace(2, 0, 4, 1),  # two bytes are left, which are too few
        RingPlace(3, 4, 6, 2),
        RingPlace(4, 0, 2, 3),
    ]


def test_a_piece_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a piece of 11 bytes in a ring of 10"):
        list(places([3, 11], 10))


def test_a_ring_is_as_large_as_it_needs_to_be() -> None:
    assert ring_bytes([], STAGING) == 0
    assert ring_bytes([3, 5], STAGING) == 8
    assert ring_bytes([CHUNK] * 100, STAGING) == RING
    assert ring_bytes([CHUNK] * 100, MIN_STAGING) == CHUNK
    assert ring_bytes([CHUNK] * 3, 1 << 10) == CHUNK, "one piece has room in any"


def test_pieces_may_be_handed_on_in_another_order_than_they_came() -> None:
    first, second, third = places([6, 4, 8], 10)
    ring = RingProgress()
    assert ring.free(first) and ring.free(second) and not ring.free(third)
    ring.came([second])
    assert ring.ready(second) and not ring.ready(first)
    assert not ring.went([second]), "the first one is still to come, so no place is free"
    assert not ring.free(third)
    ring.came([first])
    assert ring.went([first])
    assert ring.free(third) and not ring.ready(third)


# ---- any layouts --------------------------------------------------------------------------------


def carried_job(seed: int, *, least: int = 1) -> Job:
    """A random job at least so many of whose rows are carried. Its numbers of streams and bytes of a bucket are random,
    too."""
    for attempt in range(1000):
        job = relayed_job(seed * 1000 + attempt, carry=True)
        if job.plan.carries and rows_of(job) >= least:
            job.streams, job.bucket_size = 1 + seed % 3, 1 << (6 + seed % 12)
            return job
    raise AssertionError("no job in which anything is carried")


def rows_of(job: Job) -> int:
    plans = [job.plan.for_rank("target", rank) for rank in range(len(job.target_agents))]
    return sum(int(((rp.kind == DELIVER) & (rp.source == rp.rank)).sum()) for rp in plans)


@pytest.fixture(params=[0, RING], ids=["a piece", "large"])
def ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The ring has room for the largest piece alone, or for all."""
    monkeypatch.setattr(carrying, "RING", request.param)
    return int(request.param)


@pytest.mark.parametrize("seed", parts(examples(40), 15))
async def test_random_carrying_equals_simulate(seed: int, ring: int) -> None:
    job = carried_job(seed)
    expected = job.expected()
    async with agents(job.agents, streams=3, encrypted=seed % 3 == 0) as at:
        programs = await transfer(job, at)
    same(job.target, expected)
    assert any(program.ring for program in programs.values())


def test_many_rings_of_the_random_jobs_are_used_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "RING", 0)
    assert sum(any(p.behind for p in ring_of(carried_job(seed))) for seed in range(20)) > 10


def ring_of(job: Job) -> list[RingPlace]:
    """All places of all agents' rings."""
    return [
        place
        for name in job.agents
        for flow in job.wire(name).receives.values()
        for lane in flow.lanes
        for span in lane
        for place in span.ring
    ]


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 500), order=ORDERS, room=st.sampled_from([0, 1, RING]))
def test_every_order_of_events_ends(seed: int, order: list[int], room: int) -> None:
    """Whatever stream is slow, and however small the rings are: a piece that can go is there until all have come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carrying, "RING", room)
        job = carried_job(seed)
        assert play(job, order).over


def test_pieces_in_two_orders_block_a_full_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one order of a carrier is for: if its ring gives places in another one, nothing goes on."""
    monkeypatch.setattr(carrying, "RING", 0)
    blocked = 0
    for seed in range(20):
        job = carried_job(seed, least=3)
        programs = {name: job.wire(name) for name in job.agents}
        numbers = [place.number for place in ring_of(job)]
        turned = Played({name: _backwards(program) for name, program in programs.items()})
        while moves := turned.moves():
            moves[-1]()
        blocked += not turned.over
        assert numbers
    assert blocked > 10


def _backwards(program: WireProgram) -> WireProgram:
    """The same, whose ring has its places in the opposite order."""
    found = [place for f in program.receives.values() for lane in f.lanes for s in lane for place in s.ring]
    sizes = [place.nbytes for place in sorted(found)]
    turned = dict(zip(range(len(sizes))[::-1], places(sizes[::-1], program.ring), strict=True))

    def flows(some: object) -> dict[str, object]:
        return {
            peer: replace(
                flow,
                lanes=tuple(
                    tuple(replace(s, ring=tuple(turned[place.number] for place in s.ring)) for s in lane)
                    for lane in flow.lanes
                ),
            )
            for peer, flow in some.items()  # type: ignore[attr-defined]
        }

    return replace(program, receives=flows(program.receives), sends=flows(program.sends))  # type: ignore[arg-type]


def test_all_ends_derive_the_same_carriages() -> None:
    for seed in range(examples(30)):
        job = carried_job(seed)
        tables = {name: CarryingTable(job.plan, job.routing(name)) for name in job.agents}
        assert sum(len(table.carried) for table in tables.values()) == rows_of(job)
        for name, table in tables.items():
            for peer, other in tables.items():
                here, there = job.routing(name), job.routing(peer)
                mine = [c for c in table.carried if here.source[c.source] == peer]
                assert [c[:3] for c in mine] == [g[:3] for g in other.given.get(name, [])]
                for one, g in zip(mine, other.given.get(name, []), strict=True):
                    assert all((a[:, 0] == b[:, 0]).all() for a, b in zip(one.region.dims, g.region.dims, strict=True))
                handed = [c for c in table.carried if there.target[c.holder] == peer]
                assert [c[:4] for c in handed] == [c[:4] for c in other.handed.get(name, [])]
                assert [c[:4] for c in table.ends().gives.get(peer, [])] == [
                    c[:4] for c in other.ends().takes.get(name, [])
                ]


def test_each_rank_accounts_for_its_own_bytes_once() -> None:
    for seed in range(examples(30)):
        job = carried_job(seed)
        found, met = {}, set()
        for name in job.agents:
            nbytes, peers = account(job.plan, job.routing(name))
            found |= nbytes
            met |= {(member, peer) for member, others in peers.items() for peer in others}
            assert name not in exchanging(job.plan, job.routing(name))
        for rank in range(len(job.target_agents)):
            rp = job.plan.for_rank("target", rank)
            assert found["target", rank] == int(rp.nbytes[(rp.target == rank) & (rp.kind != CARRY)].sum())
            for holder in set(rp.target[(rp.kind == DELIVER) & (rp.source == rank)].tolist()):
                assert (("target", holder), ("target", rank)) in met
                assert any(peer == ("target", rank) for member, peer in met if member[0] == "source")


# ---- one holder ---------------------------------------------------------------------------------


def one_holder(
    rows: int = 4096, hosts: str = "ttt", *, private: tuple[bool, bool] = (False, False), **options: object
) -> Job:
    """Rows of 2 KiB on one of three target ranks, each with an agent of its own. The first two carry a third each for
    rank 2."""
    here, there = ("s", "s"), tuple(f"{host}{rank}" for rank, host in enumerate(hosts))
    target = {
        "w": TensorSpec((rows, 512), torch.float32, Layout([2], [Shard(0)])),
        "x": TensorSpec((1, 3), torch.float32, Layout((3,), [Shard(1)])),
    }
    source = {
        "w": TensorSpec((rows, 512), torch.float32, Layout((2,), [Shard(0)])),
        "x": TensorSpec((1, 3), torch.float32, Layout((2,), [Replicate()])),
    }
    plan = build_plan(
        source, target, source_agents=here, target_agents=there, source_hosts=here, target_hosts=list(hosts)
    )
    held = {r: {k: torch.rand(s.local_shape(r) or ()) for k, s in source.items()} for r in range(2)}
    held[1]["x"] = held[0]["x"].clone()
    blank = {
        r: {k: torch.zeros(shape) for k, s in target.items() if (shape := s.local_shape(r)) is not None}
        for r in range(3)
    }
    return Job(plan, here, there, held, blank, private, **options)  # type: ignore[arg-type]


async def test_agents_without_the_tensor_take_in_their_share() -> None:
    job = one_holder()
    nbytes = 4096 * 512 * 4
    async with agents(job.agents) as at:
        await transfer(job, at)
        taken = {name: sum(t.received for peer, t in at[name].plane.traffic.items() if peer == "s") for name in at}
        given = {name: sum(t.sent for t in at[name].plane.traffic.values()) for name in at}
    same(job.target, job.expected())
    assert all(0.33 * nbytes < taken[name] < 0.34 * nbytes for name in ("t0", "t1", "t2"))
    assert given["t0"] + given["t1"] == nbytes - (taken["t2"] - 4) and given["t2"] == 0


def test_hosts_carry_only_for_themselves() -> None:
    assert one_holder().plan.carries
    assert one_holder(hosts="tut").plan.carries
    assert not one_holder(hosts="tuv").plan.carries


def test_nccl_does_not_carry() -> None:
    job = one_holder()
    cut = device_cut(job.agents, STAGING)
    for name in job.agents:
        with pytest.raises(ValueError, match="over NCCL"):
            compile_wire(job.plan, job.routing(name), *job.views_of(name), cut=cut)
        program = compile_wire(job.plan.uncarried(), job.routing(name), *job.views_of(name), cut=cut)
        assert not program.ring
    assert job.plan.uncarried() is job.plan.uncarried() and not job.plan.uncarried().carries
    assert one_holder(hosts="tuv").plan.uncarried().digest() == one_holder(hosts="tuv").plan.digest()


def test_an_agent_that_would_carry_for_itself_is_refused() -> None:
    job = one_holder()
    job.target_agents = ("t0", "t0", "t0")
    with pytest.raises(ValueError, match="agent t0 carries for itself"):
        CarryingTable(job.plan, job.routing("t0"))


def test_carried_rows_are_not_lent() -> None:
    job = one_holder(32768, private=(True, True))
    lent = {
        name: sum(s.wire for lane in worker_stretches(job.wire(name)).values() for s in lane.values())
        for name in job.agents
    }
    third = 32768 * 512 * 4 / 3
    assert 0.9 * third < lent["s"] < 1.1 * third and 0.9 * third < lent["t2"] < 1.1 * third
    assert lent["t0"] == lent["t1"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("staging", [MIN_STAGING, STAGING])
async def test_a_holder_that_stands_still_holds_up_its_carriers_within_their_rings(
    staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost and no more is used than was booked, however late the holder reads."""
    job = one_holder(1 << 16, staging=staging)
    go, held, free = threading.Event(), ReceiveStream._take, RingProgress.free
    loop, full = asyncio.get_running_loop(), asyncio.Event()

    def late(self: ReceiveStream, run: object, span: object, base: int) -> None:
        if self.peer in ("t0", "t1"):
            assert go.wait(60)
        held(self, run, span, base)  # type: ignore[arg-type]

    def watched(self: RingProgress, place: RingPlace) -> bool:
        found = free(self, place)
        if not found:
            loop.call_soon_threadsafe(full.set)
        return found

    monkeypatch.setattr(ReceiveStream, "_take", late)
    monkeypatch.setattr(RingProgress, "free", watched)
    async with agents(job.agents, staging=staging) as at:
        runs = await opened(job, at)
        tasks = {name: asyncio.ensure_future(at[name].transport.run(run)) for name, run in runs.items()}
        await full.wait()
        assert not any(task.done() for task in tasks.values())
        go.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks.values())
        for name in ("t0", "t1"):
            program = runs[name].program
            assert program.ring == min(RING, staging // 16)
            assert at[name].plane.peak_staging <= at[name].plane.need(program) + at[name].plane.copy_slots.scratch
    same(job.target, job.expected())


# ---- beside what else streams do ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(examples(12)))
async def test_differences_leave_out_what_is_carried(seed: int, ring: int) -> None:
    job = next(j for s in range(1000) if may_differ((j := carried_job(100 * seed + s)).plan, STAGING))
    job.private = (False, False)
    before = cloned(job.source)
    change(job.source, 0.02)
    expected = job.expected()
    now, job.source, job.streams = job.source, before, 2
    async with agents(job.agents, streams=2, differences="always") as at:
        await transfer(job, at)
        job.source = now
        runs = {}
        for name in job.agents:
            program = replace(job.wire(name), differs=True)
            await at[name].transport.open(
                [TransportPeer(agent=peer, address=at[peer].address_for(name)) for peer in program.sends]
            )
            bases = {peer: base_of(job, name, before) for peer in program.sends if name in job.source_agents}
            if name in job.target_agents:  # what it hands on and forwards is not compared
                bases = {}
            runs[name] = WireRun(program=program, seq=2, key=bytes(32), bases=bases, held=1)
        async with asyncio.TaskGroup() as group:
            for name in job.agents:
                group.create_task(at[name].transport.run(runs[name]))
    if not {*job.source_agents} & {*job.target_agents}:
        same(job.target, expected)


async def test_a_version_of_which_a_part_is_there_is_carried_whole(ring: int) -> None:
    """What has come before is asked for and left out; what is carried comes again."""
    job = one_holder()
    expected = job.expected()
    versions = {name: ArrivingVersion(1, 5) for name in ("t0", "t1", "t2")}
    async with agents(job.agents) as at:
        for seq in (1, 2):
            runs = await opened(job, at)
            for name, run in runs.items():
                run.seq, run.arriving = seq, versions.get(name)
                run.resumed = frozenset(run.program.sends) if seq == 2 else frozenset()
                if name in versions:
                    versions[name].begin(run.program)
            await asyncio.gather(*(at[name].transport.run(run) for name, run in runs.items()))
            for version in versions.values():
                version.settle(whole=False)
            versions = {name: ArrivingVersion(2, 5, earlier=version) for name, version in versions.items()}
            same(job.target, expected)
    third = runs["t0"].program.receives["s"].nbytes
    assert runs["t0"].wired >= third - 4, "a carrier keeps nothing"
    assert runs["t2"].wired == runs["t2"].program.receives["t0"].nbytes + runs["t2"].program.receives["t1"].nbytes


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "drop", "close"])
@pytest.mark.parametrize("who", ["t0", "t2", "s"], ids=["carrier", "holder", "source"])
async def test_who_ends_in_the_middle_ends_all_others(who: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rings are full or wait for their next piece: nobody's thread stays, and the next run is exact."""
    monkeypatch.setattr(carrying, "RING", 0)
    job = one_holder(1 << 16)
    async with agents(job.agents) as at:
        runs = await opened(job, at)
        begun = asyncio.Event()
        if how == "abort" and who != "t0":  # a carrier's own memory is not touched
            side = "source" if who == "s" else "target"
            gate = Gate(lambda: at[who].transport.stop(ValueError("no")))
            ranks = [0, 1] if who == "s" else [2]
            runs[who] = replace(runs[who], guards={(side, rank): gate for rank in ranks})  # type: ignore[misc]
        tasks = {
            name: asyncio.ensure_future(at[name].transport.run(run, lambda done: begun.set()))
            for name, run in runs.items()
        }
        started = asyncio.ensure_future(begun.wait())
        await asyncio.wait([started, tasks[who]], return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if how == "abort" and who == "t0":
            at[who].transport.stop(ValueError("no"))
        elif how == "drop":
            for name in set(at) - {who}:
                at[name].plane.drop(who)
        elif how == "close":
            await at[who].plane.close()
        async with asyncio.timeout(30):
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            for name in at:  # as the coordinator's ABORT does
                at[name].transport.stop(PeerLostError("told", reason="died"))
            ended = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        assert any(isinstance(error, BaseException) for error in ended.values())
        for name, error in ended.items():
            right = (ValueError, PeerLostError) if name == who else (PeerLostError,)
            assert isinstance(error, right) or error == runs[name].program.total, (name, error)
        if how != "close":
            for held in job.target.values():
                for tensor in held.values():
                    tensor.zero_()
            await transfer(job, at, seq=2)
            same(job.target, job.expected())


async def test_a_carrier_with_another_plan_is_refused_before_anything_is_written() -> None:
    job = one_holder()
    other = replace(job, plan=job.plan.uncarried())
    async with agents(job.agents) as at:
        runs = await opened(job, at)
        runs["t0"] = WireRun(program=other.wire("t0"), seq=1)
        found: Sequence[object] = await asyncio.gather(*(fails(at, name, run) for name, run in runs.items()))
    assert any(isinstance(error, ProtocolError) for error in found), found


async def fails(at: dict[str, Agent], name: str, run: WireRun) -> object:
    """What a run ends with; whoever fails ends all others."""
    try:
        async with asyncio.timeout(30):
            return await at[name].transport.run(run)
    except (ProtocolError, PeerLostError) as error:
        for other in at.values():
            other.transport.stop(PeerLostError("told", reason="died"))
        return error
