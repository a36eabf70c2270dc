"""LLMClient: drives vLLM's ``LLM`` in the trainer's own process, by calls and not over HTTP.

    trainer   send_weights   start  ...  update  finish                 generate
    LLM       (idle: one thread uses it)           new weights, caches of the old ones cleared

An ``LLM`` computes only during ``generate``, so nothing has to be paused. vLLM's core refuses some kinds of pause when
it runs in the same process.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from etha.errors import ConfigError, TransferError


class LLMClient:
    """vLLM's weight transfer client for the ``LLM`` in this process: ``trainer_init(..., client=LLMClient(llm))``.

    One rank of the trainer passes it. Call ``generate`` and ``send_weights`` one after the other: weights that arrive
    while requests run are a ConfigError.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Make the workers meet the trainer."""
        self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    def shutdown_weight_transfer_engine(self) -> None:
        """Make the workers leave the pair."""
        self._llm.shutdown_weight_transfer_engine()

    def start_weight_update(self) -> None:
        """Begin to receive a version."""
        if self._llm.llm_engine.has_unfinished_requests():
            raise ConfigError("requests of this LLM are under way: call send_weights when generate has returned")
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Wait until the version has been received."""
        self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Bring the version into the model, and clear what was computed with the previous one.

        TransferError if a cache cannot be cleared.
        """
        self._llm.finish_weight_update(weight_version)
        engine = self._llm.llm_engine
        outside = engine.vllm_config.kv_transfer_config is not None
        if not engine.reset_prefix_cache(reset_connector=outside):
            raise TransferError("the LLM has the new weights and still the prefix cache of the old ones: restart it")
        engine.reset_encoder_cache()

    def pause_generation(self, mode: str) -> None:
        """Do nothing, because an ``LLM`` computes only during ``generate``."""

    def resume_generation(self) -> None:
        """Do nothing, as ``pause_generation``."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Do nothing, because ``finish_weight_update`` has cleared it and no request is running."""
