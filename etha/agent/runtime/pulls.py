"""The copies of one transfer that its receiving workers do themselves while they wait in a blocking call.

start   push a Pull to each of them          hear   their Pulled: progress, the end, or an error
stop    end at once: this agent touches nothing, and each worker ends its own copies before its call returns
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from etha.agent.protocol.effects import CallKey
from etha.agent.runtime.sessions import OpenCalls
from etha.bus.messages import Pull, Pulled
from etha.memory.pull import PullTable
from etha.memory.reach import AccessError, ReachError, RevokedError, error_of
from etha.memory.revocation import Guard
from etha.transport.copy.program import Member
from etha.transport.copy.pulling import PullPlan


class WorkerPulls:
    """One run. ``calls`` are the receiving members' calls. ``threads`` is the number for each of them.

    ``known``: for each member the tables, by number, that its worker has already.
    """

    def __init__(
        self,
        plan: PullPlan,
        seq: int,
        number: int,
        *,
        open_calls: OpenCalls,
        calls: Mapping[Member, CallKey],
        known: Mapping[Member, set[int]],
        guards: Mapping[Member, Guard],
        threads: int,
    ) -> None:
        self.plan, self._seq, self._number, self._threads = plan, seq, number, threads
        self._open_calls, self._calls, self._known, self._guards = open_calls, calls, known, guards
        self._done = dict.fromkeys(plan.tables, 0)
        self._pulling = set(plan.tables)
        self._error: ReachError | None = None
        self._progress: Callable[[int], None] = lambda done: None
        self._over: Callable[[ReachError | None], None] = lambda error: None
        self._begun = self._ended = False
        #: Whether targets may have been written.
        self.touched = False

    def start(self, progress: Callable[[int], None], over: Callable[[ReachError | None], None]) -> None:
        """Begin. ``progress(bytes done)``, then once ``over(error)``, from the event loop. An AccessError means that a
        worker could not reach another one's memory, so that the agent has to copy what the plan covers."""
        self._progress, self._over, self._begun, self.touched = progress, over, True, True
        for member, table in self.plan.tables.items():
            self._open_calls.push(self._calls[member], self._pull(member, table))

    def _pull(self, member: Member, table: PullTable) -> Pull:
        if self._number in self._known[member]:
            return Pull(seq=self._seq, table=self._number, threads=self._threads)
        blobs = table.to_blobs()
        return Pull(seq=self._seq, table=self._number, threads=self._threads, processes=table.processes, blobs=blobs)

    def hear(self, member: Member, pulled: Pulled) -> None:
        """A worker says how far it has come. What comes late, or twice, is ignored."""
        if self._ended or pulled.seq != self._seq or member not in self._pulling:
            return
        if not pulled.kind:  # a push may have missed a call that ended, so what was sent is not known to be there
            self._known[member].add(self._number)
        self._done[member] = max(self._done[member], min(pulled.done, self.plan.tables[member].nbytes))
        if not pulled.over:
            return self._progress(sum(self._done.values()))
        self._pulling.discard(member)
        if pulled.kind:
            error = error_of(pulled.kind, pulled.text, pid=pulled.pid or None, address=pulled.address)
            # An agent that cannot copy either says so itself.
            if self._error is None or isinstance(self._error, AccessError):
                self._error = error
        elif self._done[member] < self.plan.tables[member].nbytes and self._error is None:
            self._error = ReachError(f"{member[0]} rank {member[1]} has ended its copies early", owner=member)
        self._progress(sum(self._done.values()))
        if not self._pulling:
            self._end(self._error or self._revoked())

    def _revoked(self) -> RevokedError | None:
        """The error if a sender has taken its memory back meanwhile: what was copied last may be something else."""
        for member in self.plan.sources:
            guard = self._guards.get(member)
            if guard is not None and not guard.lends:
                return RevokedError(f"{member[0]} rank {member[1]} took its memory back", owner=member)
        return None

    def stop(self) -> None:
        """End soon, without waiting for workers: one that is stopped must not delay the others. Idempotent."""
        if self._begun and not self._ended:
            asyncio.get_running_loop().call_soon(self._end, None)

    def _end(self, error: ReachError | None) -> None:
        if not self._ended:
            self._ended = True
            self._over(error)
