"""A vLLM model as its loaders expect it, although its weights were processed long ago; vLLM's layerwise reload.

While a model serves, its parameters may be packed, fused or gone. vLLM can put them back as they were created, on
the meta device, run its loaders, process each layer as it is full, and copy the result to where the live one lies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from etha.integrations.vllm.keep import Meta, Recorded, Recording

#: Warns of every layer that nothing was loaded into: all of them in a recording, tied and computed ones in a reload.
_NOISE = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


def record(model: nn.Module, model_config: Any, metas: Iterable[Meta], device: torch.device) -> Recorded:
    """What this worker's model keeps of each checkpoint tensor; the model serves on as before."""
    with _created(model, model_config):
        return Recording(dict(model.named_parameters()), device).of(metas, _loader(model))


def reload(model: nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load ``weights`` by checkpoint names into the live model, layer by layer; other layers stay as they are."""
    with _packed_again(model), _quiet():
        initialize_layerwise_reload(model)
        try:
            _loader(model)(weights)
        finally:
            finalize_layerwise_reload(model, model_config)


def repack(model: nn.Module) -> None:
    """Pack anew what is computed with beside a parameter that was written.

    On a CPU vLLM's embeddings and heads keep the parameter and a packed copy of it, which a reload makes anew only
    where tensors were loaded under the module's own name. A head that is tied to the embeddings has none.
    """
    for module in model.modules():
        weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
            cast(Any, method).process_weights_after_loading(module)


def _loader(model: Any) -> Any:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with disable_mtp_completeness_check():
            model.load_weights(iter(weights))

    return load


@contextmanager
def _created(model: nn.Module, model_config: Any) -> Iterator[None]:
    """The model with its parameters as they were created, on meta, and its own loaders, not vLLM's buffering ones."""
    initialize_layerwise_reload(model)
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            loader: Any = getattr(tensor, "weight_loader", None)
            while getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
                setattr(tensor, "weight_loader", loader)  # noqa: B010
        yield
    finally:
        with _quiet():
            finalize_layerwise_reload(model, model_config)


@contextmanager
def _packed_again(model: nn.Module) -> Iterator[None]:
    """Experts on a CPU pack their weights only while they have no kernel, so that vLLM 0.32's own reload leaves what
    was loaded unpacked, and their answers wrong: they get a new kernel with every version.
    """
    kernels = []
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and all(p.device.type == "cpu" for p in module.parameters()):
            kernels.append((method, kernel))
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # nothing was loaded into it
                method.moe_kernel = kernel


@contextmanager
def _quiet() -> Iterator[None]:
    before = _NOISE.level
    _NOISE.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _NOISE.setLevel(before)
