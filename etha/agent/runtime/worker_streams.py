"""The streams of one transfer that workers move themselves while they wait in a blocking call.

lend     a stream's thread offers its socket; the loop hands it to the worker, with the rows of its memory
hear     the worker says how far it has come, or how it ended
give up  the run is over: the socket is shut, which ends the worker's part, and its call waits for that
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from etha.agent.protocol.effects import CallKey
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.bus.messages import MoveStream, Streamed
from etha.errors import ProtocolError
from etha.memory.process import IoVec
from etha.memory.reach import AccessError, error_of
from etha.memory.worker_stream import ENDED
from etha.transport.copy.program import Member
from etha.transport.loan import Loan
from etha.transport.wire.worker_rows import StreamLane, Stretch

#: ``Streamed.kind`` of a connection that has failed.
LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """A member whose worker is blocked in its call. ``known``: the tables that the worker has, by number."""

    call: CallKey
    session: WorkerSession
    known: set[int] = field(default_factory=set)


class WorkerStreams:
    """A ``Lender`` for one run, number ``seq`` of its batch. ``movers`` are the members that may move something.

    ``variant`` (0 to 3) tells this program's tables from those of the registration's other programs.
    """

    def __init__(
        self,
        stretches: Mapping[StreamLane, Mapping[int, Stretch]],
        seq: int,
        variant: int,
        *,
        open_calls: OpenCalls,
        movers: Mapping[Member, Mover],
    ) -> None:
        self._stretches, self._seq, self._variant = stretches, seq, variant
        self._open_calls, self._movers = open_calls, movers
        self._loop = asyncio.get_running_loop()
        self._loans: dict[int, Loan] = {}
        #: Held while a socket is handed over, so that nobody closes it then.
        self._lock = threading.Lock()

    # ---- what streams ask (any thread) --------------------------------------------------------

    def stretch(self, peer: str, sends: bool, lane: int, first: int) -> Stretch | None:
        found = self._stretches.get((peer, sends, lane), {}).get(first)
        return found if found is not None and found.member in self._movers else None

    def lend(self, stretch: Stretch, conn: socket.socket, wake: Callable[[], None]) -> Loan:
        loan = Loan(stretch, conn, wake)
        with self._lock:
            self._loans[stretch.number] = loan
        rows = stretch.rows  # here, because the first time takes long
        self._loop.call_soon_threadsafe(self._hand_over, loan, rows)
        return loan

    def give_up(self, loan: Loan) -> None:
        with self._lock:
            self._loans.pop(loan.stretch.number, None)

    # ---- on the loop ----------------------------------------------------------------------------

    def _hand_over(self, loan: Loan, rows: IoVec) -> None:
        mover, number = self._movers[loan.stretch.member], self._number(loan.stretch)
        message = MoveStream(seq=self._seq, table=number, sends=loan.stretch.sends)
        fds: list[int] = []
        with self._lock:
            if self._loans.get(loan.stretch.number) is not loan:
                return
            try:
                if number not in mover.known:
                    fds.append(_in_memory(rows))
                handed = mover.session.streams and self._open_calls.hand(
                    mover.call, message, [loan.conn.fileno(), *fds]
                )
            except OSError:  # no descriptors or memory are left
                handed = False
            finally:
                for fd in fds:
                    os.close(fd)
        if not handed:
            self._end(loan, declined=True)

    def _number(self, stretch: Stretch) -> int:
        return stretch.number * 4 + self._variant

    def hear(self, member: Member, message: Streamed) -> None:
        """A worker says how far it has come. What comes late is ignored."""
        number, variant = divmod(message.table, 4)
        with self._lock:
            loan = self._loans.get(number)
        if loan is None or message.seq != self._seq or variant != self._variant or loan.stretch.member != member:
            return
        mover = self._movers[member]
        if message.kind == AccessError.kind:
            mover.session.streams = False
            return self._end(loan, declined=True)
        if not message.kind:
            mover.known.add(message.table)
        loan.done = max(loan.done, min(message.done, loan.stretch.wire))
        if not message.over:
            return loan.wake()
        if message.kind == LOST:
            return self._end(loan, error=OSError(message.code, message.text), ended=message.code == ENDED)
        if message.kind:
            error = error_of(message.kind, message.text, pid=mover.session.peer.pid, address=0)
            error.owner = member
            return self._end(loan, error=error)
        if loan.done != loan.stretch.wire:
            text = f"a worker says that it has moved {loan.stretch.wire} bytes, but has moved {message.done}"
            return self._end(loan, error=ProtocolError(text))
        self._end(loan)

    def _end(self, loan: Loan, *, error: Exception | None = None, ended: bool = False, declined: bool = False) -> None:
        with self._lock:
            self._loans.pop(loan.stretch.number, None)
        loan.error, loan.ended, loan.declined = error, ended, declined
        loan.over = True
        loan.wake()


def _in_memory(rows: IoVec) -> int:
    """A memfd that holds the rows: any number of them fits, and the other end needs to read it once only."""
    fd = os.memfd_create("etha-rows", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, rows.nbytes)
        written = 0
        data = memoryview(rows.tobytes())
        while written < len(data):
            written += os.pwrite(fd, data[written:], written)
    except BaseException:
        os.close(fd)
        raise
    return fd
