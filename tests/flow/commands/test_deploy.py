"""Files of deploy/: what Prometheus and Grafana ask is answered by real agents, and scripts run as they stand there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from etha.errors import EthaError
from tests.flow.commands.test_metrics import ask, prometheus
from tests.flow.sides import Sides
from tests.flow.sites import open_site
from tests.flow.ways import Way

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
GRAFANA = json.loads((DEPLOY / "grafana" / "etha.json").read_text(encoding="utf-8"))
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
SECONDS = 90
#: Files that a page of the docs has, too: page, language of its block, and which of those blocks.
ON_PAGES = {
    "slurm/etha-node.sh": ("slurm", "bash", 0),
    "slurm/redis.sbatch": ("slurm", "bash", 1),
    "slurm/trainer.sbatch": ("slurm", "bash", 2),
    "slurm/inference.sbatch": ("slurm", "bash", 3),
    "slurm/both.sbatch": ("slurm", "bash", 5),
    "kubernetes/redis.yaml": ("kubernetes", "yaml", 0),
    "kubernetes/inference.yaml": ("kubernetes", "yaml", 1),
    "kubernetes/network-policy.yaml": ("kubernetes", "yaml", 2),
    "kubernetes/sidecar.yaml": ("kubernetes", "yaml", 4),
    "kubernetes/daemonset.yaml": ("kubernetes", "yaml", 5),
}


@pytest.mark.parametrize("name", ON_PAGES)
def test_a_file_that_is_on_a_page_is_the_same_there(name: str) -> None:
    page, language, number = ON_PAGES[name]
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert (DEPLOY / name).read_text(encoding="utf-8") == blocks[number], f"docs/{page}.md and deploy/{name} differ"


def test_every_file_is_in_the_table_that_says_what_was_run() -> None:
    table = (DEPLOY / "README.md").read_text(encoding="utf-8")
    files = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()}
    files -= {"README.md", "requirements.txt", "check.sh"}
    assert {name for name in files if f"`{name}`" not in table and f"`{Path(name).parent}/*" not in table} == set()


def queries() -> list[tuple[str, str]]:
    """Title of the panel and query of everything that Grafana's file asks, with its variables replaced."""
    found = []
    for panel in GRAFANA["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "30s").replace("$job", "etha").replace("$instance", ".*")
            assert "$" not in text
            found.append((panel["title"], text))
    return found


def get(api: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{api}/api/v1/{path}", timeout=60) as answer:
        return json.load(answer)["data"]


@pytest.mark.needs("prometheus")
async def test_every_query_and_every_alert_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    with open_site(Way.TCP) as site:
        plain = site.at
        monkeypatch.setattr(site, "at", lambda place: {**plain(place), "ETHA_METRICS": "127.0.0.1:0"})
        async with Sides(site, pair, timeout=60.0) as sides:
            await sides.meet(device_mesh=(1,), placements=[Replicate()])
            handles = await sides.register("b", lambda side, rank: ({"w": torch.ones(1000)}, {}))
            with pytest.raises(EthaError):  # a counter of failures has no series before the first
                await handles["inference", 0].transfer("recv", timeout=0.2)
            targets = sorted({(await client.status())["agent"]["metrics"] for client in sides.clients.values()})
            with prometheus(tmp_path, targets, [ALERTS]) as api:
                open_questions, deadline = dict.fromkeys(queries()), time.monotonic() + SECONDS
                while open_questions:  # transfers go on, because a rate needs two scrapes that differ
                    assert time.monotonic() < deadline, f"nothing answers {list(open_questions)}"
                    await sides.move(handles)
                    for title, text in list(open_questions):
                        if await asyncio.to_thread(ask, api, text):
                            del open_questions[title, text]
                (group,) = (await asyncio.to_thread(get, api, "rules"))["groups"]
                while any(rule["health"] == "unknown" for rule in group["rules"]):
                    assert time.monotonic() < deadline, group
                    (group,) = (await asyncio.to_thread(get, api, "rules"))["groups"]
                assert {rule["name"]: rule["health"] for rule in group["rules"] if rule["health"] != "ok"} == {}
                there = set(await asyncio.to_thread(get, api, "label/__name__/values"))
                for rule in group["rules"]:
                    named = set(re.findall(r"\b(?:etha|process)_\w+|\bup\b", rule["query"]))
                    assert named and named <= there, f"{rule['name']} asks for {sorted(named - there)}"
    assert len(group["rules"]) == 12


@pytest.mark.needs("promtool")
def test_each_alert_fires_on_what_it_is_for_and_not_on_a_healthy_agent() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yml"],
        cwd=ALERTS.parent,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = set(re.findall(r"- alert: (\w+)", ALERTS.read_text(encoding="utf-8")))
    assert names == set(re.findall(r'alertname="(\w+)"', (ALERTS.parent / "alerts.test.yml").read_text()))


def test_the_alerts_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## What to alert on")[2]
    asked = set(re.findall(r"\betha_\w+", page)) - {"etha_metrics"}
    assert asked == set(re.findall(r"\betha_\w+", ALERTS.read_text(encoding="utf-8")))


@pytest.mark.more
def test_two_jobs_of_torchrun_meet(runtime: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", DEPLOY / "torchrun" / "pair.sh"],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ETHA_IDLE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"inference rank (\d): version (\d) as it was sent", done.stdout)) == [
        (rank, version) for rank in "01" for version in "123"
    ]
