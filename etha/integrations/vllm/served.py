"""An API server knows the adapters that its engine has received by their names: ``model="policy"`` in a request.

vLLM's server knows adapters that it was started with, or that were loaded over HTTP from a directory. The calls of a
trainer pass through the same process, so when the first version of an adapter is live it is entered beside those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from etha.errors import ConfigError
from etha.integrations.vllm.adapter import adapter_path, lora_request


def serve_adapters(executor: Any, wanted: Callable[[Any], bool]) -> None:
    """Have API servers of engines that ``wanted`` says so of answer for the adapters that these receive. Once.

    A server asks for the engine's class of ``executor`` before it makes its client of the engine, and its models after.
    """
    asked = executor.get_class
    if hasattr(asked, "serves_adapters"):
        return

    @wraps(asked)
    def get_class(vllm_config: Any) -> Any:
        client = sys.modules.get("vllm.v1.engine.async_llm")
        if client is not None and wanted(_Holder(vllm_config)) and vllm_config.lora_config is not None:
            from vllm.entrypoints.openai.models.serving import OpenAIServingModels

            _remember_models(OpenAIServingModels)
            _enter_adapters(client.AsyncLLM, wanted)
        return asked(vllm_config)

    get_class.serves_adapters = True  # type: ignore[attr-defined]
    executor.get_class = staticmethod(get_class)


class _Holder:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


def _remember_models(models: Any) -> None:
    """The names that a server answers to are known to the client of its engine."""
    made = models.__init__
    if hasattr(made, "serves_adapters"):
        return

    @wraps(made)
    def __init__(self: Any, engine_client: Any, *args: Any, **kwargs: Any) -> None:
        made(self, engine_client, *args, **kwargs)
        engine_client.etha_models = self

    __init__.serves_adapters = True  # type: ignore[attr-defined]
    models.__init__ = __init__


def _enter_adapters(client: Any, wanted: Callable[[Any], bool]) -> None:
    begun, ended = client.init_weight_transfer_engine, client.finish_weight_update
    if hasattr(begun, "serves_adapters"):
        return

    @wraps(begun)
    async def init_weight_transfer_engine(self: Any, request: Any) -> None:
        told = (request.init_info or {}).get("adapter") if wanted(self) else None
        if told is not None:
            _refuse(self, told["name"])
        await begun(self, request)
        self.etha_adapter = None if told is None else told["name"]

    @wraps(ended)
    async def finish_weight_update(self: Any, weight_version: str | None = None) -> None:
        await ended(self, weight_version)
        name, models = getattr(self, "etha_adapter", None), getattr(self, "etha_models", None)
        if name is not None and models is not None:
            models.lora_requests.setdefault(name, lora_request(name))

    init_weight_transfer_engine.serves_adapters = True  # type: ignore[attr-defined]
    client.init_weight_transfer_engine, client.finish_weight_update = init_weight_transfer_engine, finish_weight_update


def _refuse(client: Any, name: str) -> None:
    """ConfigError for a name that requests could not address the adapter by."""
    models = getattr(client, "etha_models", None)
    if models is None:
        return
    if client.vllm_config.parallel_config._api_process_count > 1:
        raise ConfigError(
            f"adapter {name!r}: this engine has several API servers, and only one of them would know the adapter: "
            f"start it with --api-server-count 1"
        )
    known = models.lora_requests.get(name)
    if models.is_base_model(name) or (known is not None and known.lora_path != adapter_path(name)):
        raise ConfigError(f"adapter {name!r}: the engine serves another model by that name: give the adapter another")
