"""Weights into a live vLLM: the backend ``etha`` of vLLM's registry for weight transfer, found by its plugin.

vllm serve MODEL --weight-transfer-config '{"backend": "etha"}'          # the engine's side, all of it

engine = WeightTransferTrainerFactory.trainer_init(                      # every rank of the trainer
    EthaTrainerInitInfo(rank=rank, pair="weights"), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
)
engine.send_weights()                                                    # after every step
"""

from __future__ import annotations

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
    "Adapter": "adapter",
    "EthaSource": "source",
    "EthaTrainerInitInfo": "trainer",
    "EthaTrainerWeightTransferEngine": "trainer",
    "EthaWeightTransferEngine": "worker",
    "FleetResult": "fleet",
    "LLMClient": "client",
    "lora_request": "adapter",
}


def __getattr__(name: str) -> Any:
    """The public names, each loaded when it is first used: vLLM is heavy, and its plugins load early."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from etha.integrations.vllm.plugin import register

    register()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
