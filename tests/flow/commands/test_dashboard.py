"""The page of ``etha dashboard``: in a real Chromium over real agents, and what its server refuses.

ETHA_TEST_PICTURES=DIR keeps a picture of each story.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from torch.distributed.tensor import Replicate

from etha.config import Settings
from etha.dashboard.server import serving
from etha.errors import ConfigError
from tests.flow.commands.browser import Page, chromium
from tests.flow.commands.running import etha as command
from tests.flow.publishing.fleets import Cut, Fleet
from tests.flow.sides import Sides
from tests.flow.sites import Site, environment, open_site
from tests.flow.ways import Way
from tests.groups.replicas import replicas

PICTURES = os.environ.get("ETHA_TEST_PICTURES", "")
#: What another job may call a version. As markup it would load a picture, fail, and run a script.
NASTY = "<img src=x onerror=\"document.title='hacked'\">"


@contextlib.asynccontextmanager
async def dashboard(variables: dict[str, str]) -> AsyncIterator[str]:
    """A dashboard in this process with these settings; its URL."""
    with environment(variables):
        settings = Settings.from_env()
    async with serving(settings, host="127.0.0.1", port=0) as url:
        yield url


async def keep(page: Page, name: str) -> None:
    if PICTURES:
        await page.picture(Path(PICTURES, f"{name}.png"))


async def fits(page: Page) -> bool:
    """Whether nobody has to scroll sideways."""
    found: bool = await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    return found


async def registered(sides: Sides, **options: Any) -> dict[Any, Any]:
    await sides.meet(placements=[Replicate()], **{side: {"device_mesh": (n,)} for side, n in sides.worlds.items()})
    return await sides.register("policy", lambda side, rank: ({"w": torch.ones(1 << 18)}, options))


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
async def test_the_page_shows_a_pair_of_two_hosts_and_its_transfers(width: int, dark: bool, pair: str) -> None:
    with open_site(Way.TCP) as site:
        async with Sides(site, pair, timeout=60.0) as sides, dashboard(site.at("a")) as url, chromium() as browser:
            handles = await registered(sides)
            for version in (1, NASTY):
                await sides.move(handles, trainer={"version": version})
            page = await browser.open(url, width=width, dark=dark)
            await page.shows(pair, "live", "formed", "trainer 1/1", "1.05 MB", "host-a/cpu (here)", NASTY, "open")
            # A later version comes by itself.
            await sides.move(handles, trainer={"version": "third"})
            await page.shows("third")
            assert await page.evaluate("document.title") == "Etha default"
            assert await page.evaluate("document.querySelectorAll('main img').length") == 0
            parts = await page.evaluate("document.querySelectorAll('#transfers .bar span').length")
            rows = await page.evaluate("document.querySelectorAll('#transfers tbody tr').length")
            assert rows == 3 and parts >= 2 * rows
            assert await fits(page)
            ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground))) < 200) is dark, ground
            await keep(page, f"pair-{width}{'-dark' if dark else ''}")
            assert page.complaints == []


@pytest.mark.needs("chromium")
async def test_the_page_says_whom_a_transfer_waits_for(pair: str) -> None:
    with open_site(Way.LOCAL) as site:
        async with Sides(site, pair, timeout=60.0, inference=2) as sides, chromium() as browser:
            handles = await registered(sides)
            calls = [
                asyncio.ensure_future(handles["trainer", 0].transfer("send")),
                asyncio.ensure_future(handles["inference", 0].transfer("recv")),
            ]
            async with dashboard(site.at("a")) as url:
                page = await browser.open(url)
                await page.shows(
                    "Who waits for whom", f"{pair}/policy", "a transfer waits for calls of inference rank 1"
                )
                assert (await page.evaluate("document.title")).startswith("(1 wait)")
                await keep(page, "stuck")
                await asyncio.gather(handles["inference", 1].transfer("recv"), *calls)
                await page.becomes("document.getElementById('waiting').hidden")
                assert page.complaints == []
            # The server is gone: what is shown is not passed off as new.
            await page.shows("nothing new for")


@pytest.mark.needs("chromium")
async def test_the_page_shows_a_group_that_loses_a_member(runtime: Path) -> None:
    with replicas(runtime, timeout=60.0) as job:
        ranks = {name: job.start(name, pause=0.01) for name in "abc"}
        for one in ranks.values():
            await asyncio.to_thread(one.until, lambda log: log.size == 3)
        async with dashboard({"ETHA_RUNTIME_DIR": str(runtime)}) as url, chromium() as browser:
            page = await browser.open(url)
            await page.shows("Elastic groups", "dp", "member", f"pid {ranks['c'].pid}")
            await keep(page, "group-before")
            await asyncio.to_thread(job.kill, ranks["c"])
            for name in "ab":
                await asyncio.to_thread(ranks[name].until, lambda log: log.size == 2 and log.committed)
            lost = ranks["c"].pid
            await page.becomes(f"!document.getElementById('groups').innerText.includes('pid {lost}')")
            await page.shows(f"pid {ranks['a'].pid}", f"pid {ranks['b'].pid}", "formed")
            await keep(page, "group-after")
            assert page.complaints == []
        await asyncio.to_thread(job.end, ranks["a"], ranks["b"])


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_the_page_shows_a_fleet_of_eight(width: int, dark: bool, pair: str) -> None:
    with open_site(Way.TCP) as site:
        places = {"trainer": "a"} | {f"replica-{number}": "ab"[number % 2] for number in range(8)}
        async with (
            Fleet(site, pair, {"w": (64, 64)}, where=lambda side, _: places[side]) as fleet,
            dashboard(site.at("a")) as url,
            chromium() as browser,
        ):
            page = await browser.open(url, width=width, dark=dark)
            await page.shows("Publications", "There is none.")
            trainer = await fleet.publish(Cut())
            replicas = [await fleet.subscribe(f"replica-{number}", Cut(), atomic=True) for number in range(8)]
            await trainer.put(1)
            for one in replicas:
                await one.next()
            await page.shows(pair, "by trainer: newest version 1, number 1", "replica-7", "current")
            await page.becomes("document.querySelectorAll('#publications tbody tr').length === 8")
            await trainer.put(2)
            for one in replicas[:5]:
                await one.next()
            await replicas[7].close()
            await page.shows("newest version 2, number 2", "the publisher keeps 2, 1", "behind")
            await page.becomes("document.querySelectorAll('#publications tbody tr').length === 7")
            assert await fits(page)
            await keep(page, f"fleet-{width}")
            assert page.complaints == []


@pytest.mark.needs("chromium")
async def test_without_an_agent_the_page_says_so(runtime: Path) -> None:
    async with dashboard({"ETHA_RUNTIME_DIR": str(runtime)}) as url, chromium() as browser:
        page = await browser.open(url, width=390)
        await page.shows("no agent is running at", "No pair is known.")
        assert await fits(page) and page.complaints == []


async def test_the_stream_comes_without_delay_and_only_while_somebody_reads(served: Site, pair: str) -> None:
    async with Sides(served, pair, timeout=60.0) as sides, dashboard(served.at("a")) as url:
        await registered(sides)
        async with aiohttp.ClientSession() as client:
            for _ in range(2):
                async with client.get(f"{url}stream") as answer:
                    assert answer.headers["Content-Type"].startswith("text/event-stream")
                    async for line in answer.content:
                        if line.startswith(b"data: "):
                            shown = json.loads(line[6:])
                            break
                assert pair in {one["pair"] for one in shown["pairs"]} and shown["namespace"] == "default"


async def test_whoever_has_no_token_sees_nothing_and_nobody_can_write(runtime: Path) -> None:
    async with dashboard({"ETHA_RUNTIME_DIR": str(runtime)}) as url, aiohttp.ClientSession() as client:
        root, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/([\w-]{32})/", url).groups()  # type: ignore[union-attr]
        for path in ("/", "/wrong/", "/wrong/stream", f"/{token[:-1]}/", "/page.js", "/\u00e9/"):
            async with client.get(root + path) as answer:
                assert answer.status == 404 and "script-src 'self'" in answer.headers["Content-Security-Policy"]
                assert token not in await answer.text()
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with client.request(method, url) as answer:
                assert answer.status == 405
        async with client.get(f"{url}../../etc/passwd") as answer:
            assert answer.status == 404
        async with client.get(url) as answer:
            text = await answer.text()
            policy = answer.headers["Content-Security-Policy"]
        assert answer.status == 200 and "<script" in text and "unsafe" not in policy and "default-src 'none'" in policy
        assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["Cache-Control"] == "no-store"
        # Everything that the page loads is here: it works without a network.
        for name in re.findall(r'(?:src|href)="([^"]+)"', text):
            async with client.get(url + name) as answer:
                assert answer.status == 200, name
                assert "http" not in (await answer.text()).replace("http://www.w3.org/2000/svg", "")


def test_the_command_prints_its_address_and_ends_when_it_is_told_to(runtime: Path) -> None:
    words = [sys.executable, "-m", "etha", "dashboard", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url), url + process.stderr.read()
            host, port = "127.0.0.1", int(re.search(r":(\d+)/", url).group(1))  # type: ignore[union-attr]
            with socket.create_connection((host, port)) as reader:  # a stream that is open does not hold it up
                path = url.partition(str(port))[2]
                reader.sendall(f"GET {path}stream HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert reader.recv(100).startswith(b"HTTP/1.1 200")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(runtime: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = command("dashboard", "--port", str(taken.getsockname()[1]))
    assert shown.returncode == 1 and "config: the dashboard cannot listen on" in shown.stderr
    assert "--port 0" in shown.stderr


def test_without_aiohttp_the_error_names_the_extra(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(\"No module named 'aiohttp'\", name='aiohttp')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "etha", "dashboard", "--port", "0"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode == 1 and "pip install 'sub-etha[dashboard]'" in done.stderr and "Traceback" not in done.stderr
    )


async def test_a_name_that_is_not_of_this_machine_is_an_error(runtime: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        async with serving(Settings.from_env(), host="203.0.113.1", port=0):
            pass
