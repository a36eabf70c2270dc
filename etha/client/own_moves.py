"""What a blocking call moves itself: copies from other workers' memory, and streams that its agent lends it.

The call must not return while anything moves, so its end stops that and waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import numpy as np

from etha.bus.link import AgentLink, Handed
from etha.bus.messages import MoveStream, Pull, Pulled, Streamed
from etha.bus.packets import close_all
from etha.client.registration import Registration
from etha.memory.handles import span_nbytes
from etha.memory.process import IoVec
from etha.memory.pull import PullRun, PullTable
from etha.memory.reach import AccessError, FaultError, ReachError
from etha.memory.worker_stream import ENDED, StreamRows, StreamRun
from etha.observe import trace

log = logging.getLogger(__name__)

#: Seconds between two reports of progress.
_PROGRESS_EVERY = 0.1


class OwnMoves:
    """All of one call. On the call's event loop only."""

    def __init__(self, registration: Registration, link: AgentLink, verb: Literal["send", "recv"]) -> None:
        self._registration, self._link, self._verb = registration, link, verb
        self._moves: list[CallPull | CallStream] = []

    @property
    def running(self) -> bool:
        """Whether something may be moved now."""
        return any(not move.over.done() for move in self._moves)

    def begin(self, message: Any) -> None:
        """Begin what the agent asks for. Returns at once; the agent hears of the end."""
        if isinstance(message, Pull):
            self._begin(lambda: CallPull(self._registration, message, self._link.tell))
        elif isinstance(message, Handed) and isinstance(message.message, MoveStream):
            self._begin(
                lambda: CallStream(self._registration, message.message, message.fds, self._verb, self._link.tell)
            )
        elif isinstance(message, MoveStream):  # this process has no room for its descriptors
            self._link.tell(_streamed(self._registration, message, error=AccessError("no descriptors are left")))

    def _begin(self, make: Callable[[], CallPull | CallStream]) -> None:
        move = make()
        if not move.over.done():
            self._moves.append(move)

    async def end(self) -> None:
        """Return when nothing is being moved any more."""
        for move in self._moves:
            move.stop()
        if waits := {move.over for move in self._moves if not move.over.done()}:
            await asyncio.wait(waits)


Report = Callable[[Pulled | Streamed], None]


def _spans(registration: Registration) -> IoVec:
    """Where the call's tensors lie: rows (address, bytes)."""
    found = [(t.data_ptr(), span_nbytes(t.shape, t.stride(), t.itemsize)) for t in registration.locals]
    return np.array(found, np.uint64).reshape(-1, 2)


class CallPull:
    """Copies from other workers' memory. ``over`` ends with them; at once if there is nothing to copy."""

    def __init__(self, registration: Registration, request: Pull, report: Report) -> None:
        self._registration, self._seq, self._report = registration, request.seq, report
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        try:
            table = self._table(request)
        except (ReachError, ValueError) as error:
            self.over.set_result(None)
            return self._tell(0, ReachError(str(error)), over=True)
        self._pull = PullRun(table, request.threads)
        threading.Thread(target=self._work, name=f"etha-pull-{registration.batch}", daemon=True).start()
        self._timer = self._loop.call_later(_PROGRESS_EVERY, self._tick)

    def stop(self) -> None:
        """End soon. Idempotent."""
        self._pull.stop()

    def _table(self, request: Pull) -> PullTable:
        tables = self._registration.pull_tables
        if request.blobs:
            table = PullTable.from_blobs(request.processes, request.blobs)
            table.check_inside(_spans(self._registration))
            tables[request.table] = table
        if request.table not in tables:
            raise ValueError(f"the agent has not sent table {request.table} of this batch: please report it")
        return tables[request.table]

    def _work(self) -> None:
        """On a thread of its own, because the executor's few threads may be waiting."""
        failed: ReachError | None = None
        tracer, begun = trace.active, time.monotonic_ns()
        try:
            self._pull.run()
        except ReachError as error:
            failed = error
        except Exception as error:  # a fault of ours must not leave the transfer waiting
            log.exception("batch %s: copies of this worker failed", self._registration.batch)
            failed = ReachError(f"the worker's own copies failed, a bug of Etha: {error!r}")
        if tracer is not None:
            about = {"name": "copy", "batch": self._registration.batch, "seq": self._seq}
            tracer.piece("own copies", begun, about, 0, self._pull.done, failed)
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(partial(self._ended, failed))

    def _ended(self, failed: ReachError | None) -> None:
        self._timer.cancel()
        self.over.set_result(None)
        self._tell(self._pull.done, failed, over=True)

    def _tick(self) -> None:
        if not self.over.done():
            self._tell(self._pull.done, None, over=False)
            self._timer = self._loop.call_later(_PROGRESS_EVERY, self._tick)

    def _tell(self, done: int, error: ReachError | None, *, over: bool) -> None:
        self._report(
            Pulled(
                batch=self._registration.batch,
                epoch=self._registration.pair.epoch,
                seq=self._seq,
                done=done,
                over=over,
                kind="" if error is None else error.kind,
                text="" if error is None else str(error)[:2000],
                pid=0 if error is None else error.pid or 0,
                address=error.address if isinstance(error, FaultError) else 0,
            )
        )


class CallStream:
    """A stretch of one stream. Owns ``fds``. ``over`` ends with it; at once if it cannot begin."""

    def __init__(
        self, registration: Registration, request: MoveStream, fds: tuple[int, ...], verb: str, report: Report
    ) -> None:
        self._registration, self._request, self._report = registration, request, report
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        try:
            self._stream = self._started(fds, verb)
        except (OSError, ValueError, ReachError) as error:
            self.over.set_result(None)
            # What was not begun, the agent does itself, unless its request makes no sense.
            kind = AccessError if isinstance(error, OSError) else ReachError
            return report(_streamed(registration, request, error=kind(str(error))))
        self._begun = time.monotonic_ns()
        self._loop.add_reader(self._stream.end_fd, self._ended)
        self._timer = self._loop.call_later(_PROGRESS_EVERY, self._tick)

    def _started(self, fds: tuple[int, ...], verb: str) -> StreamRun:
        conn: socket.socket | None = None
        try:
            rows = self._rows(fds[1:])
            if self._request.sends != (verb == "send"):
                raise ValueError(f"the agent lends a stream in the wrong direction for a {verb}: please report it")
            conn = socket.socket(fileno=fds[0])
            conn.settimeout(None)
            stream = StreamRun(rows, conn, sends=self._request.sends)
        except BaseException:
            close_all(fds[:1]) if conn is None else conn.close()
            raise
        try:
            stream.start()
        except BaseException:
            stream.close()
            raise
        return stream

    def _rows(self, memory: tuple[int, ...]) -> StreamRows:
        tables, number = self._registration.stream_tables, self._request.table
        try:
            if memory:
                rows = StreamRows.from_bytes(os.pread(memory[0], os.fstat(memory[0]).st_size, 0))
                rows.check_inside(_spans(self._registration))
                tables[number] = rows
        finally:
            close_all(memory)
        if number not in tables:
            raise ValueError(f"the agent has not sent rows {number} of this batch: please report it")
        return tables[number]

    def stop(self) -> None:
        """End soon, and the connection with it. Idempotent."""
        if not self.over.done():
            self._stream.stop()

    def _ended(self) -> None:
        stream, registration = self._stream, self._registration
        self._loop.remove_reader(stream.end_fd)
        self._timer.cancel()
        done, code = stream.done, stream.error
        stream.close()
        self.over.set_result(None)
        if (tracer := trace.active) is not None:
            about = {"name": "stream", "batch": registration.batch, "seq": self._request.seq}
            error = OSError(code, os.strerror(code)) if code else None
            tracer.piece(f"own stream {self._request.table}", self._begun, about, 0, done, error)
        self._report(_streamed(registration, self._request, done=done, over=True, code=code))

    def _tick(self) -> None:
        if not self.over.done():
            self._report(_streamed(self._registration, self._request, done=self._stream.done))
            self._timer = self._loop.call_later(_PROGRESS_EVERY, self._tick)


def _streamed(
    registration: Registration,
    request: MoveStream,
    *,
    done: int = 0,
    over: bool = False,
    code: int = 0,
    error: ReachError | None = None,
) -> Streamed:
    kind, text = "", ""
    if error is not None:
        kind, text = error.kind, str(error)[:2000]
    elif code == errno.EFAULT:
        kind, text = FaultError.kind, "the worker has nothing mapped there any more, or nothing writable"
    elif code:
        kind, text = "lost", "" if code == ENDED else os.strerror(code)
    return Streamed(
        batch=registration.batch,
        epoch=registration.pair.epoch,
        seq=request.seq,
        table=request.table,
        done=done,
        over=over or error is not None,
        kind=kind,
        text=text,
        code=code,
    )
