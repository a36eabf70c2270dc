"""The engine's side: what each vLLM worker does in vLLM's four calls.

    init_weight_transfer_engine   record what the loaders keep; meet the trainer; register memory for just that
    start_weight_update           begin to receive, beside the engine's steps
    update_weights                wait until it is committed; nothing of the model has changed
    finish_weight_update          bring it into the model, between two steps

A version comes into the model only after every worker has it whole: an error in ``update_weights`` of one of them
ends the update for all, and the engine answers with what it had.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from etha import TensorBusClient, TransferFuture, TransferResult
from etha.client.sync_handle import BatchHandle
from etha.errors import ConfigError, TransferAbortedError
from etha.integrations.vllm.keep import Meta
from etha.integrations.vllm.plugin import unsupported
from etha.integrations.vllm.received import Dtypes, Received, widest

# Under vLLM's own root: what an engine prints is what is logged there.
log = init_logger("vllm.etha")


@dataclass(kw_only=True)
class EthaWeightTransferInitInfo(WeightTransferInitInfo):
    """What the trainer tells the workers once: the pair's names, and every tensor of the checkpoint.

    Plain JSON. ``timeout``: seconds for meeting, and for each version. The rest as ``EthaTrainerInitInfo``.
    """

    pair: str
    local_name: str
    remote_name: str
    batch: str
    names: list[str] = field(repr=False)
    dtypes: list[str] = field(repr=False)
    shapes: list[list[int]] = field(repr=False)
    direct: bool = False
    atomic: bool = True
    timeout: float = 300.0
    redis_url: str | None = field(default=None, repr=False)
    namespace: str | None = None

    def metas(self) -> list[Meta]:
        """The tensors announced; ConfigError for lists that do not belong together."""
        if not len(self.names) == len(self.dtypes) == len(self.shapes) == len(set(self.names)):
            raise ConfigError(
                f"init_info of pair {self.pair!r}: {len(self.names)} names ({len(set(self.names))} different), "
                f"{len(self.dtypes)} dtypes and {len(self.shapes)} shapes; give one of each for every tensor"
            )
        metas = []
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise ConfigError(f"init_info of pair {self.pair!r}: tensor {name!r} has dtype {dtype!r}, not torch's")
            metas.append(Meta(name, tuple(shape), kind))
        return metas


@dataclass
class EthaWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """Nothing needs to be said of a version but that it shall not come: ``cancel`` ends the update with an error."""

    cancel: bool = False


class _Together:
    """The workers of an engine agree on dtypes in the middle of what each does for itself, and all fail if one does.

    The others would wait for it, here or when tensors are registered, until their deadline.
    """

    def __enter__(self) -> _Together:
        self._agreed = self._failed = False
        return self

    def agree(self, mine: Dtypes) -> Dtypes:
        """The widest dtype of each tensor; ConfigError with the error of a worker that failed."""
        self._agreed = True
        return widest(self._gather(mine))

    def _gather(self, mine: Dtypes | str) -> list[Dtypes]:
        """What all workers say; a text is an error, and raised where it is another worker's."""
        group = get_world_group()
        found: list[Any] = [mine]
        if group.world_size > 1:
            found = [None] * group.world_size
            torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
        errors = [(rank, said) for rank, said in enumerate(found) if isinstance(said, str)]
        self._failed = bool(errors)
        if errors and not isinstance(mine, str):
            raise ConfigError("worker {} of the engine: {}".format(*errors[0]))
        return found

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._failed:
            self._gather({} if error is None else str(error))


class EthaWeightTransferEngine(WeightTransferEngine[EthaWeightTransferInitInfo, EthaWeightTransferUpdateInfo]):
    """vLLM's worker engine of the backend ``etha``; made by vLLM."""

    init_info_cls = EthaWeightTransferInitInfo
    update_info_cls = EthaWeightTransferUpdateInfo
    # What is kept was recorded of one model.
    supports_draft_weight_update = False

    _client: TensorBusClient | None = None
    _batch: BatchHandle | None = None
    _received: Received | None = None
    _known: tuple[Any, ...] = ()
    _standing_for: tuple[str, int, str] | None = None
    _where: tuple[str | None, str | None] | None = None
    _moving: TransferFuture | None = None
    _result: TransferResult | None = None
    _timeout = 300.0

    def init_transfer_engine(self, init_info: EthaWeightTransferInitInfo) -> None:
        """Meet the trainer and register what this worker keeps; again for a relaunched trainer.

        Errors of ``init_pair`` and ``register_tensors``.
        """
        why = unsupported(vllm.__version__)
        if why is not None:
            raise ConfigError(f"{why}: install a vLLM that is, or a sub-etha that supports this one")
        metas = init_info.metas()
        rank, world = self._place(init_info.pair)
        self._stop()
        client = self._connect(init_info)
        self._timeout = init_info.timeout
        pair = client.init_pair(
            init_info.pair, init_info.local_name, init_info.remote_name, world, rank=rank, timeout=init_info.timeout
        )
        known = (metas, init_info.direct, init_info.atomic)
        standing = (pair.name, pair.epoch, init_info.batch)
        if self._batch is not None and self._standing_for == standing:
            if self._known == known:
                return
            raise ConfigError(
                f"pair {pair.name!r} stands with a trainer that lives and announced other tensors; end it first, or "
                f"give another pair"
            )
        if self._batch is not None:
            self._batch.close()
            self._batch = None
        if self._received is None or self._known != known:
            self._received = None  # there is never a second shadow beside it
            with set_current_vllm_config(self.vllm_config), _Together() as together:
                self._received = Received(
                    self.model, self.model_config, metas, self.device,
                    direct=init_info.direct, atomic=init_info.atomic, agree=together.agree,
                )  # fmt: skip
            self._known = known
        received = self._received
        self._batch = client.register_tensors(
            init_info.batch,
            received.tensors,
            pair_name=init_info.pair,
            regions=received.regions,
            shapes=received.shapes,
            direction="recv",
            timeout=init_info.timeout,
        )
        self._standing_for = standing
        report = self.report()
        log.info(
            "pair %s: rank %d receives %d of %d bytes of %d tensors; %d written in place, received whole: %s",
            init_info.pair,
            rank,
            report["bytes"],
            report["checkpoint_bytes"],
            report["tensors"],
            len(report["direct"]),
            report["whole"] or "none",
        )
        if report["partial"] or report["unfilled"]:
            log.warning(
                "pair %s: the engine keeps what it has in the parameters %s, that the trainer sends nothing of, and in "
                "the rest of %s",
                init_info.pair,
                report["unfilled"] or "(none)",
                report["partial"] or "(none)",
            )

    def _place(self, pair: str) -> tuple[int, int]:
        """This worker's rank in the engine's side, and the side's world size."""
        parallel = self.parallel_config
        rank, world = parallel.data_parallel_index * parallel.world_size + parallel.rank, parallel.world_size_across_dp
        if rank >= world:
            raise ConfigError(
                f"pair {pair!r}: this engine is replica {parallel.data_parallel_index} of several that know nothing of "
                f"each other; give each of them a pair of its own, and a trainer engine for each"
            )
        return rank, world

    def _connect(self, init_info: EthaWeightTransferInitInfo) -> TensorBusClient:
        where = (init_info.redis_url, init_info.namespace)
        if self._where != where:
            self.shutdown()
            self._where = where
        if self._client is None:
            self._client = TensorBusClient(
                device=self.device, redis_url=init_info.redis_url, namespace=init_info.namespace
            )
        return self._client

    def start_weight_update(self) -> None:
        """Begin to receive the next version; ConfigError before ``init_weight_transfer_engine``."""
        self._stop()
        self._result = None
        self._moving = self._standing().transfer("recv", blocking=False, timeout=self._timeout)

    def receive_weights(self, update_info: EthaWeightTransferUpdateInfo) -> None:
        """Wait for the version that ``start_weight_update`` began to receive.

        TransferError and its subclasses: the model serves on with the version that it had.
        """
        if update_info.cancel:
            self._stop()
            torn = self._received is not None and self._received.in_place
            left = "what is written in place may be torn until the next one" if torn else "the model has the one it had"
            raise TransferAbortedError(f"the trainer has ended this version on its way; {left}")
        if self._moving is None:
            raise ConfigError("update_weights without start_weight_update: call that first, for each version")
        moving, self._moving = self._moving, None
        self._result = moving.result()

    def finish_weight_update(self) -> None:
        """Bring the received version into the model."""
        if self._result is None or self._received is None:
            raise ConfigError("finish_weight_update without a version: call start_weight_update and update_weights")
        self._received.apply()
        log.info(
            "version %s (number %d) is live: %d bytes received",
            self._result.version,
            self._result.seq,
            self._result.bytes,
        )
        self._result = None

    def shutdown(self) -> None:
        """Leave the pair; ``init_weight_transfer_engine`` joins again."""
        self._stop()
        client, self._client, self._batch = self._client, None, None
        if client is not None:
            client.close()

    def report(self) -> dict[str, Any]:
        """How this worker receives each tensor, and bytes; see ``Received.report``."""
        if self._received is None:
            raise ConfigError("nothing is known of a checkpoint yet: call init_weight_transfer_engine")
        return dict(self._received.report())

    def _standing(self) -> BatchHandle:
        if self._batch is None:
            raise ConfigError(
                "the weight transfer engine of this worker has met no trainer: call init_weight_transfer_engine"
            )
        return self._batch

    def _stop(self) -> None:
        """End a receive that nobody waits for."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()
            with suppress(CancelledError):
                moving.exception()
