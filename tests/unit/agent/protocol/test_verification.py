"""Checksums of both ends over real data planes: they agree on what is right, and name what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from etha.agent.protocol.verification import Line, VerificationBook, VerificationPlan
from etha.errors import TransferError
from etha.plan import Layout, TensorSpec
from etha.transport.copy.staging import Budget
from etha.transport.tcp.run import TcpRun
from etha.transport.tcp.streams import SendStream
from etha.transport.verify.checksums import ChecksumReader, checksum
from etha.transport.verify.chunks import CHUNK, SAMPLE, Course
from etha.transport.wire.carrying import RingPlace
from etha.transport.wire.flows import WireProgram
from tests.examples import examples
from tests.unit.transport.agents import Agent, Job, agents, bits, make_plan, same, transfer
from tests.unit.transport.relaying import copies, relayed_job
from tests.unit.transport.tcp.test_transport import partial, random_job, rows
from tests.unit.transport.wire.test_carrying import carried_job, one_holder

LIMIT = 64 << 20
#: Seeds of jobs in which some rank receives something dense.
FLIPPED = [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 21, 24, 26, 27, 29]


@dataclass
class Watched:
    """A job whose transfers are verified: the part of every agent, one after the other."""

    job: Job
    full: bool = True
    checks: dict[str, VerificationPlan] = field(init=False)
    books: dict[str, VerificationBook] = field(init=False)
    budget: Budget = field(default_factory=lambda: Budget(LIMIT))

    def __post_init__(self) -> None:
        job, wire = self.job, self.job.wire
        self.checks = {
            me: VerificationPlan(
                job.plan, job.routing(me), *job.views_of(me), sides=("s", "t"), staging=job.staging, full=self.full
            )
            for me in job.agents
        }  # fmt: skip

        def witnessed(me: str) -> WireProgram:
            return replace(wire(me), observer=self.checks[me].reduction_sums)

        job.wire = witnessed  # type: ignore[method-assign]

    async def move(
        self, at: Mapping[str, Agent], seq: int = 1, between: Callable[[], None] = lambda: None
    ) -> list[Line]:
        """A transfer and all comparisons; the lines of all agents. TransferError for a difference."""
        reader = ChecksumReader(0, self.budget, {})
        self.books = {me: checks.book(seq) for me, checks in self.checks.items()}
        for me, book in self.books.items():
            for piece in book.first:
                self.checks[me].run(piece, reader)
        await transfer(self.job, at, seq)
        between()
        for me, book in self.books.items():
            for piece in book.then:
                self.checks[me].run(piece, reader)
        assert reader.close() <= 16 << 20
        assert self.budget.used == 0
        for me, book in self.books.items():
            for peer, lines in book.takes.items():
                given = self.books[peer].gives[me]
                assert [x.chunk.bounds for x in given] == [x.chunk.bounds for x in lines]
                for line, there in zip(lines, given, strict=True):
                    line.expected += there.expected
                    self.checks[me].compare(line)
            assert all(me in self.books[peer].takes for peer in book.gives)
        found = [s.line for book in self.books.values() for piece in (*book.first, *book.then) for s in piece]
        return list({id(x): x for x in found}.values())


def flip(tensor: torch.Tensor) -> None:
    """One bit, in the middle of it."""
    raw = tensor.view(torch.uint8).view(-1)
    raw[raw.numel() // 2] ^= 16


@pytest.mark.parametrize("seed", range(examples(60)))
async def test_both_ends_of_any_redistribution_agree(seed: int) -> None:
    """Random layouts, casts, NaNs, strides, reductions and empty shards; tcp, host and local mixed."""
    job = random_job(seed, partial=0.5, hosts=seed % 2 == 0)
    job.streams = 2
    expected = job.expected()
    watched = Watched(job, full=seed % 3 != 0)
    async with agents("abc", streams=2) as at:
        lines = await watched.move(at, seq=seed)
    same(job.target, expected)
    assert bool(lines) == any(x.numel() for held in job.target.values() for x in held.values())


@pytest.mark.parametrize("seed", range(examples(20)))
async def test_both_ends_of_what_is_passed_on_agree(seed: int) -> None:
    job = relayed_job(seed)
    job.streams = 2
    expected = job.expected()
    async with agents(job.agents, streams=2) as at:
        await Watched(job, full=seed % 3 != 0).move(at, seq=seed)
    same(job.target, expected)


@pytest.mark.parametrize("partial", [0, 3])
async def test_a_bit_that_changed_behind_a_relay_is_found_between_the_two(partial: int) -> None:
    job = copies((1024, 300), 3, partial=partial)
    async with agents(job.agents) as at:
        watched = Watched(job)
        for rank in range(3):
            with pytest.raises(TransferError, match=r"chunk \[.*\] of t rank \d is not what .*[st] rank \d"):
                await watched.move(at, 1 + rank, between=lambda rank=rank: flip(job.target[rank]["w0"]))


@pytest.mark.parametrize("seed", range(examples(20)))
async def test_both_ends_of_what_is_carried_agree(seed: int) -> None:
    """The carrier keeps nothing: the source's agent and the holder's compare with each other."""
    job = carried_job(seed)
    expected = job.expected()
    async with agents(job.agents, streams=3) as at:
        await Watched(job, full=seed % 3 != 0).move(at, seq=seed)
    same(job.target, expected)


async def test_a_bit_that_changes_in_a_carriers_ring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    job, carried, flipped = one_holder(), TcpRun.carried, list[int]()

    def corrupt(self: TcpRun, places: Sequence[RingPlace]) -> list[memoryview]:
        found = carried(self, places)
        if not flipped:
            flipped.append(1)
            found[0][5] ^= 1
        return found

    monkeypatch.setattr(TcpRun, "carried", corrupt)
    watched = Watched(job)
    async with agents(job.agents) as at:
        with pytest.raises(TransferError, match=r"tensor 'w' chunk \[.*\] of t rank 2 is not what s rank \d holds"):
            await watched.move(at, 1)
        await watched.move(at, 2)
    same(job.target, job.expected())


@pytest.mark.parametrize("seed", FLIPPED)
async def test_a_bit_of_any_target_that_differs_is_found(seed: int) -> None:
    job = random_job(seed, partial=0.5, hosts=seed % 2 == 0)
    job.streams = 2
    wanted = [(r, k) for r, held in job.target.items() for k, x in held.items() if x.numel() and x.is_contiguous()]
    rank, name = wanted[seed % len(wanted)]
    received, right = job.target[rank][name], job.expected()[rank][name]

    def between() -> None:
        value = 3 if right.reshape(-1)[-1].item() != 3 else 4
        received.view(-1)[-1] = value

    async with agents("abc", streams=2) as at:
        with pytest.raises(TransferError, match=rf"tensor '{name}' chunk \[.*\] of t rank {rank} is not what"):
            await Watched(job).move(at, between=between)


@pytest.mark.parametrize("agents_of", [("ab", "ab"), ("aabb", "abb"), ("abca", "cab"), ("ab", "cc"), ("aa", "aa")])
async def test_reductions_are_verified_as_they_are_made(agents_of: tuple[str, str]) -> None:
    """Contributions, values and targets, in waves."""
    job = partial(20, (64, 48), *agents_of, staging=128 << 10, streams=3)
    expected = job.expected()
    watched = Watched(job)
    async with agents("abc", streams=3) as at:
        lines = await watched.move(at)
        same(job.target, expected)
        assert len(lines) >= 20
        with pytest.raises(TransferError, match=r"'t07' chunk \[.*\] of t rank 1 is not what was reduced at s rank"):
            await watched.move(at, 2, between=lambda: flip(job.target[1]["t07"]))


async def test_a_part_of_a_slot_that_only_its_own_agent_wants_is_made() -> None:
    """Rows 0 to 31 of a slot go to b, row 32 only to the owner's own agent: no stream asks for it."""
    shape = (99, 2000)
    source = TensorSpec(shape, torch.float64, Layout((3,), [Partial("sum")]))
    target = TensorSpec(shape, torch.float64, Layout((4,), [Shard(0)]))
    plan = make_plan({"t": source}, {"t": target}, ("a",) * 3, ("b", "a", "a", "a"))
    held = {r: {"t": torch.randn(shape, dtype=torch.float64)} for r in range(3)}
    blank = {r: {"t": torch.zeros(target.local_shape(r) or (), dtype=torch.float64)} for r in range(4)}
    job = Job(plan, ("a",) * 3, ("b", "a", "a", "a"), held, blank)
    program = job.wire("a")
    assert any(not p.far and not program.values[p.number].sends for p in program.parts)
    expected = job.expected()
    async with agents("ab") as at:
        await Watched(job).move(at)
    same(job.target, expected)


async def test_a_contribution_that_changed_on_the_way_is_named() -> None:
    """What came to the reduction is not what its owner still holds: nobody's target shows that."""
    job = partial(3, (64, 48), "ab", "ab")
    async with agents("ab") as at:
        with pytest.raises(TransferError, match=r"'t01' chunk \[.*\] of s rank \d is not what came to the reduction"):
            await Watched(job).move(at, between=lambda: flip(job.source[1]["t01"]))


@pytest.mark.parametrize("private", [False, True], ids=["mapped", "private"])
async def test_a_bit_that_flips_on_the_wire_is_found_with_its_place(
    private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's bytes are right and the receiver's memory too: only the stream between them is not."""
    job = rows(1, 1, (4096, 256), Shard(0), "a", "b")
    job.private = (private, private)
    straight = SendStream._straight
    flipped: list[int] = []

    def corrupt(self: SendStream, exchange: object, span: object, memory: memoryview) -> None:
        if not flipped:
            flipped.append(1)
            memory = memoryview(bytearray(memory))
            memory[5] ^= 1
        straight(self, exchange, span, memory)  # type: ignore[arg-type]

    def corrupt_packed(self: SendStream, exchange: object, span: object) -> None:
        memory, ops = self._pack(exchange, span)  # type: ignore[arg-type]
        with self.owner.copy_slots.one() as copy_slot:
            copy_slot.run(ops)
        if not flipped:
            flipped.append(1)
            memory[5] ^= 1
        self.sock.sendall(memory)

    monkeypatch.setattr(SendStream, "_straight", corrupt)
    monkeypatch.setattr(SendStream, "_packed", corrupt_packed)
    expected = job.expected()
    watched = Watched(job)
    async with agents("ab") as at:
        with pytest.raises(TransferError, match=r"'t' chunk \[\d+:\d+, 0:256\] of t rank 0 is not what s rank 0 holds"):
            await watched.move(at, 1)
        assert bits(job.target[0]["t"]) != bits(expected[0]["t"])
        await watched.move(at, 2)
        same(job.target, expected)


async def test_one_memory_as_source_and_target_is_summed_before_it_is_written() -> None:
    job = rows(4, 4, (64, 64), Shard(1), "aabb", "aabb")
    expected = job.expected()
    job.target = {r: {"t": held["t"].view(64, 16)} for r, held in job.source.items()}
    watched = Watched(job)
    async with agents("ab") as at:
        assert await watched.move(at)
        assert all(book.first for book in watched.books.values())
    same(job.target, expected)


# ---- which chunks -------------------------------------------------------------------------------


def course(shape: tuple[int, ...], tensors: int, *, full: bool) -> tuple[Course, Watched]:
    source = TensorSpec(shape, torch.float32, Layout((2,), [Shard(0)]))
    target = TensorSpec(shape, torch.float32, Layout((2,), [Replicate()]))
    names = [f"t{i}" for i in range(tensors)]
    plan = make_plan(dict.fromkeys(names, source), dict.fromkeys(names, target), ("a", "a"), ("b", "b"))
    job = Job(plan, ("a", "a"), ("b", "b"), {r: {} for r in range(2)}, {r: {} for r in range(2)})
    watched = Watched(job, full=full)
    return watched.checks["a"]._scheme.gives["b"], watched


def nbytes(found: list[object]) -> int:
    return sum(chunk.numel * 4 for chunk in found)  # type: ignore[attr-defined]


def test_full_is_every_byte_in_chunks_of_a_mebibyte() -> None:
    gives, _ = course((1024, 1024), 3, full=True)
    chunks = gives.choose(1)
    assert nbytes(chunks) == 3 * (4 << 20) and len(chunks) == len(gives)
    assert max(chunk.numel * 4 for chunk in chunks) <= CHUNK


@pytest.mark.parametrize("rows_", [1, 40, 1000, 5000])
def test_a_sample_is_a_sixteenth_and_at_least_one_chunk_of_each_tensor(rows_: int) -> None:
    gives, _ = course((rows_, 256), 5, full=False)
    for seq in (1, 2, 77):
        chunks = gives.choose(seq)
        assert {chunk.subject.tensor for chunk in chunks} == set(range(5))
        assert nbytes(chunks) <= 5 * max(2 * rows_ * 256 * 4 // SAMPLE, 64 << 10)
        assert [c.bounds for c in chunks] == [c.bounds for c in gives.choose(seq)]


def test_sixteen_samples_in_a_row_are_everything() -> None:
    gives, _ = course((3000, 256), 2, full=False)
    seen = {(c.subject.tensor, c.subject.source, c.bounds) for seq in range(40, 56) for c in gives.choose(seq)}
    assert len(seen) == len(gives)


# ---- checksums ----------------------------------------------------------------------------------


def test_every_nan_counts_as_the_same_only_where_it_was_made_on_the_way() -> None:
    quiet = torch.tensor([1.0, float("nan")])
    other = quiet.clone()
    other.view(torch.int32)[1] |= 5
    assert checksum(quiet, torch.float32, True) == checksum(other, torch.float32, True)
    assert checksum(quiet, torch.float32, False) != checksum(other, torch.float32, False)
    assert checksum(quiet, torch.float32, True) != checksum(torch.tensor([1.0, 2.0]), torch.float32, True)
    assert checksum(torch.tensor([0.0]), torch.float32, True) != checksum(torch.tensor([-0.0]), torch.float32, True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_any_dtype_has_a_checksum(dtype: torch.dtype) -> None:
    one = torch.tensor([1, 0, 1]).to(dtype)
    assert checksum(one, dtype, True) == checksum(one.clone(), dtype, True)
    assert checksum(one, dtype, True) != checksum(one[:2], dtype, True)


def test_partial_layouts_have_no_subjects_without_elements() -> None:
    source = TensorSpec((0, 3), torch.float32, Layout((2,), [Partial("sum")]))
    target = TensorSpec((0, 3), torch.float32, Layout((1,), [Replicate()]))
    plan = make_plan({"t": source}, {"t": target}, ("a", "a"), ("a",))
    held = {r: {"t": torch.zeros(0, 3)} for r in range(2)}
    job = Job(plan, ("a", "a"), ("a",), held, {0: {"t": torch.zeros(0, 3)}})
    assert Watched(job).checks["a"].book(1).then == []
