"""The engine's side: the actions of each vLLM worker in vLLM's four calls.

    init_weight_transfer_engine   record what the loaders keep; begin to meet the trainer (meeting.py)
    start_weight_update           begin to receive, beside the engine's steps
    update_weights                wait until it is committed; nothing of the model has changed
    finish_weight_update          bring it into the model, between two steps

A version comes into the model only after every worker has all of it. An error in ``update_weights`` of one worker ends
the update for all, and the engine continues with the version that it had.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from etha import TransferFuture, TransferResult
from etha.errors import ConfigError, TransferAbortedError, TransferError
from etha.integrations.vllm.engine.init_info import EthaWeightTransferInitInfo, Incoming
from etha.integrations.vllm.engine.loader import subscriber_of
from etha.integrations.vllm.engine.meeting import Meetings
from etha.integrations.vllm.engine.refusals import MOVED, REBALANCED, STRANGER
from etha.integrations.vllm.engine.subscriber import EngineSubscriber
from etha.integrations.vllm.engine.versions import unsupported
from etha.integrations.vllm.engine.workers import WorkerAgreement
from etha.integrations.vllm.weights.keep import Meta
from etha.integrations.vllm.weights.lora import ReceivedAdapter
from etha.integrations.vllm.weights.received import Received

# Under vLLM's own root, so that vLLM's handlers print it.
log = init_logger("vllm.etha")
#: Most parameters that an error names.
_SHOWN = 5


@dataclass
class EthaWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """Options of one update. ``cancel`` ends the update with an error.

    ``verify``: compare the live model with the received version instead of bringing it in.
    """

    cancel: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """A version that is being received, its destination, and its result once it is complete."""

    received: Incoming
    moving: TransferFuture
    result: TransferResult | None = None
    verified: bool = False


class EthaWeightTransferEngine(WeightTransferEngine[EthaWeightTransferInitInfo, EthaWeightTransferUpdateInfo]):
    """vLLM's worker engine of the backend ``etha``; made by vLLM."""

    init_info_cls = EthaWeightTransferInitInfo
    update_info_cls = EthaWeightTransferUpdateInfo
    # The recording is of one model.
    supports_draft_weight_update = False

    _meetings: Meetings | None = None
    _where: tuple[str | None, str | None] | None = None
    _known: tuple[Any, ...] = ()
    _received: Incoming | None = None
    _coming: _Coming | None = None
    _timeout = 300.0
    #: Of an engine that follows a publication: what its model was loaded by.
    subscriber: EngineSubscriber | None = None

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.subscriber = subscriber_of(model)
        if self.subscriber is not None and vllm_config.lora_config is not None:
            with set_current_vllm_config(vllm_config):
                self.subscriber.adopt(model, self.model_config, device)

    def init_transfer_engine(self, init_info: EthaWeightTransferInitInfo) -> None:
        """Record what this worker keeps, and begin to meet the trainer; again for a relaunched trainer.

        Returns before the trainer has been met. ConfigError for tensors that the model does not take.
        """
        why = unsupported(vllm.__version__)
        if why is not None:
            raise ConfigError(f"{why}: install a vLLM that is, or a sub-etha that supports this one")
        if self.subscriber is not None:
            raise ConfigError(
                f"this engine follows publication {self.subscriber.publication!r}, and takes no version from a trainer "
                f"of pair {init_info.pair!r}: let that trainer publish, or start the engine without --load-format etha"
            )
        if self.parallel_config.enable_eplb:
            raise ConfigError(f"pair {init_info.pair!r}: {REBALANCED}")
        metas = init_info.metas()
        rank, world = self._place(init_info.pair)
        meetings = self._connect(init_info)
        if meetings.standing() is None:
            self._stop()
        received = self._record(init_info, metas)
        if init_info.again:
            received.renew()
        else:
            self._tell(init_info.pair, rank)
        self._timeout = init_info.timeout
        meetings.begin(init_info, rank, world, received)

    def _record(self, init_info: EthaWeightTransferInitInfo, metas: list[Meta]) -> Incoming:
        """What the loaders keep; taken from the last recording if a trainer announces the same tensors again."""
        known = (metas, init_info.direct, init_info.atomic, init_info.adapter)
        if self._received is None or self._known != known:
            self._received = None
            with set_current_vllm_config(self.vllm_config), WorkerAgreement() as workers:
                if init_info.adapter is not None:
                    self._received = ReceivedAdapter(self.model, metas, self.device, **init_info.adapter)
                else:
                    self._received = Received(
                        self.model, self.model_config, metas, self.device,
                        direct=init_info.direct, atomic=init_info.atomic, agree=workers.agree,
                    )  # fmt: skip
            self._known = known
        return self._received

    def _tell(self, pair: str, rank: int) -> None:
        report = self.report()
        log.info(
            "pair %s: rank %d receives %d of %d bytes of %d tensors; %d written in place, received whole: %s",
            pair,
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
                pair,
                report["unfilled"] or "(none)",
                report["partial"] or "(none)",
            )

    def _place(self, pair: str) -> tuple[int, int]:
        """This worker's rank in the engine's side, and the side's world size."""
        parallel = self.parallel_config
        rank, world = parallel.data_parallel_index * parallel.world_size + parallel.rank, parallel.world_size_across_dp
        if rank >= world:
            raise ConfigError(
                f"pair {pair!r}: this engine is replica {parallel.data_parallel_index} of several behind one URL that "
                f"know nothing of each other (--data-parallel-size of a model without experts); all of them get the "
                f"same calls, and a pair has room for one: start each replica as a server with a URL of its own, and "
                f"give each a pair and a trainer engine, or use --tensor-parallel-size instead"
            )
        return rank, world

    def _connect(self, init_info: EthaWeightTransferInitInfo) -> Meetings:
        where = (init_info.redis_url, init_info.namespace)
        if self._meetings is not None and (met := self._meetings.standing()) is not None:
            if self._where != where or met.pair.name != init_info.pair:
                raise ConfigError(
                    f"pair {met.pair.name!r} stands with a trainer that lives: end that one before another meets this "
                    f"engine on pair {init_info.pair!r}, or give the other one an engine of its own"
                )
        elif self._where != where:
            self.shutdown()
        if self._meetings is None:
            self._where = where
            self._meetings = Meetings(self.device, redis_url=init_info.redis_url, namespace=init_info.namespace)
        return self._meetings

    def start_weight_update(self) -> None:
        """Begin to receive the next version; ConfigError before ``init_weight_transfer_engine``.

        If the meeting with the trainer failed, raises its error (of ``init_pair`` or ``register_tensors``).
        """
        if self.subscriber is not None:
            self.subscriber.take()
            return
        self._stop()
        if self._meetings is None:
            raise ConfigError(f"the weight transfer engine of this worker {STRANGER}: call init_weight_transfer_engine")
        met = self._meetings.met()
        if moved := met.received.moved():
            raise TransferError(f"{MOVED}: {len(moved)}, {moved[0]!r} first", outcome="withdrawn")
        self._coming = _Coming(received=met.received, moving=self._meetings.receive(met, self._timeout))

    def receive_weights(self, update_info: EthaWeightTransferUpdateInfo) -> None:
        """Wait for the version that ``start_weight_update`` began to receive.

        TransferError and its subclasses: the model keeps its version. With ``verify``, also if the live model differs
        from the received version.
        """
        if self.subscriber is not None:
            self._refuse_options(update_info)
            self.subscriber.take()
            return
        coming = self._coming
        if update_info.cancel:
            self._stop()
            torn = coming is not None and coming.received.in_place
            left = "what is written in place may be torn until the next one" if torn else "the model has the one it had"
            raise TransferAbortedError(f"the trainer has ended this version on its way; {left}")
        if coming is None:
            raise ConfigError("update_weights without start_weight_update: call that first, for each version")
        self._coming = None
        coming = replace(coming, result=coming.moving.result(), verified=update_info.verify)
        if update_info.verify:
            self._verify(coming.received)
        self._coming = coming

    def _refuse_options(self, update_info: EthaWeightTransferUpdateInfo) -> None:
        if update_info.cancel or update_info.verify:
            raise ConfigError("an engine that follows a publication takes no options of a trainer's update")

    def _verify(self, received: Incoming) -> None:
        """TransferError that names parameters if the live model differs from what ``received`` would make of it."""
        found = received.compare()
        if found.left_out:
            log.warning("not compared, for they are packed and no product is known of them: %s", found.left_out)
        if found.differs:
            shown = "; ".join(found.differs[:_SHOWN])
            rest = f"; and {len(found.differs) - _SHOWN} more" if len(found.differs) > _SHOWN else ""
            raise TransferError(
                f"{len(found.differs)} of {found.compared} parameters are not the trainer's: {shown}{rest}; "
                f"call send_weights, and restart the engine if that does not mend it"
            )
        log.info("the live model is the trainer's: %d parameters compared", found.compared)

    def finish_weight_update(self) -> None:
        """Bring the received version into the model."""
        if self.subscriber is not None:
            self.subscriber.bring_in()
            return
        coming, self._coming = self._coming, None
        if coming is None or coming.result is None:
            raise ConfigError("finish_weight_update without a version: call start_weight_update and update_weights")
        if coming.verified:
            return
        coming.received.apply()
        result = coming.result
        log.info("version %s (number %d) is live: %d bytes received", result.version, result.seq, result.bytes)

    def shutdown(self) -> None:
        """Leave the pair; ``init_weight_transfer_engine`` joins again."""
        self._stop()
        meetings, self._meetings = self._meetings, None
        if meetings is not None:
            meetings.close()
        if self.subscriber is not None:
            self.subscriber.close()

    def report(self) -> dict[str, Any]:
        """How this worker receives each tensor, and the bytes; see ``Received.report``."""
        if self.subscriber is not None:
            return self.subscriber.report()
        if self._received is None:
            raise ConfigError("nothing is known of a checkpoint yet: call init_weight_transfer_engine")
        return dict(self._received.report())

    def _stop(self) -> None:
        """End a receive for which nobody waits."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.moving.cancel()
            with suppress(CancelledError):
                coming.moving.exception()
