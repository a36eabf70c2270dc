"""The checkpoint's names for a transformers module's tensors; these are the names that vLLM's loaders know.

    mlp.experts.gate_up_proj [4, 2 * inner, hidden]   ->   block_sparse_moe.experts.{0..3}.w{1,3}.weight, as views

transformers 5 computes with other tensors than it saves: it renames, stacks and fuses them while it loads, and reverts
all of that in ``save_pretrained``. Here its own code reverts stand-ins of the tensors, and this file notes which view
each result is. There is no table of models: any model that transformers can save works.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from etha.errors import ConfigError
from etha.integrations.fsdp import walk
from etha.integrations.vllm.trainer.part import TensorPart
from etha.integrations.vllm.weights.standin import StandIn
from etha.integrations.vllm.weights.trace import Trace

_CPU = torch.device("cpu")
#: The names by which transformers' configurations give the number of experts.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A checkpoint tensor: ``part`` of the module's tensor ``source``."""

    source: str
    part: TensorPart


def has_checkpoint(module: nn.Module) -> bool:
    """Whether a module is one of transformers', or contains one."""
    return any(True for _ in _models(module))


def checkpoint_parts(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Shown]:
    """Checkpoint name -> the part of ``tensors``, which are the module's by their names without wrappers.

    Tensors that are not transformers' keep their names. ConfigError for a checkpoint tensor that is not a view of one
    tensor.
    """
    found: dict[str, Shown] = {}
    rest = dict(tensors)
    for prefix, model in _models(module):
        mine = {name.removeprefix(prefix): rest.pop(name) for name in list(rest) if name.startswith(prefix)}
        for name, shown in _reverted(model, mine).items():
            found[prefix + name] = Shown(source=prefix + shown.source, part=shown.part)
    for name, tensor in rest.items():
        if name in found:
            raise ConfigError(f"{name!r} and {found[name].source!r} of the module are one tensor of the checkpoint")
        found[name] = Shown(source=name, part=TensorPart.all(tensor.shape))
    return found


def _models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The topmost transformers models in a module, with the prefixes of their names."""
    library = sys.modules.get("transformers.modeling_utils")
    # Nothing is needed for transformers 4, which saves the tensors that it has.
    if library is None or "revert_weight_conversion" not in vars(library):
        return
    kind: type = library.PreTrainedModel
    inside: list[str] = []
    for prefix, owner in walk(module):
        if isinstance(owner, kind) and not any(prefix.startswith(above) for above in inside):
            inside.append(prefix)
            yield prefix, owner


def _reverted(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Shown]:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    log: list[tuple[str, Trace | None, torch.Tensor]] = []
    stand_ins = {
        name: StandIn.of(tensor.shape, tensor.dtype, _CPU, _Tap(name, log))
        for name, tensor in tensors.items()
        if name not in ignored
    }
    skeleton = _skeleton(model)
    try:
        reverted = revert_weight_conversion(skeleton, dict(stand_ins))
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot say what {type(skeleton).__name__}'s tensors are in its "
            f"checkpoint: {type(error).__name__}: {error}; give EthaSource a mapping of checkpoint names to tensors"
        ) from error
    found: dict[str, Shown] = {}
    refused: list[str] = []
    for name, shown in reverted.items():
        log.clear()
        read = shown._read() if isinstance(shown, StandIn) else None
        part = None
        if len(log) == 1 and log[0][2] is read and log[0][1] is not None:
            part = TensorPart.of(log[0][1])
        if part is None:
            refused.append(name)
        else:
            found[name] = Shown(source=log[0][0], part=part)
    if refused:
        raise ConfigError(
            f"{len(refused)} tensors of the checkpoint of {type(skeleton).__name__} are no views of the module's, "
            f"{refused[0]!r} first: transformers computes them ({_operations(skeleton, list(stand_ins))}), and this "
            f"backend copies nothing at the trainer; give EthaSource a mapping of checkpoint names to tensors"
        )
    for name, split in Counter(shown.source for shown in found.values()).items():
        _refuse_some_experts(model, name, tensors[name].shape, split)
    return found


def _refuse_some_experts(model: nn.Module, name: str, shape: torch.Size, split: int) -> None:
    """ConfigError for a plain stack of this rank's experts, because each rank's would get the names of the model's
    first ones."""
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    experts = next((n for key in _EXPERTS if isinstance(n := getattr(config, key, None), int)), None)
    if len(shape) == 3 and split >= shape[0] and experts is not None and shape[0] < experts:
        raise ConfigError(
            f"tensor {name!r} holds {shape[0]} experts and the model has {experts}: a rank that holds some of them "
            f"gives them as a DTensor that is sharded over the ranks, so that it is known which they are; or give "
            f"EthaSource a mapping of checkpoint names to tensors"
        )


def _operations(model: nn.Module, names: list[str]) -> str:
    """The operations by which transformers saves a model, except those that can be views."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    views = (loading.SplitModulelist, loading.Chunk, loading.Transpose)
    conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    reversed_ = [c.reverse_transform() for c in conversions if isinstance(c, loading.WeightConverter)]
    used = [c for c in reversed_ if any(c.rename_source_key(name)[1] is not None for name in names)]
    ops = {type(op).__name__ for c in used for op in c.operations if not isinstance(op, views)}
    return ", ".join(sorted(ops)) or "by operations that are no views"


class _Tap:
    """Notes which view of the tensor ``name`` is read. ``log`` is shared by all tensors of a model."""

    def __init__(self, name: str, log: list[tuple[str, Trace | None, torch.Tensor]]) -> None:
        self.name, self._log = name, log

    def read(self, trace: Trace | None, seen: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(seen)
        self._log.append((self.name, trace, made))
        return made

    def copy(self, into: torch.Tensor, trace: Trace | None, seen: torch.Tensor) -> None:
        raise ValueError(f"{self.name!r} is copied into another tensor")

    def put(self, into: torch.Tensor, value: torch.Tensor) -> None:
        raise ValueError(f"{self.name!r} is copied into another tensor")

    def change(self) -> torch.Tensor:
        raise ValueError(f"{self.name!r} is written to")


def _skeleton(model: nn.Module) -> nn.Module:
    """The same tree of modules with parameters on meta, without wrappers, in the classes that transformers knows.

    FSDP2 makes a new class of each class that it shards, which transformers takes for custom code.
    """
    shells: dict[str, nn.Module] = {}
    for prefix, owner in walk(model):
        shells[prefix] = shell = _shell(owner)
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                shell.register_parameter(name, nn.Parameter(made, requires_grad=False))
    for prefix, shell in shells.items():
        if prefix:
            above, _, leaf = prefix[:-1].rpartition(".")
            shells[f"{above}." if above else ""].add_module(leaf, shell)
    return shells[""]


def _shell(owner: nn.Module) -> nn.Module:
    kind: Any = next(c for c in type(owner).__mro__ if not issubclass(c, FSDPModule))
    if "config" not in vars(owner) or not hasattr(kind, "base_model_prefix"):
        return nn.Module()
    shell: nn.Module = kind.__new__(kind)
    nn.Module.__init__(shell)
    for name in ("config", "_weight_conversions"):
        if name in vars(owner):
            setattr(shell, name, vars(owner)[name])
    return shell
