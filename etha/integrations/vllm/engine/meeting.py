"""Meets the trainer beside the engine's steps, so that no answer waits for a trainer that is late or dies in joining.

    init_weight_transfer_engine   begin: after the loaders were recorded, which the engine's own thread has to do
    (steps of the engine)         init_pair, memory, register_tensors, on the loop of the clients
    start_weight_update           met: they have ended when the trainer calls; else their error is raised

The engine's thread waits only in ``met``, for work that is almost done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from etha import AsyncTensorBusClient, TransferFuture
from etha.client.aio import AsyncBatchHandle
from etha.client.loop_thread import LoopMembership
from etha.client.results import AsyncPair
from etha.errors import AgentLostError, ConfigError, EthaError, TransferError
from etha.integrations.vllm.engine.cores import leave_bound_core
from etha.integrations.vllm.engine.init_info import EthaWeightTransferInitInfo, Incoming
from etha.integrations.vllm.engine.news import report
from etha.integrations.vllm.engine.refusals import STRANGER

# Under vLLM's own root, so that vLLM's handlers print it.
log = logging.getLogger("vllm.etha")
#: Seconds that a call waits for a meeting. The trainer has met everybody when it calls, so this is short.
_SOON = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetTrainer:
    """A trainer that was met: the pair, the batch that it sends, and the destination."""

    pair: AsyncPair
    batch: AsyncBatchHandle
    received: Incoming


class Meetings:
    """One worker's meetings with trainers, one after another. A new one ends the one before if that has not ended."""

    def __init__(self, device: torch.device, *, redis_url: str | None, namespace: str | None) -> None:
        self._bus = AsyncTensorBusClient(device=device, redis_url=redis_url, namespace=namespace)
        self._membership = LoopMembership(self)
        leave_bound_core(self._membership.loop_thread)
        self._order = asyncio.Lock()
        self._met: MetTrainer | None = None
        self._meeting: TransferFuture | None = None
        self._watch: TransferFuture | None = None

    def begin(self, info: EthaWeightTransferInitInfo, rank: int, world: int, received: Incoming) -> None:
        """Begin to meet the trainer that announces ``info``, as ``rank`` of ``world``. Does not wait for it."""
        if self._meeting is not None:
            self._meeting.cancel()
        if info.again and (met := self.standing()) is not None:
            self._met = None
            again: Coroutine[Any, Any, Any] = self._renew(met, info, received)
            self._meeting = self._membership.loop_thread.submit(again)
            return
        work: Coroutine[Any, Any, Any] = self._meet(info, rank, world, received)
        self._meeting = self._membership.loop_thread.submit(work)

    def standing(self) -> MetTrainer | None:
        """The trainer that was met, while it lives."""
        met = self._met
        return None if met is None or met.pair.lost.is_set() else met

    def met(self) -> MetTrainer:
        """The trainer that was met last; raises that meeting's error if it failed.

        ConfigError if none was begun; TransferError if it has not ended, because then the trainer is not complete.
        """
        if (standing := self.standing()) is not None:
            return standing
        if self._meeting is not None:
            try:
                self._meeting.result(_SOON)
            except TimeoutError:
                raise TransferError(
                    "the trainer has not been met yet: some of its ranks are late, or of this engine's; call "
                    "start_weight_update when trainer_init has returned on all of them",
                    outcome="withdrawn",
                ) from None
        if self._met is None:
            raise ConfigError(f"the weight transfer engine of this worker {STRANGER}: call init_weight_transfer_engine")
        return self._met

    def receive(self, met: MetTrainer, timeout: float) -> TransferFuture:
        """Begin to receive the next transfer of ``met``."""
        mark = met.batch.mark()  # of this thread: its queued device work comes first
        return self._membership.loop_thread.submit(met.batch.transfer_after(mark, "recv", timeout=timeout))

    def close(self) -> None:
        """Leave the pair and meet nobody any more; idempotent."""
        meeting, self._meeting, self._met = self._meeting, None, None
        watch, self._watch = self._watch, None
        for work in (meeting, watch):
            if work is not None:
                work.cancel()
        try:
            with suppress(AgentLostError):  # the process ends, and its loop before this
                self._membership.loop_thread.call(self._bus.close())
        finally:
            self._membership.leave()

    # ---- on the loop ---------------------------------------------------------------------------

    async def _meet(self, info: EthaWeightTransferInitInfo, rank: int, world: int, received: Incoming) -> None:
        async with self._order:
            try:
                if await self._leave(info.timeout):
                    await self._join(info, rank, world, received)
            except EthaError as error:
                log.warning("pair %s: the trainer was not met: %s", info.pair, error)
                raise

    async def _leave(self, timeout: float) -> bool:
        """Wait until the previous trainer has left; returns whether it has. It may live, and the new one may be too
        early.

        Its receive memory is released before memory for the next trainer is taken.
        """
        met = self._met
        if met is None:
            return True
        if not await met.pair.lost.heard(timeout):
            return False
        self._met = None
        with suppress(EthaError):  # the agent is gone, and the batch with it
            await met.batch.close()
        return True

    async def _join(self, info: EthaWeightTransferInitInfo, rank: int, world: int, received: Incoming) -> None:
        pair = await self._bus.init_pair(
            info.pair, info.local_name, info.remote_name, world, rank=rank, give_up=True, timeout=info.timeout
        )
        self._met = await self._registered(pair, info, received)
        if info.news:
            watch: Coroutine[Any, Any, Any] = self._tell_when_lost(pair, info)
            self._watch = self._membership.loop_thread.submit(watch)
        log.info("pair %s: the trainer was met, epoch %d", info.pair, pair.epoch)

    async def _renew(self, met: MetTrainer, info: EthaWeightTransferInitInfo, received: Incoming) -> None:
        """Register the tensors whose memory has changed again, with the same trainer."""
        async with self._order:
            await met.batch.close()
            self._met = await self._registered(met.pair, info, received)

    async def _registered(self, pair: AsyncPair, info: EthaWeightTransferInitInfo, received: Incoming) -> MetTrainer:
        batch = await self._bus.register_tensors(
            info.batch,
            await asyncio.to_thread(received.room),
            pair_name=info.pair,
            regions=received.regions,
            shapes=received.shapes,
            direction="recv",
            timeout=info.timeout,
        )
        return MetTrainer(pair=pair, batch=batch, received=received)

    async def _tell_when_lost(self, pair: AsyncPair, info: EthaWeightTransferInitInfo) -> None:
        """When the trainer has gone, inform the engine that holds its pause."""
        await pair.lost
        report(info.news, info.holder)
