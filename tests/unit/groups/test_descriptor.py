"""What members say about their calls: 128 bytes, equal exactly if the calls are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etha.groups import descriptor
from etha.groups.schedule import Kind, Variant


def test_a_common_part_has_its_size_and_a_text() -> None:
    common = descriptor.encode(Kind.ALLREDUCE, "float32", "SUM", counts=(6,))
    assert len(common) == descriptor.COMMON
    assert descriptor.decode(common) == "allreduce SUM of 6 float32"


def test_texts_name_what_users_know() -> None:
    text = descriptor.decode(descriptor.encode(Kind.BROADCAST, "int64", counts=(2, 5), root=1))
    assert text == "broadcast from rank 1 of 2 tensors of 2, 5 int64"
    text = descriptor.decode(descriptor.encode(Kind.REDUCE, "float64", "PREMUL_SUM", counts=(3,), root=0, factor=0.5))
    assert text == "reduce PREMUL_SUM by 0.5 to rank 0 of 3 float64"
    text = descriptor.decode(descriptor.encode(Kind.ALLGATHER, "bool", counts=(1, 2, 3, 4, 5)))
    assert text == "allgather of 5 tensors of 1, 2, 3, 4, ... (15 together) bool"
    assert descriptor.decode(descriptor.encode(Kind.BARRIER)) == "barrier"
    assert descriptor.decode(descriptor.encode(Kind.ALLREDUCE, "float32", "SUM", counts=(0,))).endswith("of 0 float32")


@pytest.mark.parametrize(
    "other",
    [
        {"kind": Kind.REDUCE},
        {"dtype": "float64"},
        {"op": "AVG"},
        {"counts": (1, 2, 3, 4, 6)},
        {"counts": (1, 2, 3, 5, 4)},
        {"counts": (15,)},
        {"root": 1},
        {"factor": 2.0},
        {"extra": 1},
        {"variant": Variant.WINDOWS},
        {"window_bytes": 64},
    ],
    ids=lambda other: next(iter(other)),
)
def test_every_difference_of_two_calls_shows(other: dict) -> None:
    call = {
        "kind": Kind.ALLREDUCE,
        "dtype": "float32",
        "op": "SUM",
        "counts": (1, 2, 3, 4, 5),
        "variant": Variant.SMALL,
    }
    mine, theirs = descriptor.encode(**call), descriptor.encode(**{**call, **other})
    assert mine != theirs
    assert descriptor.difference(mine, theirs)
    assert descriptor.difference(mine, mine) == ""


def test_what_has_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="tensors of float3"):
        descriptor.encode(Kind.ALLREDUCE, "float3", "SUM")
    with pytest.raises(ValueError, match="the reduction XOR"):
        descriptor.encode(Kind.ALLREDUCE, "float32", "XOR")


@given(st.binary(min_size=descriptor.COMMON, max_size=descriptor.COMMON))
def test_any_bytes_have_a_text(common: bytes) -> None:
    assert isinstance(descriptor.decode(common), str)
    assert isinstance(descriptor.difference(common, bytes(descriptor.COMMON)), str)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_the_matrix_of_an_alltoall_is_read_out_of_all_slots(matrix: list[list[int]]) -> None:
    size = len(matrix)
    takes = [[matrix[s][d] for s in range(size)] for d in range(size)]
    slots = [
        descriptor.encode_slot(bytes(128), 7, splits=descriptor.encode_splits(matrix[r], takes[r])) for r in range(size)
    ]
    assert all(len(slot) <= descriptor.slot_bytes(size) for slot in slots)
    assert descriptor.split_matrix(slots) == tuple(map(tuple, matrix))
    assert descriptor.wrong_splits(slots) == []
    takes[0][-1] += 1
    slots[0] = descriptor.encode_slot(bytes(128), 7, splits=descriptor.encode_splits(matrix[0], takes[0]))
    assert descriptor.wrong_splits(slots) == [(size - 1, 0, matrix[-1][0], matrix[-1][0] + 1)]
