"""What vLLM's plugin loader calls in each of its processes: registers the backend ``etha`` on both sides."""

from __future__ import annotations

from etha.integrations.vllm.answers import read_all_answers

#: The backend's name in ``WeightTransferConfig(backend=...)``.
NAME = "etha"


def register() -> None:
    """Register both engines with vLLM, by name: nothing of them is loaded before it is used. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    read_all_answers(MultiprocExecutor)
    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "EthaWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "EthaTrainerWeightTransferEngine"),
    ):
        if NAME not in factory._registry:
            factory.register_engine(NAME, f"etha.integrations.vllm.{module}", name)
