"""What loaders keep, recorded: the ways of real loaders over parameters on meta and over live ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from etha.integrations.vllm.weights.keep import KeptPart, Meta, Recording, nothing

Weights = Iterable[tuple[str, Tensor]]
CPU = torch.device("cpu")


def record(load: Callable[[Weights], object], params: dict[str, Tensor], *metas: Meta) -> dict[str, KeptPart]:
    return Recording(params, CPU).of(metas, load).kept


def weight(name: str = "w", shape: tuple[int, ...] = (8, 6), dtype: torch.dtype = torch.float32) -> Meta:
    return Meta(name, shape, dtype)


def test_a_fused_parameter_keeps_its_slice_of_each_tensor() -> None:
    fused = torch.empty(8, 6, device="meta")

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            at = {"gate": 0, "up": 4}[name]
            fused.data.narrow(0, at, 4).copy_(tensor.narrow(0, 4, 4))

    kept = record(load, {"mlp.gate_up": fused}, weight("gate"), weight("up"))
    assert kept["gate"].region == kept["up"].region == (((4, 8),), ((0, 6),))
    (copy,) = kept["up"].copies or ()
    assert (copy.param, copy.offset, copy.sizes) == ("mlp.gate_up", 24, (4, 6))
    assert kept["gate"].nbytes == 4 * 6 * 4


def test_what_nobody_reads_is_left_out() -> None:
    kept = record(lambda weights: None, {}, weight(), weight("scalar", ()))
    assert nothing(kept["w"])
    assert kept["w"].nbytes == 0
    assert kept["scalar"].nbytes == 4, "what has no dims cannot be left out in part"


def test_a_conversion_by_copy_is_made_on_the_way_where_that_saves_bytes() -> None:
    low, high = torch.empty(8, 6, dtype=torch.bfloat16, device="meta"), torch.empty(8, 6, device="meta")

    def into(param: Tensor) -> Callable[[Weights], object]:
        return lambda weights: [param.copy_(tensor) for _, tensor in weights]

    assert record(into(low), {"p": low}, weight())["w"].dtype is torch.bfloat16
    assert record(into(high), {"p": high}, weight(dtype=torch.bfloat16))["w"].dtype is torch.bfloat16
    whole = torch.empty(8, 6, dtype=torch.int32, device="meta")
    assert record(into(whole), {"p": whole}, weight())["w"].dtype is torch.float32


def test_an_operation_that_is_no_view_reads_what_it_sees_and_no_more() -> None:
    param = torch.empty(3, 6, device="meta")

    def load(weights: Weights) -> None:
        ((_, tensor),) = weights
        param.copy_((tensor[:3] * 2).contiguous())

    kept = record(load, {"p": param}, weight())["w"]
    assert kept.region == (((0, 3),), ((0, 6),))
    assert kept.copies is None, "a product is not the tensor's own bits"
    assert kept.dtype is torch.float32


def test_a_parameter_that_is_worked_on_after_its_copy_has_no_plain_copies() -> None:
    param = torch.empty(8, 6, device="meta")

    def load(weights: Weights) -> None:
        ((_, tensor),) = weights
        param.copy_(tensor)
        param.copy_(-torch.exp(param))

    kept = record(load, {"p": param}, weight())["w"]
    assert kept.copies is None
    assert kept.region == (((0, 8),), ((0, 6),))


def test_live_parameters_are_not_written() -> None:
    live = torch.ones(8, 6)

    def load(weights: Weights) -> None:
        ((_, tensor),) = weights
        live[:4].copy_(tensor[:4])
        live[4:].fill_(0)
        live.data.mul_(3)

    kept = record(load, {"p": live}, weight())["w"]
    assert kept.region == (((0, 4),), ((0, 6),))
    assert torch.equal(live, torch.ones(8, 6))


def scaled(param: Tensor) -> Callable[[Weights], None]:
    """A loader that looks at values of one tensor; of others it keeps the upper half."""

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "scaled":
                param.copy_(tensor / float(tensor.max()))
            elif name == "unknown":
                raise ValueError("there is no parameter of that name")
            else:
                param[:4].copy_(tensor[:4])

    return load


def test_a_tensor_that_cannot_be_recorded_is_kept_whole_and_says_why() -> None:
    param = torch.empty(8, 6, device="meta")
    kept = record(scaled(param), {"p": param}, weight("a"), weight("scaled"), weight("z"))
    assert kept["scaled"].why is not None
    assert kept["scaled"].region == (((0, 8),), ((0, 6),))
    assert kept["a"].why is kept["z"].why is None
    assert kept["a"].region == kept["z"].region == (((0, 4),), ((0, 6),))


@pytest.mark.parametrize("at_once", [False, True])
def test_a_tensor_that_no_loader_takes_is_refused_with_its_words(at_once: bool) -> None:
    param = torch.empty(8, 6, device="meta")
    load = scaled(param)
    metas = [weight("a"), weight("unknown"), weight("z")]
    recorded = Recording({"p": param}, CPU).of(metas, (lambda w: load(list(w))) if at_once else load)
    assert "no parameter of that name" in recorded.refused["unknown"]
    assert recorded.kept.keys() == {"a", "z"}


def test_tensors_that_are_loaded_in_pairs_stay_pairs_when_another_fails() -> None:
    param = torch.empty(8, 6, device="meta")

    def load(weights: Weights) -> None:
        waiting: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name == "unknown":
                raise KeyError(name)
            waiting[name] = tensor
            if len(waiting) == 2:
                param.copy_(waiting["a"] * waiting["scale"])

    kept = Recording({"p": param}, CPU).of([weight("unknown"), weight("a"), weight("scale")], load).kept
    assert not nothing(kept["a"])
    assert not nothing(kept["scale"])


def test_what_is_left_of_the_parameters_is_told() -> None:
    params = {name: torch.empty(8, 6, device="meta") for name in ("whole", "half", "none")}

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            params["whole"].copy_(tensor)
            params["half"][:4].copy_(tensor[:4])

    recorded = Recording(params, CPU).of([weight()], load)
    assert (recorded.partial, recorded.unfilled) == (["half"], ["none"])


def test_other_numbers_of_the_same_bits_are_a_read() -> None:
    param = torch.empty(2, 6, dtype=torch.int32, device="meta")

    def load(weights: Weights) -> None:
        ((_, tensor),) = weights
        param.copy_(tensor.view(torch.int32))

    kept = record(load, {"p": param}, Meta("w", (2, 24), torch.uint8))["w"]
    assert kept.region == (((0, 2),), ((0, 24),))
    assert kept.dtype is torch.uint8
    assert kept.copies is None


def test_a_copy_that_does_not_fit_is_refused_as_it_is_in_a_real_load() -> None:
    param = torch.empty(7, 6, device="meta")
    load = lambda weights: [param.copy_(tensor) for _, tensor in weights]  # noqa: E731
    refused = Recording({"p": param}, CPU).of([weight()], load).refused["w"]
    assert "(8, 6)" in refused
    assert "(7, 6)" in refused


def test_rows_that_a_loader_puts_in_another_order_are_kept_in_part() -> None:
    """Bloom's fused qkv: heads of (q, k, v) in the checkpoint, all q before all k in the engine; a worker has half."""
    heads, size, columns = 4, 3, 5
    fused = torch.empty(heads * 3 * size // 2, columns, dtype=torch.bfloat16, device="meta")

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            rows = tensor.view(heads, 3, size, columns).transpose(0, 1).reshape(tensor.shape)
            for part in range(3):
                mine = rows.narrow(0, part * heads * size, heads * size).narrow(0, heads * size // 2, heads * size // 2)
                fused.data.narrow(0, part * heads * size // 2, heads * size // 2).copy_(mine)

    kept = record(load, {"qkv": fused}, weight("qkv", (heads * 3 * size, columns)))["qkv"]
    assert kept.region == (((18, 36),), ((0, 5),)), "the rows of its two heads, as they lie in the checkpoint"
    assert (kept.dtype, kept.why) == (torch.bfloat16, None)


def test_what_a_loader_computes_with_is_told_of_as_whole() -> None:
    param = torch.empty(8, 6, device="meta")
    kept = record(lambda weights: [param.copy_(tensor * 2) for _, tensor in weights], {"p": param}, weight())["w"]
    assert kept.why == "its loader computes with all of it"
