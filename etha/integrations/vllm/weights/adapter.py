"""LoRA adapters: the trainer's description of one, and how requests address it.

trainer   Adapter(name="policy", rank=8, alpha=16)   source: the adapter's tensors, or a module of peft
engine    lora.py keeps them, and gives them to vLLM instead of the adapter's directory
requests  model="policy" over HTTP (served.py), lora_request("policy") if the LLM is in this process
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any
from zlib import crc32

from etha.errors import ConfigError

#: vLLM knows an adapter by a path. Nothing can lie under this one, and the file system is not asked for it.
ROOT = "/dev/null/etha/"
#: The first of Etha's adapter numbers; vLLM's own servers count from 1.
_FIRST = 1 << 30
_LORA = "LORA"
#: The keys of adapter_config.json that are fields of ``Adapter``.
_OWN = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
#: The other keys that vLLM reads: it computes with them, or refuses the adapter.
_READ = frozenset({
    "alora_invocation_tokens", "alpha_pattern", "bias", "init_lora_weights", "layer_replication", "lora_bias",
    "modules_to_save", "rank_pattern", "use_bdlora", "use_dora", "use_qalora", "use_rslora",
})  # fmt: skip
#: Keys that peft writes and that do not change an engine's results: about training, the base model's files, and the
#: modules with an adapter, which the tensors show.
_UNREAD = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_parameters", "task_type",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter as a trainer sends it: ``EthaTrainerInitInfo(adapter=Adapter(...))``.

    ``name``: the name that requests use. ``rank``, ``alpha``, ``target_modules`` and ``config`` are what peft writes to
    adapter_config.json. ``config`` has further settings for vLLM, such as ``{"use_rslora": True}``, or the rest of such
    a file; ConfigError for a setting that vLLM would silently ignore. ``part``: peft's name of the adapter in a module
    that is the source.
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
        if not isinstance(self.config, Mapping):
            raise ConfigError(
                f"Adapter(name={self.name!r}, config={self.config!r}): give the mapping that it is, or leave it out"
            )
        for key, value in self.config.items():
            if (why := _wrong(key, value)) is not None:
                raise ConfigError(f"Adapter(name={self.name!r}, config={{{key!r}: {_plain(value)!r}}}): {why}")

    @classmethod
    def of(cls, module: Any, name: str, *, part: str = "default") -> Adapter:
        """The adapter ``part`` of a peft module, under the name ``name`` for requests; ConfigError for other
        modules."""
        known = getattr(module, "peft_config", None)
        if not isinstance(known, Mapping) or part not in known:
            raise ConfigError(
                f"{type(module).__name__} has no adapter {part!r} of peft"
                + (f", but {sorted(known)}" if isinstance(known, Mapping) else "")
                + ": give a module of peft, or Adapter(name=, rank=, alpha=)"
            )
        config = _set(known[part])
        if (kind := _kind(config.get("peft_type"))) != _LORA:
            raise ConfigError(f"adapter {part!r} of {type(module).__name__} is one of {kind}: vLLM takes LoRA adapters")
        made = {key: config.pop(key, None) for key in _OWN}
        return cls(
            name=name, rank=made["r"], alpha=made["lora_alpha"], target_modules=made["target_modules"] or (),
            config=config, part=part,
        )  # fmt: skip

    def to_wire(self) -> dict[str, Any]:
        """The description for the engine: plain JSON."""
        own = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": self.target_modules}
        return {"name": self.name, "config": _plain({**self.config, **own})}


def _wrong(key: Any, value: Any) -> str | None:
    """Why ``Adapter(config={key: value})`` is refused; None if an engine follows it or does not need it."""
    if key in _OWN:
        return f"that is what {_OWN[key]}= of Adapter says: leave it out of config"
    if key == "peft_type" and _kind(value) != _LORA:
        return "vLLM takes LoRA adapters"
    # A setting that is off changes nothing: adapter_config.json has every field of the peft that wrote it.
    if key in _READ or key in _UNREAD or not value:
        return None
    close = get_close_matches(str(key), _READ, 1)
    meant = f"do you mean {close[0]!r}?" if close else f"it reads {', '.join(sorted(_READ))}"
    return f"vLLM reads no {key!r} of an adapter, and would compute without it: {meant} Else leave it out"


def _set(config: Any) -> dict[str, Any]:
    """A peft configuration without unknown fields that have their defaults, because a newer peft may have written
    it."""
    found: dict[str, Any] = config.to_dict()
    unset: dict[str, Any] = {}
    for known in fields(config) if is_dataclass(config) else ():
        made = known.default_factory
        unset[known.name] = known.default if made is MISSING else made()
    known_keys = {*_OWN, *_READ, *_UNREAD}
    return {key: value for key, value in found.items() if key in known_keys or value != unset.get(key)}


def _kind(value: Any) -> str:
    """peft's name for the kind of an adapter."""
    return _LORA if value is None else str(_plain(value)).upper()


def adapter_path(name: str) -> str:
    """The path by which vLLM knows the adapter. Nothing is there."""
    return ROOT + name


def adapter_number(name: str) -> int:
    """vLLM's number of the adapter, the same in every process that makes a request for it."""
    return _FIRST + crc32(name.encode()) % _FIRST


def lora_request(name: str) -> Any:
    """vLLM's request for the adapter ``name`` that a trainer sends: ``llm.generate(..., lora_request=)``."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=adapter_number(name), lora_path=adapter_path(name))


def _plain(value: Any) -> Any:
    """``value`` as JSON: peft's configurations hold sets and enumerations, too."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
