"""A version whose hop has failed in the middle: the next hop, from any other holder, brings the rest alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.errors import TransferError
from etha.memory.views import CARRIERS, view_of
from etha.plan import Layout, TensorSpec
from etha.transport.arrival import ArrivingVersion, may_arrive
from etha.transport.base import TransportPeer, WireRun
from etha.transport.wire import compiler, flows
from etha.transport.wire.flows import PAD, End, FlowPiece, WireProgram, count_pieces, divide, span_memory
from tests.examples import examples
from tests.flow.truth import cut
from tests.unit.transport.agents import Agent, Job, Local, agents, make_plan, same
from tests.unit.transport.copy.test_local import allocate

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@dataclass
class Played:
    """Bytes that came over the wire, by agent, and the errors of those that failed."""

    wired: dict[str, int]
    errors: list[BaseException]


async def play(
    job: Job,
    at: Mapping[str, Agent],
    seq: int,
    arriving: Mapping[str, ArrivingVersion],
    *,
    resumed: bool = False,
    spans: int | None = None,
) -> Played:
    """One run of all agents. ``spans``: it fails at all receivers once one has received so many."""
    programs = {name: job.wire(name) for name in job.agents}
    runs = {}
    for name, program in programs.items():
        assert name not in arriving or may_arrive(program)
        peers = [TransportPeer(agent=peer, address=at[peer].address_for(name)) for peer in program.sends]
        await at[name].transport.open(peers)
        asked = frozenset(program.sends) if resumed else frozenset[str]()
        runs[name] = WireRun(program=program, seq=seq, resumed=asked, arriving=arriving.get(name))
        await at[name].plane.prepare(runs[name])
    for name, version in arriving.items():
        version.begin(programs[name])
        if spans is not None:
            version.listen(Breaker(at, version, spans))
    found = await asyncio.gather(*(at[name].transport.run(runs[name]) for name in runs), return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    for name in runs:
        if errors:
            at[name].transport.stop(TransferError("stopped"))
        else:
            at[name].transport.settled()
    for version in arriving.values():
        version.settle(whole=not errors)
    return Played({name: run.wired for name, run in runs.items()}, errors)


class Breaker:
    """Fails all runs once it has heard often enough, in the thread that has brought the last span."""

    def __init__(self, at: Mapping[str, Agent], version: ArrivingVersion, spans: int) -> None:
        self._at, self._version, self._left = at, version, spans

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            for agent in self._at.values():
                for run in list(agent.plane._running.values()):
                    run.fail(TransferError("broken off"))


def wire_of(program: WireProgram, version: ArrivingVersion) -> tuple[int, int, int]:
    """Bytes that a run receives, and those that are kept; and how many spans they are."""
    spans = [span for flow in program.receives.values() for lane in flow.lanes for span in lane]
    kept = [some for span in spans for some in divide(span, version.kept(span))[1]]
    rest = [some for span in spans for some in divide(span, version.kept(span))[0]]
    assert sum(some.nbytes for some in (*rest, *kept)) == sum(span.nbytes for span in spans)
    return sum(some.wire for some in rest), sum(some.nbytes for some in kept), len(spans)


def cut_dim(rng: random.Random, world: int, ndim: int) -> int | None:
    """The dim that is cut over ranks; None: each has all."""
    return rng.choice([None, *range(ndim)]) if world > 1 else None


def side(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], dims: Mapping[str, int | None], world: int
) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            shape, dtypes[name], Layout((world,), [Replicate() if (dim := dims[name]) is None else Shard(dim)])
        )
        for name, shape in shapes.items()
    }


def hops(seed: int) -> tuple[list[Job], Local]:
    """Hops of one version to the same targets from three holders of their own layouts, and what all must bring."""
    rng = random.Random(seed)
    shapes = {
        f"t{i}": tuple(rng.choice([40, 64, 100, 200, 300]) for _ in range(rng.randint(1, 2)))
        for i in range(rng.randint(1, 5))
    }
    given = {name: rng.choice(DTYPES) for name in shapes}
    wanted = {
        name: torch.float32 if given[name] is torch.bfloat16 and rng.random() < 0.5 else given[name] for name in shapes
    }
    whole = {
        name: torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(given[name])
        for name, shape in shapes.items()
    }
    n = rng.choice([1, 2, 3])
    there = tuple(rng.choice("bc") for _ in range(n))
    into = {name: cut_dim(rng, n, len(shape)) for name, shape in shapes.items()}
    targets = side(shapes, wanted, into, n)
    target: Local = {r: {} for r in range(n)}
    expected: Local = {r: {} for r in range(n)}
    for r in range(n):
        for name in shapes:
            full = whole[name].to(wanted[name])
            dim = into[name]
            expected[r][name] = full if dim is None else cut(full, dim, n, r)
            shape = tuple(expected[r][name].shape)
            target[r][name] = allocate(rng, shape, wanted[name], False)
            if r % 2 == 0 and len(shape) == 2 and rng.random() < 0.5:
                target[r][name] = torch.empty(shape[::-1], dtype=wanted[name]).t()
    jobs = []
    for agent in "ade":
        m = rng.choice([1, 2])
        dims = {name: cut_dim(rng, m, len(shape)) for name, shape in shapes.items()}
        held: Local = {
            r: {
                name: full.clone() if (dim := dims[name]) is None else cut(full, dim, m, r)
                for name, full in whole.items()
            }
            for r in range(m)
        }
        plan = make_plan(side(shapes, given, dims, m), targets, (agent,) * m, there)
        jobs.append(
            Job(
                plan,
                (agent,) * m,
                there,
                held,
                target,
                streams=rng.choice([1, 2, 4]),
                bucket_size=rng.choice([8192, 65536]),
            )
        )
    return jobs, expected


def poison(target: Local) -> None:
    for held in target.values():
        for tensor in held.values():
            tensor.view(CARRIERS[tensor.itemsize]).fill_(77)


async def resume(seed: int, *, encrypted: bool = False) -> int:
    """Hops of one version until one of them ends well; the bytes that this one need not bring any more."""
    rng = random.Random(seed)
    jobs, expected = hops(seed)
    names = sorted(set(jobs[0].target_agents))
    poison(jobs[0].target)
    versions = {name: ArrivingVersion(1, 5) for name in names}
    async with agents("abcde", encrypted=encrypted) as at:
        for seq, job in enumerate(jobs, 1):
            due = {name: wire_of(job.wire(name), versions[name]) for name in names}
            spans = None if job is jobs[-1] else rng.randint(1, max(1, min(count for *_, count in due.values()) - 1))
            played = await play(job, at, seq, versions, resumed=seq > 1, spans=spans)
            if not played.errors:
                same(job.target, expected)
                assert {name: played.wired[name] for name in names} == {
                    name: rest for name, (rest, _, _) in due.items()
                }
                return sum(had for _, had, _ in due.values())
            versions = {name: ArrivingVersion(seq + 1, 5, earlier=version) for name, version in versions.items()}
    raise AssertionError("the last hop has failed")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that little tensors travel in many pieces, of which memory that lies in a row takes more at once than a chunk
    does: the two ends of a stream join pieces in their own ways."""
    monkeypatch.setattr(compiler, "CHUNK", 4096)
    monkeypatch.setattr(compiler, "STRAIGHT", 2048)
    monkeypatch.setattr(flows, "CHUNK", 16_384)
    monkeypatch.setattr(flows, "PIECE", 40_000)
    monkeypatch.setattr(flows, "MIN_BUCKET", 4096)


@pytest.mark.parametrize("encrypted", [False, True])
async def test_what_has_come_is_not_sent_again(encrypted: bool) -> None:
    count = examples(16)
    kept = [await resume(seed, encrypted=encrypted) for seed in range(count)]
    assert sum(one > 0 for one in kept) > count // 2


async def test_a_receiver_that_keeps_nothing_is_sent_all_bytes() -> None:
    """It was asked, because it had announced a part, and then its run could keep none."""
    jobs, expected = hops(3)
    poison(jobs[0].target)
    async with agents("abcde") as at:
        played = await play(jobs[0], at, 1, {}, resumed=True)
    assert not played.errors
    same(jobs[0].target, expected)


def test_the_ends_of_these_streams_join_pieces_in_their_own_ways() -> None:
    differ = 0
    for job in (job for seed in range(10) for job in hops(seed)[0]):
        sender = job.source_agents[0]
        for peer, flow in job.wire(sender).sends.items():
            received = job.wire(peer).receives[sender]
            differ += [len(lane) for lane in flow.lanes] != [len(lane) for lane in received.lanes]
            for sends, receives in zip(flow.lanes, received.lanes, strict=True):
                assert sum(map(count_pieces, sends)) == sum(map(count_pieces, receives))
    assert differ >= 3


@pytest.mark.parametrize("seed", range(30))
def test_a_divided_span_has_each_piece_with_its_padding(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [PAD * rng.randint(1, 9) for _ in range(rng.randint(1, 7))]
    sizes[-1] -= rng.randint(0, PAD - 1)
    view = view_of(torch.arange(sum(sizes)).to(torch.uint8))
    pieces, at = [], 0
    for nbytes in sizes:
        address = view.address + at
        memory = span_memory(view, address, nbytes)
        pieces.append(
            FlowPiece(
                stage=0, tensor=0, nbytes=nbytes, dtype=torch.uint8, owners=(), ends=(End(view, ()),),
                straight=memory if seed % 2 else None, address=address,
            )
        )  # fmt: skip
        at += nbytes
    [span] = flows.spans(pieces)
    kept = [rng.random() < 0.5 for _ in pieces]
    for which, spans in zip((False, True), divide(span, kept), strict=True):
        some = [piece for piece, had in zip(pieces, kept, strict=True) if had is which]
        assert sum(map(count_pieces, spans)) == len(some)
        assert sum(one.nbytes for one in spans) == sum(piece.nbytes for piece in some)
        assert sum(one.wire for one in spans) == sum(piece.padded for piece in some)
        if seed % 2:
            expected = b"".join(bytes(piece.straight or b"") for piece in some)
            assert b"".join(bytes(one.memory or b"") for one in spans) == expected
        else:
            assert [piece for one in spans for _, piece in one.pieces] == some
            assert all(place % PAD == 0 for one in spans for place, _ in one.pieces)
