"""A program made a job: each piece only while every call that lends its memory still stands.

Errors come out with ``owner``, the (side, rank) whose memory it was, which is what peers are told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from etha.agent.lane import Lane, Running
from etha.agent.workspaces import Workspaces
from etha.memory.reach import ReachError, RevokedError
from etha.memory.revocation import Guard
from etha.transport.base import Peer, Progress
from etha.transport.program import Member, Piece, Program

log = logging.getLogger(__name__)


#: Of threads whose agent has no card.
_workspaces = Workspaces()


class Execution:
    """One run of a program, guarded by the revocation words of the calls that lend memory to it.

    A member without a guard (an in-process test, staging) is always lent. ``workspaces``: of the agent's threads.
    """

    def __init__(self, program: Program, guards: Mapping[Member, Guard], workspaces: Workspaces = _workspaces) -> None:
        self.program = program
        self._workspaces = workspaces
        self._guards = guards
        #: Whether targets may have been written.
        self.touched = False

    @property
    def pieces(self) -> int:
        """Pieces of the program."""
        return len(self.program.pieces)

    @property
    def barriers(self) -> tuple[int, ...]:
        """Where the program's phases begin."""
        return self.program.barriers

    def run(self, piece: int, thread: int) -> int:
        """Run a piece; RevokedError when a call has returned, other ReachErrors as memory raises them."""
        what = self.program.pieces[piece]
        entered: list[Guard] = []
        work = self._workspaces.mine()
        work.wrote = False
        try:
            for member in what.owners:
                guard = self._guards.get(member)
                if guard is not None:
                    if not guard.enter(thread):
                        raise RevokedError(f"{member[0]} rank {member[1]} took its memory back", owner=member)
                    entered.append(guard)
            return self.program.run(piece, work)
        except ReachError as error:
            if error.owner is None:
                error.owner = _owner(self.program, what, error.pid)
            raise
        finally:
            self.touched = self.touched or work.wrote
            for guard in entered:
                guard.leave(thread)


def _owner(program: Program, piece: Piece, pid: int | None) -> Member | None:
    """The member of a piece whose memory is process ``pid``'s."""
    for pair in program.pairs:
        for member in pair.owners:
            view = pair.source if member[0] == "source" else pair.target
            if member in piece.owners and view.process is not None and view.process.pid == pid:
                return member
    return piece.owners[0] if len(piece.owners) == 1 else None


class LocalTransport:
    """The lane as a Transport: a bucket is an Execution; there are no peers to open."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._running: set[Running] = set()
        self._cause: BaseException | None = None

    async def open(self, peers: Sequence[Peer]) -> None:
        """Nothing to do: both ends are on this agent."""

    async def run(self, bucket: Execution, on_progress: Progress | None = None) -> int:
        """Run a program on the lane and return its payload in bytes; cancelling it aborts it and waits."""
        if self._cause is not None:
            raise self._cause
        loop = asyncio.get_running_loop()
        over: asyncio.Future[BaseException | None] = loop.create_future()
        running = self._lane.submit(bucket, on_progress=on_progress, on_done=over.set_result)
        self._running.add(running)
        try:
            error = await asyncio.shield(over)
        except asyncio.CancelledError as cancelled:
            running.abort(cancelled)
            while not over.done():
                try:
                    await asyncio.shield(over)
                except asyncio.CancelledError:
                    continue  # cancelled again: the memory is still in use
            raise
        finally:
            self._running.discard(running)
        if error is not None:
            raise error
        return bucket.program.total

    def abort(self, cause: BaseException) -> None:
        """End what runs with ``cause``, and refuse more."""
        self._cause = self._cause or cause
        for running in self._running:
            running.abort(cause)

    async def close(self) -> None:
        """End what runs."""
        self.abort(RuntimeError("the transport is closed"))
