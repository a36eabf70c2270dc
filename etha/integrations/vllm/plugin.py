"""The function that vLLM's plugin loader calls in each of its processes: it registers the backend.

At this point nothing is known of the engine, not even whether weights will be transferred. So this only registers the
names of the two engines of the backend ``etha`` and of its loader, and makes executors of that backend read all answers
(answers.py). It never raises, because a vLLM that does not use the backend must not fail.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from etha.integrations.vllm.engine.versions import NAME, unsupported

# Under vLLM's own root, so that vLLM's handlers print it.
log = logging.getLogger("vllm.etha")


def register() -> None:
    """Register both engines with vLLM by name, so that they are loaded when they are used. May be called again."""
    try:
        why = _register()
    except Exception as error:
        why = f"the backend {NAME!r} of sub-etha could not be registered: {type(error).__name__}: {error}"
    if why is not None:
        _warn_once(why)


def _register() -> str | None:
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "engine.worker", "EthaWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer.trainer_engine", "EthaTrainerWeightTransferEngine"),
    ):
        if NAME not in factory._registry:
            factory.register_engine(NAME, f"etha.integrations.vllm.{module}", name)
    why = unsupported(vllm.__version__)
    if why is None:
        from vllm.model_executor import model_loader
        from vllm.v1.executor.abstract import Executor
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        from etha.integrations.vllm.engine.answers import read_all_answers
        from etha.integrations.vllm.engine.following import follow_publications
        from etha.integrations.vllm.engine.lease import keep_leases
        from etha.integrations.vllm.engine.loader import EthaModelLoader
        from etha.integrations.vllm.engine.served import serve_adapters

        read_all_answers(MultiprocExecutor, chosen)
        keep_leases(Executor, chosen)
        serve_adapters(Executor, chosen)
        follow_publications(Executor)
        if NAME not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
            model_loader.register_model_loader(NAME)(EthaModelLoader)
    return why


def chosen(owner: Any) -> bool:
    """Whether an engine, or an executor's engine, was started with this backend."""
    config = getattr(getattr(owner, "vllm_config", None), "weight_transfer_config", None)
    return getattr(config, "backend", None) == NAME


@cache
def _warn_once(why: str) -> None:
    log.warning("%s", why)
