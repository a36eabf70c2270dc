"""Quantized layers: lists vLLM's methods that can receive a trainer's weights; engines with others are refused.

    serialized   the trainer sends what the checkpoint has: a quantized tensor and its scale
    online       the trainer sends unquantized tensors, and vLLM quantizes them as in a load from a file

Methods and kernels are listed by name, because each keeps its result in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.utils.torch_utils import is_quantized_kv_cache

from etha.errors import ConfigError

#: vLLM's methods for layers that hold the numbers of a checkpoint as they are, by name.
UNQUANTIZED = frozenset(
    ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "_GateLinearMethod")
)
#: Methods, or schemes of compressed-tensors, that keep all their results in the layer's parameters and in their kernel.
SERIALIZED = frozenset(("CompressedTensorsW8A8Int8", "CompressedTensorsW8A8Fp8", "Fp8LinearMethod"))
ONLINE = frozenset(("Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod", "Fp8PerBlockOnlineLinearMethod"))
#: Their kernels; each packs weights in its own way.
KERNELS = frozenset(
    (
        "CPUInt8ScaledMMLinearKernel",
        "CPUFp8BlockScaledMMKernel",
        "CPUFp8PerTensorScaledMMLinearKernel",
        "PerTensorTorchFP8ScaledMMLinearKernel",
        "ChannelWiseTorchFP8ScaledMMLinearKernel",
    )
)


def kernel_of(module: Any) -> Any:
    """The kernel with which a quantized layer computes; None for other layers."""
    for owner in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
        for name in ("kernel", "fp8_linear"):
            if (found := getattr(owner, name, None)) is not None:
                return found
    return None


@cache
def exact_integers() -> bool:
    """Whether vLLM's products of 8-bit integers are exact on this CPU.

    Without VNNI, oneDNN adds two of them at a time in 16 bits, which saturate (oneDNN's documentation, "Nuances of int8
    Computations").
    """
    weight = torch.full((32, 64), 127, dtype=torch.int8, device="cpu")
    scales = torch.ones(32, 1, dtype=torch.float32, device="cpu")  # oneDNN keeps their address
    packed = _custom_ops.create_onednn_scaled_mm(weight.t(), scales, torch.bfloat16, True, False, 1)
    probe, scale, zero = _custom_ops.onednn_scaled_int8_quant(weight[:1].bfloat16())
    found = torch.empty(1, 32, dtype=torch.bfloat16, device="cpu")
    _custom_ops.onednn_scaled_mm(packed, probe, found, scale, zero, None, None)
    due = 1032192.0  # 127 * 127 * 64, rounded to bfloat16
    return bool((found == due).all())


def quantized(module: Any) -> bool:
    """Whether a layer's method changes the numbers that are loaded into it."""
    method = getattr(module, "quant_method", None)
    return (
        isinstance(method, QuantizeMethodBase)
        and not isinstance(method, BaseKVCacheMethod)
        and type(method).__name__ not in UNQUANTIZED
    )


def refuse_quantized(model: nn.Module) -> None:
    """ConfigError that names the first quantized module that cannot receive weights."""
    found = [(name, why) for name, module in model.named_modules() for why in _refused(module)]
    if found:
        name, why = found[0]
        raise ConfigError(
            f"{len(found)} modules of the engine are quantized in a way that a trainer's weights cannot be brought "
            f"into, {name!r} first: {why}; docs/vllm.md lists the ways that are supported"
        )


def _refused(module: Any) -> Iterator[str]:
    """The reasons why a module cannot receive weights."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, BaseKVCacheMethod):
        if is_quantized_kv_cache(module.kv_cache_dtype):
            yield f"its cache of keys and values is {module.kv_cache_dtype}, whose scales come with a checkpoint"
        return
    if not quantized(module):
        return
    what = type(method).__name__
    if what == "CompressedTensorsLinearMethod":
        what = type(module.scheme).__name__
    if what not in SERIALIZED | ONLINE:
        yield f"by {what}"
    elif (kernel := kernel_of(module)) is None or type(kernel).__name__ not in KERNELS:
        yield f"by {what} with {type(kernel).__name__}"
    elif getattr(method, "requantization_source", None) is not None:
        yield f"by {what}, from a checkpoint that is quantized in another way"


def cast_refused(name: str, source: torch.dtype, target: torch.dtype) -> str:
    """Why a tensor of ``source`` cannot go into the parameter ``name``."""
    return (
        f"the engine's parameter {name!r} is {target} and would be filled from {source} by a plain copy, without a "
        f"scale: send what the checkpoint has that the engine was started with, for a quantized one each quantized "
        f"tensor and its scale; or start the engine from an unquantized one, or with --quantization fp8_per_channel, "
        f"which quantizes what it is sent"
    )
