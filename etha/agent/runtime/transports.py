"""Wires: what carries a batch's bytes between agents: streams (``transport.tcp``), or NCCL where all have cards.

NCCL's communicator goes with a failed transfer, on every agent of the batch. All of them know which transfers have
failed, so the number of the last one names the communicator that the next transfer needs: the first one's id came with
the verdicts, through Redis; a later one's is made by the first of the agents and told over links.
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


class Wire(Protocol):
    """One batch's: a ``Transport[WireRun]`` whose runs may be stopped."""

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Get ready to send to these peers."""
        ...

    async def prepare(self, run: WireRun) -> None:
        """Copy what must be read before anything is written, once a run."""
        ...

    async def run(self, bucket: WireRun, on_progress: Progress | None = None) -> int:
        """Exchange everything of one transfer; its payload in bytes, sent and received."""
        ...

    def settled(self) -> None:
        """The last transfer is committed; idempotent."""
        ...

    def stop(self, cause: BaseException) -> None:
        """The transfer is aborted; returns at once, idempotent."""
        ...

    async def close(self) -> None:
        """The batch is over: end what runs, and refuse more."""
        ...


class NcclWire:
    """``members``: the agents' names; ``scope``: the registration; ``unique_id``: of the first communicator."""

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
        """The id of a later communicator; only the first of the agents makes them."""
        if agent == self._members[0] and message.edition not in self._ids:
            self._ids[message.edition] = message.id
            self._news.set()

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Nothing to do: the communicator reaches all agents of the batch, and is formed by the first run."""

    async def prepare(self, run: WireRun) -> None:
        """As of a Wire."""
        await (await self._ready(run.after)).prepare(run)

    async def run(self, bucket: WireRun, on_progress: Progress | None = None) -> int:
        """As of a Wire; errors as of ``NcclTransport.run``, TransferTimeoutError where NCCL does not connect.

        Also of an agent that has nothing to exchange: the others wait for it until the communicator is formed.
        """
        transport = await self._ready(bucket.after)
        if bucket.program.empty:
            return 0
        self._programs.add(bucket.program)
        return await transport.run(bucket, on_progress)

    def settled(self) -> None:
        """As of a Wire: the communicator is this batch's own."""

    def stop(self, cause: BaseException) -> None:
        """As of a Wire; the next run forms another communicator."""
        self._cause = cause
        for scope in self._waiting:
            scope.reschedule(asyncio.get_running_loop().time())
        if self._transport is not None:
            self._transport.stop(cause)

    async def close(self) -> None:
        """As of a Wire; its communicators are closed, and what the card kept for its programs is given back."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()
        await self._plane.forget(self._programs)
        await self._plane.communicators.drop((self._scope, self._edition))

    async def _ready(self, edition: int) -> NcclTransport:
        """What runs after failed transfer number ``edition`` (0: none has failed); raises what it is stopped with."""
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
        """``stop`` ends it with its cause, also where the work is done but nobody has taken it yet."""
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
