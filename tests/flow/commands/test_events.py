"""``etha events`` names cause and culprit of what really failed, and tells what went well, on every host."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.cli import main
from etha.config import Settings
from etha.errors import EthaError, PeerLostError, RedisUnavailableError, RegistrationError, RendezvousTimeoutError
from etha.events import Follower, Gathered, gather, line, parse_since
from etha.observe.history import Happening
from tests.flow.errors.test_errors_transfer import BIG, tear
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sides import Member, Sides
from tests.flow.sites import Site, environment, open_site, private_directory
from tests.flow.ways import Way
from tests.processes import send_signal
from tests.unit.store.server import served

SECONDS = 60.0
local = pytest.mark.ways(Way.LOCAL)
both = pytest.mark.ways(Way.LOCAL, Way.TCP)


async def shown(site: Site, place: str = "a", *, failed: bool = False) -> Gathered:
    """What `etha events` finds at a place."""
    with environment(site.at(place)):
        settings = Settings.from_env()
    return await gather(settings, since=0.0, failed=failed, timeout=SECONDS)


async def the_failure(site: Site, where: str, *patterns: str, place: str = "a") -> Happening:
    """The one failure about ``where`` whose line matches all patterns."""
    found = [one for one in (await shown(site, place, failed=True)).happenings if one.fits(where)]
    lines = [line(one) for one in found]
    fits = [one for one, text in zip(found, lines, strict=True) if all(re.search(p, text) for p in patterns)]
    assert fits, f"none says {patterns}:\n" + "\n".join(lines)
    return fits[-1]


async def simple(sides: Sides, size: int = 64, **options: Any) -> dict[Member, Any]:
    await sides.meet(device_mesh=(1,), placements=[Replicate()])
    return await sides.register("b", lambda side, rank: ({"w": torch.ones(size)}, options))


async def send(handles: dict[Member, Any], version: int) -> None:
    await asyncio.gather(
        handles["trainer", 0].transfer("send", version=version), handles["inference", 0].transfer("recv")
    )


# ---- what went well -----------------------------------------------------------------------------


@both
async def test_transfers_are_told_with_their_phases_and_by_whom(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        for version in (7, 8):
            await send(handles, version)
        found = [one for one in (await shown(site)).happenings if one.fits(f"{pair}/b") and "committed" in one.text]
    agents = {one.details["ranks"][0][0] if len(one.details["ranks"]) == 1 else "both" for one in found}
    assert agents == ({"both"} if site.way is Way.LOCAL else {"trainer", "inference"})
    assert len(found) == 2 * len(agents)
    for one in found:
        assert re.search(r"transfer [12] \(version [78]\) from trainer to inference committed: 256 B", one.text)
        details = one.as_json()
        assert details["outcome"] == "committed" and details["payload"]["whole"] == 256
        assert set(details["phases"]) >= {"wait", "book", "move", "commit"}
        json.dumps(details)


# ---- what failed --------------------------------------------------------------------------------


@both
async def test_a_deadline_names_who_was_missing(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        with pytest.raises(EthaError):
            await handles["inference", 0].transfer("recv", timeout=0.2)
        place = site.way.place("inference", 0)
        one = await the_failure(
            site,
            f"{pair}/b",
            "its deadline passed",
            r"\[transfer_timeout\]",
            r"because of trainer rank 0 \(",
            place=place,
        )
        assert "waiting for the others to call" in one.text
        [culprit] = one.details["culprits"]
        assert culprit["pid"] == os.getpid()


@both
async def test_a_cancelled_call_is_named(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        call = asyncio.ensure_future(handles["inference", 0].transfer("recv"))
        await asyncio.sleep(0)
        await sides.clients["inference", 0].status()
        call.cancel()
        await asyncio.wait([call])
        place = site.way.place("inference", 0)
        await the_failure(site, f"{pair}/b", "it was cancelled", "because of inference rank 0", place=place)


@local
async def test_a_torn_target_is_told(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides, size=BIG)
        await sides.move(handles)
        if not await tear(handles["trainer", 0], handles["inference", 0]):
            pytest.skip("this machine moves 64 MiB before anybody can cancel it")
        one = await the_failure(
            site, f"{pair}/b", "was aborted", "its deadline passed", "because of trainer rank 0", "may be half-written"
        )
        assert "it ended while moving bytes" in one.text and one.details["ended_in"] == "move"
        assert one.details["phases"]["commit"] == 0


@local
async def test_a_wrong_pair_name_and_who_did_not_come(site: Site, pair: str) -> None:
    async with site.client("trainer", 0) as client:
        with pytest.raises(RendezvousTimeoutError):
            await client.init_pair(pair, "trainer", "inference", 1, rank=0, timeout=0.3)
    await the_failure(site, pair, r"\[rendezvous_timeout\]", "missing: everybody of inference")


@local
async def test_a_refused_registration_is_told(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        refused = await sides.register("b", lambda side, rank: ({"w": torch.ones(4 if side == "trainer" else 5)}, {}))
        assert all(isinstance(error, RegistrationError) for error in refused.values())
    await the_failure(site, f"{pair}/b", r"\[registration\]", "'w'", "shape")


def trainer(pair: str) -> None:
    with etha.TensorBusClient(timeout=SECONDS) as client:
        client.init_pair(pair, "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
        client.register_tensors("b", {"w": torch.ones(64)}, pair_name=pair)
        tell("registered")
        wait_for("the end")


@both
async def test_a_peer_that_was_killed_is_named_with_its_process(guests: Job, site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        worker = guests.start(trainer, pair, at=("trainer", 0))
        await sides.init(("inference", 0), device_mesh=(1,), placements=[Replicate()])
        handle = await sides.clients["inference", 0].register_tensors("b", {"w": torch.zeros(64)}, pair_name=pair)
        await asyncio.to_thread(worker.expect, "registered")
        waiting = asyncio.ensure_future(handle.transfer("recv"))
        await sides.clients["inference", 0].status()
        worker.kill()
        with pytest.raises(PeerLostError) as caught:
            await waiting
        assert caught.value.culprits == (("trainer", 0),)
        with pytest.raises(PeerLostError) as later:
            await handle.transfer("recv")
        assert later.value.culprits == (("trainer", 0),)
        await the_failure(site, pair, rf"process {worker.pid}.* died", "trainer rank 0")
        place, because = site.way.place("inference", 0), rf"because of trainer rank 0 \(.*process {worker.pid}\)"
        await the_failure(site, f"{pair}/b", r"\[peer_lost\]", because, place=place)


@both
async def test_a_peer_that_closed_its_client_is_named(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        waiting = asyncio.ensure_future(handles["inference", 0].transfer("recv"))
        await sides.clients["inference", 0].status()
        await sides.clients["trainer", 0].close()
        with pytest.raises(PeerLostError) as caught:
            await waiting
        assert caught.value.reason == "closed" and caught.value.culprits == (("trainer", 0),)
        place = site.way.place("inference", 0)
        await the_failure(site, f"{pair}/b", r"\[peer_lost\]", r"because of trainer rank 0 \(", place=place)


@local
async def test_a_receiver_that_is_stuck_is_named(guests: Job, site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        worker = guests.start(trainer, pair, at=("trainer", 0))
        await sides.init(("inference", 0), device_mesh=(1,), placements=[Replicate()])
        handle = await sides.clients["inference", 0].register_tensors("b", {"w": torch.zeros(64)}, pair_name=pair)
        await asyncio.to_thread(worker.expect, "registered")
        assert worker.pid is not None
        send_signal(worker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EthaError):
                await handle.transfer("recv", timeout=0.3)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        await the_failure(site, f"{pair}/b", rf"because of trainer rank 0 \(.*process {worker.pid}\)")
        await handle.close()
        worker.go("the end")


@local
async def test_an_agent_that_was_killed_is_told_by_the_next_one(rough: Site, pair: str) -> None:
    async with Sides(rough, pair) as sides:
        handles = await simple(sides)
        await send(handles, 1)
        pid = (await sides.clients["inference", 0].status())["agent"]["pid"]
        before = await shown(rough)
        assert any(one.fits(f"{pair}/b") for one in before.happenings)
        os.kill(pid, signal.SIGKILL)
        await sides.pairs["inference", 0].lost
        alone = await shown(rough)  # no agent runs
        assert "no agent here could be asked" in alone.notes[0]
        assert any(one.fits(f"{pair}/b") and "committed" in one.text for one in alone.happenings)
        await sides.meet(device_mesh=(1,), placements=[Replicate()], timeout=SECONDS)
        await the_failure(rough, "", "ended without leaving", rf"process {pid}\b")


async def test_redis_that_is_away_is_told(pair: str) -> None:
    with private_directory() as directory, served(directory) as server, open_site(Way.LOCAL, server.url) as site:
        async with site.client("trainer", 0) as client:
            await client.status()
            server.signal(signal.SIGSTOP)
            try:
                with pytest.raises(RedisUnavailableError):
                    await client.init_pair(pair, "trainer", "inference", 1, rank=0, timeout=1.0)
                await the_failure(site, pair, r"\[redis_unavailable\]")
            finally:
                server.signal(signal.SIGCONT)


# ---- other hosts, other agents ------------------------------------------------------------------


@pytest.mark.ways(Way.TCP)
async def test_a_host_tells_what_happened_on_the_other(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        with pytest.raises(EthaError):
            await handles["inference", 0].transfer("recv", timeout=0.2)
        await the_failure(site, f"{pair}/b", "its deadline passed", "because of trainer rank 0", place="a")
        assert not (await shown(site, "a")).notes


async def test_failures_of_an_agent_on_a_host_of_the_same_name_are_told(pair: str) -> None:
    """Two users of one host, or containers that share a host name: one Redis, no link."""
    with (
        private_directory() as directory,
        served(directory) as server,
        open_site(Way.LOCAL, server.url) as mine,
        open_site(Way.LOCAL, server.url) as other,
    ):
        async with mine.client("trainer", 0) as client, Sides(other, pair) as sides:
            await client.status()
            with environment(mine.at("a")):
                settings = Settings.from_env()
            with Follower(settings) as follower:
                lines = follower.follow(await gather(settings, since=0.0, failed=False, timeout=SECONDS))
                handles = await simple(sides)
                with pytest.raises(EthaError):
                    await handles["inference", 0].transfer("recv", timeout=0.2)
                async with asyncio.timeout(SECONDS):
                    async for one in lines:
                        if "its deadline passed" in one.text:
                            break
                await lines.aclose()
            for site in (mine, other):
                gathered = await shown(site, failed=True)
                found = [one for one in gathered.happenings if one.fits(f"{pair}/b", failed=True)]
                assert len(found) == 1 and "its deadline passed" in found[0].text
            [note] = (await shown(mine)).notes
            assert re.search("agent [0-9a-f]{16} of cpu on host .*: .*ask there", note)


@local
async def test_an_agents_lines_have_the_name_that_it_gives_its_host(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        await send(handles, 1)
        before = await shown(site)
        with environment(site.at("a") | {"ETHA_HOST_ID": "elsewhere"}):
            named = await gather(Settings.from_env(), since=0.0, failed=False, timeout=SECONDS)
    assert {one.host for one in before.happenings} == {os.uname().nodename, ""}
    assert {one.host for one in named.happenings} == {os.uname().nodename, ""}
    texts = [one.text for one in named.happenings if one.fits(f"{pair}/b") and "committed" in one.text]
    assert len(texts) == 1, "told by the agent's file, and not again by Redis"


@local
async def test_following_shows_what_happens_next(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        with environment(site.at("a")):
            settings = Settings.from_env()
        with Follower(settings) as follower:
            gathered = await gather(settings, since=0.0, failed=False, timeout=SECONDS)
            lines = follower.follow(gathered)
            await send(handles, 41)
            async with asyncio.timeout(SECONDS):
                async for one in lines:
                    if one.fits(f"{pair}/b") and "version 41" in one.text:
                        break
            await lines.aclose()


# ---- the command --------------------------------------------------------------------------------


@both
async def test_the_command_prints_lines_and_json(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["etha", "events", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out.splitlines()

    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        await sides.move(handles)
        with pytest.raises(EthaError):
            await handles["inference", 0].transfer("recv", timeout=0.2)
        with environment(site.at("a")):
            lines = await asyncio.to_thread(run, pair)
            found = [json.loads(text) for text in await asyncio.to_thread(run, f"{pair}/b", "--json", "--since", "1h")]
            failures = await asyncio.to_thread(run, f"{pair}/b", "--failed")
    assert any("joined" in text for text in lines)
    assert len([text for text in lines if "transfer 1" in text and "committed: 256 B" in text]) == 1
    agents = 1 if site.way is Way.LOCAL else 2
    assert len([one for one in found if one.get("seq") == 1]) == agents, "each agent's record, with its phases"
    assert {one.get("outcome") for one in found} >= {"committed", "withdrawn"}
    assert len(failures) == 1 and "its deadline passed" in failures[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600.0), ("2h", 7200.0), ("1d", 86400.0), ("1.5 h", 5400.0), ("30s", 30.0)]
)
def test_since_takes_ages(text: str, seconds: float) -> None:
    assert parse_since(text, 1e9) == 1e9 - seconds


def test_since_takes_times() -> None:
    assert parse_since("2026-01-31T14:00+00:00", 0.0) == 1769868000.0
    assert abs(parse_since("1970-01-02", 0.0) - 86400) <= 14 * 3600
    today = datetime(2026, 1, 31, 20, 15)
    assert parse_since("14:00", today.timestamp()) == today.replace(hour=14, minute=0).timestamp()
    for wrong in ("", "yesterday", "10", "25:00", "-5m"):
        with pytest.raises(etha.ConfigError, match="--since"):
            parse_since(wrong, time.time())


@local
async def test_a_name_without_records_is_answered_with_those_that_have_some(site: Site, pair: str) -> None:
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        await send(handles, 1)
        await shown(site)
    said = await command(site, "weights7")
    assert said.stdout == "" and said.returncode == 0
    assert "nothing is recorded about weights7 since 1d, but about " in said.stderr and f"{pair}/b" in said.stderr
    said = await command(site, "--since", "0s", "--failed")
    assert "no failure is recorded since 0s; --since 7d looks further back" in said.stderr


async def command(site: Site, *words: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    """``etha events`` with these words, at place a; ``shell``: what follows in the pipe."""
    line = f"set -o pipefail; exec {sys.executable} -m etha events {' '.join(words)} {shell}"
    return await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", line],
        env={**os.environ, **site.at("a")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@local
async def test_following_ends_with_its_reader(site: Site, pair: str) -> None:
    """Also if nothing happens that it could print, and with no word of it."""
    async with Sides(site, pair) as sides:
        handles = await simple(sides)
        await send(handles, 1)
        await shown(site)
        for words in (("--follow",), ("--json", "--follow"), ()):
            said = await command(site, *words, shell="| head -1")
            assert (said.returncode, said.stderr, said.stdout.count("\n")) == (0, "", 1)
