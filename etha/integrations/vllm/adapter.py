"""LoRA adapters: what a trainer says of one, and how requests address it.

trainer   Adapter(name="policy", rank=8, alpha=16)   source: the adapter's tensors, or a module of peft
engine    lora.py keeps them, and gives them to vLLM where it would read the directory of the adapter
requests  model="policy" over HTTP (served.py), lora_request("policy") where the LLM is in this process
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from zlib import crc32

from etha.errors import ConfigError

#: vLLM knows an adapter by a path. Nothing can lie under this one, and no file system is asked for it.
ROOT = "/dev/null/etha/"
#: Numbers of adapters from here on are Etha's: vLLM's own servers count from 1.
_FIRST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter as a trainer sends it: ``EthaTrainerInitInfo(adapter=Adapter(...))``.

    ``name``: what requests call it. ``rank``, ``alpha``, ``target_modules`` and ``config`` are what peft writes to
    adapter_config.json: ``config`` has what else vLLM should know, as ``{"use_rslora": True}``. ``part``: peft's name
    of the adapter in a module that is the source.
    """

    name: str
    rank: int
    alpha: float
    target_modules: str | Collection[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    part: str = "default"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("Adapter(name=''): give the name by which requests address the adapter")
        if self.rank < 1:
            raise ConfigError(f"Adapter(name={self.name!r}, rank={self.rank}): give the rank that it was made with")

    @classmethod
    def of(cls, module: Any, name: str, *, part: str = "default") -> Adapter:
        """The adapter ``part`` of a module of peft, to be called ``name`` by requests; ConfigError for others."""
        known = getattr(module, "peft_config", None)
        if not isinstance(known, Mapping) or part not in known:
            raise ConfigError(
                f"{type(module).__name__} has no adapter {part!r} of peft"
                + (f", but {sorted(known)}" if isinstance(known, Mapping) else "")
                + ": give a module of peft, or Adapter(name=, rank=, alpha=)"
            )
        config = known[part].to_dict()
        made = {key: config.pop(key, None) for key in ("r", "lora_alpha", "target_modules")}
        return cls(
            name=name, rank=made["r"], alpha=made["lora_alpha"], target_modules=made["target_modules"] or (),
            config=config, part=part,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What the engine is told of it: plain JSON."""
        own = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": self.target_modules}
        return {"name": self.name, "config": _plain({**self.config, **own})}


def adapter_path(name: str) -> str:
    """The path by which vLLM knows the adapter; nothing is there."""
    return ROOT + name


def adapter_number(name: str) -> int:
    """vLLM's number of the adapter: the same in every process that makes a request for it."""
    return _FIRST + crc32(name.encode()) % _FIRST


def lora_request(name: str) -> Any:
    """vLLM's request for the adapter ``name`` that a trainer sends: ``llm.generate(..., lora_request=)``."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=adapter_number(name), lora_path=adapter_path(name))


def _plain(value: Any) -> Any:
    """``value`` as JSON can say it: peft's configurations hold sets and enumerations, too."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
