"""The metrics of real agents: asked for by an option or a variable, and scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from torch.distributed.tensor import Replicate

import etha
from etha.errors import ConfigError
from etha.status import status_tables
from tests.flow.commands.running import agent
from tests.flow.commands.running import etha as command
from tests.flow.sides import Sides
from tests.flow.sites import open_site
from tests.flow.ways import Way

ROUNDS = 3


def page(address: str) -> dict[tuple[str, str], float]:
    """What an agent shows: name and labels -> value."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(one.name, " ".join(one.labels.values())): one.value for family in families for one in family.samples}


def test_an_agent_in_the_foreground_has_metrics_if_it_is_asked_for_them(runtime: Path) -> None:
    with agent("--metrics", "127.0.0.1:0"):
        address = json.loads(command("status", "--json").stdout)["agent"]["metrics"]
        shown = page(address)
        assert shown["etha_redis_up", ""] == 1 and shown["etha_sessions", ""] == 0
        assert shown["etha_agent_info", "cpu default"] == 1 and shown["etha_lane_threads", ""] >= 1


def test_an_address_that_cannot_be_one_ends_the_agent_before_it_starts(runtime: Path) -> None:
    shown = command("agent", "--metrics", "9464")
    assert shown.returncode == 1 and "--metrics '9464' is not HOST:PORT with a port up to 65535" in shown.stderr
    assert "PORT+1" not in shown.stderr


async def test_a_client_checks_the_variable_before_it_starts_an_agent(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETHA_METRICS", "somewhere")
    with pytest.raises(ConfigError, match="ETHA_METRICS='somewhere' is not HOST:PORT"):
        async with etha.AsyncTensorBusClient(timeout=60.0) as client:
            await client.status()
    assert not (runtime / "default" / "cpu.log").exists()


async def test_status_shows_where_the_agents_of_other_hosts_have_their_metrics(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_site(Way.TCP) as site:
        plain = site.at
        here = site.client("inference", 0, timeout=60.0)
        monkeypatch.setattr(site, "at", lambda place: {**plain(place), "ETHA_METRICS": "127.0.0.1:0"})
        async with here, site.client("trainer", 0, timeout=60.0) as there:
            theirs = (await there.status())["agent"]["metrics"]
            report = await here.status()
    assert re.fullmatch(r"127\.0\.0\.1:\d+", theirs)
    assert {line["host"]: line["metrics"] for line in report["agents"]} == {
        Way.TCP.host("a"): theirs,
        Way.TCP.host("b"): "",
    }
    Console(file=sys.stdout, width=300).print(status_tables(report))
    assert theirs in capsys.readouterr().out


async def test_a_port_that_is_taken_is_a_warning_and_not_the_end(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("ETHA_METRICS", f"127.0.0.1:{taken.getsockname()[1]}")
        async with etha.AsyncTensorBusClient(timeout=60.0) as client:
            shown = (await client.status())["agent"]["metrics"]
        assert re.fullmatch(r"none: 127.0.0.1:\d+ cannot be listened on \(.*in use.*\)", shown)
        log = await asyncio.to_thread((runtime / "default" / "cpu.log").read_text)
        assert " WARNING cpu " in log and "this agent has no metrics" in log and "Traceback" not in log


@contextmanager
def prometheus(room: Path, targets: list[str], rules: Sequence[Path] = ()) -> Iterator[str]:
    """A Prometheus that scrapes ``targets`` every second and evaluates these files of rules; the address of its API."""
    config = room / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(path) for path in rules],
                "scrape_configs": [{"job_name": "etha", "static_configs": [{"targets": targets}]}],
            }
        )
    )
    program = shutil.which("prometheus")
    assert program is not None
    words = [program, f"--config.file={config}", f"--storage.tsdb.path={room / 'data'}"]
    words += ["--web.listen-address=127.0.0.1:0", "--log.format=json"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said, address = [], ""
            for line in process.stderr:
                said.append(line)
                found = json.loads(line)
                address = found.get("address", address) if found.get("msg") == "Listening on" else address
                if "ready to receive web requests" in found.get("msg", ""):
                    break
            else:
                pytest.fail("".join(said))
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=60)


def ask(api: str, query: str) -> dict[str, float]:
    """Instance -> value of an instant query."""
    address = f"http://{api}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        found = json.load(answer)
    return {one["metric"].get("instance", ""): float(one["value"][1]) for one in found["data"]["result"]}


async def until(api: str, query: str, expected: dict[str, float]) -> None:
    """Ask until the answer is as expected: a scrape has come in between."""
    deadline, found = time.monotonic() + 90, {}
    while found != expected:
        assert time.monotonic() < deadline, f"{query}: {found}, not {expected}"
        found = await asyncio.to_thread(ask, api, query)


@pytest.mark.needs("prometheus")
async def test_a_real_prometheus_scrapes_two_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str) -> None:
    with open_site(Way.TCP) as site:
        plain = site.at
        monkeypatch.setattr(site, "at", lambda place: {**plain(place), "ETHA_METRICS": "127.0.0.1:0"})
        async with Sides(site, pair, timeout=60.0) as sides:
            await sides.meet(device_mesh=(1,), placements=[Replicate()])
            handles = await sides.register("b", lambda side, rank: ({"w": torch.ones(1000)}, {}))
            for _ in range(ROUNDS):
                await sides.move(handles)
            where: dict[str, str] = {}
            for (side, _), client in sides.clients.items():
                where[side] = (await client.status())["agent"]["metrics"]
            assert len(set(where.values())) == 2
            with prometheus(tmp_path, sorted(where.values())) as api:
                await until(api, "up", dict.fromkeys(where.values(), 1.0))
                await until(
                    api, 'etha_transfers_total{outcome="committed"}', dict.fromkeys(where.values(), float(ROUNDS))
                )
                await until(api, "etha_sent_bytes_total", {where["trainer"]: 4000.0 * ROUNDS, where["inference"]: 0.0})
                await until(api, "etha_received_bytes_total > 0", {where["inference"]: 4000.0 * ROUNDS})
                await until(api, 'etha_moved_bytes_total{way="tcp"}', dict.fromkeys(where.values(), 4000.0 * ROUNDS))
                await until(api, 'etha_links{state="open"}', dict.fromkeys(where.values(), 1.0))
                await until(api, "etha_redis_up", dict.fromkeys(where.values(), 1.0))
                await until(
                    api,
                    'etha_transfer_phase_seconds_count{phase="move"}',
                    dict.fromkeys(where.values(), float(ROUNDS)),
                )


async def test_replicas_that_are_behind(monkeypatch: pytest.MonkeyPatch, pair: str) -> None:
    """One that holds the newest version, one that has not asked for it, until it does."""
    options: dict[str, Any] = {"device_mesh": (1,), "placements": {"w": [Replicate()]}}
    options |= {"rank": 0, "expected_world_size": 1, "timeout": 60}
    with open_site(Way.TCP) as site:
        plain = site.at
        monkeypatch.setattr(site, "at", lambda place: {**plain(place), "ETHA_METRICS": "127.0.0.1:0"})
        async with (
            site.client("trainer", 0) as trainer,
            site.client("inference", 0) as one,
            site.client("inference", 0) as two,
        ):
            publication = await trainer.publish(pair, {"w": torch.ones(100)}, **options)
            first, second = [
                await client.subscribe(pair, {"w": torch.zeros(100)}, subscriber=name, atomic=True, **options)
                for client, name in ((one, "one"), (two, "two"))
            ]
            agent = (await one.status())["agent"]["metrics"]
            assert [await shown_of(agent, name) for name in REPLICAS] == [2, 0, 0]
            await publication.put(1)
            await asyncio.gather(first.next(), second.next())
            assert [await shown_of(agent, name) for name in REPLICAS] == [2, 0, 0]
            await publication.put(2)
            await first.next()
            assert [await shown_of(agent, name) for name in REPLICAS[:2]] == [2, 1]
            before = await shown_of(agent, REPLICAS[2])
            assert 0 < before < await shown_of(agent, REPLICAS[2])
            await second.next()
            assert [await shown_of(agent, name) for name in REPLICAS] == [2, 0, 0]
            assert await shown_of((await trainer.status())["agent"]["metrics"], "etha_subscribers") == 0
            await second.close()
            assert await shown_of(agent, "etha_subscribers") == 1


REPLICAS = ("etha_subscribers", "etha_subscribers_behind", "etha_subscriber_oldest_lag_seconds")


async def shown_of(address: str, name: str) -> float:
    """The value of a metric without labels on an agent's page."""

    def ask() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    page = await asyncio.to_thread(ask)
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))
