"""What loaders keep, recorded: the ways of real loaders over parameters on meta and over live ones."""

from __future__ import annotations

import torch
from torch import Tensor

from etha.integrations.vllm.keep import Kept, Meta, Recording, nothing

Weights = list[tuple[str, Tensor]]
CPU = torch.device("cpu")


def record(load, params: dict[str, Tensor], *metas: Meta) -> dict[str, Kept]:
    return Recording(params, CPU).of(metas, load)


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

    def into(param: Tensor):
        return lambda weights: [param.copy_(tensor) for _, tensor in weights]

    assert record(into(low), {"p": low}, weight())["w"].dtype is torch.bfloat16
    assert record(into(high), {"p": high}, weight(dtype=torch.bfloat16))["w"].dtype is torch.bfloat16
    whole = torch.empty(8, 6, dtype=torch.int32, device="meta")
    assert record(into(whole), {"p": whole}, weight())["w"].dtype is torch.float32


def test_an_operation_that_is_no_view_reads_what_it_sees_and_no_more() -> None:
    param = torch.empty(3, 6, device="meta")

    def load(weights: Weights) -> None:
        param.copy_((weights[0][1][:3] * 2).contiguous())

    kept = record(load, {"p": param}, weight())["w"]
    assert kept.region == (((0, 3),), ((0, 6),))
    assert kept.copies is None, "a product is not the tensor's own bits"
    assert kept.dtype is torch.float32


def test_a_parameter_that_is_worked_on_after_its_copy_has_no_plain_copies() -> None:
    param = torch.empty(8, 6, device="meta")

    def load(weights: Weights) -> None:
        param.copy_(weights[0][1])
        param.copy_(-torch.exp(param))

    kept = record(load, {"p": param}, weight())["w"]
    assert kept.copies is None
    assert kept.region == (((0, 8),), ((0, 6),))


def test_live_parameters_are_not_written() -> None:
    live = torch.ones(8, 6)

    def load(weights: Weights) -> None:
        live[:4].copy_(weights[0][1][:4])
        live[4:].fill_(0)
        live.data.mul_(3)

    kept = record(load, {"p": live}, weight())["w"]
    assert kept.region == (((0, 4),), ((0, 6),))
    assert torch.equal(live, torch.ones(8, 6))


def test_a_tensor_that_cannot_be_recorded_is_kept_whole_and_says_why() -> None:
    param = torch.empty(8, 6, device="meta")

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            if name == "scaled":
                param.copy_(tensor / float(tensor.max()))
            else:
                param[:4].copy_(tensor[:4])

    kept = record(load, {"p": param}, weight("scaled"), weight("plain"))
    assert kept["scaled"].why is not None
    assert kept["scaled"].region == (((0, 8),), ((0, 6),))
    assert kept["plain"].why is None
    assert kept["plain"].region == (((0, 4),), ((0, 6),))


def test_a_copy_that_does_not_fit_is_an_error_as_it_is_in_a_real_load() -> None:
    param = torch.empty(7, 6, device="meta")
    kept = record(lambda weights: param.copy_(weights[0][1]), {"p": param}, weight())["w"]
    assert "(8, 6)" in (kept.why or "")
    assert "(7, 6)" in (kept.why or "")
