"""vLLM's own quantized layers, in a process without an engine: a reload makes of them what a first load does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etha.errors import ConfigError
from etha.integrations.vllm.weights.keep import Meta
from tests.vllm import cpu_paths
from tests.vllm.checkpoints import QUANTIZED
from tests.vllm.models.test_quantized import NO_BLOCKS, kernels
from tests.vllm.models.test_reload import CPU, bring

pytest.importorskip("vllm")
with warnings.catch_warnings():  # of others' packages
    warnings.simplefilter("ignore")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import resolve_quantization_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    from etha.integrations.vllm.weights import loading
    from etha.integrations.vllm.weights.quantized import kernel_of
    from etha.integrations.vllm.weights.received import Received

BLOCKS = pytest.mark.skipif(not cpu_paths.bfloat16(), reason=NO_BLOCKS)
ONLINE = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
SHAPES = {"up.0": (256, 256), "up.1": (128, 256), "down": (128, 384)}


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one worker: vLLM's layers ask for theirs."""
    config = VllmConfig()
    object.__setattr__(config, "model_config", SimpleNamespace(dtype=torch.bfloat16, is_moe=False))
    patch = pytest.MonkeyPatch()
    before = torch.get_default_dtype()
    with set_current_vllm_config(config):
        address = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        kernels(patch)
        # vLLM compiles how it quantizes what comes in, once for all layers of a model.
        patch.setattr(torch._dynamo.config, "disable", True)
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(before)
        patch.undo()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class Model(nn.Module):
    """A fused projection of two tensors, and one of one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = MergedColumnParallelLinear(256, [256, 128], bias=False, quant_config=config, prefix="up")
        self.down = RowParallelLinear(384, 128, bias=False, quant_config=config, prefix="down")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        params = dict(self.named_parameters())
        for name, tensor in weights:
            stem, _, leaf = name.rpartition(".")
            part = () if stem == "down" else (int(stem[-1]),)
            param = params[f"{stem.partition('.')[0]}.{leaf}"]
            param.weight_loader(param, tensor, *part)  # type: ignore[attr-defined]

    def first(self, tensors: dict[str, Tensor]) -> Model:
        """As vLLM loads it from a file."""
        reload.record_metadata_for_reloading(self)
        self.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
        finalize_layerwise_processing(self, None)
        for layer in (self.up, self.down):
            layer.quant_method.process_weights_after_loading(layer)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)[0])[0]


def quantization(how: str) -> Any:
    if how in ONLINE:
        return OnlineQuantizationConfig(resolve_quantization_config(how, None))
    said = QUANTIZED[how][1]
    return get_quantization_config(said["quant_method"]).from_config(dict(said))


def tensors(how: str, seed: int) -> dict[str, Tensor]:
    of: Callable[[Tensor], dict[str, Tensor]] = QUANTIZED[how][0] if how in QUANTIZED else lambda w: {"weight": w}
    make = torch.Generator().manual_seed(seed)
    found = {}
    for stem, shape in SHAPES.items():
        made = of(torch.randn(shape, generator=make, dtype=torch.float32).to(torch.bfloat16))
        found.update({f"{stem}.{leaf}": tensor for leaf, tensor in made.items()})
    return found


def received(model: Model, tensors: dict[str, Tensor]) -> Received:
    metas = [Meta(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return Received(model, SimpleNamespace(dtype=torch.bfloat16), metas, CPU, direct=False, atomic=True)


def parameters(model: Model) -> dict[str, Any]:
    """What a model computes with, as far as it can be read; and the names of what it has released."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for leaf, tensor in module._parameters.items():
            name = f"{prefix}.{leaf}"
            found[name] = None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.float().tolist())
    return found


def of_amx(patch: pytest.MonkeyPatch) -> None:
    """The kernels that vLLM takes where a CPU has AMX; they compute without it, too, by other instructions."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    patch.setattr(cpu, "check_cpu_sgl_kernel", lambda *_: True)
    patch.setattr(cpu.CPUFp8PerTensorScaledMMLinearKernel, "is_supported", classmethod(lambda *_: (True, None)))


X = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.mark.parametrize("amx", [False, True], ids=["", "kernels of AMX"])
@pytest.mark.parametrize("how", [*sorted(QUANTIZED), *ONLINE])
def test_a_reload_makes_what_a_first_load_makes(how: str, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if (amx or "block" in how) and not cpu_paths.bfloat16():
        pytest.skip(NO_BLOCKS)
    if amx:
        of_amx(monkeypatch)
    versions = [tensors(how, seed) for seed in (0, 1)]
    fresh = [Model(quantization(how)).first(version) for version in versions]
    assert not torch.equal(fresh[0](X), fresh[1](X))
    live = Model(quantization(how)).first(versions[0])
    into = received(live, versions[0])
    assert torch.equal(live(X), fresh[0](X)), "the engine computes on while a trainer joins"
    for number in (1, 0):
        bring(into, versions[number])
        assert torch.equal(live(X), fresh[number](X))
        assert parameters(live) == parameters(fresh[number])
        found = into.compare()
        assert not found.differs
        if how == "int8-static-zero-point":
            assert "up.weight" in found.left_out
        else:
            assert found.compared and not found.left_out
        assert torch.equal(live(X), fresh[number](X))


@pytest.mark.parametrize(
    "how", ["int8-channel", "int8-channel-zero-point", "fp8-channel", pytest.param("fp8-block", marks=BLOCKS)]
)
def test_a_scale_that_is_not_the_one_received_is_named(how: str) -> None:
    live = Model(quantization(how)).first(tensors(how, 0))
    into = received(live, tensors(how, 1))
    bring(into, tensors(how, 1))
    scale: Any = getattr(live.up, "weight_scale_inv" if how == "fp8-block" else "weight_scale")
    scale.data[1] *= 1.1
    [line] = into.compare().differs
    assert line.startswith("up.weight") and line.endswith("differ")
    into.apply()
    assert into.compare().differs == []


@pytest.mark.parametrize("how", ["int8-channel", "int8-channel-zero-point", "int8-tensor", "int8-static"])
def test_products_that_saturate_are_compared_with_such(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without VNNI: what is due is what the kernel computes, and not what arithmetic says."""
    live = Model(quantization(how)).first(tensors(how, 0))
    into = received(live, tensors(how, 1))
    monkeypatch.setattr(loading, "exact_integers", lambda: False)
    bring(into, tensors(how, 1))
    found = into.compare()
    assert found.compared and not found.differs and not found.left_out
    computed, before = live(X), Model(quantization(how)).first(tensors(how, 0))
    kernel_of(live.down).dnnl_handler = kernel_of(before.down).dnnl_handler
    [line] = into.compare().differs
    assert line.startswith("down.weight") and line.endswith("products differ")
    into.apply()
    assert torch.equal(live(X), computed) and into.compare().differs == []


@pytest.mark.parametrize("how", ["int8-channel", pytest.param("fp8-block", marks=BLOCKS)])
def test_tensors_without_a_scale_are_refused(how: str) -> None:
    version = tensors(how, 0)
    live = Model(quantization(how)).first(version)
    before = live(X)
    plain = {name: tensor.bfloat16() for name, tensor in version.items() if name.endswith(".weight")}
    with pytest.raises(
        ConfigError, match=r"'(up|down)\.weight' is torch\..*8.* from torch\.bfloat16 .* without a scale"
    ):
        received(live, plain)
    bare = {name: tensor for name, tensor in version.items() if name.endswith(".weight")}
    with pytest.raises(ConfigError, match=r"fill 0 of \d+ elements of .*'up\.weight_scale.*send all tensors"):
        received(live, bare)
    unfused = {name: tensor for name, tensor in version.items() if not name.startswith("up.1")}
    with pytest.raises(ConfigError, match=r"fill \d+ of \d+ elements of the engine's 'up\.weight.*send all tensors"):
        received(live, unfused)
    assert torch.equal(live(X), before), "and the engine computes on"
    bring(received(live, version), version)
    assert torch.equal(live(X), before)


def test_quantized_tensors_for_an_engine_that_quantizes_itself_are_refused() -> None:
    live = Model(quantization("fp8_per_channel")).first(tensors("fp8_per_channel", 0))
    bare = {name: tensor for name, tensor in tensors("fp8-channel", 0).items() if name.endswith(".weight")}
    with pytest.raises(ConfigError, match=r"is torch\.bfloat16 .* from torch\.float8_e4m3fn .* without a scale"):
        received(live, bare)


def test_a_kernel_that_is_not_known_is_refused() -> None:
    live = Model(quantization("fp8-channel")).first(tensors("fp8-channel", 0))
    live.down.scheme.fp8_linear = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"'down' first: by CompressedTensorsW8A8Fp8 with SimpleNamespace"):
        received(live, tensors("fp8-channel", 0))


def test_a_quantized_cache_of_keys_and_values_is_refused() -> None:
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for dtype, refused in (("auto", False), ("fp8", True)):
        live = Model(quantization("fp8-channel")).first(tensors("fp8-channel", 0))
        live.attn = nn.Module()
        live.attn.quant_method = BaseKVCacheMethod(None)
        live.attn.kv_cache_dtype = dtype
        if refused:
            with pytest.raises(ConfigError, match=r"'attn' first: its cache of keys and values is fp8"):
                received(live, tensors("fp8-channel", 0))
        else:
            received(live, tensors("fp8-channel", 0))


def test_what_is_received_is_what_the_checkpoint_has() -> None:
    """8 bits a weight, and scales as they are sent."""
    for how in sorted(QUANTIZED):
        version = tensors(how, 0)
        into = received(Model(quantization(how)).first(version), version)
        assert {name: room.dtype for name, room in into.room().items()} == {k: v.dtype for k, v in version.items()}
        assert into.report()["bytes"] == sum(tensor.nbytes for tensor in version.values())


@BLOCKS
def test_scales_that_are_powers_of_two() -> None:
    """As DeepSeek's later checkpoints have them, in 8 bits; the engine computes with float32."""
    versions = [tensors("fp8-block", seed) for seed in (0, 1)]
    for version in versions:
        for name in version:
            if name.endswith("_scale_inv"):
                version[name] = version[name].to(torch.float8_e8m0fnu)
    live = Model(quantization("fp8-block")).first(versions[0])
    into = received(live, versions[0])
    bring(into, versions[1])
    assert into.room()["down.weight_scale_inv"].dtype is torch.float8_e8m0fnu
    assert torch.equal(live(X), Model(quantization("fp8-block")).first(versions[1])(X))
    assert not into.compare().differs
