"""Finds the checkpoint tensors that may be written into a model's live parameters without a loader.

Decided for whole modules, because vLLM's reload finishes a module as a whole. Every tensor that the module's loaders
take must be one plain copy, the copies must fill its parameters, and nothing may change the parameters after loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from etha.integrations.vllm.weights.keep import Copy, KeptPart, nothing

#: Methods that leave parameters on an NVIDIA GPU as they were loaded. On a CPU they pack them.
_PLAIN_ON_CUDA = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def live_views(model: nn.Module, kept: Mapping[str, KeptPart]) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the part of a live parameter that holds the kept region, of ``kept[name].shape``.

    Only for tensors that may be written in place; all others go through their loaders.
    """
    live = dict(model.named_parameters())
    views: dict[str, torch.Tensor] = {}
    owners: dict[str, list[str]] = {}
    for name, item in kept.items():
        if nothing(item):
            continue
        for copy in item.copies or ():
            owners.setdefault((copy.param or "").rpartition(".")[0], []).append(name)
        if item.copies is not None and len(item.copies) == 1:
            (only,) = item.copies
            view = _view(live.get(only.param or ""), item, only)
            if view is not None:
                views[name] = view
    for owner, names in owners.items():
        if not all(name in views for name in names) or not _plain(model.get_submodule(owner), views, names):
            for name in names:
                views.pop(name, None)
    return views


def _view(live: torch.Tensor | None, item: KeptPart, copy: Copy) -> torch.Tensor | None:
    straight = tuple(dim for dim, step in copy.trace.walks if dim >= 0) == tuple(
        dim for dim, n in enumerate(item.shape) if n > 1
    )
    if live is None or not straight or copy.sizes != item.shape or live.dtype != item.dtype:
        return None
    view = live.detach()
    last = copy.offset + sum((n - 1) * stride for n, stride in zip(copy.sizes, copy.strides, strict=True))
    if not view.is_contiguous() or last >= view.numel():
        return None
    return view.as_strided(copy.sizes, copy.strides, view.storage_offset() + copy.offset)


def _plain(module: nn.Module, views: Mapping[str, torch.Tensor], names: list[str]) -> bool:
    """Whether the module's parameters are exactly what the copies of ``names`` make of them."""
    own = list(module.parameters(recurse=False))
    filled = sum(views[name].numel() for name in set(names))
    return _untouched(module, own) and filled == sum(p.numel() for p in own)


def _untouched(module: nn.Module, parameters: list[nn.Parameter]) -> bool:
    """Whether nothing changes the module's parameters after they were loaded."""
    method: Any = getattr(module, "quant_method", None)
    if hasattr(module, "process_weights_after_loading"):
        return False
    if not isinstance(method, QuantizeMethodBase):
        return True
    if type(method).process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return True
    on_cuda = all(p.device.type == "cuda" for p in parameters)
    return on_cuda and type(method) in _PLAIN_ON_CUDA and torch.version.hip is None
