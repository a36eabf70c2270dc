"""The long proof: `make proof`. ETHA_PROOF_CASES sets how many random redistributions, 10,000 by default."""

from __future__ import annotations

import os

import pytest

from tests.unit.plan.prove import prove
from tests.unit.plan.relayed import prove_relayed

CASES = int(os.environ.get("ETHA_PROOF_CASES", "10000"))
PART = 250


@pytest.mark.proof
@pytest.mark.parametrize("part", range(-(-CASES // PART)))
def test_random_redistributions_are_exact_and_proven(part: int) -> None:
    for seed in range(1_000_000 + part * PART, 1_000_000 + min(CASES, (part + 1) * PART)):
        prove(seed)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(-(-CASES // PART)))
def test_random_relays_are_exact_and_proven(part: int) -> None:
    for seed in range(1_000_000 + part * PART, 1_000_000 + min(CASES, (part + 1) * PART)):
        prove_relayed(seed)
