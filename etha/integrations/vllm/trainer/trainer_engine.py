"""The trainer's side: every rank sends its shards, and rank 0 also calls the engine and informs the others.

replica.py has the work with one engine.
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
        # A second call in the middle of one would meet an update that is not its own.
        self._calling = Lock()
        self._weights = _weights(init_info, source)
        self._bus = AsyncTensorBusClient(
            redis_url=init_info.redis_url, namespace=init_info.namespace, timeout=init_info.timeout
        )
        self._membership: LoopMembership | None = LoopMembership(self)
        self._replicas: Replica | Replicas
        if isinstance(client, (list, tuple)):
            self._replicas = Replicas(init_info, client, self._bus, self._weights, self._membership.loop_thread)
            finalize(self, self._replicas.close).atexit = False  # else the search for engines would continue
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
        """Meet the other ranks and the engine, on every rank of the trainer. Waits for an engine that is not up yet.

        ``client``: one, or a list with one for each engine (the same list on every rank). With a list, an engine that
        has not come within the timeout is left out, and takes the next version once it is there; an error if none
        comes.

        Raises the errors of ``init_pair`` and ``register_tensors``, and ConfigError if the engine refuses, on all
        ranks.
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
        """Send the weights as they are now to the engine as ``version``; on every rank.

        The engine's weight version is ``version``, else the transfer's number. When this returns, the engine serves
        with it. If the pair was lost before a byte has moved, it is formed again first, which waits for an engine that
        starts. TransferError and its subclasses are raised on all ranks: the engine keeps its version; call again for
        the next one. One call runs at a time: another thread's call waits for it.

        With a list of clients, all engines receive at the same time, and the ``FleetResult`` has the outcome of each.
        An engine that is lost does not delay the others, is reported (``failed``, and a warning), and takes the next
        version once it answers again. An error if none has taken the version.
        """

        def send() -> Coroutine[Any, Any, TransferResult | FleetResult]:
            return self._replicas.send(version)

        return self._call(send)

    def verify(self) -> TransferResult | FleetResult:
        """Prove that the engine computes with the weights as they are now on this side; on every rank, after an update.

        They are sent once more, beside the live model, and each worker compares: parameters that can be read bit by
        bit, packed ones by their products with a fixed probe, to within the dtype's rounding. The engine does not
        change; requests wait while it compares. TransferError, on all ranks, names the parameters that differ. With a
        list of clients, it is an error if one engine differs; one that is out is reported in the ``FleetResult``.
        ConfigError with ``atomic=False``, because there is no memory beside the model.
        """
        if self._info.direct and not self._info.atomic:
            raise ConfigError(
                f"pair {self._info.pair!r}: with atomic=False weights are sent into the live parameters, so that there "
                f"is nothing to compare them with: use atomic=True to verify"
            )
        return self._call(self._replicas.verify)

    def shutdown(self) -> None:
        """Leave the pair; idempotent. Does nothing in a forked child, because the engine belongs to the parent."""
        if self._membership is not None and os.getpid() == self._pid:
            left, self._membership = self._membership, None
            if isinstance(self._replicas, Replicas):
                self._replicas.close()
            try:
                with suppress(AgentLostError):  # the program ends, and its loop before this
                    left.loop_thread.call(self._bus.close())
            finally:
                left.leave()

    def _announce(self) -> None:
        """Learn the tensors of all ranks, by a collective of torch.distributed if its world is the trainer.

        Otherwise each rank's source must know the whole model.
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
    """ConfigError for options that could not be sent to an engine, and for an invalid client."""
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
    """The source in a form that can be sent."""
    found = EthaSource.of(source, info.names)
    if info.adapter is None:
        return found
    if info.direct or not info.atomic:
        raise ConfigError(f"adapter {info.adapter.name!r}: direct=True and atomic=False are for the model's weights")
    return AdapterSource(found, info.adapter) if isinstance(found, EthaSource) else found
