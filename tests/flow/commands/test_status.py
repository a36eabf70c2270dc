"""Status is true when it is read, also from an agent that has nothing to do with the pair any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etha.agent_session import look
from etha.config import Settings
from etha.errors import RendezvousTimeoutError
from tests.flow.sites import Site, environment
from tests.flow.ways import Way

SECONDS = 60
both = pytest.mark.ways(Way.LOCAL, Way.TCP)


async def shown(site: Site, pair: str, *sides: str) -> list[dict[str, Any]]:
    """The lines of the pair, one an agent, as `etha status` prints them now, in the order of these ``sides``.

    Who has left last comes first: its agent answers once Redis knows, so the other one finds it there.
    """
    return [line for report in await reports(site, *sides) for line in report["pairs"] if line["pair"] == pair]


async def reports(site: Site, *sides: str) -> list[dict[str, Any]]:
    """What each agent of these sides says, each agent once."""
    found = []
    for place in dict.fromkeys(site.way.place(side, 0) for side in sides):
        with environment(site.at(place)):
            settings = Settings.from_env()
        found += await look(settings, timeout=SECONDS)
    return found


@both
async def test_a_pair_is_closed_as_soon_as_both_sides_have_closed_in_order(site: Site, pair: str) -> None:
    async with site.client("trainer", 0, timeout=SECONDS) as one:
        async with site.client("inference", 0, timeout=SECONDS) as two:
            await asyncio.gather(
                one.init_pair(pair, "trainer", "inference", 1, rank=0),
                two.init_pair(pair, "inference", "trainer", 1, rank=0),
            )
            lines = await shown(site, pair, "trainer", "inference")
            assert lines and all(line["state"] == "formed" for line in lines)
        for line in await shown(site, pair, "inference", "trainer"):
            assert line["state"] == "lost" and line["sides"]["inference"]["ranks"] == []
            assert line["sides"]["trainer"]["ranks"] == [0]
    for line in await shown(site, pair, "trainer", "inference"):
        assert (line["state"], line["error"], line["waiting_for"]) == ("closed", "", {})
        assert all(side["ranks"] == [] for side in line["sides"].values())


@both
async def test_who_has_given_up_is_not_listed_as_joined(site: Site, pair: str) -> None:
    async with site.client("trainer", 0, timeout=SECONDS) as one, site.client("inference", 0, timeout=SECONDS) as two:
        await asyncio.gather(one.status(), two.status())  # their agents are up
        with pytest.raises(RendezvousTimeoutError):
            await asyncio.gather(
                one.init_pair(pair, "trainer", "inference", 2, rank=0, timeout=1),
                two.init_pair(pair, "inference", "trainer", 1, rank=0, timeout=10),
            )
        for line in await shown(site, pair, "trainer", "inference"):
            assert line["state"] == "forming"
            assert line["sides"]["trainer"]["ranks"] == []


@pytest.mark.ways(Way.LOCAL)
async def test_who_asks_at_once_after_giving_up_alone_is_not_listed(site: Site, pair: str) -> None:
    async with site.client("trainer", 0, timeout=SECONDS) as client:
        await client.status()  # its agent is up
        for _ in range(5):
            with pytest.raises(RendezvousTimeoutError):
                await client.init_pair(pair, "trainer", "inference", 2, rank=0, timeout=0.3)
            [line] = [line for line in (await client.status())["pairs"] if line["pair"] == pair]
            assert line["sides"]["trainer"]["ranks"] == [], "the agent forgets the pair while it reads it again"
