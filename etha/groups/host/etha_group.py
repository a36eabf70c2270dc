"""`ProcessGroupEtha`: a process group over mapped memory inside a host and TCP between hosts."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from typing import Any, ClassVar, Literal

from torch.distributed.distributed_c10d import PrefixStore

from etha.errors import GroupAbortedError, GroupError
from etha.groups.base import GroupConfig, ProcessGroup, Timeout
from etha.groups.calls import GroupCall
from etha.groups.host.engine import Engine
from etha.groups.host.meeting import MeetingDeadline, MeetingEnd, ask_store, meet
from etha.groups.host.windows import WINDOW, BlockLayout, new_block
from etha.groups.store_client import create_store_client
from etha.groups.work import GroupWork


class ProcessGroupEtha(ProcessGroup):
    """A group of processes whose calls go through memory that they map inside a host, and over TCP between hosts.

    ``timeout``: seconds for each call and for ``configure``. ``errors``: as in the base class. ``window``: bytes of
    each of a member's two windows. ``order``: how members of several hosts reduce. "host": those of one host in the
    order of their ranks, then the hosts in the order of their lowest ranks, so that what a host sends does not grow
    with its members. "rank": by rank wherever they are, as ``etha.redistribute`` does. All members give the same.
    """

    _compares: ClassVar[bool] = True

    def __init__(
        self,
        timeout: Timeout = 60.0,
        errors: Literal["raise", "swallow"] = "raise",
        *,
        window: int = WINDOW,
        order: Literal["host", "rank"] = "host",
    ) -> None:
        super().__init__(timeout, errors)
        if order not in ("host", "rank"):
            raise GroupError(f"order={order!r} is none of 'host', 'rank'")
        if window < 1 << 16 or window % 4096:
            raise GroupError(f"window={window}: a multiple of 4096 of at least 65536 is needed")
        self._window, self._order = window, order
        self._engine: Engine | None = None
        self._error: GroupError | None = None
        #: Grows with every configure, abort and shutdown, so that a configure notices that it was overtaken.
        self._turn = 0
        #: Ends a configure that is under way.
        self._meeting = MeetingEnd()
        self._changing = threading.Lock()
        self._finalizer: Any = None
        #: Address of the last store, and the connection to it.
        self._connection: tuple[str, Any] | None = None

    def getBackendName(self) -> str:
        return "etha"

    def _configure(self, config: GroupConfig) -> None:
        deadline = MeetingDeadline(self._timeout.total_seconds())
        turn = self._end(None)
        self._error = None
        end = self._meeting = MeetingEnd()
        store = self._open(config.store, deadline, end)
        layout = BlockLayout(size=config.world_size, window=self._window)
        fd, block = new_block(layout)
        try:
            peers, hosts = meet(
                store,
                rank=config.rank,
                layout=layout,
                block_fd=fd,
                name=config.replica_id,
                deadline=deadline,
                end=end,
                order=self._order,
            )
        except BaseException:
            block.close()
            self._connection = None  # it may be busy with a question that nobody waits for any more
            raise
        finally:
            os.close(fd)
        engine = Engine(
            rank=config.rank,
            block=block,
            peers=peers,
            timeout=self._timeout.total_seconds(),
            epoch=config.quorum_id,
            name=config.replica_id,
            hosts=hosts,
            by_host=self._order == "host",
        )
        try:
            with end.waking(lambda: engine.abort("configure was ended by abort(), shutdown() or another configure()")):
                engine.meet(deadline.ns)
            with self._changing:
                if self._turn != turn:
                    raise GroupAbortedError("configure was ended by abort(), shutdown() or another configure()")
                self._engine = engine
                # A group that is dropped, or that is left at the end of the program, is shut down.
                self._finalizer = weakref.finalize(self, engine.close)
        except BaseException:
            engine.close()
            raise

    def _open(self, store: Any, deadline: MeetingDeadline, end: MeetingEnd) -> Any:
        """The store of a configure. A connection is kept for the next one, because new ones sometimes stall for 5 s."""
        if not isinstance(store, str):
            return store
        place, _, prefix = store.partition("/")
        if self._connection is None or self._connection[0] != place:
            self._connection = None
            connect = partial(create_store_client, store, timeout=self._timeout)
            client = ask_store(connect, deadline, f" at {place}", end)
            self._connection = (place, client.underlying_store)
        return PrefixStore(prefix, self._connection[1])

    def _issue(self, call: GroupCall) -> Any:
        engine = self._engine
        if engine is None:
            error = self._error or GroupError(
                f"{call.describe()}: the group was not configured: call configure() first"
            )
            work = GroupWork(call)
            work.finish(error)
        else:
            timeout = call.timeout or self._timeout
            work = engine.submit(call, timeout.total_seconds())
        return work

    def abort(self) -> None:
        engine = self._engine
        if engine is not None:
            engine.abort("abort() was called")
            engine.settle()
        else:
            self._turn += 1
            self._meeting.set()

    def shutdown(self) -> None:
        """Leave the group and free its memory. The group can be configured again."""
        self._connection = None
        self._end(GroupAbortedError("the group was shut down: call configure() to form it again"))

    def errored(self) -> Exception | None:
        engine = self._engine
        return self._error if engine is None else engine.error

    def _end(self, error: GroupError | None) -> int:
        """Close the engine; returns the number of this change."""
        with self._changing:
            self._turn += 1
            self._meeting.set()
            turn, engine, self._engine = self._turn, self._engine, None
            if self._finalizer is not None:
                self._finalizer.detach()
            if engine is not None:
                self._error = engine.error or error
            elif error is not None and self._error is None:
                self._error = error
        if engine is not None:
            engine.close()
        return turn

    def __repr__(self) -> str:
        return f"ProcessGroupEtha(rank={self.rank()}, size={self.size()})"
