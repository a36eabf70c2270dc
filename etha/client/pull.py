"""What a blocking ``recv`` copies itself: the thread that pulls, and what the agent hears of it.

The call must not return while it copies, so its end stops the copies and waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np

from etha.bus.link import AgentLink
from etha.bus.messages import Pull, Pulled
from etha.client.registration import Registration
from etha.errors import EthaError
from etha.memory.handles import span_nbytes
from etha.memory.pull import PullRun, PullTable
from etha.memory.reach import FaultError, ReachError
from etha.observe import trace

log = logging.getLogger(__name__)

#: Seconds between two reports of progress.
_PROGRESS_EVERY = 0.1


class CallPulls:
    """The copies of one call, of which at most one run is under way. On the call's event loop only."""

    def __init__(self, registration: Registration, link: AgentLink) -> None:
        self._registration, self._link = registration, link
        self._loop = asyncio.get_running_loop()
        self._pull: PullRun | None = None
        self._over: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reports: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> bool:
        """Whether something may be copied now."""
        return self._over is not None and not self._over.done()

    def begin(self, request: Pull) -> None:
        """Begin to copy. Returns at once; the agent hears of the end."""
        try:
            table = self._table(request)
        except (ReachError, ValueError) as error:
            return self._report(request.seq, 0, ReachError(str(error)), over=True)
        self._pull, self._over = PullRun(table, request.threads), self._loop.create_future()
        threading.Thread(
            target=self._work, args=(self._pull, request.seq), name=f"etha-pull-{self._registration.batch}", daemon=True
        ).start()
        self._timer = self._loop.call_later(_PROGRESS_EVERY, self._tick, request.seq)

    async def end(self) -> None:
        """Return when nothing is being copied any more."""
        if self._pull is not None and self._over is not None:
            self._pull.stop()
            await asyncio.wait({self._over})

    def _table(self, request: Pull) -> PullTable:
        tables = self._registration.pull_tables
        if request.blobs:
            table = PullTable.from_blobs(request.processes, request.blobs)
            spans = [(t.data_ptr(), span_nbytes(t.shape, t.stride(), t.itemsize)) for t in self._registration.locals]
            table.check_inside(np.array(spans, np.uint64).reshape(-1, 2))
            tables[request.table] = table
        if request.table not in tables:
            raise ValueError(f"the agent has not sent table {request.table} of this batch: please report it")
        return tables[request.table]

    def _work(self, pull: PullRun, seq: int) -> None:
        """On a thread of its own, because the executor's few threads may be waiting."""
        failed: ReachError | None = None
        tracer, begun = trace.active, time.monotonic_ns()
        try:
            pull.run()
        except ReachError as error:
            failed = error
        except Exception as error:  # a fault of ours must not leave the transfer waiting
            log.exception("batch %s: copies of this worker failed", self._registration.batch)
            failed = ReachError(f"the worker's own copies failed, a bug of Etha: {error!r}")
        if tracer is not None:
            about = {"name": "copy", "batch": self._registration.batch, "seq": seq}
            tracer.piece("own copies", begun, about, 0, pull.done, failed)
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(partial(self._ended, pull, seq, failed))

    def _ended(self, pull: PullRun, seq: int, failed: ReachError | None) -> None:
        assert self._over is not None
        if self._timer is not None:
            self._timer.cancel()
        self._over.set_result(None)
        self._report(seq, pull.done, failed, over=True)

    def _tick(self, seq: int) -> None:
        if self._pull is not None and self.running:
            self._report(seq, self._pull.done, None, over=False)
            self._timer = self._loop.call_later(_PROGRESS_EVERY, self._tick, seq)

    def _report(self, seq: int, done: int, error: ReachError | None, *, over: bool) -> None:
        message = Pulled(
            batch=self._registration.batch,
            epoch=self._registration.pair.epoch,
            seq=seq,
            done=done,
            over=over,
            kind="" if error is None else error.kind,
            text="" if error is None else str(error)[:2000],
            pid=0 if error is None else error.pid or 0,
            address=error.address if isinstance(error, FaultError) else 0,
        )
        task = self._loop.create_task(self._send(message))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _send(self, message: Pulled) -> None:
        with suppress(EthaError):  # an agent that is gone ends the call in another way
            await self._link.request(message, timeout=math.inf)
