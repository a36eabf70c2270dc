"""Ten thousand transfers a way, a relaunch after every 500, an agent's restart after every 2,000: nobody grows."""

from __future__ import annotations

import pytest

from tests.flow.endurance.soak import Soak
from tests.flow.jobs import Job
from tests.flow.sites import open_site
from tests.flow.ways import Way

pytestmark = pytest.mark.soak

#: By how much anything may differ at a process's end from what it was after the first 500.
TOLERANCE = 0.05


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [Way.LOCAL, Way.TCP], ids=str)
def test_nobody_grows_in_ten_thousand_transfers(way: Way) -> None:
    with open_site(way) as site, Job(site.env) as job:
        soak = Soak(site, job, "soak", block=500, restart=4)
        soak.run(20)
        print(f"\n{way}: {soak.report()}")
        assert not soak.grown(TOLERANCE, memory=True)
