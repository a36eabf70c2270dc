"""Lets an API server answer to the names of the adapters that its engine has received: ``model="policy"`` in a request.

vLLM's server knows adapters that it was started with, or that were loaded over HTTP from a directory. A trainer's calls
pass through the same process, so an adapter is added to them when its first version is live.

A request for an adapter without a live version is refused where requests come in, also with an ``LLM``. A worker would
find it out in the middle of a step, which ends the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from etha.errors import ConfigError
from etha.integrations.vllm.weights.adapter import ROOT, adapter_path, lora_request


def serve_adapters(executor: Any, wanted: Callable[[Any], bool]) -> None:
    """Make API servers answer for received adapters, for engines for which ``wanted`` is true. Once.

    A server asks for the engine's class of ``executor`` before it makes its engine client, and makes its models after
    that.
    """
    asked = executor.get_class
    if hasattr(asked, "serves_adapters"):
        return

    @wraps(asked)
    def get_class(vllm_config: Any) -> Any:
        client = sys.modules.get("vllm.v1.engine.async_llm")
        if vllm_config.lora_config is not None:
            _refuse_unknown()
        if client is not None and wanted(_Holder(vllm_config)) and vllm_config.lora_config is not None:
            from vllm.entrypoints.openai.models.serving import OpenAIServingModels

            _remember_models(OpenAIServingModels)
            _enter_adapters(client.AsyncLLM, wanted)
        return asked(vllm_config)

    get_class.serves_adapters = True  # type: ignore[attr-defined]
    executor.get_class = staticmethod(get_class)


def _refuse_unknown() -> None:
    """Make this process's engines refuse requests for adapters that they have not received. Once."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    _refuse_requests(InputProcessor)
    _know_live(LLMEngine, awaited=False)
    _know_live(AsyncLLM, awaited=True)


def _refuse_requests(processor: Any) -> None:
    validate = processor._validate_lora
    if hasattr(validate, "serves_adapters"):
        return

    @wraps(validate)
    def _validate_lora(self: Any, lora_request: Any) -> None:
        validate(self, lora_request)
        if lora_request is None or not lora_request.lora_path.startswith(ROOT):
            return
        name = lora_request.lora_path.removeprefix(ROOT)
        if name not in getattr(self, "etha_live", ()):
            raise ConfigError(
                f"adapter {name!r}: this engine has received no version of it yet: send one first, with send_weights "
                f"of a trainer engine that was made with adapter=Adapter(name={name!r}, ...)"
            )

    _validate_lora.serves_adapters = True  # type: ignore[attr-defined]
    processor._validate_lora = _validate_lora


def _know_live(engine: Any, *, awaited: bool) -> None:
    """Wrap the calls to the workers of ``engine``, so that a received adapter's name is known where requests come
    in."""
    call = engine.collective_rpc
    if hasattr(call, "serves_adapters"):
        return

    def note(self: Any, method: Any, options: Any) -> None:
        if method == "init_weight_transfer_engine":
            adapter_info = options.get("init_info") if isinstance(options, dict) else None
            adapter = adapter_info.get("adapter") if isinstance(adapter_info, dict) else None
            self.etha_sent = None if adapter is None else adapter["name"]
        elif method == "finish_weight_update" and getattr(self, "etha_sent", None) is not None:
            live = self.input_processor
            live.etha_live = {*getattr(live, "etha_live", ()), self.etha_sent}

    @wraps(call)
    def now(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        found = call(self, method, timeout, args, kwargs)
        note(self, method, kwargs)
        return found

    @wraps(call)
    async def later(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        found = await call(self, method, timeout, args, kwargs)
        note(self, method, kwargs)
        return found

    made: Any = later if awaited else now
    made.serves_adapters = True
    engine.collective_rpc = made


class _Holder:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


def _remember_models(models: Any) -> None:
    """Give the engine client the list of names to which the server answers."""
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
        adapter_info = (request.init_info or {}).get("adapter") if wanted(self) else None
        if adapter_info is not None:
            _refuse(self, adapter_info["name"])
        await begun(self, request)
        self.etha_adapter = None if adapter_info is None else adapter_info["name"]

    @wraps(ended)
    async def finish_weight_update(self: Any, weight_version: str | None = None) -> None:
        await ended(self, weight_version)
        name, models = getattr(self, "etha_adapter", None), getattr(self, "etha_models", None)
        if name is not None and models is not None:
            models.lora_requests.setdefault(name, lora_request(name))

    init_weight_transfer_engine.serves_adapters = True  # type: ignore[attr-defined]
    client.init_weight_transfer_engine, client.finish_weight_update = init_weight_transfer_engine, finish_weight_update


def _refuse(client: Any, name: str) -> None:
    """ConfigError for a name by which requests could not address the adapter."""
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
