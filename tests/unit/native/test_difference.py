"""Differences of bytes: exact, equal from both libraries, small where little has changed, and safe if malformed."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etha.native.build import LIBRARY, is_current
from etha.native.difference import BLOCK, CompiledDifference, DifferenceLibrary, PythonDifference, most_bytes

ITEMS = (1, 2, 4, 8)
NAMES = ("compiled", "python")


@cache
def get(name: str) -> DifferenceLibrary | None:
    if name == "python":
        return PythonDifference()
    return CompiledDifference(str(LIBRARY)) if is_current(LIBRARY) else None


@pytest.fixture(params=NAMES)
def library(request: pytest.FixtureRequest) -> DifferenceLibrary:
    found = get(request.param)
    if found is None:
        pytest.skip("executor.c is not compiled")
    return found


def versions(nbytes: int, item: int, share: float, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(newer, older): each element differs with probability ``share``."""
    rng = np.random.default_rng(seed)
    older = rng.integers(0, 256, nbytes, dtype=np.uint8)
    newer = older.copy()
    elements = newer.view(f"u{item}")
    elements[rng.random(len(elements)) < share] ^= 1
    return newer, older


def encode(
    library: DifferenceLibrary, newer: NDArray[np.uint8], older: NDArray[np.uint8] | None, item: int
) -> NDArray[np.uint8]:
    out = np.full(most_bytes(newer.nbytes) + 16, 0xAB, np.uint8)
    length = library.encode(newer, older, item, out)
    assert (out[most_bytes(newer.nbytes) :] == 0xAB).all()
    return out[:length].copy()


def apply(
    library: DifferenceLibrary, target: NDArray[np.uint8], item: int, records: NDArray[np.uint8]
) -> tuple[int, NDArray[np.uint8]]:
    room = np.full(target.nbytes + 128, 0xCD, np.uint8)
    room[64 : 64 + target.nbytes] = target
    changed = library.apply(room[64 : 64 + target.nbytes], target.nbytes, item, records)
    assert (room[:64] == 0xCD).all() and (room[64 + target.nbytes :] == 0xCD).all()
    return changed, room[64 : 64 + target.nbytes]


sizes = st.sampled_from([0, 1, 2, 31, 32, 33, BLOCK // 8 - 1, BLOCK // 8, BLOCK // 8 + 1, BLOCK // 2 + 3])
shares = st.sampled_from([0.0, 0.00001, 0.001, 0.01, 0.1, 0.2, 0.33, 0.5, 1.0])


@given(elements=sizes, item=st.sampled_from(ITEMS), share=shares, seed=st.integers(0, 1000))
def test_applied_to_the_older_bytes_it_gives_the_newer(elements: int, item: int, share: float, seed: int) -> None:
    newer, older = versions(elements * item, item, share, seed)
    written = []
    for library in filter(None, map(get, NAMES)):
        records = encode(library, newer, older, item)
        changed, found = apply(library, older, item, records)
        assert np.array_equal(found, newer)
        assert changed == library.apply(None, newer.nbytes, item, records)
        blocks = range(0, newer.nbytes, BLOCK)
        assert changed == sum(not np.array_equal(newer[b : b + BLOCK], older[b : b + BLOCK]) for b in blocks)
        whole = encode(library, newer, None, item)
        assert len(whole) == (most_bytes(newer.nbytes) if newer.nbytes else 0)
        assert np.array_equal(apply(library, older, item, whole)[1], newer)
        written.append((records.tobytes(), whole.tobytes()))
    assert len(set(written)) == 1


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.0001), (0.01, 0.025), (0.1, 0.22), (1.0, 1.01)])
def test_a_difference_of_bf16_is_small(library: DifferenceLibrary, share: float, most: float) -> None:
    newer, older = versions(32 * BLOCK, 2, share, 7)
    assert len(encode(library, newer, older, 2)) <= most * newer.nbytes


def test_values_are_compared_as_bits(library: DifferenceLibrary) -> None:
    older = np.array([0.0, -0.0, np.nan, 1.0], np.float32)
    newer = np.array([-0.0, -0.0, np.nan, 1.0], np.float32)
    other = newer.copy()
    other.view(np.uint32)[2] ^= 1  # a NaN of another payload
    assert len(encode(library, older.view(np.uint8), older.view(np.uint8), 4)) == 4
    for version in (newer, other):
        changed, found = apply(
            library, older.view(np.uint8), 4, encode(library, version.view(np.uint8), older.view(np.uint8), 4)
        )
        assert changed == 1 and found.tobytes() == version.tobytes()


@given(
    elements=sizes,
    item=st.sampled_from(ITEMS),
    share=st.sampled_from([0.0, 0.01, 0.4]),
    seed=st.integers(0, 100),
    cut=st.integers(0, 40),
    flips=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), max_size=4),
    more=st.binary(max_size=12),
)
def test_malformed_records_are_found_and_write_nothing_outside(
    elements: int, item: int, share: float, seed: int, cut: int, flips: list[tuple[int, int]], more: bytes
) -> None:
    newer, older = versions(elements * item, item, share, seed)
    found = []
    for library in filter(None, map(get, NAMES)):
        records = encode(library, newer, older, item)
        for place, bits in flips:
            if place < len(records):
                records[place] ^= bits
        wrong = np.concatenate([records[: max(0, len(records) - cut)], np.frombuffer(more, np.uint8)])
        changed, target = apply(library, older, item, wrong)
        assert changed == library.apply(None, older.nbytes, item, wrong)
        found.append((changed, target.tobytes() if changed >= 0 else b""))
        if not flips and (cut or more) and len(records) and not np.array_equal(wrong, records):
            assert changed == -1
    assert len(set(found)) == 1
