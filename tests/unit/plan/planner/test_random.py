"""Random redistributions against the enumerated truth; 10,000 of them by `make proof`."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples, parts
from tests.unit.plan.prove import prove

CASES = 1000
PART = 100


@pytest.mark.slow
@pytest.mark.parametrize("part", parts(CASES // PART, 5))
def test_random_redistributions_are_exact_and_proven(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        prove(seed)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 20), st.randoms(use_true_random=False))
def test_hypothesis_draws_none_that_fails(seed: int, rng: random.Random) -> None:
    prove(seed, rng)
