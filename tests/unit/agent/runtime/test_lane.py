"""The lane: pieces shared out, of each job in turn, an end that nothing follows."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from etha.agent.runtime.lane import Lane, Running


class Pieces:
    """A job of counted pieces; ``act`` runs inside each."""

    def __init__(
        self, pieces: int, act: Callable[[int, int], None] = lambda piece, thread: None, barriers: tuple[int, ...] = ()
    ) -> None:
        self.pieces, self.act, self.barriers = pieces, act, barriers
        self.log: list[tuple[str, int]] = []
        self.lock = threading.Lock()

    def run(self, piece: int, thread: int) -> int:
        with self.lock:
            self.log.append(("begin", piece))
        try:
            self.act(piece, thread)
        finally:
            with self.lock:
                self.log.append(("end", piece))
        return 10


class Over:
    """What a submitted job came to."""

    def __init__(self, lane: Lane, job: Pieces) -> None:
        self.result: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.progress: list[int] = []
        self.running: Running = lane.submit(job, on_progress=self.progress.append, on_done=self.result.set_result)


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    found = Lane(threads=2)
    yield found
    await asyncio.to_thread(found.close)


async def test_every_piece_runs_once(lane: Lane) -> None:
    job = Pieces(100)
    assert await Over(lane, job).result is None
    assert sorted(p for what, p in job.log if what == "begin") == list(range(100))


async def test_both_threads_work_on_one_job(lane: Lane) -> None:
    meet = threading.Barrier(2, timeout=5)
    assert await Over(lane, Pieces(2, lambda piece, thread: meet.wait() and None)).result is None


async def test_a_small_job_does_not_wait_for_a_big_one_before_it() -> None:
    lane = Lane(threads=1)
    step, stay = threading.Semaphore(0), threading.Event()

    def act(piece: int, thread: int) -> None:
        assert stay.is_set() or step.acquire(timeout=5)

    big = Over(lane, Pieces(100, act))
    small = Over(lane, Pieces(3))
    for _ in range(4):  # pieces of the big one, between which the small one has its own
        step.release()
    assert await small.result is None
    assert not big.result.done() and big.running.next < 6
    stay.set()
    step.release(2)
    assert await big.result is None
    await asyncio.to_thread(lane.close)


async def test_jobs_have_their_pieces_in_turn() -> None:
    lane = Lane(threads=1)
    gate, turns = threading.Event(), list[int]()
    first = Over(lane, Pieces(1, lambda piece, thread: gate.wait(5) and None))
    jobs = [Pieces(3, lambda piece, thread, i=i: turns.append(i)) for i in range(4)]  # type: ignore[misc]
    overs = [Over(lane, job) for job in jobs]
    gate.set()
    for over in (first, *overs):
        assert await over.result is None
    assert turns == [0, 1, 2, 3] * 3
    await asyncio.to_thread(lane.close)


async def test_a_barrier_holds_back_its_own_job_only() -> None:
    lane = Lane(threads=2)
    leave = threading.Event()
    held = Over(lane, Pieces(2, lambda piece, thread: leave.wait(5) and None, barriers=(1,)))
    assert await Over(lane, Pieces(10)).result is None
    assert not held.result.done()
    leave.set()
    assert await held.result is None
    await asyncio.to_thread(lane.close)


async def test_a_job_without_pieces_is_over_at_once(lane: Lane) -> None:
    assert await Over(lane, Pieces(0)).result is None


async def test_nothing_passes_a_barrier_before_all_before_it_is_done(lane: Lane) -> None:
    for _ in range(20):
        job = Pieces(9, barriers=(4, 5))
        assert await Over(lane, job).result is None
        at = {entry: i for i, entry in enumerate(job.log)}
        for barrier in (4, 5):
            assert max(at["end", p] for p in range(barrier)) < min(at["begin", p] for p in range(barrier, 9))


async def test_an_error_ends_its_job_and_not_the_next(lane: Lane) -> None:
    def fail(piece: int, thread: int) -> None:
        if piece == 3:
            raise ValueError("piece 3")

    job = Pieces(10_000, fail)
    first, second = Over(lane, job), Over(lane, Pieces(5))
    error = await first.result
    assert isinstance(error, ValueError) and str(error) == "piece 3"
    assert len(job.log) < 200
    assert await second.result is None


async def test_abort_waits_for_the_pieces_inside_and_starts_no_other(lane: Lane) -> None:
    inside, leave = threading.Barrier(3, timeout=5), threading.Event()

    def act(piece: int, thread: int) -> None:
        inside.wait()
        assert leave.wait(5)

    job = Pieces(50, act)
    over = Over(lane, job)
    await asyncio.to_thread(inside.wait)
    cause = RuntimeError("stop")
    over.running.abort(cause)
    over.running.abort(RuntimeError("later"))
    await asyncio.sleep(0)
    assert not over.result.done()
    leave.set()
    assert await over.result is cause
    assert sorted(job.log) == [("begin", 0), ("begin", 1), ("end", 0), ("end", 1)]
    over.running.abort(cause)  # long over


async def test_a_job_that_has_had_no_turn_is_aborted_without_running(lane: Lane) -> None:
    gate = threading.Event()
    first = Over(lane, Pieces(2, lambda piece, thread: gate.wait(5) and None))
    job = Pieces(5)
    second = Over(lane, job)
    cause = RuntimeError("withdrawn")
    second.running.abort(cause)
    assert await second.result is cause and job.log == []
    gate.set()
    assert await first.result is None


async def test_progress_is_told_in_bytes_and_not_for_every_piece(lane: Lane) -> None:
    over = Over(lane, Pieces(2000))
    await over.result
    assert 1 <= len(over.progress) < 100
    assert over.progress == sorted(over.progress) and all(n % 10 == 0 for n in over.progress)


async def test_an_idle_lane_holds_nothing_of_the_last_job(lane: Lane) -> None:
    job = Pieces(4)
    reference = weakref.ref(job)
    await Over(lane, job).result
    del job
    barrier = Pieces(2)  # its threads have let go of the first one by the time it is over
    await Over(lane, barrier).result
    gc.collect()
    assert reference() is None


async def test_close_aborts_what_is_left() -> None:
    lane = Lane(threads=1)
    gate = threading.Event()
    first, second = Over(lane, Pieces(3, lambda piece, thread: gate.wait(60) and None)), Over(lane, Pieces(3))
    closing = asyncio.get_running_loop().run_in_executor(None, lane.close)
    assert isinstance(await second.result, RuntimeError)
    gate.set()
    assert isinstance(await first.result, RuntimeError)
    await closing
    with pytest.raises(RuntimeError, match="closed"):
        Over(lane, Pieces(1))
