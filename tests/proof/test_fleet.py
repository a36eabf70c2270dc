"""A fleet of 16 replicas of two ranks under attack for ten minutes: nobody holds a mixture, everybody comes back to the
newest version in time, and no agent grows. ETHA_FLEET_SEED, ETHA_FLEET_MINUTES and ETHA_FLEET_REPLICAS change that.
"""

from __future__ import annotations

import os

import pytest

from tests.flow.jobs import Job
from tests.flow.publishing.attack import Attack
from tests.flow.sites import open_site
from tests.flow.ways import Way

SEED = int(os.environ.get("ETHA_FLEET_SEED", "1"))
MINUTES = float(os.environ.get("ETHA_FLEET_MINUTES", "10"))
REPLICAS = int(os.environ.get("ETHA_FLEET_REPLICAS", "16"))


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 1800)
def test_a_large_fleet_is_attacked() -> None:
    with open_site(Way.TCP) as site, Job(lambda side, rank: {}) as job:
        attack = Attack(site, job, replicas=REPLICAS, seed=SEED)
        attack.run(seconds=60 * MINUTES)
        attack.end()
        print(f"\nseed {SEED}, {REPLICAS} replicas: {attack.report()}")
        assert not attack.grown()
