"""A program made a job: each piece only while every call that lends its memory still stands.

Errors come out with ``owner``, the (side, rank) whose memory it was, which is what peers are told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from etha.agent.runtime.workspaces import Workspaces
from etha.memory.reach import ReachError, RevokedError
from etha.memory.revocation import Guard
from etha.transport.copy.program import CopyPiece, Member, Program

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


def _owner(program: Program, piece: CopyPiece, pid: int | None) -> Member | None:
    """The member of a piece whose memory is process ``pid``'s."""
    for pair in program.pairs:
        for member in pair.owners:
            view = pair.source if member[0] == "source" else pair.target
            if member in piece.owners and view.process is not None and view.process.pid == pid:
                return member
    return piece.owners[0] if len(piece.owners) == 1 else None
