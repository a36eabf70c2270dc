"""The trainer's side: every rank sends the shards it holds; rank 0 speaks to the engine, too, and tells the others.

What is done with an engine is in replica.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Self, TypeVar
from weakref import finalize

import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from etha import AsyncTensorBusClient, TransferResult
from etha.client.loop_thread import LoopMembership
from etha.errors import AgentLostError, ConfigError
from etha.integrations.vllm.trainer.fleet import FleetResult, Replicas
from etha.integrations.vllm.trainer.init_info import EthaTrainerInitInfo
from etha.integrations.vllm.trainer.replica import Replica, place_of
from etha.integrations.vllm.trainer.source import AdapterSource, EthaSource, Iterated, merged
from etha.integrations.vllm.weights.adapter import Adapter

T = TypeVar("T")


class EthaTrainerWeightTransferEngine(TrainerWeightTransferEngine[EthaTrainerInitInfo]):
    """vLLM's trainer engine of the backend ``etha``; made by ``WeightTransferTrainerFactory.trainer_init``."""

    init_info_cls = EthaTrainerInitInfo

    def __init__(
        self,
        init_info: EthaTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient | Sequence[VLLMWeightSyncClient],
        source: WeightSource | None,
    ) -> None:
        _check(init_info, client)
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._info, self._pid = init_info, os.getpid()
        # A second call in the midst of one would meet an update that is not its own.
        self._calling = Lock()
        self._weights = _weights(init_info, source)
        self._bus = AsyncTensorBusClient(
            redis_url=init_info.redis_url, namespace=init_info.namespace, timeout=init_info.timeout
        )
        self._membership: LoopMembership | None = LoopMembership(self)
        self._replicas: Replica | Replicas
        if isinstance(client, (list, tuple)):
            self._replicas = Replicas(init_info, client, self._bus, self._weights, self._membership.loop_thread)
            finalize(self, self._replicas.close).atexit = False  # else what looks for engines would go on
        else:
            self._replicas = Replica(init_info, client, self._bus, self._weights)

    @classmethod
    def trainer_init(
        cls,
        init_info: EthaTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient | Sequence[VLLMWeightSyncClient],
        source: WeightSource | None = None,
    ) -> Self:
        """Meet the other ranks and the engine, on every rank of the trainer; an engine that is not up is waited for.

        ``client``: one, or a list with one for each engine (the same list on every rank): an engine that has not come
        within the timeout is left out then, and takes the next version once it is there; an error if none comes.
        Errors of ``init_pair`` and ``register_tensors``; ConfigError where the engine refuses, on all ranks.
        """
        engine = cls(init_info, client=client, source=source)
        try:
            engine._announce()
            engine._run(engine._replicas.begin())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def send_weights(self, version: int | str | None = None) -> TransferResult | FleetResult:
        """Bring the weights as they are now into the engine as ``version``; on every rank.

        The engine's weight version is ``version``, else the transfer's number. Where the pair was lost before a
        byte has moved, it is formed again first, which waits for an engine that is starting. TransferError and its
        subclasses, on all ranks alike: the engine answers with what it had; call again for the next version. The
        engine is live with it when this returns. One call at a time: a thread that calls meanwhile waits for it.

        With a list of clients, all engines at the same time, and a ``FleetResult`` that says how it ended with each: an
        engine that is lost costs the others nothing, is told of (``failed``, and a warning), and takes the next
        version once it answers again. An error where none has taken the version.
        """

        def send() -> Coroutine[Any, Any, TransferResult | FleetResult]:
            return self._replicas.send(version)

        return self._call(send)

    def verify(self) -> TransferResult | FleetResult:
        """Prove that the engine computes with the weights as they are here now; on every rank, after an update.

        They are sent once more, beside the live model, and each worker compares: parameters that can be read bit by
        bit, packed ones by their products with a fixed probe, to within the dtype's rounding. Nothing of the engine
        changes; requests wait while it compares. TransferError, on all ranks, names the parameters that differ.
        With a list of clients, an error if one engine differs; one that is out is told of in the ``FleetResult``.
        ConfigError with ``atomic=False``, where there is no place beside the model.
        """
        if self._info.direct and not self._info.atomic:
            raise ConfigError(
                f"pair {self._info.pair!r}: with atomic=False weights are sent into the live parameters, so that there "
                f"is nothing to compare them with: use atomic=True to verify"
            )
        return self._call(self._replicas.verify)

    def shutdown(self) -> None:
        """Leave the pair; idempotent. Nothing in a forked child: the engine is its parent's."""
        if self._membership is not None and os.getpid() == self._pid:
            left, self._membership = self._membership, None
            if isinstance(self._replicas, Replicas):
                self._replicas.close()
            try:
                with suppress(AgentLostError):  # the program ends, and the loop before this
                    left.loop_thread.call(self._bus.close())
            finally:
                left.leave()

    def _announce(self) -> None:
        """Learn what all ranks hold: a collective of torch.distributed where the trainer is its world.

        Elsewhere each rank's source must know the whole model.
        """
        self._weights.refresh()
        metas = self._weights.metadata()
        held = [list(self._weights.tensors())]
        world = place_of(self._info).world_size
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world > 1:
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, (metas, held[0]))
            metas = merged([metas for metas, _ in gathered])
            held = [names for _, names in gathered]
        spread = any(set(names) != {meta.name for meta in metas} for names in held)
        if not metas:
            raise ConfigError(
                f"pair {self._info.pair!r}: the source has no tensors on any rank: there is nothing to send"
            )
        self._replicas.announce(metas, spread=spread)

    def _call(
        self, work: Callable[[], Coroutine[Any, Any, TransferResult | FleetResult]]
    ) -> TransferResult | FleetResult:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"this trainer engine belongs to process {self._pid}, from which process {os.getpid()} was forked: use "
                f"it there"
            )
        with self._calling:
            self._weights.refresh()
            return self._run(work())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._membership is None:
            work.close()
            raise ConfigError(f"the trainer engine of pair {self._info.pair!r} is shut down: make another")
        return self._membership.loop_thread.call(work)


def _check(info: EthaTrainerInitInfo, client: object) -> None:
    """ConfigError for options that could not be sent to an engine, and for what is no client of one."""
    if type(info.rank) is not int or info.rank < 0:
        raise ConfigError(f"rank={info.rank!r}: give this rank's number among the trainer's, from 0")
    for name, seconds in (("timeout", info.timeout), ("lease", info.lease)):
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not math.isfinite(seconds) or seconds < 0 or (name == "timeout" and seconds == 0):
            raise ConfigError(f"{name}={seconds!r}: give a finite number of seconds")
    if info.adapter is not None and not isinstance(info.adapter, Adapter):
        raise ConfigError(
            f"adapter={info.adapter!r}: give etha.integrations.vllm.Adapter(name=..., rank=..., alpha=...)"
        )
    for one in client if isinstance(client, (list, tuple)) else (client,):
        if info.rank == 0 and not callable(getattr(one, "start_weight_update", None)):
            raise ConfigError(f"client={one!r} is no client of an engine: give HTTPVLLMWeightSyncClient(url) for a URL")


def _weights(info: EthaTrainerInitInfo, source: WeightSource | None) -> EthaSource | Iterated:
    """What is sent of ``source``."""
    found = EthaSource.of(source, info.names)
    if info.adapter is None:
        return found
    if info.direct or not info.atomic:
        raise ConfigError(f"adapter {info.adapter.name!r}: direct=True and atomic=False are for the model's weights")
    return AdapterSource(found, info.adapter) if isinstance(found, EthaSource) else found
