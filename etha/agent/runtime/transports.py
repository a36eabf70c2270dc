"""Wires: what carries a batch's bytes between agents: streams (``transport.tcp``), or NCCL if all have cards.

A failed transfer ends NCCL's communicator on every agent of the batch. All of them know which transfers have failed, so
the number of the last failed one names the communicator that the next transfer needs. The id of the first communicator
came with the verdicts, through Redis. The first of the agents makes later ids and sends them over links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from etha.errors import TransferTimeoutError
from etha.peer.introductions import UniqueId
from etha.transport.base import Progress, TransportPeer, WireRun
from etha.transport.nccl.communicator import FORMING
from etha.transport.nccl.transport import NcclPlane, NcclTransport
from etha.transport.wire.flows import WireProgram

T = TypeVar("T")


class BatchTransport(Protocol):
    """One batch's ``Transport[WireRun]``, whose runs may be stopped."""

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Prepare to send to these peers."""
        ...

    async def prepare(self, run: WireRun) -> None:
        """Copy what must be read before anything is written, once per run."""
        ...

    async def run(self, bucket: WireRun, on_progress: Progress | None = None) -> int:
        """Exchange everything of one transfer. Returns its payload in bytes, sent and received."""
        ...

    def settled(self) -> None:
        """The last transfer is committed. Idempotent."""
        ...

    def stop(self, cause: BaseException) -> None:
        """The transfer is aborted. Returns at once; idempotent."""
        ...

    async def close(self) -> None:
        """The batch is over: end what runs, and refuse more."""
        ...


class NcclBatchTransport:
    """A wire over NCCL.

    ``members`` are the agents' names, ``scope`` is the registration, ``unique_id`` that of the first communicator.
    """

    def __init__(
        self,
        plane: NcclPlane,
        *,
        me: str,
        members: Sequence[str],
        scope: Hashable,
        unique_id: bytes,
        tell: Callable[[str, UniqueId], None],
    ) -> None:
        self._plane, self._me, self._members, self._scope = plane, me, sorted(members), scope
        self._tell = tell
        self._ids: dict[int, bytes] = {0: unique_id}
        self._news = asyncio.Event()
        self._edition = -1
        self._transport: NcclTransport | None = None
        self._programs: set[WireProgram] = set()
        self._waiting: set[asyncio.Timeout] = set()
        self._cause: BaseException | None = None

    def hear(self, agent: str, message: UniqueId) -> None:
        """Take the id of a later communicator. Only the first of the agents makes them."""
        if agent == self._members[0] and message.edition not in self._ids:
            self._ids[message.edition] = message.id
            self._news.set()

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Does nothing: the communicator reaches all agents of the batch, and the first run forms it."""

    async def prepare(self, run: WireRun) -> None:
        await (await self._ready(run.after)).prepare(run)

    async def run(self, bucket: WireRun, on_progress: Progress | None = None) -> int:
        """Exchange everything of one transfer. Raises as ``NcclTransport.run``, or TransferTimeoutError if NCCL does
        not connect.

        An agent that has nothing to exchange runs it, too, because the others wait for it until the communicator is
        formed.
        """
        transport = await self._ready(bucket.after)
        if bucket.program.empty:
            return 0
        self._programs.add(bucket.program)
        return await transport.run(bucket, on_progress)

    def settled(self) -> None:
        """Does nothing, because the communicator is this batch's own."""

    def stop(self, cause: BaseException) -> None:
        """Stop the transfer. The next run forms another communicator."""
        self._cause = cause
        for scope in self._waiting:
            scope.reschedule(asyncio.get_running_loop().time())
        if self._transport is not None:
            self._transport.stop(cause)

    async def close(self) -> None:
        """Close the communicators, and free what the card kept for its programs."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()
        await self._plane.forget(self._programs)
        await self._plane.communicators.drop((self._scope, self._edition))

    async def _ready(self, edition: int) -> NcclTransport:
        """The transport after failed transfer number ``edition`` (0: none has failed). Raises the cause of a stop."""
        self._cause = None
        if self._transport is None or self._edition != edition:
            former, self._edition, self._transport = self._edition, edition, None
            unique_id = await self._until_stopped(self._id(edition))
            if former >= 0:
                await self._until_stopped(self._plane.communicators.drop((self._scope, former)))
            forming = self._plane.communicators.get((self._scope, edition), self._members, unique_id)
            self._transport = NcclTransport(self._plane, await self._until_stopped(forming))
        return self._transport

    async def _id(self, edition: int) -> bytes:
        if edition not in self._ids and self._me == self._members[0]:
            self._ids[edition] = await self._plane.communicators.unique_id()
            for agent in self._members[1:]:
                self._tell(agent, UniqueId(edition=edition, id=self._ids[edition]))
        try:
            async with asyncio.timeout(FORMING):
                while edition not in self._ids:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise TransferTimeoutError(
                f"agent {self._members[0]} told no id of another NCCL communicator within {FORMING:g} s"
            ) from None
        return self._ids[edition]

    async def _until_stopped(self, work: Awaitable[T]) -> T:
        """Await ``work``. ``stop`` ends it with its cause, even if the work is done but not taken yet."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._waiting.add(scope)
                found = await work
        except TimeoutError:
            if not scope.expired() or self._cause is None:
                raise
            raise self._cause from None
        finally:
            self._waiting.discard(scope)
        if self._cause is not None:
            raise self._cause
        return found
