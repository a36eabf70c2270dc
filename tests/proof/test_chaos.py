"""Two thousand transfers in all, three hundred of them disturbed; ETHA_CHAOS_TURNS gives more to each way."""

from __future__ import annotations

import os

import pytest

from tests.flow.endurance.chaos import Chaos
from tests.flow.sides import Sides
from tests.flow.sites import open_site
from tests.flow.ways import Way

pytestmark = pytest.mark.chaos

#: Of each of the three ways, atomic and plain: 2,100 in all.
TURNS = int(os.environ.get("ETHA_CHAOS_TURNS", "350"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", [Way.LOCAL, Way.TCP, Way.HOST], ids=lambda way: way.value)
@pytest.mark.parametrize("atomic", [True, False])
async def test_every_outcome_of_every_transfer_is_said_as_it_is(way: Way, atomic: bool) -> None:
    with open_site(way) as site:
        async with Sides(site, "chaos", trainer=2, inference=2, timeout=20) as sides:
            chaos = Chaos(sides, atomic=atomic, seed=2026)
            await chaos.run(TURNS)
        events = sum(chaos.counts[event] for event in ("cancel", "deadline", "close", "kill"))
        assert events > TURNS / 8, chaos.counts
        print(way.value, "atomic" if atomic else "plain", dict(chaos.counts))
