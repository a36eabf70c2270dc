"""Errand: what a task of the NCCL thread is on the loop: how it is stopped, waited for, and given up on."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from etha.transport.nccl.pipeline import Conveyor, Unquiet
from etha.transport.nccl.plane import BOUND, NcclPlane
from etha.transport.nccl.thread import T, Task


class Errand:
    """See the module's head. ``cause`` is why it was stopped."""

    def __init__(self, plane: NcclPlane) -> None:
        self._plane = plane
        self._loop = asyncio.get_running_loop()
        self.conveyor: Conveyor | None = None
        self.cause: BaseException | None = None
        self.late: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def stop(self, cause: BaseException) -> None:
        """Have it end; idempotent, returns at once."""
        if self.cause is None:
            self.cause = cause
            self._timer = self._loop.call_later(BOUND, self._expire)
            if self.conveyor is not None:
                self.conveyor.stop(cause)
            self._plane.thread.nudge()

    def _expire(self) -> None:
        if not self.late.done():
            self.late.set_result(None)

    def begun(self, conveyor: Conveyor) -> None:
        """On the NCCL thread: from now on a stop is the conveyor's."""
        self.conveyor = conveyor
        if self.cause is not None:
            conveyor.stop(self.cause)

    async def over(self, task: Task[T]) -> T:
        """Run a task to its end; a cancellation stops it and waits for that, as long as it may take."""
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
                self._plane.stuck = Unquiet(
                    f"agent {self._plane.me}: NCCL did not come back within {BOUND:g} s of a stop ({self.cause}), its "
                    f"device may still be at work: restart this agent before its workers' memory is used for anything",
                    quiesced=False,
                )
                self._plane.unquiet = self.conveyor
                raise self._plane.stuck from self.cause
            failed = future.exception()
            if isinstance(failed, Unquiet):
                self._plane.stuck, self._plane.unquiet = failed, self.conveyor
            if cancelled is not None and self._plane.stuck is None:
                raise cancelled
            return future.result()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def until_stopped(self, task: Task[T]) -> Task[T]:
        """A task that may end between any two of its steps."""
        while True:
            try:
                moved = next(task)
            except StopIteration as over:
                return cast(T, over.value)
            if self.cause is not None:
                task.close()
                raise self.cause
            yield moved
