"""NcclPlane: an agent's NCCL thread, communicators and ring, and the programs compiled for the ring.

An ``NcclJob`` is the event loop's side of a task of the NCCL thread: it stops the task, waits for it, and gives up on
it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from etha.config import STAGING
from etha.cuda.driver import Device, Driver
from etha.cuda.nccl import Nccl
from etha.memory.revocation import THREADS
from etha.transport.base import Traffic, WireRun
from etha.transport.copy.device import Copier
from etha.transport.copy.staging import Budget
from etha.transport.nccl.communicator import Communicators
from etha.transport.nccl.launches import LaunchProgram, make_steps
from etha.transport.nccl.pipeline import ABORTING, NcclPipeline, QuiesceTimeout
from etha.transport.nccl.schedule import NcclSchedule, make_rounds
from etha.transport.nccl.staging_ring import StagingRing
from etha.transport.nccl.thread import NcclThread, T, Task
from etha.transport.wire.flows import WireProgram
from etha.transport.wire.nccl_messages import DEPTH

#: Numbers on revocation pages: the last ones. An agent with a card has at most that many copy slots fewer.
NUMBERS = tuple(range(THREADS - DEPTH, THREADS))
#: Seconds after a stop within which the thread must have returned; it gives up on the device before that.
BOUND = ABORTING + 5.0


class NcclPlane:
    """An agent's NCCL thread, communicators and ring. ``traffic`` counts per peer.

    ``numbers`` are DEPTH numbers on revocation pages that nothing else of this agent uses.
    """

    def __init__(
        self,
        me: str,
        device: Device,
        *,
        driver: Driver,
        nccl: Nccl,
        staging: int = STAGING,
        budget: Budget | None = None,
        numbers: Sequence[int] = NUMBERS,
    ) -> None:
        self.me, self.device, self.driver = me, device, driver
        self.budget = Budget(staging) if budget is None else budget
        self.thread = NcclThread()
        self.communicators = Communicators(self.thread, nccl, device.ordinal, me)
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.numbers = tuple(numbers)
        #: One run at a time has the ring.
        self.turn = asyncio.Lock()
        #: Why nothing can run any more: the device may still be at work for a run that is over.
        self.stuck: QuiesceTimeout | None = None
        #: Kept with it for ever, because forgetting it would leave the guards of calls whose memory it may still touch.
        self.unfinished: NcclPipeline | None = None
        self._ring: StagingRing | None = None
        self._copier: Copier | None = None
        self._rounds: dict[WireProgram, NcclSchedule] = {}
        self._steps: dict[WireProgram, LaunchProgram] = {}

    @property
    def peak_staging(self) -> int:
        """Most bytes of staging in use at once so far."""
        return self.budget.peak

    def steps(self, program: WireProgram) -> Task[LaunchProgram]:
        """The program compiled for the ring, kept for the next run. Call it on the NCCL thread, holding the turn."""
        if self._ring is None or self._copier is None:
            self._ring = StagingRing(self.driver, self.device.uuid, self.budget)
            self._copier = Copier(self.driver, self.device.uuid)
        rounds = self._rounds.get(program)
        if rounds is None:
            rounds = self._rounds[program] = make_rounds(program)
        self._ring.provide(program, rounds)
        found = self._steps.get(program)
        if found is None or found.generation != self._ring.generation:
            if found is not None:
                found.release()
            found = yield from make_steps(program, rounds, self._ring, self._copier)
            self._steps[program] = found
        return found

    def pipeline(self, run: WireRun, progress: Callable[[int], None] | None) -> Task[NcclPipeline]:
        """Make a run that is ready to begin. Call it on the NCCL thread."""
        steps = yield from self.steps(run.program)
        assert self._ring is not None and self._copier is not None
        return NcclPipeline(
            steps, self._ring, self._copier, run.guards,
            numbers=self.numbers, budget=self.budget, count=self._count, progress=progress, label=(run.key, run.seq),
        )  # fmt: skip

    async def forget(self, programs: Collection[WireProgram]) -> None:
        """Free what is kept for programs that run no more; on the NCCL thread, because freeing may wait for the
        device."""
        async with self.turn:
            kept = [program for program in programs if program in self._rounds]
            if kept and self.stuck is None:
                await self.thread.start(self._forget(kept))

    def _forget(self, programs: Sequence[WireProgram]) -> Task[None]:
        yield True
        for program in programs:
            self._rounds.pop(program, None)
            steps = self._steps.pop(program, None)
            if steps is not None:
                steps.release()

    def _count(self, peer: str, sent: int, received: int) -> None:
        traffic = self.traffic[peer]
        traffic.sent += sent
        traffic.received += received

    async def close(self) -> None:
        """End all communicators, free the device's memory, end the thread. Idempotent. No run may be under way."""
        if self.stuck is None:
            async with self.turn:
                await self.communicators.close()
                await self.thread.start(self._let_go())
        self.thread.close()
        await asyncio.to_thread(self.thread.join, 0.0 if self.stuck is not None else BOUND)

    def _let_go(self) -> Task[None]:
        yield from self._forget(list(self._rounds))
        if self._copier is not None:
            self._copier.close()
        if self._ring is not None:
            self._ring.close()
        self._ring = self._copier = None


class NcclJob:
    """See the module. ``cause`` is why it was stopped."""

    def __init__(self, plane: NcclPlane) -> None:
        self._plane = plane
        self._loop = asyncio.get_running_loop()
        self.pipeline: NcclPipeline | None = None
        self.cause: BaseException | None = None
        self.late: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def stop(self, cause: BaseException) -> None:
        """End it with ``cause``. Idempotent; returns at once."""
        if self.cause is None:
            self.cause = cause
            self._timer = self._loop.call_later(BOUND, self._expire)
            if self.pipeline is not None:
                self.pipeline.stop(cause)
            self._plane.thread.nudge()

    def _expire(self) -> None:
        if not self.late.done():
            self.late.set_result(None)

    def begun(self, pipeline: NcclPipeline) -> None:
        """Called on the NCCL thread: from now on ``stop`` also stops the pipeline."""
        self.pipeline = pipeline
        if self.cause is not None:
            pipeline.stop(self.cause)

    async def over(self, task: Task[T]) -> T:
        """Run a task to its end. A cancellation stops the task, and waits for its end, at most BOUND seconds."""
        future = self._plane.thread.start(task)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not (future.done() or self.late.done()):
                try:
                    ends: list[asyncio.Future[Any]] = [future, self.late]
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError as error:
                    cancelled = error
                    self.stop(error)
            if not future.done():
                self._plane.stuck = QuiesceTimeout(
                    f"agent {self._plane.me}: NCCL did not come back within {BOUND:g} s of a stop ({self.cause}), its "
                    f"device may still be at work: restart this agent before its workers' memory is used for anything",
                    quiesced=False,
                )
                self._plane.unfinished = self.pipeline
                raise self._plane.stuck from self.cause
            failed = future.exception()
            if isinstance(failed, QuiesceTimeout):
                self._plane.stuck, self._plane.unfinished = failed, self.pipeline
            if cancelled is not None and self._plane.stuck is None:
                raise cancelled
            return future.result()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def until_stopped(self, task: Task[T]) -> Task[T]:
        """A task that a stop ends between any two of its steps."""
        while True:
            try:
                moved = next(task)
            except StopIteration as over:
                return cast(T, over.value)
            if self.cause is not None:
                task.close()
                raise self.cause
            yield moved
