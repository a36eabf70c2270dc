"""One rank of a holder towards one subscriber: it joins their pair, registers a slot once, and sends.

It outlives its hops, so that rendezvous and plan happen once, and ends when the subscriber has left the pair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from etha.agent.runtime.in_process_worker import Dispatcher, InProcessWorker
from etha.agent.runtime.sessions import HopClaim, WorkerSession
from etha.bus.messages import BatchLost, Entry, InitPair, PairFormed, PairLost, Register, Registered, Transfer
from etha.memory.handles import TensorHandle
from etha.memory.mapping import StandingSegment
from etha.memory.views import View
from etha.transport.rate_limit import RateLimit
from etha.transport.wire.differences import ViewKey, key_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingTensors:
    """What a rank of a holder has registered. ``slots``: for each slot, where the tensors lie, by entry."""

    side: str
    world_size: int
    rank: int
    layouts: tuple[dict[str, Any], ...]
    entries: tuple[Entry, ...]
    slots: tuple[Sequence[TensorHandle], ...]


class HopWorker:
    """``left()`` is called when the subscriber has left the pair, and no hop runs. ``limit``: how fast it may send."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tensors: StandingTensors,
        segments: Iterable[StandingSegment],
        *,
        pair: str,
        remote: str,
        left: Callable[[], None],
        limit: RateLimit | None = None,
    ) -> None:
        self._tensors, self._pair, self._remote, self._left = tensors, pair, remote, left
        self._worker = InProcessWorker(dispatcher, segments, self._pushed, limit)
        self._epoch: int | None = None
        #: batch -> the generation in which it is registered.
        self._registered: dict[str, int] = {}
        #: The last epoch, and the last generation of each batch, that is over.
        self._lost_epoch = 0
        self._lost_generations: dict[str, int] = {}
        #: Hops of one subscriber come one after the other.
        self._turn = asyncio.Lock()
        self._hops = 0
        self._between: dict[tuple[int, int], Mapping[ViewKey, View]] = {}

    async def send(self, batch: str, slot: int, version: int, ready: Callable[[], Any], hop: HopClaim) -> None:
        """Send ``slot`` as batch ``batch``. ``await ready()`` comes last before the bytes move. When it returns or
        raises, nothing reads the slot any more."""
        self._hops += 1
        try:
            async with self._turn:
                epoch = await self._join()
                self._worker.session.hops[batch] = hop
                while batch not in self._registered:
                    await self._enroll(batch, slot, epoch)
                await ready()
                await self._worker.request(
                    Transfer(batch=batch, epoch=epoch, verb="send", version=version, slot=0, progress=False)
                )
        finally:
            self._worker.session.hops.pop(batch, None)
            self._hops -= 1
            if self._epoch is None and not self._hops:
                self._left()

    @property
    def session(self) -> WorkerSession:
        """As what the agent knows it."""
        return self._worker.session

    def views_between(self, slot: int, other: int) -> Mapping[ViewKey, View]:
        """For each tensor of ``slot``, the one of ``other``."""
        found = self._between.get((slot, other))
        if found is None:
            slots = self._tensors.slots
            found = self._between[slot, other] = _between(
                self._worker.session.memory.resolve, slots[slot], slots[other]
            )
        return found

    def close(self) -> None:
        """Leave the pair. Idempotent."""
        self._between.clear()
        self._worker.close()

    # ---- inside -------------------------------------------------------------------------------

    async def _join(self) -> int:
        while self._epoch is None:
            formed = await self._worker.request(
                InitPair(
                    pair=self._pair,
                    side=self._tensors.side,
                    remote=self._remote,
                    world_size=self._tensors.world_size,
                    rank=self._tensors.rank,
                    launch=None,
                )
            )
            assert isinstance(formed, PairFormed)
            if formed.epoch > self._lost_epoch:
                self._epoch = formed.epoch
        return self._epoch

    def _register(self, batch: str, slot: int, epoch: int) -> Register:
        handles = self._tensors.slots[slot]
        entries = tuple(replace(e, handle=handle) for e, handle in zip(self._tensors.entries, handles, strict=True))
        return Register(
            batch=batch,
            epoch=epoch,
            form="map",
            pairs=(self._pair,),
            layouts=self._tensors.layouts,
            entries=entries,
            refusals=(),
            direction="send",
            bucket_size=None,
            atomic=False,
            verify=None,
            seq=0,
        )

    async def _enroll(self, batch: str, slot: int, epoch: int) -> None:
        def note(registered: Any) -> None:
            """The batch stands, unless the subscriber has left it before this was noticed."""
            assert isinstance(registered, Registered)
            if registered.generation > self._lost_generations.get(batch, 0):
                self._registered[batch] = registered.generation

        note(await self._worker.request(self._register(batch, slot, epoch), on_cancel=note))

    def _pushed(self, message: Any) -> None:
        match message:
            case PairLost(epoch=epoch):
                self._lost_epoch = max(self._lost_epoch, epoch)
                if epoch == self._epoch:
                    self._epoch = None
                    self._registered.clear()
                    self._lost_generations.clear()
                    if not self._hops:
                        self._left()
            case BatchLost(batch=batch, epoch=epoch, generation=generation) if epoch == self._epoch:
                self._lost_generations[batch] = generation
                if self._registered.get(batch, 0) <= generation:
                    self._registered.pop(batch, None)


def _between(
    resolve: Callable[[TensorHandle], View], sent: Sequence[TensorHandle], before: Sequence[TensorHandle]
) -> Mapping[ViewKey, View]:
    """For each tensor that is sent, the one that holds the version before."""
    return {key_of(resolve(new)): resolve(old) for new, old in zip(sent, before, strict=True)}
