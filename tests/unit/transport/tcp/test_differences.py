"""Differences over real sockets: any layouts to the bit, a base that is overwritten meanwhile, malformed data, and when
they are worth it."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import ProtocolError
from etha.memory.views import View, view_of
from etha.plan import Layout, TensorSpec, build_plan
from etha.transport.base import TransportPeer, WireRun
from etha.transport.tcp.streams import FRAME, FrameWriter
from etha.transport.wire.differences import LEAST, BaseVersion, DifferenceChoice, joined, key_of, may_differ
from tests.examples import examples
from tests.unit.transport.agents import Job, Local, agents, run_here, same, transfer
from tests.unit.transport.tcp.test_transport import random_job, rows


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory, which its elements may share."""
    found = view_of(tensor).raw
    assert found is not None
    return found


def cloned(local: Local) -> Local:
    """The same tensors elsewhere, with the same strides."""
    return {
        rank: {
            name: flat(x).clone().view(x.dtype).as_strided(x.size(), x.stride()) if x.numel() else x.clone()
            for name, x in held.items()
        }
        for rank, held in local.items()
    }


def change(local: Local, share: float) -> None:
    """Change about this share of the elements. Equal ones change alike, because replicas must stay equal."""
    for held in local.values():
        for tensor in filter(torch.Tensor.numel, held.values()):
            bits = flat(tensor)
            chosen = (bits.to(torch.int64) * 2654435761 >> 7) % 1000 < 1000 * share
            bits.copy_(torch.where(chosen, bits ^ 1, bits))


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in groups of errors."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in leaves(one)]
    return [error]


def base_of(job: Job, me: str, before: Local, intact: Callable[[], bool] = lambda: True) -> BaseVersion:
    """What the sources at an agent held before."""
    mine, _ = job.views_of(me)
    earlier = replace(job, source=before)
    old, _ = earlier.views_of(me)
    views: dict[tuple[int, int, torch.dtype], View] = {}
    for rank, tensors in mine.items():
        for number, view in tensors.items():
            views[key_of(view)] = old[rank][number]
    return BaseVersion(seq=1, views=views, intact=intact)


async def second(
    job: Job, before: Local, *, intact: Callable[[], bool] = lambda: True, held: int = 1, staging: int = 256 << 20
) -> dict[str, int]:
    """Transfer ``before``, then the job's source as a difference; the bytes that each agent received for it."""
    now, job.source, job.streams = job.source, before, 2
    async with agents(job.agents, streams=2, differences="always") as at:
        await transfer(job, at)
        job.source = now
        differs = may_differ(job.plan, staging)
        programs = {name: replace(job.wire(name), differs=differs) for name in job.agents}
        runs = {}
        for name, program in programs.items():
            peers = [TransportPeer(agent=peer, address=at[peer].address_for(name)) for peer in program.sends]
            await at[name].transport.open(peers)
            base = base_of(job, name, before, intact)
            runs[name] = WireRun(
                program=program, seq=2, key=bytes(32), bases=dict.fromkeys(program.sends, base), held=held
            )
        for name in job.agents:
            run_here(job.here(name))
        async with asyncio.TaskGroup() as group:
            for name in job.agents:
                group.create_task(at[name].transport.run(runs[name]))
        return {name: run.wired for name, run in runs.items()}


def differing(seed: int) -> Job:
    """A random job of mapped memory, none of whose agents copies by itself, whose targets hold the wire's own bits."""
    for attempt in range(1000):
        job = random_job(seed * 1000 + attempt, partial=0.0)
        if {*job.source_agents} & {*job.target_agents}:
            job.source_agents, job.target_agents = ("a",) * len(job.source_agents), ("b",) * len(job.target_agents)
        job.private = (False, False)
        if may_differ(job.plan, 256 << 20):
            return job
    raise AssertionError("no job whose targets hold the wire's own bits")


@pytest.mark.parametrize("seed", range(examples(30)))
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
async def test_a_difference_gives_what_all_bytes_would(seed: int, share: float) -> None:
    job = differing(seed)
    before = cloned(job.source)
    change(job.source, share)
    expected = job.expected()
    await second(job, before)
    same(job.target, expected)


def forwarding(rows: int) -> Job:
    """Agent a, which has a source and a target, sends c its own rows and forwards those of b."""
    here, there = ("b", "a", "b", "b"), ("a", "c", "c")
    source = {"w": TensorSpec((rows, 128), torch.float32, Layout((4,), [Shard(0)]))}
    target = {"w": TensorSpec((rows, 128), torch.float32, Layout.replicated(3))}
    plan = build_plan(
        source, target, source_agents=here, target_agents=there, source_hosts=here, target_hosts=there,
        fan_out="relay", relay_bytes=0, carry=False,
    )  # fmt: skip
    for klass in plan.classes:
        klass.chains = 1
    shapes = [spec["w"].local_shape(0) for spec in (source, target)]
    held: list[Local] = [
        {rank: {"w": torch.randn(s)} for rank in range(n)} for s, n in zip(shapes, (4, 3), strict=True)
    ]
    return Job(plan, here, there, held[0], held[1], (False, False))


@pytest.mark.parametrize("rows", [4, 1024])
async def test_a_peer_that_is_sent_what_is_forwarded_gets_all_bytes(rows: int) -> None:
    job = forwarding(rows)
    flow = job.wire("a").sends["c"]
    assert {bool(span.after) for lane in flow.lanes for span in lane} == {False, True}
    before = cloned(job.source)
    change(job.source, 0.02)
    await second(job, before)
    same(job.target, job.expected())


@pytest.mark.parametrize("layout", ["aligned", "crossed"])
async def test_little_travels_if_little_has_changed(layout: str) -> None:
    job = rows(2, 2, (1024, 1024), Shard(0 if layout == "aligned" else 1), "aa", "bb")
    before = cloned(job.source)
    change(job.source, 0.01)
    wired = await second(job, before)
    assert 0 < wired["b"] < 0.03 * 4 * 1024 * 1024  # elements of 4 bytes, places of 2
    same(job.target, job.expected())


async def test_a_base_that_is_overwritten_meanwhile_is_not_used() -> None:
    job = rows(2, 2, (1024, 1024), Shard(1), "aa", "bb")
    before, chance = cloned(job.source), random.Random(1)
    change(job.source, 0.01)
    asked = 0

    def intact() -> bool:
        """Whoever asks the third time finds that a put has begun, which writes from then on."""
        nonlocal asked
        asked += 1
        if asked >= 3:
            for held in before.values():
                # What is not compared any more may hold anything, even what is sent.
                held["t"].view(-1)[chance.randrange(0, held["t"].numel()) :] = job.source[0]["t"].view(-1)[0]
            return False
        return True

    wired = await second(job, before, intact=intact)
    assert asked > 3 and wired["b"] > 0.5 * 4 * 1024 * 1024
    same(job.target, job.expected())


async def test_a_difference_to_a_version_that_is_not_held_is_refused() -> None:
    job = rows(1, 1, (512, 1024), Shard(0), "a", "b")
    before = cloned(job.source)
    change(job.source, 0.01)
    with pytest.raises(ExceptionGroup) as raised:
        await second(job, before, held=7)
    assert any("difference to version 1, but the tensors here hold 7" in str(e) for e in leaves(raised.value))


async def test_malformed_differences_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    add = FrameWriter.add

    def wrong(writer: FrameWriter, newer: memoryview, older: memoryview, dtype: torch.dtype) -> None:
        add(writer, newer, older, dtype)
        writer._room[FRAME.size : FRAME.size + 4] = struct.pack("<I", 9 << 28 | 1)

    monkeypatch.setattr(FrameWriter, "add", wrong)
    for to in (0, 1):
        job = rows(1, 1, (512, 1024), Shard(to), "a", "b")
        before = cloned(job.source)
        with pytest.raises(ExceptionGroup) as raised:
            await second(job, before)
        assert any(isinstance(e, ProtocolError) and "malformed" in str(e) for e in leaves(raised.value))


async def test_a_frame_longer_than_its_piece_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    add = FrameWriter.add

    def wrong(writer: FrameWriter, newer: memoryview, older: memoryview, dtype: torch.dtype) -> None:
        add(writer, newer, older, dtype)
        FRAME.pack_into(writer._room, 0, 1 << 31)

    monkeypatch.setattr(FrameWriter, "add", wrong)
    job = rows(1, 1, (512, 1024), Shard(0), "a", "b")
    before = cloned(job.source)
    with pytest.raises(ExceptionGroup) as raised:
        await second(job, before)
    assert any("sends a difference of 2147483648 bytes for a piece of" in str(e) for e in leaves(raised.value))


def test_ranks_share_a_base_only_if_all_have_the_same() -> None:
    one, other = (BaseVersion(seq=seq, views={}, intact=lambda: True) for seq in (1, 2))
    assert joined([]) is None and joined([one, None]) is None and joined([one, other]) is None
    both = joined([one, BaseVersion(seq=1, views={}, intact=lambda: False)])
    assert both is not None and both.seq == 1 and not both.intact()


def test_when_a_difference_is_worth_it() -> None:
    for mode, chosen in (("always", True), ("never", False)):
        assert DifferenceChoice(mode).choose(LEAST) is chosen
    choice = DifferenceChoice("auto")
    assert not choice.choose(1 << 30)  # not known yet
    choice.note(1 << 30, 1.0, differed=False)
    assert choice.choose(1 << 30) and not choice.choose(LEAST - 1)
    choice.note(1 << 30, 0.5, differed=True)
    assert choice.choose(1 << 30)
    for _ in range(4):
        choice.note(1 << 30, 4.0, differed=True)  # everything changes, and comparing costs
    assert not choice.choose(1 << 30)
    for _ in range(15):
        choice.note(1 << 30, 1.0, differed=False)
        assert not choice.choose(1 << 30)
    choice.note(1 << 30, 1.0, differed=False)
    assert choice.choose(1 << 30)  # once again
    fast = DifferenceChoice("auto")
    fast.note(4 << 30, 1.0, differed=False)
    assert not fast.choose(1 << 30)
