"""Nobody holds more after relaunches than after the first transfers; the long run is in tests/proof."""

from __future__ import annotations

import pytest

from tests.flow.endurance.soak import Soak
from tests.flow.jobs import Job
from tests.flow.sites import open_site
from tests.flow.ways import Way


@pytest.mark.ways("local", "tcp", reason="host shares all that can grow with tcp")
@pytest.mark.proof
def test_nobody_holds_more_after_relaunches(way: Way, pair: str) -> None:
    with open_site(way) as site, Job(site.env) as job:
        soak = Soak(site, job, pair, block=24, restart=2)
        soak.run(4)
        assert sum(soak.relaunches.values()) == 4
        assert not soak.grown(0.0, memory=False), soak.report()
