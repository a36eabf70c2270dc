"""Boxes, tiles and runs against element-by-element enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etha.transport.geometry import boxes
from etha.transport.geometry.boxes import Axes, Ints, Placed


@st.composite
def products(draw: st.DrawFn) -> tuple[list[Ints], list[int], list[int]]:
    """Runs per dim, and strides of two tensors that hold them without overlap."""
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        rows, a, b = [], 0, 0
        regular = draw(st.booleans())
        gap, length = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        for _ in range(draw(st.integers(1, 4))):
            if not regular:
                gap, length = draw(st.integers(0, 3)), draw(st.integers(0, 3))
            rows.append((a, b, length))
            a, b = a + length + gap, b + length
        dims.append(np.array(rows, np.int64))
    strides = []
    for end in (0, 1):
        order = draw(st.permutations(range(len(dims))))
        one, at = [0] * len(dims), draw(st.integers(1, 2))
        for d in order:
            one[d] = at
            at *= int((dims[d][:, end] + dims[d][:, 2]).max(initial=1)) + draw(st.integers(0, 2))
        strides.append(one)
    return dims, strides[0], strides[1]


def listed(dims: list[Ints], s: list[int], t: list[int]) -> set[tuple[int, int]]:
    per_dim = [[(a + i, b + i) for a, b, n in runs.tolist() for i in range(n)] for runs in dims]
    return {
        (sum(x[0] * k for x, k in zip(p, s, strict=True)), sum(x[1] * k for x, k in zip(p, t, strict=True)))
        for p in itertools.product(*per_dim)
    }


def elements(axes: Axes, source: int, target: int) -> list[tuple[int, int]]:
    return [
        (
            source + sum(i * a.source for i, a in zip(at, axes, strict=True)),
            target + sum(i * a.target for i, a in zip(at, axes, strict=True)),
        )
        for at in itertools.product(*(range(a.steps) for a in axes))
    ]


@given(products(), st.sampled_from(["source", "target"]), st.integers(1, 20), st.booleans())
def test_tiles_copy_exactly_the_elements_of_the_region(
    product: tuple[list[Ints], list[int], list[int]], by: str, limit: int, spanning: bool
) -> None:
    dims, s, t = product
    found: list[tuple[int, int]] = []
    if all(runs[:, 2].any() for runs in dims):
        for placed in boxes.boxes(dims, s, t):
            turned = Placed(boxes.ordered(placed.axes, by), placed.source, placed.target)
            for axes, sources, targets in boxes.cut(turned, limit, spanning=spanning):
                assert boxes.numel(axes) <= limit
                assert not spanning or boxes.span(axes, 1) <= limit or boxes.numel(axes) == 1
                for a, b in zip(sources.tolist(), targets.tolist(), strict=True):
                    found += elements(axes, a, b)
    assert len(found) == len(set(found))
    assert set(found) == listed(dims, s, t)


@given(products(), st.sampled_from([1, 2]))
def test_runs_list_one_end_in_order(product: tuple[list[Ints], list[int], list[int]], end: int) -> None:
    dims, s, t = product
    if not all(runs[:, 2].any() for runs in dims):
        return
    for placed in boxes.boxes(dims, s, t):
        axes = boxes.ordered(placed.axes, "target")
        offsets, length = boxes.runs(axes, end)
        assert boxes.run_shape(axes, end) == (len(offsets), length)
        assert [o + i for o in offsets.tolist() for i in range(length)] == [e[end - 1] for e in elements(axes, 0, 0)]
        source, target, common = boxes.common_runs(axes)
        pairs = [(a + i, b + i) for a, b in zip(source.tolist(), target.tolist(), strict=True) for i in range(common)]
        assert pairs == elements(axes, 0, 0)


def test_contiguous_at_both_ends_is_one_run_whatever_the_dims() -> None:
    dims = [np.array([[0, 0, n]], np.int64) for n in (3, 4, 5)]
    (placed,) = boxes.boxes(dims, (20, 5, 1), (20, 5, 1))
    assert boxes.ordered(placed.axes, "target") == (boxes.BoxAxis(60, 1, 1),)


def test_strided_shards_are_one_box() -> None:
    runs = np.array([[2 * i, 8 * i, 2] for i in range(100)], np.int64)
    assert len(boxes.boxes([runs], (1,), (1,))) == 1
    assert len(boxes.boxes([np.append(runs, [[200, 800, 1]], axis=0)], (1,), (1,))) == 2


@pytest.mark.parametrize("distinct", [False, True])
def test_steps_of_zero_are_read_once_if_asked(distinct: bool) -> None:
    axes = (boxes.BoxAxis(3, 0, 4), boxes.BoxAxis(4, 1, 1))
    offsets, length = boxes.runs(axes, 1, distinct=distinct)
    assert (len(offsets), length) == ((1, 4) if distinct else (3, 4))
    assert boxes.dense(axes, 1, distinct=distinct) == ((0, 1) if distinct else (4, 1))
