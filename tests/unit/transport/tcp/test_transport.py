"""Agents over real loopback sockets against ``simulate``: any layouts, dtypes, strides and memory, to the bit."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.errors import ConfigError, TransferError
from etha.plan import Layout, TensorSpec
from etha.transport.base import TransportPeer, WireRun
from etha.transport.copy.program import PIECE
from etha.transport.rate_limit import RateLimit
from etha.transport.tcp import data_plane
from etha.transport.wire.routing import account
from tests.examples import examples
from tests.unit.transport.agents import Job, Local, agents, bits, make_plan, same, transfer
from tests.unit.transport.copy.test_local import FLOATS, allocate, layout


def random_job(seed: int, *, partial: float = 0.3, big: float = 0.1, hosts: bool = False) -> Job:
    """Random layouts, dtypes, strides and memory over two or three agents that serve ranks of both sides."""
    rng = random.Random(seed)
    m, n = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 4])
    source, target = {}, {}
    for i in range(rng.randint(1, 4)):
        large = rng.random() < big
        ndim = rng.randint(0, 3)
        shape = tuple(rng.choice([40, 64, 100] if large else [0, 1, 2, 3, 5, 7, 8, 16, 33]) for _ in range(ndim))
        a = rng.choice(FLOATS)
        b = rng.choice([a, a, *FLOATS[:4]])
        reduces = rng.random() < partial and a is not torch.float8_e4m3fn
        source[f"t{i}"] = TensorSpec(shape, a, layout(rng, m, ndim, reduces))
        target[f"t{i}"] = TensorSpec(shape, b, layout(rng, n, ndim, False))
    names = rng.choice([["a", "b"], ["a", "b"], ["a", "b", "c"]])
    here, there = (tuple(rng.choice(names) for _ in range(k)) for k in (m, n))
    if rng.random() < 0.3:
        here, there = ("a",) * m, ("b",) * n
    reads = frozenset()
    if hosts:
        reads = frozenset((x, y) for x in names for y in names if x != y and rng.random() < 0.5)

    def held(specs: dict[str, TensorSpec], ranks: int, is_source: bool) -> Local:
        return {
            r: {
                k: allocate(random.Random(f"{seed} {k} {content(s, r)}"), shape, s.dtype, is_source)
                for k, s in specs.items()
                if (shape := s.local_shape(r)) is not None
            }
            for r in range(ranks)
        }

    plan = make_plan(source, target, here, there)
    assert not plan.violations
    private = (rng.random() < 0.5, rng.random() < 0.5)
    return Job(plan, here, there, held(source, m, True), held(target, n, False), private, reads)


def content(spec: TensorSpec, rank: int) -> str:
    """What a rank holds: equal for replicas, whose values must be equal too."""
    one = spec.layouts[0]
    where = torch.nonzero(torch.from_numpy(one.ranks == rank))[0].tolist()
    return f"{one.owned(spec.shape, rank)} {[i for i, p in zip(where, one.placements, strict=True) if p.is_partial()]}"


@pytest.mark.parametrize("seed", range(examples(50)))
async def test_random_redistributions_equal_simulate(seed: int) -> None:
    job = random_job(seed)
    job.streams, job.bucket_size = 2, 1 << (10 + seed % 12)
    expected = job.expected()
    async with agents("abc", streams=2) as at:
        await transfer(job, at)
    same(job.target, expected)


def rows(m: int, n: int, shape: tuple[int, ...], to: object, here: str, there: str, **options: object) -> Job:
    """float32 in rows over m ranks to ``to`` over n, on the agents that the letters name."""
    source = TensorSpec(shape, torch.float32, Layout((m,), [Shard(0)]))
    target = TensorSpec(shape, torch.float32, Layout((n,), [to]))
    plan = make_plan({"t": source}, {"t": target}, tuple(here), tuple(there))
    held = {r: {"t": torch.rand(source.local_shape(r) or ())} for r in range(m)}
    blank = {r: {"t": torch.zeros(target.local_shape(r) or ())} for r in range(n)}
    return Job(plan, tuple(here), tuple(there), held, blank, **options)  # type: ignore[arg-type]


async def test_whole_segments_go_straight_without_any_staging() -> None:
    job = rows(2, 2, (2048, 2048), Shard(0), "aa", "bb")
    async with agents("ab") as at:
        programs = await transfer(job, at)
        assert all(s.memory is not None for lane in programs["a"].sends["b"].lanes for s in lane)
        assert all(s.memory is not None for lane in programs["b"].receives["a"].lanes for s in lane)
        assert all(s.nbytes <= PIECE for lane in programs["b"].receives["a"].lanes for s in lane)
        assert len(programs["a"].sends["b"].lanes) == 4
        assert at["a"].plane.peak_staging == at["b"].plane.peak_staging == 0
    same(job.target, job.expected())


async def test_a_stream_is_enough_for_little() -> None:
    job = rows(1, 1, (32, 32), Shard(0), "a", "b")
    async with agents("ab") as at:
        programs = await transfer(job, at)
    assert len(programs["a"].sends["b"].lanes) == 1
    same(job.target, job.expected())


@pytest.mark.parametrize("replicas", [1, 2])
async def test_nothing_crosses_twice(replicas: int) -> None:
    """Three target replicas on one agent, one or two source replicas on the other: the payload crosses once."""
    shape = (512, 96)
    source = TensorSpec(shape, torch.float32, Layout((replicas, 2), [Replicate(), Shard(0)]))
    target = TensorSpec(shape, torch.float32, Layout((3, 2), [Replicate(), Shard(1)]))
    here, there = ("a",) * 2 * replicas, ("b",) * 6
    full = torch.rand(shape)
    held = {r: {"t": full[256 * (r % 2) : 256 * (r % 2) + 256].clone()} for r in range(2 * replicas)}
    blank = {r: {"t": torch.zeros(512, 48)} for r in range(6)}
    job = Job(make_plan({"t": source}, {"t": target}, here, there), here, there, held, blank)
    async with agents("ab") as at:
        await transfer(job, at)
        assert at["a"].plane.traffic["b"].sent == at["b"].plane.traffic["a"].received == full.nbytes
        assert at["a"].plane.traffic["b"].received == at["b"].plane.traffic["a"].sent == 0
    for r in range(6):
        assert torch.equal(job.target[r]["t"], full[:, 48 * (r % 2) : 48 * (r % 2) + 48])


def partial(tensors: int, shape: tuple[int, ...], here: str, there: str, **options: object) -> Job:
    """Sums over all source ranks, replicated to all targets: every slot is wanted everywhere."""
    m, n = len(here), len(there)
    source = TensorSpec(shape, torch.float32, Layout((m,), [Partial("sum")]))
    target = TensorSpec(shape, torch.float32, Layout((n,), [Replicate()]))
    names = [f"t{i:02}" for i in range(tensors)]
    plan = make_plan(dict.fromkeys(names, source), dict.fromkeys(names, target), tuple(here), tuple(there))
    held = {r: {k: torch.randn(shape) for k in names} for r in range(m)}
    blank = {r: {k: torch.zeros(shape) for k in names} for r in range(n)}
    return Job(plan, tuple(here), tuple(there), held, blank, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("agents_of", [("ab", "ab"), ("aabb", "abb"), ("abca", "cab"), ("ab", "cc")])
async def test_reductions_in_many_waves_equal_simulate(agents_of: tuple[str, str]) -> None:
    """All agents contribute to all, and no wave holds much: nobody waits in a ring."""
    job = partial(20, (64, 48), *agents_of, staging=128 << 10, streams=3, bucket_size=8 << 10)
    expected = job.expected()
    async with agents("abc", streams=3) as at:
        programs = await transfer(job, at)
        same(job.target, expected)
        waves = max(part.wave for program in programs.values() for part in program.parts)
        assert waves >= 3
        for name, program in programs.items():
            assert max(part.end for part in program.parts) <= job.staging // 8 if program.parts else True
            # Contributions go once to the owner, results once to each other agent.
            assert sum(t.sent for t in at[name].plane.traffic.values()) == sum(f.nbytes for f in program.sends.values())
    assert bits(job.target[0]["t00"]) == bits(job.target[1]["t00"])


async def test_a_budget_holds_however_much_is_moved() -> None:
    """64 MiB that must be packed, cast and reduced, with 48 MiB for everything."""
    staging = 48 << 20
    job = partial(2, (4096, 1024), "ab", "ab", staging=staging, streams=2)
    expected = job.expected()
    async with agents("ab", staging=staging, streams=2) as at:
        await transfer(job, at)
        for agent in at.values():
            assert 0 < agent.plane.peak_staging <= staging
    same(job.target, expected)


async def test_a_budget_too_small_is_refused_before_anything_moves() -> None:
    job = partial(1, (256, 256), "ab", "ab")
    async with agents("ab", staging=4 << 20) as at:
        with pytest.raises(ExceptionGroup) as caught:
            await transfer(job, at)
        assert any(isinstance(e, ConfigError) and "staging" in str(e) for e in caught.value.exceptions)
    assert all(bool((x == 0).all()) for held in job.target.values() for x in held.values())
    with pytest.raises(ConfigError, match="'t00'"):
        partial(1, (256, 256), "ab", "ab", staging=64 << 10).wire("a")


async def test_one_memory_as_source_and_target_is_read_before_it_is_written() -> None:
    """Rows to columns in place, each rank's only tensor is both, half of the ranks on each agent."""
    job = rows(4, 4, (64, 64), Shard(1), "aabb", "aabb")
    expected = job.expected()
    job.target = {r: {"t": held["t"].view(64, 16)} for r, held in job.source.items()}
    async with agents("ab") as at:
        programs = await transfer(job, at)
    assert all(program.aliased and program.early for program in programs.values())
    same(job.target, expected)


def streams() -> set[int | None]:
    return {t.ident for t in threading.enumerate() if t.name.startswith(("etha-send", "etha-recv"))}


async def test_transfers_follow_each_other_on_the_same_streams() -> None:
    job = rows(2, 2, (256, 64), Shard(1), "ab", "ba")
    async with agents("ab") as at:
        for seq in range(1, 6):
            for held in job.source.values():
                held["t"].fill_(seq)
            before = streams()
            await transfer(job, at, seq)
            assert all(bool((held["t"] == seq).all()) for held in job.target.values())
            assert streams() == before or seq == 1


async def test_sets_that_no_run_has_used_for_a_while_are_closed_but_for_the_lowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = rows(1, 1, (64, 64), Shard(0), "a", "b")
    async with agents("ab") as at:
        plane, address = at["a"].plane, at["b"].address_for("a")
        await transfer(job, at, 1)
        threads = streams()
        lowest, *others = [await plane.lease("b", address) for _ in range(3)]
        plane.release([*others, lowest])
        assert lowest.healthy and all(one.healthy for one in others), "they have just been used"
        monkeypatch.setattr(data_plane, "IDLE", 0.0)
        held = [await plane.lease("b", address) for _ in range(2)]
        plane.release([held[0]])
        assert held == [lowest, others[0]] and lowest.healthy and others[0].healthy, "one is the lowest, one has a run"
        assert not others[1].healthy
        plane.release([held[1]])
        await transfer(job, at, 2)
        assert lowest.healthy and not others[0].healthy
        for thread in threading.enumerate():
            if thread.ident in streams() - threads:
                await asyncio.to_thread(thread.join, 10)
        assert streams() == threads, "the other end's threads have ended too"
    same(job.target, job.expected())


async def test_progress_counts_bytes() -> None:
    job = rows(1, 1, (4096, 1024), Shard(0), "a", "b")
    program = {name: job.wire(name) for name in "ab"}
    seen: list[int] = []
    async with agents("ab") as at:
        await at["a"].transport.open([TransportPeer(agent="b", address=at["b"].address_for("a"))])
        moved = await asyncio.gather(
            at["a"].transport.run(WireRun(program=program["a"], seq=1)),
            at["b"].transport.run(WireRun(program=program["b"], seq=1), seen.append),
        )
    assert moved == [16 << 20] * 2
    assert seen and seen == sorted(seen) and seen[-1] <= 16 << 20


async def test_accounts_are_of_the_plan_whatever_the_way() -> None:
    job = rows(2, 2, (64, 64), Shard(1), "ab", "ab")
    for name, rank in (("a", 0), ("b", 1)):
        nbytes, peers = account(job.plan, job.routing(name))
        assert nbytes == {("source", rank): 64 * 64 * 2, ("target", rank): 64 * 64 * 2}
        assert peers["source", rank] == (("target", 0), ("target", 1))
    sums = partial(1, (32, 32), "ab", "ab")
    nbytes, peers = account(sums.plan, sums.routing("a"))
    assert nbytes["target", 0] == 32 * 32 * 4 and peers["target", 0] == (("source", 0), ("source", 1))


def test_a_view_smaller_than_planned_is_refused() -> None:
    job = rows(1, 1, (64, 64), Shard(0), "a", "b")
    job.source[0]["t"] = torch.zeros(63, 64)
    with pytest.raises(ValueError, match="outside"):
        job.wire("a")
    job.target[0] = {}
    with pytest.raises(ValueError, match="no memory for 't'"):
        job.wire("b")


@pytest.mark.parametrize("dim", [0, 1], ids=["straight", "packed"])
async def test_a_run_with_a_limit_keeps_to_its_rate(dim: int) -> None:
    """Rows go straight from memory, columns are packed first. Four streams share the rate."""
    job = rows(1, 2, (2048, 1024), Shard(dim), "a", "bb")
    limit, rate = RateLimit(), 16e6
    limit.lower(rate)
    program = {name: job.wire(name) for name in "ab"}
    async with agents("ab") as at:
        await at["a"].transport.open([TransportPeer(agent="b", address=at["b"].address_for("a"))])
        begun = time.monotonic()
        moved = await asyncio.gather(
            at["a"].transport.run(WireRun(program=program["a"], seq=1, limit=limit)),
            at["b"].transport.run(WireRun(program=program["b"], seq=1)),
        )
        seconds = time.monotonic() - begun
    assert moved == [8 << 20] * 2
    for rank, held in job.target.items():
        assert torch.equal(held["t"], job.source[0]["t"].chunk(2, dim)[rank])
    # A burst at the beginning, and what lies in socket buffers, come on top; a busy machine is slower.
    assert 0.3 < moved[0] / seconds / rate < 1.15


async def test_a_run_that_waits_for_its_rate_ends_at_once() -> None:
    job = rows(1, 1, (2048, 1024), Shard(0), "a", "b")
    limit = RateLimit()
    limit.lower(1.0)
    program = {name: job.wire(name) for name in "ab"}
    async with agents("ab") as at:
        await at["a"].transport.open([TransportPeer(agent="b", address=at["b"].address_for("a"))])
        runs = [
            asyncio.ensure_future(at["a"].transport.run(WireRun(program=program["a"], seq=1, limit=limit))),
            asyncio.ensure_future(at["b"].transport.run(WireRun(program=program["b"], seq=1))),
        ]
        done, _ = await asyncio.wait(runs, timeout=0.5)
        assert not done
        at["a"].transport.stop(TransferError("no more"))
        async with asyncio.timeout(30):
            outcomes = await asyncio.gather(*runs, return_exceptions=True)
        assert str(outcomes[0]) == "no more" and isinstance(outcomes[1], TransferError)
