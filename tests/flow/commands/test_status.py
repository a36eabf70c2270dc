"""Status is true when it is read, also from an agent that has nothing to do with the pair any more."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from etha.agent_session import look
from etha.config import Settings
from etha.errors import PeerLostError, RendezvousTimeoutError
from etha.status import pair_line
from etha.store.records import AgentRecord
from etha.store.registry import Store
from tests.flow.commands.sending import here, meet, sent
from tests.flow.sites import Site, environment
from tests.flow.ways import Way
from tests.processes import send_signal

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
async def test_a_pair_that_is_waited_for_again_shows_who_is_missing_and_not_how_it_ended(site: Site, pair: str) -> None:
    async with site.client("trainer", 0, timeout=SECONDS) as one:
        async with site.client("inference", 0, timeout=SECONDS) as two:
            await asyncio.gather(
                one.init_pair(pair, "trainer", "inference", 1, rank=0),
                two.init_pair(pair, "inference", "trainer", 1, rank=0),
            )
        [ended] = await shown(site, pair, "trainer")
        assert ended["state"] == "lost" and "has closed its client" in ended["error"]
        waiting = asyncio.ensure_future(one.init_pair(pair, "trainer", "inference", 1, rank=0))
        await one.status()
        [line] = await shown(site, pair, "trainer")
        while line["waits"] is None or not line["sides"]["trainer"]["ranks"]:
            [line] = await shown(site, pair, "trainer")
        assert (line["state"], line["error"], line["last_error"]) == ("forming", "", ended["error"])
        said = pair_line(line)["error"]
        assert "waits" in said and "for side inference, of which nobody has come" in said
        waiting.cancel()
        await asyncio.wait([waiting])


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


def links(report: dict[str, Any]) -> dict[int, tuple[str, list[str]]]:
    """By pid: the state of the link to an agent, and the pairs in which it takes part."""
    return {line["pid"]: (line["links"][0]["link"], line["pairs"]) for line in report["agents"]}


@both
async def test_status_says_whether_every_agent_that_is_needed_is_linked(
    site: Site, pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with sent(site, pair, "policy"):
        found = await reports(site, "trainer", "inference")
        pids = [one["agent"]["pid"] for one in found]
        for report in found:
            mine = report["agent"]["pid"]
            for pid in pids:
                state, pairs = links(report)[pid]
                assert state == ("self" if pid == mine else "open")
                assert pair in pairs
            for line in report["agents"]:
                assert 0 <= line["heartbeat"] < 30 and line["version"] and line["host"]
        await here(site, "status")
        shown = " ".join(capsys.readouterr().out.split())
        assert ("agents that Redis knows" in shown) is (len(pids) > 1)
        assert ("linked: all 1 links that formed pairs need are open" in shown) is (len(pids) > 1), shown


@pytest.mark.parametrize(
    ("address", "says"),
    [("127.0.0.1:7000", "127.0.0.1:7000 is loopback"), ("", "takes no links"), ("no address", "cannot be read")],
)
async def test_status_says_of_an_agent_of_another_host_that_it_cannot_be_reached(
    address: str, says: str, served: Site
) -> None:
    async with served.client("trainer", 0, timeout=SECONDS) as client:
        status = await client.status()
        async with await Store.open(status["agent"]["redis"], Settings.from_env().namespace, timeout=SECONDS) as store:
            far = {"host": "far", "host_name": "far-away", "address": address, "public_key": ""}
            record = AgentRecord(id="feed", device="cpu", pid=4711, started_at=1.0, version="old", **far)
            await store.agents.publish(record)
            status = await client.status()
            await store.agents.withdraw()
    (line,) = [line for line in status["agents"] if line["id"] == "feed"]
    assert (line["host"], line["version"], line["links"][0]["link"]) == ("far-away", "old", "none")
    assert says in line["links"][0]["trouble"]


async def test_a_wrong_pair_name_can_be_recognised_while_its_worker_waits(served: Site, pair: str) -> None:
    right, wrong = f"{pair[:80]}.weights", f"{pair[:80]}.weigths"  # codespell:ignore weigths
    async with served.client("trainer", 0, timeout=SECONDS) as one, served.client("inference", 0) as two:
        calls = [
            asyncio.ensure_future(one.init_pair(right, "trainer", "inference", 1, rank=0, timeout=SECONDS)),
            asyncio.ensure_future(two.init_pair(wrong, "inference", "trainer", 1, rank=0, timeout=SECONDS)),
        ]
        try:
            found: dict[str, dict[str, Any]] = {}
            while not all(found.get(name, {}).get("hint") for name in (right, wrong)):
                found = {line["pair"]: line for line in (await one.status())["pairs"]}
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    assert found[wrong]["waits"] >= 0 and found[wrong]["waiting_for"] == {"trainer": [0]}
    assert f"is one of them meant? pair '{right}'" in found[wrong]["hint"]
    assert f"'{wrong}'" in found[right]["hint"]


@pytest.mark.ways(Way.TCP)
async def test_status_says_why_a_link_is_lost(rough: Site, pair: str) -> None:
    async with rough.client("trainer", 0, timeout=SECONDS) as one, rough.client("inference", 0, timeout=SECONDS) as two:
        await asyncio.gather(meet(one, pair, "trainer", "inference"), meet(two, pair, "inference", "trainer"))
        far = (await two.status())["agent"]["pid"]
        send_signal(far, signal.SIGSTOP)
        try:
            with pytest.raises(PeerLostError):
                await one.register_tensors("b", {}, pair_name=pair)
            (line,) = [line for line in (await one.status())["agents"] if line["pid"] == far]
        finally:
            os.kill(far, signal.SIGCONT)
    (link,) = line["links"]
    assert link["link"] == "failed" and "its link was lost: it missed 3 beats" in link["trouble"]
