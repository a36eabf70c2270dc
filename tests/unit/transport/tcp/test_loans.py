"""Streams that are lent: whoever moves a stretch, the bytes are those of the plan, and the stream goes on after it."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.distributed.tensor import Placement, Replicate, Shard

from etha.errors import PeerLostError
from etha.memory.worker_stream import ENDED, StreamRows, StreamRun
from etha.transport.loan import Loan
from etha.transport.wire import worker_rows
from etha.transport.wire.flows import WireProgram
from etha.transport.wire.worker_rows import StreamLane, Stretch, worker_stretches
from tests.examples import examples
from tests.unit.transport.agents import agents, same, transfer
from tests.unit.transport.tcp.test_transport import random_job, rows


class OwnProcess:
    """A lender whose workers are this process: a stretch is moved on a thread, unless ``refuses`` says no."""

    def __init__(self, program: WireProgram, refuses: Callable[[Stretch], bool] = lambda stretch: False) -> None:
        self.stretches: Mapping[StreamLane, Mapping[int, Stretch]] = worker_stretches(program)
        self._refuses = refuses
        self.moved = 0
        self.runs: dict[Loan, StreamRun] = {}
        self.threads: list[threading.Thread] = []

    def stretch(self, peer: str, sends: bool, lane: int, first: int) -> Stretch | None:
        return self.stretches.get((peer, sends, lane), {}).get(first)

    def lend(self, stretch: Stretch, conn: socket.socket, wake: Callable[[], None]) -> Loan:
        loan = Loan(stretch, conn, wake)
        if self._refuses(stretch):
            loan.declined = loan.over = True
            return loan
        run = self.runs[loan] = StreamRun(StreamRows(rows=stretch.rows), conn.dup(), sends=stretch.sends)
        self.threads.append(threading.Thread(target=self._move, args=(loan, run)))
        self.threads[-1].start()
        return loan

    def _move(self, loan: Loan, run: StreamRun) -> None:
        run.start()
        select.select([run.end_fd], [], [])
        loan.done, loan.ended = run.done, run.error == ENDED
        loan.error = OSError(run.error, "lost") if run.error else None
        self.moved += run.done
        loan.over = True
        run.close()
        loan.wake()

    def give_up(self, loan: Loan) -> None:
        pass

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


class Lenders(list[OwnProcess]):
    """Makes one for each program."""

    def __init__(self, refuses: Callable[[Stretch], bool] = lambda stretch: False) -> None:
        self._refuses = refuses

    def __call__(self, program: WireProgram) -> OwnProcess:
        self.append(OwnProcess(program, self._refuses))
        return self[-1]

    @property
    def moved(self) -> int:
        for lender in self:
            lender.close()
        return sum(lender.moved for lender in self)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend whatever can be lent, however small."""
    monkeypatch.setattr(worker_rows, "MIN_STRETCH", 1)
    monkeypatch.setattr(worker_rows, "MIN_ROW", 1)


@pytest.mark.usefixtures("everything")
@pytest.mark.parametrize("seed", range(examples(60)))
async def test_random_redistributions_equal_simulate(seed: int) -> None:
    job = random_job(seed, partial=0.1, big=0.4)
    job.private = [(True, True), (True, False), (False, True)][seed % 3]
    job.streams, job.bucket_size = 2, 1 << (10 + seed % 12)
    expected = job.expected()
    some = Lenders(lambda stretch: seed % 4 == 0 and stretch.number % 2 == 0)
    async with agents("abc", streams=2) as at:
        for seq in (1, 2):
            await transfer(job, at, seq, lend=some)
            same(job.target, expected)
        some.moved  # noqa: B018 - waits for its threads


PAIRS = [(Shard(0), 1, 1), (Shard(1), 1, 2), (Shard(0), 2, 2), (Shard(1), 2, 2), (Replicate(), 2, 1)]


@pytest.mark.parametrize(("to", "m", "n"), PAIRS, ids=str)
async def test_plain_tensors_cross_no_chunk(to: Placement, m: int, n: int) -> None:
    here, there = "abcd"[:m], "efgh"[:n]
    job = rows(m, n, (2048, 2050), to, here, there, private=(True, True))
    some = Lenders()
    async with agents(here + there) as at:
        await transfer(job, at, lend=some)
        wire = sum(sum(flow.wire) for agent in at for flow in job.wire(agent).sends.values())
        assert some.moved == 2 * wire > 0
        assert all(agent.plane.peak_staging == 0 for agent in at.values())
        sent = sum(traffic.sent for agent in at.values() for traffic in agent.plane.traffic.values())
        assert sent == sum(flow.nbytes for agent in at for flow in job.wire(agent).sends.values())
    same(job.target, job.expected())


@pytest.mark.parametrize("ends", ["mine", "theirs"])
async def test_a_shut_loan_ends_the_run(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker ends its stream in the middle: both agents' runs fail, and no thread is left."""
    job = rows(1, 1, (4096, 4096), Shard(0), "a", "b", private=(True, True))
    some = Lenders()
    start = StreamRun.start

    def shut(self: StreamRun) -> None:
        start(self)
        if bool(self._struct.sends) == (ends == "mine"):
            self.stop()

    monkeypatch.setattr(StreamRun, "start", shut)
    async with agents("ab") as at:
        with pytest.raises(BaseExceptionGroup) as raised:
            await transfer(job, at, lend=some)
        assert raised.group_contains(PeerLostError)
        assert some.moved < 2 * 4096 * 4096 * 4
        assert at["a"].plane.peak_staging == 0


def lendable(**changes: Any) -> int:
    """Bytes of stretches in a job of 16 MiB."""
    options = {"private": (True, True)} | changes
    job = rows(1, 1, (2048, 2048), Shard(0), "a", "b", **options)
    return sum(s.wire for lane in worker_stretches(job.wire("a")).values() for s in lane.values())


def test_what_is_lent() -> None:
    assert lendable() == 16 << 20
    assert lendable(private=(False, True)) == 0, "mapped memory needs no chunk"


def test_little_is_not_lent() -> None:
    job = rows(1, 1, (64, 64), Shard(0), "a", "b", private=(True, True))
    assert not worker_stretches(job.wire("a"))


def test_short_rows_are_not_lent() -> None:
    job = rows(1, 64, (4096, 1024), Shard(1), "a", "b" * 64, private=(True, True))
    assert not worker_stretches(job.wire("a"))


def test_a_stretch_is_of_one_rank_and_casts_nothing() -> None:
    found = 0
    for seed in range(60):
        job = random_job(seed, partial=0.1, big=1.0)
        job.private = (True, True)
        for agent in job.agents:
            for lane in worker_stretches(job.wire(agent)).values():
                for stretch in lane.values():
                    for span in stretch.spans:
                        found += 1
                        assert span.owners == (stretch.member,)
                        assert all(not t.ends.casts for _, p in span.pieces for e in p.ends for t, _, _ in e.steps)
    assert found
