"""Random redistributions against the enumerated truth; 10,000 of them by `make proof`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.plan.prove import prove

CASES = 1000
PART = 100


@pytest.mark.parametrize("part", range(CASES // PART))
def test_random_redistributions_are_exact_and_proven(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        prove(seed)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(min_value=1 << 20, max_value=1 << 40))
def test_hypothesis_finds_no_seed_that_fails(seed: int) -> None:
    prove(seed)
