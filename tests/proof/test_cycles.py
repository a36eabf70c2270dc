"""Two thousand batches from registration to end, and thirty relaunches of either side: nobody holds more in the end.

In slices, which can be run one by one: four of 500 cycles each, two of 30 relaunches of each side.
"""

from __future__ import annotations

import pytest

from tests.flow.endurance.cycles import SIDES, Cycles
from tests.flow.jobs import Job
from tests.flow.sites import open_site
from tests.flow.ways import Way

pytestmark = pytest.mark.soak

#: By how much anything may be more at the end than after the first cycles or relaunches.
TOLERANCE = 0.05
#: Elements of the large tensor: 64 MiB.
LARGE = 16 << 20
WARM, CYCLES = 50, 500
RELAUNCHES = 30


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("way", "staged"),
    [(Way.LOCAL, False), (Way.LOCAL, True), (Way.HOST, False), (Way.TCP, False)],
    ids=["local", "local-staged", "host", "tcp"],
)
def test_nobody_grows_in_five_hundred_batches(way: Way, staged: bool) -> None:
    with open_site(way) as site, Job(site.env) as job:
        cycles = Cycles(site, job, "cycles", LARGE, staged=staged)
        cycles.begin()
        cycles.run(WARM)
        cycles.run(CYCLES - WARM)
        print(f"\n{way}{', staged' if staged else ''}: {cycles.report()}")
        assert not cycles.grown(TOLERANCE)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [Way.LOCAL, Way.HOST], ids=str)
def test_nobody_grows_in_thirty_relaunches_of_either_side(way: Way) -> None:
    """Every fifth relaunch is a new process; the measures are of those that live through all of it."""
    with open_site(way) as site, Job(site.env) as job:
        cycles = Cycles(site, job, "relaunches", LARGE)
        cycles.begin()
        for number in range(RELAUNCHES):
            for side in SIDES:
                cycles.relaunch(side, process=number % 10 == 9 and side == "trainer")
            if number == 1:
                cycles.run(8)
        cycles.run(8)
        print(f"\n{way}: {cycles.report()}")
        assert not cycles.grown(TOLERANCE)
