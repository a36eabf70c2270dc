"""Weights into a live vLLM: the backend ``etha`` of vLLM's registry for weight transfer, found by its plugin.

vllm serve MODEL --weight-transfer-config '{"backend": "etha"}'          # the engine's side, all of it

from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from etha.integrations.vllm import EthaTrainerInitInfo

engine = WeightTransferTrainerFactory.trainer_init(                      # every rank of the trainer
    EthaTrainerInitInfo(rank=rank, pair="weights"), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
)
engine.send_weights()                                                    # after every step
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

__all__ = [
    "Adapter",
    "EthaSource",
    "EthaTrainerInitInfo",
    "EthaTrainerWeightTransferEngine",
    "EthaWeightTransferEngine",
    "FleetResult",
    "LLMClient",
    "lora_request",
]

_HOME = {
    "Adapter": "weights.adapter",
    "EthaSource": "trainer.source",
    "EthaTrainerInitInfo": "trainer.init_info",
    "EthaTrainerWeightTransferEngine": "trainer.trainer_engine",
    "EthaWeightTransferEngine": "engine.worker",
    "FleetResult": "trainer.fleet",
    "LLMClient": "trainer.client",
    "lora_request": "weights.adapter",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, because vLLM is heavy and its plugins load early."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from etha.integrations.vllm.plugin import register

    register()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """Include the public names if vLLM is installed, so that ``help()`` shows them; otherwise they cannot be loaded."""
    return sorted({*globals(), *(__all__ if find_spec("vllm") is not None else ())})
