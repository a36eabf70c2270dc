"""Transfers of one agent over different ways, and of different sizes over one: nobody waits for another's network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.flow.jobs import Job
from tests.flow.networks.distant import holds, meet, prepare, register, settle, transfer
from tests.flow.networks.paths import LINKS, MARKS, Paths, paths
from tests.flow.puppets import Puppet, Stage, together
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way

pytestmark = [pytest.mark.timeout(240), *MARKS]

LITTLE, SMALL, LARGE = (32, 32), (512, 512), (4096, 1024)  # of int32: 4 KiB, 1 and 16 MiB
PATIENCE = 120.0


@pytest.fixture(scope="module")
def ways() -> Iterator[Paths]:
    with paths() as found:
        yield found


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with open_site(Way.TCP) as found:
        yield found


class Couple:
    """A trainer on the first host and an inference worker on another, as a pair of their own."""

    def __init__(self, job: Job, site: Site, ways: Paths, host: str, name: str, shapes: dict[str, Any]) -> None:
        stage = Stage(job, name)
        self.both: list[Puppet] = []
        for side, place in (("trainer", ways.one), ("inference", host)):
            env = site.at(place) | {"ETHA_LISTEN": f"{ways.address(place)}:{LINKS}", "ETHA_HOST_ID": place}
            self.both.append(stage.puppet(side, 0, 1, env).begin(settle, place))
        for puppet in self.both:
            puppet.ends()
        together(self.both, meet)
        for batch, shape in shapes.items():
            together(self.both, register, batch, shape, {})

    def begin(self, batch: str, version: int) -> None:
        together(self.both, prepare, batch, version)
        for puppet in self.both:
            puppet.begin(transfer, batch, version, PATIENCE)

    def moving(self) -> None:
        """Bytes have come to the other end, and more will."""
        self.both[1].worker.expect("moving")

    def exact(self, batch: str, version: int) -> None:
        """A whole transfer."""
        self.begin(batch, version)
        self.ends(batch, version)

    def ends(self, batch: str, version: int) -> None:
        for puppet in self.both:
            puppet.ends(PATIENCE)
        assert self.both[1].do(holds, batch, version) == version

    @property
    def ended(self) -> bool:
        """Whether a call that began has ended, in either worker."""
        return any(puppet.worker.has_told("step") for puppet in self.both)


@pytest.fixture
def job(site: Site) -> Iterator[Job]:
    with Job(lambda side, rank: {}) as found:
        yield found


def test_a_way_that_lets_nothing_through_stalls_no_other(job: Job, site: Site, ways: Paths, pair: str) -> None:
    bad = Couple(job, site, ways, ways.two, f"{pair}-bad", {"w": LARGE})
    good = Couple(job, site, ways, ways.three, f"{pair}-good", {"w": SMALL})
    with ways.slow(ways.two, 16):
        bad.begin("w", 1)
        bad.moving()
        with ways.hole(ways.two):
            for version in range(1, 6):
                good.exact("w", version)
            assert not bad.ended, "it was in the middle of its bytes all the time"
            for puppet in bad.both:  # a way on which nothing moves for long is an error, told by whoever waits for it
                failed = puppet.fails(PATIENCE)
                assert (failed.code, failed.data["outcome"]) in (
                    ("transfer", "aborted"),
                    ("transfer_aborted", "aborted"),
                ) and failed.data["quiesced"], failed
                assert "stands still" in failed.text, failed
    bad.exact("w", 2)
    good.exact("w", 9)


def test_a_slow_way_slows_no_other_and_no_small_transfer_of_its_own(
    job: Job, site: Site, ways: Paths, pair: str
) -> None:
    slow = Couple(job, site, ways, ways.two, f"{pair}-slow", {"w": LARGE})
    beside = Couple(job, site, ways, ways.two, f"{pair}-beside", {"w": LITTLE})
    other = Couple(job, site, ways, ways.three, f"{pair}-other", {"w": SMALL})
    with ways.slow(ways.two, 16):
        slow.begin("w", 1)
        slow.moving()
        for version in range(1, 4):
            beside.exact("w", version)
            other.exact("w", version)
        assert not slow.ended, "the others came after it"
    slow.ends("w", 1)
