"""A client's connection to a simulated agent: a ``Bus`` in this process answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from etha.bus.codec import Failure
from etha.bus.handshake import WorkerWelcome
from etha.bus.link import AgentLink, Answer
from etha.bus.messages import (
    AttachSnapshot,
    BeginPut,
    ClaimVersion,
    CloseBatch,
    ClosePublication,
    CloseSubscription,
    Confirm,
    DescribePublication,
    EndHop,
    FinishPut,
    GetStatus,
    GetSubscribers,
    InitPair,
    LeavePair,
    Ok,
    Publish,
    Published,
    Register,
    Status,
    Subscribe,
    Supersede,
    Transfer,
    WaitHeld,
    WaitHolders,
    WaitOffer,
)
from etha.client.connection import AgentConnection
from etha.client.memory.segments import SegmentUse, SharedSegments
from etha.errors import AgentLostError, EthaError, PeerLostError, ProtocolError, TransferError
from etha.memory.handles import TensorHandle
from etha.memory.revocation import RevocationPage
from etha.testing.bus import Bus
from etha.version import __version__


class _Link(AgentLink):
    """A session in which ``Bus`` answers at once."""

    #: There is no agent whom a thread could ask.
    direct, wants_direct = None, False

    def __init__(self, bus: Bus, on_push: Callable[[Any], None], device: str) -> None:
        self._bus, self.on_push = bus, on_push
        self.welcome = WorkerWelcome(
            version=__version__, namespace="default", device=device, redis=None, pid=os.getpid()
        )
        self.lost: asyncio.Future[AgentLostError] = asyncio.get_running_loop().create_future()

    async def request(
        self,
        message: Any,
        *,
        timeout: float = 0.0,
        on_push: Callable[[Any], None] | None = None,
        on_timeout: Callable[[], EthaError] | None = None,
        on_cancel: Callable[[Answer | None], None] | None = None,
        patient: bool = False,
        tag: object = None,
    ) -> Any:
        try:
            await asyncio.sleep(0)  # an endless loop of transfers leaves the event loop to others, too
        except asyncio.CancelledError:
            if on_cancel is not None:
                on_cancel(Failure(0, TransferError("cancelled", outcome="withdrawn")))
            raise
        if self.lost.done():
            raise AgentLostError(self.lost.result().message)
        match message:
            case InitPair():
                return self._bus.init_pair(message)
            case Register():
                return self._bus.register(message)
            case Transfer():
                if self._bus.faults:
                    await self._fail(message.batch, self._bus.faults.popleft())
                return self._bus.transfer(message)
            case WaitOffer():
                return self._bus.offer(message)
            case CloseBatch() | Confirm() | AttachSnapshot() | Supersede():
                return Ok()
            case Publish():
                return self._bus.publish(message)
            case BeginPut():
                return self._bus.begin_put(message)
            case FinishPut():
                announced = self._bus.finish_put(message)
                if self.on_push is not None:
                    self.on_push(announced)
                return Published(seq=announced.seq)
            case DescribePublication(publication=publication):
                return self._bus.describe(publication)
            case Subscribe():
                return self._bus.subscribe(message)
            case ClaimVersion():
                return await self._bus.claim(message, timeout)
            case GetSubscribers(publication=publication):
                return self._bus.subscribers(publication)
            case WaitHolders(publication=publication, seq=seq):
                return self._bus.holders(publication, seq)
            case EndHop(publication=publication, error=error):
                if not error:
                    self._bus.hold(publication)
                return Ok()
            case WaitHeld() | ClosePublication() | CloseSubscription() | LeavePair():
                return Ok()
            case GetStatus():
                return Status(report=self._bus.status())
        raise ProtocolError(f"the dummy knows no {type(message).__name__}")

    async def send_descriptors(
        self,
        header: dict[str, Any],
        fds: Sequence[int],
        *,
        timeout: float,
        on_timeout: Callable[[], EthaError] | None = None,
    ) -> None:
        """Does nothing, because nobody reads the memory."""

    async def _fail(self, batch: str, error: EthaError) -> None:
        """What a real agent's workers are told together with such an error."""
        if isinstance(error, PeerLostError):
            for name in self._bus.batches[batch].register.pairs:
                lost = self._bus.lose(name, error.reason)
                if self.on_push is not None:
                    self.on_push(lost)
        if isinstance(error, AgentLostError):
            for name in self._bus.pairs:
                self._bus.lose(name, "died")
            self.lost.set_result(error)
            await asyncio.sleep(0)  # the client hears it first
        raise error

    async def hear_of_death(self, within: float) -> None:
        """Does nothing, because there is no agent's process."""

    def withdraw(self, tag: object) -> None:
        """Does nothing, because every call is answered at once."""

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.lost.done():
            with suppress(RuntimeError):  # its loop is closed: nobody is waiting
                self.lost.set_result(AgentLostError("this client is closed"))


class _Page(RevocationPage):
    """A page that lends nothing, because nobody ever writes into a tensor."""

    def __init__(self) -> None:
        return

    def open(self) -> int:
        return 1

    def revoke(self, word: int) -> bool:
        return True

    def close(self) -> None:
        return


class _Segments(SharedSegments):
    """Shows no segment to anybody."""

    async def show(self, use: SegmentUse, handles: Iterable[TensorHandle], timeout: float) -> None:
        return

    async def release(self, use: SegmentUse, timeout: float) -> None:
        return


class DummyConnection(AgentConnection):
    """A connection without an agent. ``device`` is the name that its agent would have."""

    def __init__(self, bus: Bus, on_push: Callable[[Any], None], device: str) -> None:
        super().__init__(_Link(bus, on_push, device), _Page())
        self.reaches = True
        self.collapser.cancel()
        self.segments = _Segments(self.link, self.home)
