"""Random kills, stops, leaves and joins: nobody holds a mixture, and everybody has the newest version in time."""

from __future__ import annotations

import pytest

from tests.flow.jobs import Job
from tests.flow.publishing.attack import Attack
from tests.flow.sites import open_site
from tests.flow.ways import Way


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_small_fleet_is_attacked_for_a_while() -> None:
    with open_site(Way.TCP) as site, Job(lambda side, rank: {}) as job:
        attack = Attack(site, job, replicas=3, seed=3)
        attack.run(seconds=30)
        attack.end()
        print(attack.report())
