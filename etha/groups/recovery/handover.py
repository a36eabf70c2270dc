"""One load of a state: a pair of two replicas, of which one sends a snapshot and the other receives it.

    source    open() -> begin_send() -> ...the program goes on; agents move the bytes...  -> close
    newcomer  open() -> receive()    -> close

It is Etha's own transfer: agents move the bytes, from any sharding to any other, between hosts too, and compare
checksums of all of them before they commit, on all ranks of the newcomer or on none. The source's ranks wait only until
their tensors have been copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from etha.client.aio import AsyncBatchHandle, AsyncTensorBusClient
from etha.client.future import TransferFuture
from etha.client.memory.base import Mark
from etha.config import LOAD_BATCH, Settings
from etha.errors import EthaError, GroupLostError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The two sides of a load's pair.
SOURCE, NEWCOMER = "source", "newcomer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank in its replica, and how it reaches its agent. ``ranks``: torch world rank -> rank in the replica."""

    settings: Settings
    redis_url: str | None
    agent: str | None
    rank: int
    world: int
    ranks: Mapping[int, int] | None
    timeout: float


class FailureNews(Protocol):
    """How a rank hears that another one cannot take part in a load, perhaps before it has met anybody."""

    async def failure(self) -> str:
        """Wait for it; why it has failed."""
        ...


class StateHandover:
    """One rank's part in a load. Coroutines are for the loop thread; ``give_up`` is called there too."""

    def __init__(self, place: Place, *, pair: str, sends: bool, news: FailureNews) -> None:
        self._place, self._pair, self._sends, self._news = place, pair, sends, news
        self._client: AsyncTensorBusClient | None = None
        self._handle: AsyncBatchHandle | None = None
        self._future: TransferFuture | None = None
        self._why: str | None = None
        #: Ends what runs now.
        self._limit: asyncio.Timeout | None = None
        #: What arrives on another device than the agent's, and where it goes.
        self._moved: list[tuple[Tensor, Tensor]] = []

    async def open(self, tensors: Mapping[str, Tensor], sharded: set[str]) -> None:
        """Meet the other replica, and name the tensors. ``sharded``: those that are DTensors at the other end.

        Raises PeerLostError, RegistrationError and LayoutError, which name tensors, RendezvousTimeoutError,
        AgentUnavailableError, and GroupLostError after ``give_up``.
        """
        await self._unless_given_up(self._open(tensors, sharded))

    async def _open(self, tensors: Mapping[str, Tensor], sharded: set[str]) -> None:
        place = self._place
        device = _device_of(tensors)
        client = self._client = AsyncTensorBusClient(
            place.agent,
            device=device,
            redis_url=place.redis_url,
            namespace=place.settings.namespace,
            timeout=place.timeout,
        )
        here, there = (SOURCE, NEWCOMER) if self._sends else (NEWCOMER, SOURCE)
        await client.init_pair(
            self._pair,
            here,
            there,
            place.world,
            (place.world,),
            [Replicate()],
            rank=place.rank,
            ranks=place.ranks,
            give_up=True,
        )
        given: dict[str, Tensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        placements: dict[str, list[Placement]] = {}
        for name, tensor in tensors.items():
            near = self._near(tensor, device)
            if isinstance(tensor, DTensor):
                given[name] = near
            elif name in sharded:
                given[name], shapes[name], placements[name] = near, tuple(tensor.shape), [Replicate()]
            else:  # each rank's own: one row of a tensor with a row for each rank
                given[name] = near.unsqueeze(0)
                shapes[name], placements[name] = (place.world, *tensor.shape), [Shard(0)]
        self._handle = await client.register_tensors(
            LOAD_BATCH,
            given,
            pair_name=self._pair,
            placements=placements,
            shapes=shapes,
            direction="send" if self._sends else "recv",
            verify="full",
        )

    def _near(self, tensor: Tensor, device: torch.device) -> Tensor:
        """``tensor`` on the agent's device."""
        if tensor.device == device or isinstance(tensor, DTensor):
            return tensor
        near = tensor.to(device)
        self._moved.append((near, tensor))
        return near

    def mark(self) -> Mark:
        """The device work that the calling thread has queued, before which nothing is read or written."""
        assert self._handle is not None
        return self._handle.mark()

    async def begin_send(self, mark: Mark) -> None:
        """Return once the tensors may change."""
        assert self._handle is not None
        self._future = await self._unless_given_up(self._handle.transfer_after(mark, "send", snapshot=True))

    async def receive(self, mark: Mark) -> None:
        """Return once everything has arrived and its checksums were equal."""
        assert self._handle is not None
        await self._unless_given_up(self._handle.transfer_after(mark, "recv"))
        for near, tensor in self._moved:
            tensor.copy_(near)

    async def finish(self) -> None:
        """Wait until what was sent has arrived, or never will; then close."""
        try:
            if self._future is not None:
                await self._unless_given_up(self._future)
        except EthaError as error:
            log.info("the state for %s was not received: %s", self._pair, error)
        finally:
            await self.close()

    def give_up(self, why: str) -> None:
        """End what runs with GroupLostError, because a member of the epoch has ended."""
        if self._why is None:
            self._why = why
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Leave the pair; whoever still waits at the other end hears that. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(EthaError):
                await client.close()

    async def _unless_given_up(self, work: Awaitable[T]) -> T:
        """``work``; it is cancelled by ``give_up``, or when another rank says that it has failed. One at a time."""
        self._limit = asyncio.timeout(None if self._why is None else 0)
        failed: Exception | None = None
        try:
            async with self._limit, asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen())
                try:
                    return await work
                except Exception as error:  # out of the group as it is
                    failed = error
                finally:
                    listening.cancel()
        except TimeoutError:
            if not self._limit.expired():
                raise
            raise GroupLostError(f"the load of a state was given up: {self._why}") from None
        finally:
            self._limit = None
        raise failed

    async def _listen(self) -> None:
        with suppress(EthaError):
            self.give_up(await self._news.failure())


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """The device of the first tensor that does not lie in the host's memory."""
    return next((one.device for one in tensors.values() if one.device.type != "cpu"), torch.device("cpu"))
