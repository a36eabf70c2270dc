"""What a blocking call moves itself: copies from other workers' memory, and streams that its agent lends it.

The call must not return while anything moves, so its end stops that and waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
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
PROGRESS_EVERY = 0.1


class OwnMoves:
    """All of one call. On the call's event loop only."""

    def __init__(self, registration: Registration, link: AgentLink, verb: Literal["send", "recv"]) -> None:
        self._registration, self._link, self._verb = registration, link, verb
        self._moves: list[FollowedPull | CallStream] = []

    @property
    def running(self) -> bool:
        """Whether something may be moved now."""
        return any(not move.over.done() for move in self._moves)

    def begin(self, message: Any) -> None:
        """Begin what the agent asks for. Returns at once; the agent hears of the end."""
        if isinstance(message, Pull):
            pull = CallPull(self._registration, message)
            pull.start()
            self.follow(pull)
        elif isinstance(message, Handed) and isinstance(message.message, MoveStream):
            self._add(CallStream(self._registration, message.message, message.fds, self._verb, self._link.tell))
        elif isinstance(message, MoveStream):  # this process has no room for its descriptors
            self._link.tell(_streamed(self._registration, message, error=AccessError("no descriptors are left")))

    def follow(self, pull: CallPull) -> None:
        """Hear the end of a pull that has begun."""
        self._add(FollowedPull(pull, self._link.tell))

    def _add(self, move: FollowedPull | CallStream) -> None:
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
    """Copies from other workers' memory, of a call of any thread. After ``start``, also an interrupted one, ``finish``
    must follow, because threads write into the tensors until then."""

    def __init__(self, registration: Registration, request: Pull) -> None:
        self._registration, self._request = registration, request
        self._run: PullRun | None = None
        self._failed: ReachError | None = None
        self._begun = time.monotonic_ns()

    def start(self) -> None:
        """Begin. It is over at once if it cannot, which ``finish`` says."""
        try:
            self._run = PullRun(self._table(self._request), self._request.threads)
            self._run.start()
        except (OSError, RuntimeError, ImportError) as error:  # no descriptors, no threads or no memory are left
            self._failed = AccessError(f"this worker could not begin to copy: {error}")
        except (ReachError, ValueError) as error:
            self._failed = error if isinstance(error, AccessError) else ReachError(str(error))

    @property
    def over(self) -> bool:
        """Whether nothing is being copied any more."""
        return self._run is None or self._run.over

    @property
    def end_fd(self) -> int:
        """Readable once it is over; -1 if it could not begin."""
        return -1 if self._run is None else self._run.end_fd

    def stop(self) -> None:
        """End soon. Idempotent."""
        if self._run is not None:
            self._run.stop()

    def _table(self, request: Pull) -> PullTable:
        tables = self._registration.pull_tables
        if request.blobs:
            table = PullTable.from_blobs(request.processes, request.blobs)
            table.check_inside(_spans(self._registration))
            tables[request.table] = table
        if request.table not in tables:
            raise ValueError(f"the agent has not sent table {request.table} of this batch: please report it")
        return tables[request.table]

    def finish(self) -> Pulled:
        """Wait until it has ended. Returns what the agent is told of that."""
        failed, run = self._failed, self._run
        if run is not None:
            try:
                run.finish()
            except ReachError as error:
                failed = failed or error
            except Exception as error:  # a fault of ours must not leave the transfer waiting
                log.exception("batch %s: copies of this worker failed", self._registration.batch)
                failed = failed or ReachError(f"the worker's own copies failed, a bug of Etha: {error!r}")
            if (tracer := trace.active) is not None:
                about = {"name": "copy", "batch": self._registration.batch, "seq": self._request.seq}
                tracer.piece("own copies", self._begun, about, 0, run.done, failed)
        return self.report(failed, over=True)

    def report(self, error: ReachError | None = None, *, over: bool = False) -> Pulled:
        """How far it has come."""
        return Pulled(
            batch=self._registration.batch,
            epoch=self._registration.pair.epoch,
            seq=self._request.seq,
            done=0 if self._run is None else self._run.done,
            over=over,
            kind="" if error is None else error.kind,
            text="" if error is None else str(error)[:2000],
            pid=0 if error is None else error.pid or 0,
            address=error.address if isinstance(error, FaultError) else 0,
        )


class FollowedPull:
    """A pull whose end the event loop hears. ``over`` ends with it."""

    def __init__(self, pull: CallPull, report: Report) -> None:
        self._pull, self._report = pull, report
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        if pull.over:  # also one that another thread has followed so far
            self._ended()
        else:
            self._loop.add_reader(pull.end_fd, self._ended)
            self._timer = self._loop.call_later(PROGRESS_EVERY, self._tick)

    def stop(self) -> None:
        """End soon. Idempotent."""
        if not self.over.done():
            self._pull.stop()

    def _ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._pull.end_fd)
        self.over.set_result(None)
        self._report(self._pull.finish())

    def _tick(self) -> None:
        if not self.over.done():
            self._report(self._pull.report())
            self._timer = self._loop.call_later(PROGRESS_EVERY, self._tick)


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
        self._timer = self._loop.call_later(PROGRESS_EVERY, self._tick)

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
            self._timer = self._loop.call_later(PROGRESS_EVERY, self._tick)


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
