"""NCCL communicators, each over exactly a set of agents, made once for a pair's epoch and never repaired.

    get(scope, members, id)  all of the set, with one id -> Communicator, or an error after ``seconds``
    drop(scope)              the epoch is over: its communicators are closed, or aborted

An agent's rank is its place among the sorted names. A communicator that failed or was aborted is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Sequence

from etha.cuda.nccl import IN_PROGRESS, OK, Nccl, NcclError
from etha.errors import PeerLostError, ProtocolError, TransferTimeoutError
from etha.transport.nccl.thread import NcclThread, Task

log = logging.getLogger(__name__)

#: Seconds that a communicator has to form. Its other ranks may still be compiling their programs.
FORMING = 60.0
#: Seconds that an orderly close may take before the communicator is aborted, because other agents may be gone.
CLOSING = 1.0


class Communicator:
    """One communicator, used on the NCCL thread.

    ``cause`` is why it is not usable any more. ``busy`` counts the runs over it.
    """

    def __init__(self, nccl: Nccl, members: Sequence[str], me: str) -> None:
        if list(members) != sorted(set(members)) or me not in members:
            raise ProtocolError(f"{me} cannot form a communicator of {list(members)}: names sorted, itself among them")
        self.nccl, self.members, self.me = nccl, tuple(members), me
        self.cause: BaseException | None = None
        self.handle = 0
        self.busy = 0
        self.forming: asyncio.Future[None] | None = None
        self.formed = False
        self._freed = True

    @property
    def usable(self) -> bool:
        """Whether transfers may use it."""
        return self.formed and self.cause is None and not self._freed

    def begin(self, ordinal: int, unique_id: bytes) -> None:
        """Start to form it."""
        self.handle = self.nccl.init(ordinal, len(self.members), self.members.index(self.me), unique_id)
        self._freed = False

    def ready(self) -> bool:
        """Whether NCCL is done with its last call. NcclError if NCCL has failed; raises the cause if it was stopped."""
        if self.cause is not None:
            raise self.cause
        state = self.nccl.state(self.handle)
        if state not in (OK, IN_PROGRESS):
            raise NcclError(f"NCCL between {', '.join(self.members)} has failed: {state}")
        return state == OK

    def abort(self, cause: BaseException) -> None:
        """End what is queued, and free it. Idempotent. Call it on the NCCL thread, like everything of NCCL."""
        if self.cause is None:
            self.cause = cause
        if not self._freed:
            self._freed = True
            try:
                self.nccl.abort(self.handle)
            except NcclError as error:
                log.warning("a communicator of %d agents could not be aborted in order: %s", len(self.members), error)

    def destroy(self) -> None:
        """Free it, after ``ready`` has said that it is finalized."""
        self._freed = True
        self.nccl.destroy(self.handle)


class Communicators:
    """The communicators of one agent. Call all methods on its loop."""

    def __init__(self, thread: NcclThread, nccl: Nccl, ordinal: int, me: str) -> None:
        self._thread, self._nccl, self._ordinal, self._me = thread, nccl, ordinal, me
        self._found: dict[tuple[Hashable, tuple[str, ...]], Communicator] = {}

    async def unique_id(self) -> bytes:
        """Make a new id, for one ``get`` by each agent of a set. One of them makes it."""
        return await self._thread.start(self._make_id())

    def _make_id(self) -> Task[bytes]:
        yield True
        return self._nccl.unique_id()

    async def get(
        self, scope: Hashable, members: Sequence[str], unique_id: bytes, *, seconds: float = FORMING
    ) -> Communicator:
        """The communicator of these agents in an epoch of a pair (``scope``). Forms a new one if none is usable.

        TransferTimeoutError if not all of them came in time, PeerLostError if NCCL failed or ``drop`` came first.
        Cancelling does not stop the forming; ``drop`` does.
        """
        key = (scope, tuple(sorted(set(members))))
        found = self._found.get(key)
        if found is None or found.cause is not None:
            found = self._found[key] = Communicator(self._nccl, key[1], self._me)
            task = self._form(found, unique_id, time.monotonic() + seconds, seconds)
            found.forming = self._thread.start(task)
        assert found.forming is not None
        await asyncio.shield(found.forming)  # shielded, because several callers may wait for it
        return found

    def _form(self, made: Communicator, unique_id: bytes, until: float, seconds: float) -> Task[None]:
        names = ", ".join(made.members)
        try:
            if made.cause is not None:
                raise made.cause
            made.begin(self._ordinal, unique_id)
            yield True
            while not made.ready():
                if time.monotonic() >= until:
                    raise TransferTimeoutError(
                        f"NCCL did not connect the agents {names} within {seconds:g} s: one of them has not come, or "
                        f"their hosts do not reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO tell more)"
                    )
                yield False
            made.formed = True
        except NcclError as error:
            lost = PeerLostError(f"NCCL could not connect the agents {names}: {error}", reason="died")
            made.abort(lost)
            raise lost from error
        except BaseException as error:
            made.abort(error)
            raise

    async def drop(self, scope: Hashable) -> None:
        """The epoch is over: close its communicators, in an orderly way if all other agents do so, too."""
        keys = [key for key in self._found if key[0] == scope]
        await self._close([self._found.pop(key) for key in keys])

    def discard(self, one: Communicator, cause: BaseException) -> None:
        """Abort it, so that no transfer uses it from now on. Returns at once; idempotent."""
        if one.cause is None:
            one.cause = cause
            self._thread.start(self._abort(one, cause))

    def _abort(self, one: Communicator, cause: BaseException) -> Task[None]:
        yield True
        one.abort(cause)

    async def close(self) -> None:
        """Close all communicators, as ``drop`` does."""
        found, self._found = list(self._found.values()), {}
        await self._close(found)

    async def _close(self, found: Sequence[Communicator]) -> None:
        for one in found:
            await self._thread.start(self._end(one))

    def _end(self, one: Communicator) -> Task[None]:
        until = time.monotonic() + CLOSING
        closed = PeerLostError(f"the communicator of {', '.join(one.members)} was closed", reason="died")
        try:
            if one.usable and not one.busy and one.ready():
                self._nccl.finalize(one.handle)
                yield True
                while not one.ready():
                    if time.monotonic() >= until:
                        one.abort(closed)
                        return
                    yield False
                one.destroy()
                one.cause = closed
                return
        except (NcclError, PeerLostError) as error:
            log.debug("a communicator is aborted instead of closed: %s", error)
        one.abort(closed)
