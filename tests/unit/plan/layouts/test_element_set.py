"""Sets of elements as text, against sets that are enumerated element by element."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from etha.errors import LayoutError
from etha.plan import Layout, TensorSpec
from etha.plan.layouts.element_set import WHOLE, element_set, includes
from etha.plan.layouts.region import Product, read_product
from etha.plan.planner.m2m import held_products
from tests.examples import examples
from tests.unit.plan.truth import Loaded, Truth, cells_of, random_dim, random_regions, random_truth, runs_of

F32 = torch.float32


def random_products(rng: random.Random, shape: tuple[int, ...]) -> list[Product]:
    return [
        read_product([runs_of(random_dim(rng, n)) for n in shape]) for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 8]))
    ]


def enumerated(products: list[Product]) -> set[tuple[int, ...]]:
    return {
        index
        for one in products
        for index in itertools.product(*([i for a, b in kept.runs for i in range(a, b)] for kept in one))
    }


def in_boxes(rng: random.Random, elements: set[tuple[int, ...]]) -> list[Product]:
    """The same elements told otherwise: one by one, or as pairs of them where they touch, in any order."""
    found = []
    for index in rng.sample(sorted(elements), len(elements)):
        dims = [(i, i + 1) for i in index]
        if index and rng.random() < 0.5 and (*index[:-1], index[-1] + 1) in elements:
            dims[-1] = (index[-1], index[-1] + 2)
        found.append(read_product([[run] for run in dims]))
    return found


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 1 << 30))
def test_equal_sets_are_equal_texts_and_others_are_not(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
    one, two = random_products(rng, shape), random_products(rng, shape)
    here, there = enumerated(one), enumerated(two)
    text, other = element_set(shape, one), element_set(shape, two)
    assert element_set(shape, in_boxes(rng, here)) == text
    assert (text == WHOLE) == (len(here) == math.prod(shape))
    assert (text == other) == (here == there)
    assert includes(text, other) == (there <= here)
    assert includes(other, text) == (here <= there)
    if there:
        less = there - {rng.choice(sorted(there))}
        assert includes(other, element_set(shape, in_boxes(rng, less)))
        assert not includes(element_set(shape, in_boxes(rng, less)), other)


def test_how_a_set_is_written() -> None:
    columns = [read_product([[(0, 4)], [(0, 2)]]), read_product([[(1, 2), (3, 4)], [(2, 5)]])]
    assert element_set((4, 5), columns) == "[[[0,1,2,3],[[[0,2]]]],[[1,2,3,4],[[[0,5]]]]]"
    assert element_set((4, 5), [read_product([[(0, 2)], [(0, 5)]]), read_product([[(2, 4)], [(0, 5)]])]) == WHOLE
    assert element_set((4, 0), []) == WHOLE  # nothing is missing of it
    assert element_set((), []) == "[]" and element_set((), [()]) == WHOLE
    assert includes("[]", "[]") and not includes("[]", WHOLE) and includes(WHOLE, "[]")


@pytest.mark.parametrize(
    "text",
    ["", "{", "7", "{}", '"a"', "[7]", "[[7]]", "[[[1]]]", "[[[1,2,2,3]]]", "[[[2,1]]]", "[[[0,1.5]]]", "[[[true,2]]]",
     "[[[0,1],[[[0,1]]]],[[1,2]]]", "[[[0,1],7]]", "[[[0,1],[],[]]]", "[" * 5000, "[[[0,1],[" * 2000],
)  # fmt: skip
def test_text_that_is_no_set_is_refused(text: str) -> None:
    for outer, inner in ((text, "[[[0,4]]]"), ("[[[0,4]]]", text)):
        with pytest.raises(LayoutError):
            includes(outer, inner)


def test_sets_of_tensors_of_other_dims_are_refused() -> None:
    with pytest.raises(LayoutError, match="1 and 2 dims"):
        includes("[[[0,4],[[[0,4]]]]]", "[[[0,4]]]")


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_a_side_has_is_what_its_present_ranks_hold(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.choice([1, 2, 3])))
    ranks = list(range(rng.choice([1, 2, 4, 6])))
    truths: list[Truth] = [random_truth(rng, ranks, len(shape), None)]
    products: tuple[TensorSpec, ...] = ()
    more: list[Truth] = []
    if rng.random() < 0.5:
        truths = random_regions(rng, shape, ranks)
        if rng.random() < 0.5:
            more = random_regions(rng, shape, ranks[:1])
            products = (TensorSpec(shape, F32, [one.layout() for one in more]),)
    present = frozenset(r for r in ranks if rng.random() < 0.8) or frozenset(ranks)
    spec = TensorSpec(shape, F32, [one.layout() for one in truths], present, products)
    there: list[Truth] = [
        Loaded((1,), [rank], [Replicate()], kept=one.indices(shape, rank))
        for one in truths
        for rank in one.ranks
        if rank in present
    ]
    elements = cells_of(shape, [*there, *more])
    held = held_products(spec)
    if held is None:
        assert len(elements) == math.prod(shape)
    else:
        assert enumerated(held) == elements


def test_contributions_count_where_all_of_them_are() -> None:
    layout = Layout((2, 2), [Shard(0), Partial("sum")])
    assert held_products(TensorSpec((4,), F32, layout)) is None
    held = held_products(TensorSpec((4,), F32, layout, frozenset({0, 1, 3})))
    assert held is not None and enumerated(held) == {(0,), (1,)}
