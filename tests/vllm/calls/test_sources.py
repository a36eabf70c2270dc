"""What each rank of a trainer says that it has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")
with warnings.catch_warnings():  # of others' packages
    warnings.simplefilter("ignore")
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    from etha.integrations.vllm.trainer.source import EthaSource, merged

from etha.errors import ConfigError


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParamMeta:
    return ParamMeta(name, dtype, shape)


class Stage(WeightSource):
    """Knows two tensors, holds one, and makes it anew in every pass."""

    def __init__(self) -> None:
        self.passes = 0

    def metadata(self) -> list[ParamMeta]:
        return [meta("first", 2, 3), meta("second", 4)]

    def held_names(self) -> set[str]:
        return {"second"}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        yield "first", None  # type: ignore[misc]
        yield "second", torch.full((4,), float(self.passes))


def test_stages_are_merged_in_the_order_of_ranks() -> None:
    first, second = [meta("embed", 4), meta("a", 2)], [meta("b", 2), meta("embed", 4)]
    assert [m.name for m in merged([first, second])] == ["embed", "a", "b"]


@pytest.mark.parametrize("other", [meta("a", 3), meta("a", 2, dtype=torch.bfloat16)])
def test_ranks_that_disagree_are_refused_by_name(other: ParamMeta) -> None:
    with pytest.raises(ConfigError, match=r"rank 0 of the trainer announces 'a' as \(2,\).*and rank 1 as"):
        merged([[meta("a", 2)], [other]])


def test_a_source_of_ones_own_is_iterated_into_the_same_memory() -> None:
    source = EthaSource.of(Stage(), {"^second$": "layers.second"})
    source.refresh()
    (held,) = source.tensors().values()
    assert list(source.tensors()) == ["layers.second"]
    assert [m.name for m in source.metadata()] == ["first", "layers.second"]
    assert held.tolist() == [1.0] * 4
    source.refresh()
    assert held.tolist() == [2.0] * 4


def test_a_source_that_does_not_yield_what_it_says_is_refused() -> None:
    class Wrong(Stage):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "second", torch.zeros(5)

    with pytest.raises(ConfigError, match=r"source=Wrong yields 'second' as \(5,\)"):
        EthaSource.of(Wrong(), None).refresh()


def test_a_tensor_with_a_history_of_autograd_is_refused_by_name() -> None:
    """Each version that is copied into it would be chained to all before it."""
    leaf = torch.nn.Parameter(torch.ones(4, 2))
    late = torch.zeros(4, 2)
    source = EthaSource({"late": late})
    assert list(source.tensors()) == ["late"]
    late.copy_(leaf)
    for refused in (source, EthaSource({"made": leaf * 2}), EthaSource({"view": (leaf * 2)[:1]})):
        for ask in (refused.refresh, refused.tensors, refused.metadata, refused.places):
            with pytest.raises(
                ConfigError, match=r"'(late|made|view)' of the source .* torch.no_grad\(\), or .* detach"
            ):
                ask()
    with torch.no_grad():
        made = leaf * 2
    kept = {"leaf": leaf, "view": leaf[:1], "turned": leaf.T, "made": made, "detached": (leaf * 2).detach()}
    EthaSource(kept).refresh()
    assert list(EthaSource(kept).tensors()) == list(kept)


def test_a_dtensor_with_a_history_of_autograd_is_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh, leaf = init_device_mesh("cpu", (1,)), torch.nn.Parameter(torch.ones(4, 2))
        wrapped = DTensor.from_local(leaf, mesh, [Shard(0)])
        parameter = torch.nn.Parameter(wrapped.detach())
        kept = {"wrapped": wrapped, "parameter": parameter, "local": parameter.to_local()}  # type: ignore[attr-defined]
        assert list(EthaSource(kept).tensors()) == list(kept)
        for made in (parameter * 2, DTensor.from_local(leaf * 2, mesh, [Shard(0)])):
            with pytest.raises(ConfigError, match="'made' of the source has a history of autograd"):
                EthaSource({"made": made}).refresh()
            EthaSource({"made": made.detach()}).refresh()
    finally:
        dist.destroy_process_group()
