"""Cards over a fake NCCL that keeps the real one's contracts: right in every element, in order, within the budget."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.observe import trace
from etha.plan import Layout, TensorSpec
from etha.transport.nccl.schedule import make_rounds
from etha.transport.wire.crossings import SlotPart
from etha.transport.wire.nccl_messages import device_cut
from tests.examples import examples
from tests.unit.transport.agents import Job, bits, make_plan, same
from tests.unit.transport.cards import Placed, fleet
from tests.unit.transport.nccl.test_schedule import crowd, small
from tests.unit.transport.relaying import copies, relayed_job
from tests.unit.transport.tcp.test_transport import partial, random_job, rows


@pytest.mark.parametrize("seed", range(examples(40)))
async def test_random_redistributions_equal_simulate(seed: int) -> None:
    job = random_job(seed)
    expected = job.expected()
    async with fleet("abc") as at:
        limit = 1 << (10 + seed % 8)
        cut = small(job, limit=limit, chunk=limit, straight=min(limit, 512), part=4096, most=1 + seed % 4)
        placed = Placed(job, at, cut if seed % 2 else None)
        await placed.transfer()
        same(placed.target, expected)


@pytest.mark.parametrize("seed", range(examples(30)))
async def test_random_relays_equal_simulate(seed: int) -> None:
    job = relayed_job(seed, chains=[1, 2, None][seed % 3])
    expected = job.expected()
    async with fleet(job.agents) as at:
        limit = 1 << (9 + seed % 8)
        cut = small(job, limit=limit, chunk=limit, straight=256, part=4096, most=1 + seed % 4)
        placed = Placed(job, at, cut if seed % 2 else None)
        await placed.transfer()
        same(placed.target, expected)


async def test_whole_segments_go_from_tensor_to_tensor_without_any_staging() -> None:
    job = rows(2, 2, (2048, 2048), Shard(0), "aa", "bb")
    async with fleet("ab") as at:
        placed = Placed(job, at)
        runs = await placed.transfer()
        for run in runs.values():
            spans = [s for f in (*run.program.sends.values(), *run.program.receives.values()) for s in f.lanes[0]]
            assert spans and all(s.address for s in spans)
        assert all(card.plane.peak_staging == 0 for card in at.cards.values())
        assert not any(card.driver.calls["copy"] for card in at.cards.values())
        same(placed.target, job.expected())


@pytest.mark.parametrize("replicas", [1, 2])
async def test_nothing_crosses_twice(replicas: int) -> None:
    shape = (512, 96)
    source = TensorSpec(shape, torch.float32, Layout((replicas, 2), [Replicate(), Shard(0)]))
    target = TensorSpec(shape, torch.float32, Layout((3, 2), [Replicate(), Shard(1)]))
    here, there = ("a",) * 2 * replicas, ("b",) * 6
    full = torch.rand(shape)
    held = {r: {"t": full[256 * (r % 2) : 256 * (r % 2) + 256].clone()} for r in range(2 * replicas)}
    blank = {r: {"t": torch.zeros(512, 48)} for r in range(6)}
    job = Job(make_plan({"t": source}, {"t": target}, here, there), here, there, held, blank)
    async with fleet("ab") as at:
        placed = Placed(job, at)
        await placed.transfer()
        traffic = {name: card.plane.traffic for name, card in at.cards.items()}
        assert traffic["a"]["b"].sent == traffic["b"]["a"].received == full.nbytes == at.world.moved
        assert traffic["a"]["b"].received == traffic["b"]["a"].sent == 0
        same(placed.target, job.expected())


@pytest.mark.parametrize("agents_of", [("ab", "ab"), ("aabb", "abb"), ("abca", "cab"), ("ab", "cc")])
async def test_reductions_in_many_waves_equal_simulate(agents_of: tuple[str, str]) -> None:
    job = partial(20, (64, 48), *agents_of, staging=256 << 10)
    expected = job.expected()
    async with fleet("abc") as at:
        placed = Placed(job, at, small(job, limit=8 << 10, chunk=8 << 10, straight=1024, part=12 << 10, most=3))
        runs = await placed.transfer()
        assert max(part.wave for run in runs.values() for part in run.program.parts) >= 3
        same(placed.target, expected)
        assert bits(placed.target[0]["t00"]) == bits(placed.target[1]["t00"])


async def test_a_budget_holds_however_much_is_moved() -> None:
    staging = 16 << 20
    job = partial(2, (2048, 512), "ab", "ab", staging=staging)
    job.staging = staging
    expected = job.expected()
    async with fleet("ab", staging=staging) as at:
        placed = Placed(job, at)
        await placed.transfer()
        assert all(0 < card.plane.peak_staging <= staging for card in at.cards.values())
        same(placed.target, expected)


@pytest.mark.parametrize("where", ["ab", "aabb"])
async def test_one_memory_as_source_and_target_is_read_before_it_is_written(where: str) -> None:
    agents = where if len(where) == 4 else "abab"
    job = rows(4, 4, (64, 64), Shard(1), agents, agents)
    expected = job.expected()
    job.target = {r: {"t": held["t"].view(64, 16)} for r, held in job.source.items()}
    async with fleet("ab") as at:
        placed = Placed(job, at)
        runs = await placed.transfer()
        assert all(run.program.aliased and run.program.early for run in runs.values())
        same(placed.target, expected)


async def test_transfers_follow_each_other_over_one_communicator() -> None:
    """Tables, groups and launches are made once."""
    job = rows(2, 2, (256, 64), Shard(1), "ab", "ba")
    async with fleet("ab") as at:
        placed = Placed(job, at)
        transports, runs = await placed.runs()
        made = dict(at.cards["a"].driver.calls)
        for seq in range(1, 6):
            for held in placed.source.values():
                held["t"].fill_(seq)
            again = {name: replace(run, seq=seq, prepared=False) for name, run in runs.items()}
            await asyncio.gather(*(transports[name].run(again[name]) for name in again))
            for name in "ab":
                placed.copy_here(name)
            assert all(bool((held["t"] == seq).all()) for held in placed.target.values())
        after = at.cards["a"].driver.calls
        assert all(after[what] == made.get(what, 0) for what in ("allocate", "stream", "event"))


async def test_programs_share_the_ring_and_are_laid_over_it_again_when_it_grows() -> None:
    async with fleet("ab") as at:
        small_one = Placed(rows(1, 1, (64, 64), Shard(1), "a", "b"), at)
        other = Placed(rows(2, 2, (512, 48), Shard(1), "aa", "bb"), at)
        expected = other.job.expected()
        for _ in range(2):
            for one in (small_one, other):
                await one.transfer()
        same(other.target, expected)
        same(small_one.target, small_one.job.expected())


async def test_progress_counts_bytes() -> None:
    job = rows(1, 1, (4096, 4096), Shard(0), "a", "b")
    seen: list[int] = []
    async with fleet("ab") as at:
        placed = Placed(job, at)
        transports, runs = await placed.runs()
        moved = await asyncio.gather(transports["a"].run(runs["a"]), transports["b"].run(runs["b"], seen.append))
        await asyncio.sleep(0)
    assert moved == [64 << 20] * 2
    assert seen and seen == sorted(seen) and seen[-1] <= 64 << 20


async def test_groups_of_many_agents_are_cut_below_what_nccl_takes() -> None:
    """As with 130 cards: the cut thinks that there are so many others."""
    job = crowd(12)
    async with fleet(job.agents) as at:
        many = sorted([*job.agents, *(f"z{i:03}" for i in range(138))])
        cut = device_cut(many, 64 << 20)
        placed = Placed(job, at, replace(device_cut(job.agents, 64 << 20), most=32))
        assert cut.most == 1 and placed.cut.colour("a000", "a001") == 0 and placed.cut.colour("a005", "a006") == 2
        runs = await placed.transfer()
        assert all(len(make_rounds(run.program).groups) == 4 for run in runs.values())
        same(placed.target, job.expected())


async def test_slots_are_used_again_only_after_their_events() -> None:
    """The unpack stream of the receiver is held: no more than three groups are queued, and nothing is torn."""
    job = rows(2, 2, (96, 8192), Shard(1), "aa", "bb")
    async with fleet("ab") as at:
        placed = Placed(job, at, small(job, limit=64 << 10, chunk=32 << 10, straight=64 << 10))
        transports, runs = await placed.runs()
        card = at.cards["b"]
        ring = card.plane._ring
        assert ring is not None and len(make_rounds(runs["b"].program).groups) > 8
        card.driver.hold(ring.unpack)
        tasks = [asyncio.ensure_future(transports[name].run(runs[name])) for name in "ab"]
        before = -1
        async with asyncio.timeout(20):
            while before != card.driver.calls["record"] or card.driver.pending(ring.wire):
                before = card.driver.calls["record"]
                await asyncio.to_thread(card.driver.drain, ring.wire)
        assert at.world.groups <= 2 * 4
        assert not any(task.done() for task in tasks)
        card.driver.release(ring.unpack)
        await asyncio.gather(*tasks)
        same(placed.target, job.expected())


async def test_relayed_tensors_arrive_over_a_chain() -> None:
    job = copies((512, 700), 4, tensors=3, relay_bytes=0)
    async with fleet(job.agents) as at:
        placed = Placed(job, at)
        await placed.transfer()
        once = 3 * 512 * 700 * 4
        assert sum(t.sent for t in at.cards["s"].plane.traffic.values()) == once
        for host in range(4):
            assert sum(t.received for t in at.cards[f"t{host}"].plane.traffic.values()) == once
        same(placed.target, job.expected())


class Seen:
    """A witness that keeps what it is shown."""

    def __init__(self) -> None:
        self.contributions: dict[tuple[int, int], torch.Tensor] = {}
        self.values: dict[int, tuple[SlotPart, torch.Tensor]] = {}

    def given(self, part: SlotPart, index: int, flat: torch.Tensor) -> None:
        assert (part.number, index) not in self.contributions
        self.contributions[part.number, index] = flat.clone()

    def value(self, part: SlotPart, flat: torch.Tensor) -> None:
        assert part.number not in self.values
        self.values[part.number] = (part, flat.clone())


async def test_a_witness_is_shown_every_contribution_and_what_it_came_to() -> None:
    job = partial(20, (64, 48), "ab", "ab", staging=256 << 10)
    async with fleet("ab") as at:
        placed = Placed(job, at, small(job, limit=8 << 10, chunk=8 << 10, straight=1024, part=12 << 10, most=3))
        transports, runs = await placed.runs()
        seen = {name: Seen() for name in runs}
        watched = {
            name: replace(run, program=replace(run.program, observer=seen[name]), prepared=False)
            for name, run in runs.items()
        }
        await asyncio.gather(*(transports[name].run(watched[name]) for name in runs))
        same(placed.target, job.expected())
        for transport in transports.values():
            await transport.close()
    for name, one in seen.items():
        assert set(one.values) == {part.number for part in runs[name].program.parts} and one.values
        for number, (part, value) in one.values.items():
            assert torch.equal(sum(one.contributions[number, i] for i in range(part.slot.count)), value)


async def test_groups_are_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = trace.Tracer(tmp_path, {"etha_trace": 1, "host_name": "h", "role": "agent", "pid": 1})
    monkeypatch.setattr(trace, "active", tracer)
    job = rows(2, 2, (2048, 2048), Shard(0), "aa", "bb")
    async with fleet("ab") as at:
        await Placed(job, at).transfer()
    tracer.close()
    groups = [line for line in map(json.loads, tracer.path.read_text().splitlines()[1:]) if line[:2] == ["x", "nccl"]]
    assert sum(group[5]["bytes"] for group in groups) == 2 * 2048 * 2048 * 4  # each byte is sent and received
    assert all(group[2] == "group" and group[4] >= 0 for group in groups)
