"""Which engines are refused because they are quantized: a trainer's tensors cannot be brought in by plain copies."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from etha.errors import ConfigError

#: vLLM's methods for layers that hold the numbers of a checkpoint as they are, by name. All others are refused: what
#: they make of a weight (scales, zero points, other dtypes) is not known here.
UNQUANTIZED = frozenset(
    ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "_GateLinearMethod")
)


def refuse_quantized(model: nn.Module, model_config: Any) -> None:
    """ConfigError, naming the first module, where the engine has quantized ones."""
    found: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method).__name__ not in UNQUANTIZED:
            found.append((name, type(method).__name__))
    if found:
        name, method_name = found[0]
        raise ConfigError(
            f"the engine is quantized ({getattr(model_config, 'quantization', None) or 'by its own choice'}): "
            f"{len(found)} modules, {name!r} first, by {method_name}; a trainer's weights cannot be brought into it, "
            f"for they would be copied without scales: start the engine without quantization"
        )
