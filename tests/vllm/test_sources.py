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

    from etha.integrations.vllm.source import EthaSource, merged

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
