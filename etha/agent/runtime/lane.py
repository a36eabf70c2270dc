"""A lane: the threads that touch memory, so that the event loop never does.

    event loop --submit--> jobs --> threads pull pieces, of each job in turn --call_soon_threadsafe--> callbacks

All jobs get the same share, piece by piece, so a small one is soon over beside a big one. A piece waits only for memory
of this machine. Threads sleep on a condition; nothing polls. ``on_done`` is called when no thread touches the job's
memory any more, however the job ended. Each thread keeps a workspace from job to job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from etha.cuda.driver import Driver
from etha.observe import trace
from etha.transport.copy.cpu import Workspace

log = logging.getLogger(__name__)


class WorkspacePool:
    """Workspaces, kept from job to job. With ``driver`` and ``uuid``, on a GPU's agent, each thread has a stream
    there."""

    def __init__(self, driver: Driver | None = None, uuid: str = "") -> None:
        self._driver, self._uuid = driver, uuid
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._all: list[Workspace] = []

    @property
    def device(self) -> bool:
        """Whether copies run on a device, so that the event loop leaves them to threads."""
        return self._driver is not None

    def make(self) -> Workspace:
        """Make one more for the caller. CardError if the device has failed."""
        if self._driver is None:
            return Workspace()
        # imported here, because only an agent with a card needs it
        from etha.transport.copy.device import Copier

        made = Workspace(Copier(self._driver, self._uuid))
        with self._lock:
            self._all.append(made)
        return made

    def mine(self) -> Workspace:
        """The calling thread's workspace."""
        found: Workspace | None = getattr(self._mine, "work", None)
        if found is None:
            found = self._mine.work = self.make()
        return found

    def close(self) -> None:
        """Free streams and device memory. No thread may be using them any more. Idempotent."""
        with self._lock:
            while self._all:
                copier = self._all.pop().copier
                if copier is not None:
                    copier.close()


#: Least seconds between two progress callbacks of one job.
PROGRESS_EVERY = 0.1
MAX_THREADS = 8
#: Of a job of which the trace says nothing more.
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Job(Protocol):
    """Work cut into pieces that any thread may run, in any order except for the barriers."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        ...

    @property
    def barriers(self) -> tuple[int, ...]:
        """Ascending indices of pieces that begin only when all pieces before them are done."""
        ...

    def run(self, piece: int, thread: int) -> int:
        """Run one piece on lane thread number ``thread``, and return its bytes. What it raises ends the job."""
        ...


class Running:
    """A submitted job. ``abort`` ends it; ``on_done`` then reports when it has ended."""

    def __init__(
        self,
        lane: Lane,
        job: Job,
        loop: asyncio.AbstractEventLoop,
        on_progress: Callable[[int], None] | None,
        on_done: Callable[[BaseException | None], None],
        about: Mapping[str, Any],
    ) -> None:
        self._lane = lane
        self.about = about
        self.job = job
        self.loop = loop
        self.on_progress = on_progress
        self.on_done = on_done
        self.pieces = job.pieces
        self.barriers = deque(job.barriers)
        self.next = self.active = self.bytes = 0
        self.error: BaseException | None = None
        self.finished = False
        self.progress_at = 0.0

    def abort(self, cause: BaseException) -> None:
        """End the job with ``cause`` after the pieces that run now. Idempotent; returns at once."""
        self._lane._abort(self, cause)

    @property
    def ready(self) -> bool:
        """Whether a thread may take the next piece now."""
        if self.error is not None or self.next >= self.pieces:
            return False
        if self.barriers and self.barriers[0] == self.next:
            if self.active:
                return False
            self.barriers.popleft()
        return True

    @property
    def over(self) -> bool:
        """Whether no piece runs and none will."""
        return self.active == 0 and (self.error is not None or self.next >= self.pieces)


def lane_threads() -> int:
    """Threads that this process may run at once, at most 8."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


class Lane:
    """Threads and their jobs. Submit on the event loop. Call close() when no job runs any more.

    ``workspaces`` is the scratch memory of its threads, closed with it.
    """

    def __init__(self, threads: int | None = None, workspaces: WorkspacePool | None = None) -> None:
        self.workspaces = WorkspacePool() if workspaces is None else workspaces
        self.threads = lane_threads() if threads is None else threads
        #: Seconds that the threads have spent on pieces, all together.
        self.busy = 0.0
        self._changed = threading.Condition(threading.Lock())
        self._jobs: deque[Running] = deque()
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, args=(i,), name=f"etha-lane-{i}", daemon=True)
            for i in range(self.threads)
        ]
        for worker in self._workers:
            worker.start()

    def submit(
        self,
        job: Job,
        *,
        on_progress: Callable[[int], None] | None = None,
        on_done: Callable[[BaseException | None], None],
        about: Mapping[str, Any] = NOTHING,
    ) -> Running:
        """Begin a job beside those that run. Callbacks are called on the running event loop.

        ``about``: what the trace says of its pieces; "name" is theirs.

        ``on_progress(bytes done)`` is called at most ten times a second. ``on_done(None or the error)`` is called once,
        after the last progress, when nothing of the job runs any more.
        """
        running = Running(self, job, asyncio.get_running_loop(), on_progress, on_done, about)
        with self._changed:
            if self._closed:
                raise RuntimeError("the lane is closed")
            self._jobs.append(running)
            if running.over:  # it has nothing to do
                self._finish(running)
            else:
                self._changed.notify(min(running.pieces, self.threads))
        return running

    @property
    def idle(self) -> bool:
        """Whether no job runs or waits."""
        return not self._jobs

    def _next(self) -> Running | None:
        """The next job in turn that has a piece to run now. It goes to the end of the queue."""
        for running in self._jobs:
            if running.ready:
                self._jobs.remove(running)
                self._jobs.append(running)
                return running
        return None

    def _finish(self, running: Running) -> None:
        self._jobs.remove(running)
        running.finished = True
        self._tell(running, running.on_done, running.error)

    def _abort(self, running: Running, cause: BaseException) -> None:
        with self._changed:
            if running.finished:
                return
            if running.error is None:
                running.error = cause
            if running.over:
                self._finish(running)

    def _tell(self, running: Running, callback: Callable[..., Any], *args: Any) -> None:
        try:
            running.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.warning("an event loop was closed while its job ran")

    def _work(self, thread: int) -> None:
        torch.set_num_threads(1)  # this is already one of several threads of ours
        running: Running | None = None
        n, began, ended = 0, 0.0, 0.0
        error: BaseException | None = None
        while True:
            with self._changed:
                if running is not None:
                    self.busy += ended - began
                    self._account(running, n, error)
                    running = error = None  # a waiting thread must keep nothing of the last job alive
                while (running := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                piece = running.next
                running.next += 1
                running.active += 1
            n, error, began = 0, None, time.perf_counter()
            tracer = trace.active
            begun = 0 if tracer is None else time.monotonic_ns()
            try:
                n = running.job.run(piece, thread)
            except BaseException as raised:  # passed to on_done
                error = raised
            ended = time.perf_counter()
            if tracer is not None:
                tracer.piece(f"lane {thread}", begun, running.about, piece, n, error)

    def _account(self, running: Running, n: int, error: BaseException | None) -> None:
        running.active -= 1
        running.bytes += n
        if error is not None and running.error is None:
            running.error = error
        if running.over:
            self._finish(running)
            return
        if running.active == 0 and running.barriers and running.error is None:
            self._changed.notify_all()
        now = time.monotonic()
        if running.on_progress is not None and now - running.progress_at >= PROGRESS_EVERY:
            running.progress_at = now
            self._tell(running, running.on_progress, running.bytes)

    def close(self) -> None:
        """Abort what runs or waits, wait for the pieces that run, and end the threads. Idempotent."""
        with self._changed:
            self._closed = True
            jobs = list(self._jobs)
            self._changed.notify_all()
        for running in jobs:
            running.abort(RuntimeError("the lane was closed"))
        for worker in self._workers:
            worker.join()
        self.workspaces.close()
