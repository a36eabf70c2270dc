"""A worker's side of LoRA adapters from a trainer: keeps them, and gives them to vLLM whenever it loads one.

    finish    the received tensors are the adapter now; vLLM drops all adapters that it has loaded, as it does
              after every update, including those of the base weights
    request   vLLM does not find the adapter and loads it: not from the path in the request, where nothing is, but
              from here

So nothing is stale, and an evicted adapter is loaded again when it is asked for. Every worker receives and keeps the
whole adapter; vLLM cuts out what the worker needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.lora_model import LoRAModel, _is_remote_expert_key
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

from etha.client.memory.tensors import empty as mapped
from etha.errors import ConfigError, TransferError
from etha.integrations.vllm.weights.adapter import ROOT, adapter_number
from etha.integrations.vllm.weights.compare import Comparison, unequal
from etha.integrations.vllm.weights.keep import Meta
from etha.integrations.vllm.weights.trace import whole


@dataclass(slots=True)
class AdapterWeights:
    """A received adapter: the data that vLLM would have read from its directory."""

    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]
    #: The numbers under which vLLM has loaded it.
    numbers: set[int] = field(default_factory=set)


class ReceivedAdapter:
    """A version of the adapter ``name`` on its way into ``model``; has the methods of ``Received``.

    ConfigError for an adapter with which the model could not compute. vLLM would find that out in the middle of a step,
    or never.
    """

    in_place = False

    def __init__(
        self, model: nn.Module, metas: list[Meta], device: torch.device, *, name: str, config: Mapping[str, Any]
    ) -> None:
        manager: Any = getattr(model, "lora_manager", None)
        if manager is None:
            raise ConfigError(f"adapter {name!r}: this engine takes no adapters: start it with --enable-lora")
        self._manager, self._name, self._config, self._device = manager, name, dict(config), device
        self._metas = metas
        self._dtype: torch.dtype = manager.lora_config.lora_dtype
        for other in _live(manager):
            if other != name and adapter_number(other) == adapter_number(name):
                raise ConfigError(f"adapter {name!r} has the number of adapter {other!r}: give it another name")
        self._check()
        self._tensors: dict[str, torch.Tensor] = {}
        self.regions = {meta.name: whole(meta.shape) for meta in metas}
        self.shapes = {meta.name: meta.shape for meta in metas}

    def room(self) -> dict[str, torch.Tensor]:
        """Memory for the adapter; taken once."""
        if not self._tensors:
            self._tensors = {meta.name: self._room(meta) for meta in self._metas}
        return self._tensors

    def moved(self) -> list[str]:
        """Empty, because none of the model's memory is registered."""
        return []

    def renew(self) -> None:
        """As of ``Received``."""

    def _room(self, meta: Meta) -> torch.Tensor:
        if self._device.type == "cpu":
            return mapped(meta.shape, dtype=self._dtype)
        return torch.empty(meta.shape, dtype=self._dtype, device=self._device)

    def apply(self) -> None:
        """What was received is the adapter from here on; vLLM loads it with the next request that asks for it."""
        _serve(self._manager)
        live = _live(self._manager).setdefault(self._name, AdapterWeights(self._config, {}))
        live.config = self._config
        live.tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors.items()}
        for number in live.numbers:  # vLLM does so after every update
            self._manager.remove_adapter(number)
        live.numbers.clear()

    def compare(self) -> Comparison:
        """What of the adapter is not what was received; between two steps, and the model serves on as it is."""
        found = Comparison()
        live = _live(self._manager).get(self._name)
        if live is None:
            raise TransferError(f"the engine has no adapter {self._name!r} yet: call send_weights")
        for name, tensor in self._tensors.items():
            found.add(name, unequal(live.tensors[name], tensor.cpu()))
        for slot, number in enumerate(self._manager.lora_index_to_id):
            if number in live.numbers:
                found.extend(self._compare_slot(slot, number))
        return found

    @torch.no_grad()
    def _compare_slot(self, slot: int, number: int) -> Comparison:
        """Compare what the engine computes with: a slot of each module's, which is filled again and compared."""
        found = Comparison()
        manager = self._manager
        due = load(manager, number, self._config, self._tensors)
        manager._create_merged_loras_inplace(due)
        for name, module in manager.modules.items():
            stacked = list(_stacked(module))
            before = [tensor.clone() for tensor in stacked]
            lora = manager._get_lora_layer_weights(due, name)
            if lora is None:
                module.reset_lora(slot)
            else:
                module.set_lora(slot, lora.lora_a, lora.lora_b)
            wrong = [unequal(was, now) for was, now in zip(before, stacked, strict=True)]
            found.add(f"{name} of adapter {self._name!r}", next((why for why in wrong if why is not None), None))
            for was, now in zip(before, stacked, strict=True):
                now.copy_(was)
        return found

    def report(self) -> Mapping[str, Any]:
        """As ``Received.report``: every worker receives all of it."""
        size = sum(torch.Size(meta.shape).numel() for meta in self._metas) * self._dtype.itemsize
        nothing: dict[str, Any] = {"direct": [], "left_out": [], "partial": [], "unfilled": [], "whole": {}}
        return {**nothing, "tensors": len(self._metas), "bytes": size, "checkpoint_bytes": size}

    # ---- before anything is sent ---------------------------------------------------------------

    def _check(self) -> None:
        try:
            helper = _helper(self._manager, self._config)
            blank = {meta.name: torch.zeros(meta.shape, dtype=self._dtype) for meta in self._metas}
            load(self._manager, adapter_number(self._name), self._config, blank)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ConfigError(f"adapter {self._name!r}: {error}") from error
        pairs: dict[str, set[bool]] = {}
        for meta in self._metas:
            module, first = parse_fine_tuned_lora_name(meta.name, _mapper(self._manager))
            if module in (helper.modules_to_save or ()):
                continue
            pairs.setdefault(module, set()).add(first)
            self._check_place(meta, module)
            rank, _ = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(meta.name)[0])
            if ".experts" not in module:
                self._check_shape(meta, module, first, rank)
        for module, seen in pairs.items():
            if len(seen) != 2:
                which = "lora_A" if True in seen else "lora_B"
                raise ConfigError(f"adapter {self._name!r} has {which} alone of {module!r}: send both")

    def _check_place(self, meta: Meta, module: str) -> None:
        """Refuse tensors for a module that the model does not have, because vLLM silently ignores them."""
        manager = self._manager
        known = set(manager.modules).union(*manager.packed_modules.values())
        elsewhere = any(type(m).__name__ == "PPMissingLayer" for m in manager.model.modules())
        if module in known or elsewhere or ".experts" in module:
            return
        raise ConfigError(
            f"adapter {self._name!r}: the engine's model has no module {module!r} that takes an adapter, for "
            f"{meta.name!r}; name them as peft saves them (names=), or leave them out; it has {sorted(known)[:6]} ..."
        )

    def _check_shape(self, meta: Meta, module: str, first: bool, rank: int) -> None:
        """Refuse wrong shapes, because vLLM would use a too small tensor beside the rest of another adapter, or fail in
        a step."""
        shape, inner = meta.shape, 0 if first else 1
        sizes = _sizes(self._manager, module)
        due: tuple[int | None, ...] = (rank, None) if first else (None, rank)
        if sizes is not None:
            due = (rank, sizes[0]) if first else (sizes[1], rank)
        if len(shape) != 2 or shape[inner] != rank or shape[1 - inner] != (due[1 - inner] or shape[1 - inner]):
            raise ConfigError(
                f"adapter {self._name!r}: {meta.name!r} has shape {shape}, and the engine's {module!r} takes {due} of "
                f"an adapter of rank {rank}"
            )


def _sizes(manager: Any, module: str) -> tuple[int, int] | None:
    """Numbers that a module of the whole model takes and gives, where they are known."""
    for owner, parts in manager.packed_modules.items():
        if module in parts:
            base = manager.modules[owner].base_layer
            outputs = _outputs(base)
            known = len(outputs) == len(parts) and hasattr(base, "input_size")
            return (base.input_size, outputs[parts.index(module)]) if known else None
    alone: Any = getattr(manager.modules.get(module), "base_layer", None)
    if not hasattr(alone, "input_size") or not hasattr(alone, "output_size"):
        return None
    return alone.input_size, alone.output_size


def _outputs(base: Any) -> list[int]:
    """What each part of a fused layer gives."""
    if hasattr(base, "total_num_kv_heads"):
        value = getattr(base, "v_head_size", base.head_size)
        return [
            base.total_num_heads * base.head_size,
            base.total_num_kv_heads * base.head_size,
            base.total_num_kv_heads * value,
        ]
    return list(getattr(base, "output_sizes", ()))


def load(
    manager: Any, number: int, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, fused: bool = False
) -> LoRAModel:
    """The adapter as vLLM loads it from a peft directory. It gets copies of ``tensors``, because it changes them."""
    helper = _helper(manager, config)
    mapper, skipped = _mapper(manager), getattr(manager.model, "lora_skip_prefixes", None)
    experts = manager.moe_ep_load_spec
    unexpected = [name for name in tensors if not _expected(manager, name, mapper, helper)]
    if unexpected:
        raise ValueError(f"the engine's model takes no adapters for {unexpected[:3]}")
    made = LoRAModel.from_lora_tensors(
        number,
        {
            name: tensor.to("cpu", copy=True)
            for name, tensor in tensors.items()
            if experts is None or not _is_remote_expert_key(name, experts)
        },
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=skipped,
    )
    made.is_3d_lora_weight = fused
    manager._validate_moe_lora_format(made)
    manager._validate_modules_to_save(made)
    manager._validate_token_classification_lora(made)
    return made


def _helper(manager: Any, config: Mapping[str, Any]) -> PEFTHelper:
    helper = PEFTHelper.from_dict(dict(config))
    helper.validate_legal(manager.lora_config)
    return helper


def _mapper(manager: Any) -> Any:
    """From names of a checkpoint to vLLM's, without what it fuses."""
    found: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
    return None if found is None else found.get_rename_mapper()


def _expected(manager: Any, name: str, mapper: Any, helper: PEFTHelper) -> bool:
    """Whether modules of this name take adapters, as vLLM asks when it loads a directory."""
    module, _ = parse_fine_tuned_lora_name(name, mapper)
    leaf = module.rpartition(".")[2]
    known = {"experts"} if "experts" in manager.supported_lora_modules else set()
    for supported in manager.supported_lora_modules:
        known.update(manager.packed_modules_mapping.get(supported, [supported]))
    if ".experts" in module:
        return module[module.index(".experts") + 1 :] in known
    return leaf in known or leaf in (helper.modules_to_save or ())


def _stacked(module: nn.Module) -> Iterator[torch.Tensor]:
    """The memory of all adapters' slots in a module, each once."""
    seen: set[int] = set()
    for name, value in vars(module).items():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            own = name.endswith("_stacked") and isinstance(tensor, torch.Tensor) and tensor._base is None
            if own and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _live(manager: Any) -> dict[str, AdapterWeights]:
    """The adapters that this worker's model has received, by name."""
    if not hasattr(manager, "etha_adapters"):
        manager.etha_adapters = {}
    found: dict[str, AdapterWeights] = manager.etha_adapters
    return found


def _serve(manager: Any) -> None:
    """Make vLLM's worker managers take received adapters from here. Once."""
    found: Callable[..., LoRAModel] = WorkerLoRAManager._load_adapter
    if hasattr(found, "serves_received"):
        return

    @wraps(found)
    def _load_adapter(self: Any, lora_request: Any) -> LoRAModel:
        if not lora_request.lora_path.startswith(ROOT):
            return found(self, lora_request)
        name = lora_request.lora_path.removeprefix(ROOT)
        live = _live(self._adapter_manager).get(name)
        if live is None:
            raise LoRAAdapterNotFoundError(lora_request.lora_name, lora_request.lora_path)
        live.numbers.add(lora_request.lora_int_id)
        return load(
            self._adapter_manager, lora_request.lora_int_id, live.config, live.tensors,
            fused=lora_request.is_3d_lora_weight,
        )  # fmt: skip

    _load_adapter.serves_received = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter
