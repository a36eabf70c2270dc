"""Brought into a live model is what its own loaders make of a checkpoint, however they do it; no engine is started.

Each model is small and loads in a way of its own. It is told what its loaders did when they loaded it for the first
time, and brought to the same by what a trainer sends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from etha.errors import ConfigError, TransferError
from etha.integrations.vllm.weights.keep import Meta

pytest.importorskip("vllm")
with warnings.catch_warnings():  # of others' packages
    warnings.simplefilter("ignore")
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from etha.integrations.vllm.weights.loading import Reload
    from etha.integrations.vllm.weights.received import Received, widest

CPU = torch.device("cpu")
Weights = Iterable[tuple[str, Tensor]]


class UnquantizedLinearMethod(QuantizeMethodBase):
    """Packs as vLLM's on a CPU: the parameter is gone, or stays beside what is computed with."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None: ...

    def apply(self, layer: Any, x: Tensor, *_: Any) -> Tensor:
        return x @ layer.packed.T

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()
        if not self.keep:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Linear(nn.Module):
    def __init__(self, rows: int, columns: int, *, keep: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x)


class Model(nn.Module):
    """Modules, and a function that loads one checkpoint tensor into them."""

    def __init__(self, load: Callable[[Any, str, Tensor], None], **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.load = load

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)

    def first(self, tensors: dict[str, Tensor]) -> Model:
        """As vLLM loads it from a file."""
        record_metadata_for_reloading(self)
        with torch.no_grad():
            self.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
            for module in self.modules():
                if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase):
                    method.process_weights_after_loading(module)
        return self


class Bare:
    """Of vLLM's model configuration, what a reload asks for."""

    dtype = torch.float32
    quantization = None


def received(model: Model, tensors: dict[str, Tensor], **how: Any) -> Received:
    metas = [Meta(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return Received(model, Bare(), metas, CPU, **{"direct": False, "atomic": True, **how})


def bring(into: Received, tensors: dict[str, Tensor]) -> None:
    """As if agents had: each tensor's region, as it is kept."""
    for name, dense in into.room().items():
        part = tensors[name]
        for dim, runs in enumerate(into.regions[name]):
            part = torch.cat([part.narrow(dim, start, stop - start) for start, stop in runs], dim) if runs else part[:0]
        dense.copy_(part.reshape(dense.shape))
    into.apply()


def random(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


X = torch.randn(5, 8)


def test_what_is_written_past_the_weight_loader_arrives() -> None:
    """As GPT-OSS's experts and sinks: copies into the parameter itself, of what was computed from the tensor."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "sinks":
            model.sinks.data.copy_(tensor.narrow(0, 2, 4))
        else:
            model.up.weight.copy_(tensor.permute(1, 0).contiguous())

    def make() -> Model:
        return Model(load, up=Linear(6, 8), sinks=nn.Parameter(torch.zeros(4), requires_grad=False))

    old, new = random(up=(8, 6), sinks=(8,)), random(up=(8, 6), sinks=(8,))
    live, fresh = make().first(old), make().first(new)
    into = received(live, new)
    for version, expected in ((new, fresh), (old, make().first(old))):
        bring(into, version)
        assert torch.equal(live.up(X), expected.up(X))
        assert torch.equal(live.sinks, expected.sinks)


def test_a_loader_that_works_on_its_parameter_afterwards() -> None:
    """As Mamba's A: what was loaded is turned into something else in place, which is counted twice elsewhere."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        param = getattr(model, name)
        param.data.copy_(tensor)
        if name == "a":
            param.data.copy_(-torch.exp(param.data))

    def make() -> Model:
        return Model(load, **{name: nn.Parameter(torch.zeros(4), requires_grad=False) for name in "ad"})

    old, new = random(a=(4,), d=(4,)), random(a=(4,), d=(4,))
    live, fresh = make().first(old), make().first(new)
    bring(received(live, new), new)
    assert torch.equal(live.a, fresh.a)
    assert torch.equal(live.d, fresh.d)


def test_a_loader_that_writes_into_the_tensor_it_was_given() -> None:
    """As GPT-OSS's bias on all workers but the first: zeros, and the received bytes stay as they are."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        tensor[2:].zero_()
        tensor.mul_(2)
        model.bias_of.copy_(tensor)

    def make() -> Model:
        return Model(load, bias_of=nn.Parameter(torch.zeros(4), requires_grad=False))

    new = random(bias=(4,))
    live, fresh = make().first(random(bias=(4,))), make().first(new)
    into = received(live, new)
    for _ in range(2):
        bring(into, new)
        assert torch.equal(live.bias_of, fresh.bias_of)


def tied(load: Callable[[Any, str, Tensor], None]) -> Model:
    model = Model(load, embed=Linear(6, 8, keep=True), head=Linear(6, 8, keep=True))
    model.head.weight = model.embed.weight
    return model


def test_a_tied_head_is_packed_anew() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.embed.weight.data.copy_(tensor)

    live = tied(load).first(random(embed=(6, 8)))
    new = random(embed=(6, 8))
    bring(received(live, new), new)
    assert torch.equal(live.head(X), X @ new["embed"].T)
    assert live.head.weight is live.embed.weight


def test_a_head_that_is_tied_to_what_is_written_in_place_is_packed_anew() -> None:
    """Embeddings that nothing processes are written with no loader in between."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.embed.weight.data.copy_(tensor)

    model = tied(load)
    del model.embed.quant_method
    live = model.first(random(embed=(6, 8)))
    for atomic in (True, False):
        new = random(embed=(6, 8))
        into = received(live, new, direct=True, atomic=atomic)
        assert into.report()["direct"] == ["embed"]
        bring(into, new)
        assert torch.equal(live.head(X), X @ new["embed"].T)


def test_two_tensors_for_one_tied_memory_are_refused() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        getattr(model, name).weight.data.copy_(tensor)

    live = tied(load).first(random(embed=(6, 8)))
    with pytest.raises(ConfigError, match=r"'embed\.weight' and 'head\.weight' as one tied memory"):
        received(live, random(embed=(6, 8), head=(6, 8)))


def fused(keep: bool) -> Model:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.qkv.weight.data.narrow(0, {"q": 0, "k": 4}[name], 4).copy_(tensor)

    return Model(load, qkv=Linear(8, 8, keep=keep))


def test_a_part_of_a_fused_parameter_that_is_packed_is_refused() -> None:
    old = random(q=(4, 8), k=(4, 8))
    live = fused(keep=False).first(old)
    before = live.qkv(X)
    with pytest.raises(ConfigError, match=r"32 of 64 elements of the engine's 'qkv\.weight'.*packed.*all tensors"):
        received(live, {"q": old["q"]})
    assert torch.equal(live.qkv(X), before)
    bring(received(live, old), old)
    assert torch.equal(live.qkv(X), before)


def test_the_rest_of_a_fused_parameter_is_what_the_engine_holds() -> None:
    class Plain(Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            del self.quant_method

    model = fused(keep=True)
    model.qkv = Plain()
    old, new = random(q=(4, 8), k=(4, 8)), random(q=(4, 8))
    live = model.first(old)
    into = received(live, new)
    bring(into, new)
    assert torch.equal(live.qkv.weight, torch.cat([new["q"], old["k"]]))
    assert into.report()["partial"] == ["qkv.weight"]


def test_a_padding_that_no_load_writes_to_is_zero() -> None:
    """As experts' biases: zeros when they are created, of which loaders fill a part, and kernels read all."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.up.weight.data.narrow(0, 0, 4).copy_(tensor)

    live = Model(load, up=Linear(6, 8))
    live.up.weight.weight_loader_numel = 4 * 8
    live.first(random(up=(4, 8)))
    new = random(up=(4, 8))
    into = received(live, new)
    torch.use_deterministic_algorithms(True)  # what is not defined is not a number
    try:
        bring(into, new)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(live.up(X), X @ torch.cat([new["up"], torch.zeros(2, 8)]).T)


def test_a_buffer_that_was_a_view_of_a_packed_parameter_follows() -> None:
    """As Mamba2's mixer: it computes with a view of the convolution's weight, which packing moves elsewhere."""

    class Conv(Linear):
        def __init__(self) -> None:
            super().__init__(6, 4, keep=True)

    class Packs(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight.data = layer.weight.data.clone() * 2

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Conv()
            self.conv.quant_method = Packs(True)
            Packs.__name__ = "UnquantizedLinearMethod"
            self.register_buffer("conv_weights", self.conv.weight.view(6, 4), persistent=False)

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.mixer.conv.weight.data.copy_(tensor)

    live = Model(load, mixer=Mixer()).first(random(conv=(6, 4)))
    new = random(conv=(6, 4))
    bring(received(live, new), new)
    assert torch.equal(live.mixer.conv_weights, new["conv"])


class Biased(Linear):
    """As vLLM's head of models that transformers computes: it has a bias once a checkpoint was loaded that has one."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.bias is None else super().forward(x) + self.bias


def biased() -> Model:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if name == "bias":
            model.head.bias = nn.Parameter(torch.empty(6), requires_grad=False)
        getattr(model.head, name).data.copy_(tensor)

    return Model(load, head=Biased())


@pytest.mark.parametrize("names", [("bias", "weight"), ("weight", "bias"), ("bias",)], ids=" and ".join)
def test_a_parameter_that_the_loaders_make_arrives(names: tuple[str, ...]) -> None:
    shapes: dict[str, tuple[int, ...]] = {"weight": (6, 8), "bias": (6,)}
    old = random(**shapes)
    live = biased().first(old)
    memory = live.head.bias.data_ptr()
    into = received(live, {name: old[name] for name in names})
    for sent in (random(**shapes), random(**shapes)):
        new = old | {name: sent[name] for name in names}
        bring(into, new)
        assert torch.equal(live.head(X), X @ new["weight"].T + new["bias"])
        assert live.head.bias.data_ptr() == memory, "what was compiled reads it there"
        assert into.compare().differs == []
    live.head.bias.data[1] += 1
    assert into.compare().differs == ["head.bias: 1 of 6 elements differ"]


def test_a_parameter_that_the_engine_has_not_is_refused() -> None:
    """An engine that started without a checkpoint computes without the bias."""
    live = biased().first(random(weight=(6, 8)))
    before = live.head(X)
    with pytest.raises(ConfigError, match=r"makes 'head\.bias', which this engine has not.*start the engine"):
        received(live, random(weight=(6, 8), bias=(6,)))
    assert torch.equal(live.head(X), before)


def test_a_module_that_the_loaders_make_anew_is_refused() -> None:
    """As projections of vLLM's embedding models: the live model would compute with what a rehearsal has left."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.head = Linear(6, 8)
        model.head.weight.data.copy_(tensor)

    live = Model(load, head=Linear(6, 8)).first(random(weight=(6, 8)))
    before, head = live.head(X), live.head
    with pytest.raises(ConfigError, match=r"makes the module 'head' anew"):
        received(live, random(weight=(6, 8)))
    assert live.head is head and torch.equal(live.head(X), before)


def classifier(*, packed: bool) -> Model:
    """Its head is made, when all is loaded, from two rows of a weight that was loaded before."""

    class Classifier(Model):
        def load_weights(self, weights: Weights) -> None:
            embedding: Any = self.embed.weight
            super().load_weights(weights)
            yes, no = (embedding.data[[row]].to(torch.get_default_dtype()) for row in (3, 1))
            self.head.weight.data.copy_((yes - no) * yes)

    def load(model: Any, name: str, tensor: Tensor) -> None:
        getattr(model, name).weight.data.copy_(tensor)

    half = torch.bfloat16
    embed = Linear(6, 8, dtype=half) if packed else nn.Embedding(6, 8, dtype=half)
    return Classifier(load, embed=embed, up=Linear(6, 8, dtype=half), head=Linear(1, 8, dtype=half))


def test_a_loader_that_computes_with_what_it_has_loaded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM makes a reranker's head of the tied head of a language model; in the dtype in which the engine loads."""
    monkeypatch.setattr(Bare, "dtype", torch.bfloat16)
    x = X.to(torch.bfloat16)

    def first(tensors: dict[str, Tensor]) -> Any:
        with set_default_torch_dtype(torch.bfloat16):
            return classifier(packed=False).first(tensors)

    old, new = random(embed=(6, 8), up=(6, 8)), random(embed=(6, 8), up=(6, 8))
    live = first(old)
    into = received(live, new)
    for version in (new, old):
        bring(into, version)
        assert torch.equal(live.head(x), first(version).head(x))
        assert into.compare().differs == []
    live.head.packed += 1
    assert [found.partition(":")[0] for found in into.compare().differs] == ["head.weight"]


def test_a_loader_that_computes_with_what_is_packed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bare, "dtype", torch.bfloat16)
    live = classifier(packed=True).first(random(embed=(6, 8), up=(6, 8)))
    before = live.head.packed.clone()
    with pytest.raises(ConfigError, match=r"compute with 'embed\.weight' after it was loaded.*not supported"):
        received(live, random(embed=(6, 8), up=(6, 8)))
    assert torch.equal(live.head.packed, before)


def test_a_loader_that_makes_numbers_where_its_parameter_is_is_refused() -> None:
    """Parameters are on meta meanwhile, where a tensor that torch makes of numbers has none."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        factor = torch.tensor([2.0] * 8, device=model.up.weight.device)
        model.up.weight.data.copy_(tensor)
        model.up.weight.data.mul_(factor)

    live = Model(load, up=Linear(6, 8)).first(random(up=(6, 8)))
    before = live.up(X)
    with pytest.raises(ConfigError, match=r"compute with a tensor of shape \(8,\) on the meta device.*not supported"):
        received(live, random(up=(6, 8)))
    assert torch.equal(live.up(X), before)


def test_a_loader_that_does_something_else_later_is_an_error() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        if not model.lazy:
            model.up.weight.data.copy_(tensor)

    live = Model(load, up=Linear(6, 8), lazy=False)
    live.first(random(up=(6, 8)))
    new = random(up=(6, 8))
    into = received(live, new)
    live.lazy = True
    with pytest.raises(TransferError, match=r"1 parameters, 'up\.weight' first"):
        bring(into, new)
    live.lazy = False
    bring(into, new)
    assert torch.equal(live.up(X), X @ new["up"].T)


SCALED = (torch.int8, torch.float8_e4m3fn)


def test_a_copy_without_a_scale_is_refused() -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.up.weight.data.copy_(tensor)

    for into, sent in [*((dtype, torch.bfloat16) for dtype in SCALED), *((torch.bfloat16, dtype) for dtype in SCALED)]:
        live = Model(load, up=Linear(6, 8, keep=True, dtype=into))
        record_metadata_for_reloading(live)
        with pytest.raises(ConfigError, match=rf"'up\.weight' is {into} and .* from {sent} .* without a scale"):
            received(live, {"up": torch.zeros(6, 8).to(sent)})


def test_a_module_that_is_quantized_in_an_unknown_way_is_refused() -> None:
    class Fp8MoEMethod(UnquantizedLinearMethod): ...

    model = Model(lambda *_: None, up=Linear(6, 8))
    model.up.quant_method = Fp8MoEMethod(True)
    with pytest.raises(ConfigError, match=r"1 modules of the engine are quantized .*'up' first: by Fp8MoEMethod"):
        received(model.first({}), random(up=(6, 8)))


def test_a_model_that_makes_something_of_all_its_weights_at_the_end_is_refused() -> None:
    """As DeepSeek-V4's experts and Dots3's vision: vLLM calls this after a first load, and not after a reload."""

    class Finished(Model):
        def process_weights_after_loading(self) -> None:
            self.doubled = 2 * self.up.weight

    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.up.weight.data.copy_(tensor)

    live = Finished(load, up=Linear(6, 8)).first(random(up=(6, 8)))
    with pytest.raises(ConfigError, match=r"model Finished makes something of its weights.*not supported"):
        received(live, random(up=(6, 8)))


def test_workers_receive_at_the_dtype_that_holds_what_each_of_them_wants() -> None:
    """As GPT-OSS's bias: the first worker copies it, the others compute with it, and a pair has one dtype for it."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        if model.first_rank:
            model.bias_of.copy_(tensor)
        else:
            model.bias_of.copy_(tensor * 0)

    def make(first_rank: bool) -> Model:
        return Model(
            load,
            bias_of=nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False),
            first_rank=first_rank,
        )

    reported: list[dict[str, torch.dtype]] = []
    new = random(bias=(4,))
    for first_rank in (True, False):
        received(make(first_rank).first(new), new, agree=lambda mine: reported.append(mine) or mine)
    assert [dtypes["bias"] for dtypes in reported] == [torch.bfloat16, torch.float32]
    for first_rank in (True, False):
        live = make(first_rank).first(new)
        into = received(live, new, agree=lambda _: widest(reported))
        assert into.room()["bias"].dtype is torch.float32
        bring(into, new)
        assert torch.equal(live.bias_of, new["bias"].bfloat16() * first_rank)


# ---- the live model compared with what was received ----


def packed() -> Model:
    """A weight that is packed, one that stays beside its packed copy, and plain parameters."""

    def load(model: Any, name: str, tensor: Tensor) -> None:
        (model.sinks if name == "sinks" else getattr(model, name).weight).data.copy_(tensor)

    sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
    return Model(load, up=Linear(6, 8), down=Linear(5, 8, keep=True), sinks=sinks)


def test_a_model_compared_is_what_was_received_and_stays_so() -> None:
    shapes: dict[str, tuple[int, ...]] = {"up": (6, 8), "down": (5, 8), "sinks": (4,)}
    live, new = packed().first(random(**shapes)), random(**shapes)
    new["sinks"][2] = torch.nan
    into = received(live, new)
    for version in (new, random(**shapes)):
        bring(into, version)
        before = live.up(X), live.down(X)
        found = into.compare()
        assert (found.compared, found.differs, found.left_out) == (3, [], [])
        assert torch.equal(live.up(X), before[0]) and torch.equal(live.down(X), before[1])


def test_what_is_not_what_was_received_is_named() -> None:
    shapes: dict[str, tuple[int, ...]] = {"up": (6, 8), "down": (5, 8), "sinks": (4,)}
    live, new = packed().first(random(**shapes)), random(**shapes)
    into = received(live, new)
    bring(into, new)
    live.up.packed[3] += 1
    live.down.packed[1, 2] += 1
    live.sinks.data[1] += 1
    assert sorted(into.compare().differs) == [
        "down.weight: 2 of 45 products differ",
        "sinks: 1 of 4 elements differ",
        "up.weight: 9 of 54 products differ",
    ]
    into.apply()
    assert into.compare().differs == []


@pytest.mark.parametrize("direct", [False, True], ids=["loaded", "written in place"])
def test_a_tied_head_that_is_not_packed_anew_is_named(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: Any, name: str, tensor: Tensor) -> None:
        model.embed.weight.data.copy_(tensor)

    live = tied(load).first(random(embed=(6, 8)))
    new = random(embed=(6, 8))
    into = received(live, new, direct=direct)
    monkeypatch.setattr(Reload, "settle", lambda *_: None)
    bring(into, new)
    assert [line.partition(":")[0] for line in into.compare().differs][-1] == "head.weight"
    monkeypatch.undo()
    bring(into, new)
    assert into.compare().differs == []
