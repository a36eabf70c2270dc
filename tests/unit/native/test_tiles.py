"""Compiled copies of tiles against NumPy, their casts against torch: any number of axes, lengths of runs, strides."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from etha.memory.casts import Cast
from etha.native.tiles import AXES, TILE, TileLibrary, load_tiles
from tests.examples import examples


@pytest.fixture
def compiled() -> TileLibrary:
    """The compiled library; skipped where there is no compiler."""
    found = load_tiles()
    if found is None:
        pytest.skip("no C compiler (cc) on the path")
    return found


def test_the_table_has_the_size_of_the_struct(compiled: TileLibrary) -> None:
    assert compiled.struct_bytes == TILE.itemsize


def _box(rng: random.Random, run: int, axes: int) -> tuple[list[int], list[int], int]:
    """Counts and strides of a box whose runs do not touch, and the bytes from its first to its last one."""
    counts, strides, reach = [], [], run
    for _ in range(axes):
        count = rng.randint(1, 4)
        stride = reach + rng.choice([0, 0, 1, 8])
        counts.append(count)
        strides.append(stride)
        reach = (count - 1) * stride + reach
    return counts, strides, reach


@pytest.mark.parametrize("seed", range(examples(40)))
def test_random_tiles_equal_numpy(seed: int, compiled: TileLibrary) -> None:
    rng = random.Random(seed)
    shapes = []
    table = np.zeros(rng.randint(1, 3), TILE)
    for row in table:
        run = rng.choice([1, 2, 3, 7, 16, 17, 32, 64, 100, 128, 256, 300, 1024, 1100])
        axes = rng.randint(0, 4 if run <= 300 else 2)
        counts, target, target_reach = _box(rng, run, axes)
        # The source has the same box with other gaps, axes in another order of size, or one row again and again.
        order = rng.sample(range(axes), axes)
        source, reach = [0] * axes, run
        for axis in order:
            source[axis] = 0 if rng.random() < 0.1 else reach + rng.choice([0, 5])
            reach = (counts[axis] - 1) * source[axis] + reach
        row["axes"], row["run"] = axes, run
        row["counts"][:axes], row["source"][:axes], row["target"][:axes] = counts, source, target
        shapes.append((run, counts, source, reach, target, target_reach))
    n = rng.randint(1, 6)
    tile = np.array([rng.randrange(len(table)) for _ in range(n)], np.int32)
    memory = np.random.default_rng(seed).integers(0, 256, 1 << 16, dtype=np.uint8)
    into = np.full(sum(shapes[t][5] + 3 for t in tile.tolist()), 251, np.uint8)
    due, source, target, at = into.copy(), [], [], 1
    for number in tile.tolist():
        run, counts, steps, reach, places, target_reach = shapes[number]
        begin = rng.randrange(len(memory) - reach)
        source.append(memory.ctypes.data + begin)
        target.append(into.ctypes.data + at)
        for index in np.ndindex(*counts):
            here = begin + sum(i * s for i, s in zip(index, steps, strict=True))
            there = at + sum(i * s for i, s in zip(index, places, strict=True))
            due[there : there + run] = memory[here : here + run]
        at += target_reach + 2
    for streamed in (False, True):
        into[:] = 251
        compiled.prepare(table, tile, np.array(source, np.uint64), np.array(target, np.uint64))(0, n, streamed)
        assert np.array_equal(into, due)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("cast", list(Cast)[1:], ids=lambda cast: cast.name)
def test_a_cast_is_that_of_torch(cast: Cast, streamed: bool, compiled: TileLibrary) -> None:
    """All patterns of 16 bits, or floats of all magnitudes, in rows of any length that begin at any element."""
    before, after = (getattr(torch, name.lower()) for name in cast.name.split("_"))
    there, here = cast.sizes
    numbers = torch.arange(1 << 16, dtype=torch.int32)
    # Each pattern of the upper half of a float32, with lower halves that round down, to even, and up.
    lower = torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x2FFF, 0xFFFF], dtype=torch.int32)
    patterns = numbers.to(torch.int16) if there == 2 else ((numbers << 16)[:, None] | lower).reshape(-1)
    values = patterns.view(before)
    for count, columns, gap in ((len(values) - 3, 1, 0), (700, 90, 3), (1, 64, 1), (2049, 30, 5)):
        table = np.zeros(1, TILE)
        row = table[0]
        row["axes"], row["cast"], row["run"], row["counts"][0] = 1, cast, count * there, columns
        row["source"][0], row["target"][0] = count * there, (count + gap) * here
        held = torch.full(((count + gap) * columns + 2,), -7.0, dtype=after)
        due = held.clone()
        due[1:-1].view(columns, count + gap)[:, :count] = values[3 : 3 + count * columns].view(columns, count).to(after)
        addresses = [np.array([t.data_ptr() + skip], np.uint64) for t, skip in ((values, 3 * there), (held, here))]
        compiled.prepare(table, np.zeros(1, np.int32), *addresses)(0, 1, streamed)
        number = ~due.isnan()
        assert torch.equal(held.isnan(), ~number)
        bits = torch.int16 if here == 2 else torch.int32
        assert torch.equal(held[number].view(bits), due[number].view(bits))


def test_a_tile_of_all_axes(compiled: TileLibrary) -> None:
    table: Any = np.zeros(1, TILE)
    table[0]["axes"], table[0]["run"], table[0]["counts"] = AXES, 2, 2
    strides = [2 << (AXES - axis) for axis in range(AXES)]
    table[0]["source"], table[0]["target"] = strides, strides[::-1]
    memory = np.arange(2 << (AXES + 1), dtype=np.uint16)
    into = np.zeros_like(memory)
    zero = np.zeros(1, np.int32)
    addresses = [np.array([array.ctypes.data], np.uint64) for array in (memory, into)]
    compiled.prepare(table, zero, *addresses)(0, 1, False)
    for index in np.ndindex(*[2] * AXES):
        here = sum(i * s for i, s in zip(index, strides, strict=True)) // 2
        there = sum(i * s for i, s in zip(index, reversed(strides), strict=True)) // 2
        assert into[there] == memory[here]


def test_arrays_that_do_not_belong_together_are_refused(compiled: TileLibrary) -> None:
    table, four, two = np.zeros(1, TILE), np.zeros(4, np.uint64), np.zeros(2, np.uint64)
    for source, target in ((four, two), (four[::2], two), (two, four[::2])):
        with pytest.raises(ValueError, match="as many, and contiguous"):
            compiled.prepare(table, np.zeros(2, np.int32), source, target)
