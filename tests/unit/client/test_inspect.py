"""Which tensors can be moved, and which memory is whose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etha.client.manifest import aliases, check_tensor_name, overlaps_itself, refusals_of
from etha.client.memory.cpu import CpuMemory
from etha.errors import ConfigError

CPU = CpuMemory()


def reasons(tensor: object) -> list[str]:
    return [f"{r.code}: {r.text}" for r in refusals_of("w", tensor, CPU, {})]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3),
        torch.zeros(()),
        torch.zeros(0, 4),
        torch.zeros(4, 6)[1:, ::2].t(),
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Buffer(torch.zeros(2)),
        torch.zeros(1).expand(1, 1),
        torch.zeros(2, dtype=torch.complex64),
    ],
)
def test_good_ones(tensor: torch.Tensor) -> None:
    assert reasons(tensor) == []


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    strides=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    work=st.sampled_from([1, 100_000]),
)
def test_overlap_is_neither_missed_nor_invented(shape: list[int], strides: list[int], work: int) -> None:
    tensor = torch.zeros(100).as_strided(shape, strides[: len(shape)])
    places = [0]
    for size, stride in zip(shape, strides, strict=False):
        places = [place + i * stride for place in places for i in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etha.client.manifest._OVERLAP_WORK", work)  # 1: too hard for the solver, so places are listed
        assert overlaps_itself(tensor) == (len(set(places)) < len(places))


def test_strides_that_interleave_are_legal() -> None:
    assert not overlaps_itself(torch.zeros(8).as_strided((2, 3), (3, 2)))
    assert reasons(torch.zeros(8).as_strided((2, 3), (3, 2))) == []


def test_what_takes_too_long_is_called_overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etha.client.manifest._OVERLAP_WORK", 1)
    monkeypatch.setattr("etha.client.manifest._LISTED", 5)
    assert overlaps_itself(torch.zeros(2000).as_strided((3, 4, 3), (391, 53, 321)))


def alias_names(**tensors: torch.Tensor) -> set[str]:
    found = list(aliases(list(tensors.items())))
    assert all(refusal.target_only and refusal.code == "alias" for refusal in found)
    return {name for refusal in found for name in (refusal.name, refusal.text.split("'")[1])}


def test_dims_of_one_element_have_no_stride_that_counts() -> None:
    memory = torch.zeros(4)
    assert alias_names(a=memory.as_strided((1, 4), (4, 1)), b=memory.as_strided((1, 4), (1, 1))) == set()


def test_the_same_region_twice_is_no_alias_but_an_overlap_is() -> None:
    memory = torch.zeros(10)
    assert alias_names(a=memory[:5], b=memory[5:]) == set()
    assert alias_names(a=memory[:5], b=memory[:5]) == set()
    assert alias_names(a=memory[:5], b=memory[4:]) == {"a", "b"}
    assert alias_names(a=memory[:4], b=memory[:4].view(2, 2)) == {"a", "b"}
    assert alias_names(a=memory, b=memory[:2], c=memory[7:9]) == {"a", "b", "c"}
    assert alias_names(a=memory[::2], b=memory[1::2]) == set(), "interleaved, no element in common"
    grid = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert alias_names(left=grid[:, :2], right=grid[:, 2:]) == set()
    assert alias_names(left=grid[:, :3], right=grid[:, 2:]) == {"left", "right"}


@pytest.mark.parametrize("name", ["w", "ü" * 250, "a b/c\n"])
def test_any_text_is_a_name(name: str) -> None:
    assert check_tensor_name(name) == name


@pytest.mark.parametrize("name", ["", "x" * 501, "ü" * 251, 3])
def test_but_not_this(name: object) -> None:
    with pytest.raises(ConfigError, match="must be a text of 1 to 500 bytes"):
        check_tensor_name(name)  # type: ignore[arg-type]
