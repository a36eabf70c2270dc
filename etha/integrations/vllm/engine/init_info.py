"""The trainer's one-time message to each worker of the engine, and the destination of a version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo

from etha.errors import ConfigError
from etha.integrations.vllm.weights.keep import Meta
from etha.integrations.vllm.weights.lora import ReceivedAdapter
from etha.integrations.vllm.weights.received import Received

#: The destination of a version: the model, or an adapter of it.
Incoming = Received | ReceivedAdapter


@dataclass(kw_only=True)
class EthaWeightTransferInitInfo(WeightTransferInitInfo):
    """The trainer's one-time message to the workers: the pair's names, and every tensor of the checkpoint.

    Plain JSON. ``timeout``: seconds for meeting, and for each version. The other fields are those of
    ``EthaTrainerInitInfo``.
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
    #: For a LoRA adapter: its name, and its configuration as peft writes it. None for the model's tensors.
    adapter: dict[str, Any] | None = None
    #: The same trainer sends this again, so that tensors whose memory has changed are registered again.
    again: bool = False
    #: The trainer's name in its claims of a pause; and the engine's own address for news of the trainer's end.
    holder: str = ""
    news: str = ""

    def metas(self) -> list[Meta]:
        """The announced tensors; ConfigError for lists that do not belong together."""
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
