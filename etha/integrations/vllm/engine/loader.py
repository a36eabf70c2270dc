"""``--load-format etha``: a worker's model starts with the newest version of a publication.

A model without quantized layers is loaded with it as with a checkpoint (``weights.first_load``). One with quantized
layers gets weights of no meaning first, as for ``dummy``, and the version then comes in as every later one does.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from etha.errors import ConfigError
from etha.integrations.vllm.engine.follow_options import FollowOptions, follow_options

if TYPE_CHECKING:
    from etha.integrations.vllm.engine.subscriber import EngineSubscriber

#: By model of this process. The worker's transfer engine takes it from here, because vLLM hands it the model only.
_subscribers: WeakKeyDictionary[nn.Module, EngineSubscriber] = WeakKeyDictionary()


class EthaModelLoader(DummyModelLoader):
    """vLLM's loader for ``--load-format etha``; made by vLLM."""

    _subscriber: EngineSubscriber
    _direct = True

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model, with the newest version of the publication. ConfigError and TransferTimeoutError say why not."""
        options = follow_options(vllm_config)
        if options is None:
            raise ConfigError("--load-format etha: this engine was not told which publication to follow")
        if model_config is not vllm_config.model_config:
            raise ConfigError(
                "--load-format etha: a draft model is in no publication: give draft_load_config in "
                '--speculative-config, as {"load_format": "auto"}'
            )
        self._subscriber = _subscriber(options, vllm_config.parallel_config)
        self._direct = vllm_config.quant_config is None
        device = torch.device(vllm_config.device_config.device)
        model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        self._subscriber.follow(model, model_config, device, strict=self._direct)
        _subscribers[model] = self._subscriber
        return model

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Called by ``load_model`` with a model whose parameters are as they were made."""
        if self._direct:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            self._subscriber.load(model, device)
        else:
            super().load_weights(model, model_config)


def subscriber_of(model: nn.Module) -> EngineSubscriber | None:
    """What a model was loaded by; None for a model that was loaded in another way."""
    return _subscribers.get(model)


def _subscriber(options: FollowOptions, parallel: Any) -> EngineSubscriber:
    """This worker's part. All workers of a data-parallel engine are one subscriber if they compute together."""
    from etha.integrations.vllm.engine.subscriber import EngineSubscriber
    from etha.integrations.vllm.engine.workers import from_first

    name = options.subscriber or f"vllm-{socket.gethostname()[:40]}-{os.getpid()}-{os.urandom(3).hex()}"
    name = str(from_first(name))
    rank, world = parallel.data_parallel_index * parallel.world_size + parallel.rank, parallel.world_size_across_dp
    if rank >= world:  # replicas that know nothing of each other, behind one URL
        if options.subscriber is not None:
            name = f"{name}.{parallel.data_parallel_index}"
        rank = parallel.rank
    return EngineSubscriber(options, name=name, rank=rank, world=world)
