"""100,000 plays of batches that share agents, in random order: an older one gets what a younger one holds."""

from __future__ import annotations

import os
import random

import pytest

from tests.unit.agent.protocol.test_lane_queue import AGENTS, play

PLAYS = 100_000
#: The first of them; a failure names the number to give here.
SEED = int(os.environ.get("ETHA_PLAY_SEED") or random.randrange(1 << 32))
#: Three coordinators on one agent, and receivers that two or three of them share. Here two batches once waited for each
#: other, in one play of 9,000.
SHARED = [("d", ["b", "b", "c"]), ("d", ["a", "b", "d"]), ("d", ["a", "b", "d"])]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_transfers_over_shared_agents_all_end_in_many_orders() -> None:
    for number in range(SEED, SEED + PLAYS):
        rng = random.Random(number)
        batches = SHARED if number % 2 else _random_batches(rng)
        try:
            play(
                batches, rng.random() < 0.7, lambda n, rng=rng: _choose(rng, n), lambda: {"lane": 1}, lambda resource: 1
            )
        except AssertionError as error:
            pytest.fail(f"ETHA_PLAY_SEED={number}: {batches}: {error}")


def _random_batches(rng: random.Random) -> list[tuple[str, list[str]]]:
    return [(rng.choice(AGENTS), rng.choices(AGENTS, k=rng.randint(1, 3))) for _ in range(rng.randint(2, 4))]


def _choose(rng: random.Random, count: int) -> int:
    """Often the first or the last: orders in which one link is far ahead of another."""
    return rng.choice([0, 0, count - 1, rng.randrange(count)])
