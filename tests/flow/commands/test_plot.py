"""``etha plot PAIR BATCH`` and completion, against an agent with a registered batch; and what status says of agents."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from etha import AsyncTensorBusClient
from etha.cli import app
from etha.config import Settings
from etha.errors import AgentUnavailableError, ConfigError
from tests.flow.commands.running import etha
from tests.flow.commands.test_status import both, reports
from tests.flow.sites import Site, environment

SECONDS = 60
SHELLS = ("bash", "zsh", "fish")


@asynccontextmanager
async def sent(site: Site, pair: str, batch: str) -> AsyncIterator[None]:
    """A batch of two tensors, of which version 7 has been sent."""
    async with site.client("trainer", 0, timeout=SECONDS) as one, site.client("inference", 0, timeout=SECONDS) as two:
        await asyncio.gather(meet(one, pair, "trainer", "inference"), meet(two, pair, "inference", "trainer"))
        tensors = {"a": torch.zeros(256, 4), "b": torch.zeros(16)}
        here, there = await asyncio.gather(
            one.register_tensors(batch, tensors, pair_name=pair),
            two.register_tensors(batch, {name: t.clone() for name, t in tensors.items()}, pair_name=pair),
        )
        await asyncio.gather(here.transfer("send", version=7), there.transfer("recv"))
        yield


async def meet(client: AsyncTensorBusClient, pair: str, side: str, other: str) -> None:
    await client.init_pair(pair, side, other, 1, rank=0, device_mesh=(1,), placements=[Replicate()])


async def here(site: Site, *words: str) -> None:
    """``etha WORDS`` in this process, as on the trainer's host; its errors are raised."""
    with environment(site.at(site.way.place("trainer", 0))):
        await asyncio.to_thread(app, words, standalone_mode=False)


def texts(path: Path) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


@both
async def test_a_live_batch_is_drawn_with_its_last_transfer(
    site: Site, pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batch.svg"
    async with sent(site, pair, "policy"):
        await here(site, "plot", pair, "policy", "-o", str(path))
        assert capsys.readouterr().out == f"wrote {path}\n"
        text = texts(path)
        assert f"batch policy of pair {pair}: trainer to inference" in text
        assert re.search(r"last transfer: version 7, 4.16 kB in [0-9.]+ (ms|us|s)", text), text
        assert "trainer sends" in text and "inference receives" in text and "rank 0" in text
        await here(site, "plot", pair, "policy", "-o", str(path), "--direction", "inference")
        assert "inference sends" in texts(path) and "last transfer from trainer: version 7" in texts(path)
        with pytest.raises(ConfigError, match="its sides are inference and trainer"):
            await here(site, "plot", pair, "policy", "-o", str(path), "--direction", "nobody")
        for names in ((pair, "other"), ("other", "policy")):
            with pytest.raises(ConfigError, match=f"there are, as PAIR BATCH: .*{pair} policy"):
                await here(site, "plot", *names, "-o", str(path))


async def test_drawing_a_live_batch_imports_no_torch(served: Site, pair: str, tmp_path: Path) -> None:
    code = (
        "import sys; from etha.cli import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    async with sent(served, pair, "policy"):
        command = [sys.executable, "-c", code, "plot", pair, "policy", "-o", str(tmp_path / "batch.png")]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_plot_without_an_agent_or_with_a_wrong_suffix_says_so(runtime: Path, tmp_path: Path) -> None:
    for name, error, says in (
        ("b.jpg", ConfigError, r"its name must end in \.svg, \.png, \.pdf"),
        ("b.svg", AgentUnavailableError, "no agent is running"),
    ):
        with pytest.raises(error, match=says):
            app(["plot", "p", "b", "-o", str(tmp_path / name)], standalone_mode=False)
    assert not list(tmp_path.iterdir())


def completed(
    words: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """What TAB offers at the end of ``words``, and what is written to standard error."""
    monkeypatch.setenv("_ETHA_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit) as ended:
        app([], prog_name="etha")
    assert not ended.value.code
    shown = capsys.readouterr()
    return shown.out, shown.err


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_offers_commands_and_is_silent_without_an_agent(
    shell: str, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = completed("etha st", shell, monkeypatch, capsys)
    assert "status" in out and "stop" in out and "doctor" not in out and not err
    for words in ("etha plot ", "etha plot weights ", "etha stop --device "):
        out, err = completed(words, shell, monkeypatch, capsys)
        assert not err and "Traceback" not in out and "weights" not in out
    monkeypatch.setenv("ETHA_IDLE", "never")  # a setting that cannot be read
    assert completed("etha plot ", shell, monkeypatch, capsys)[1] == ""


async def test_completion_knows_pairs_batches_and_devices(served: Site, pair: str) -> None:
    async with sent(served, pair, "policy"):

        async def offered(words: str) -> str:
            variables = {"_ETHA_COMPLETE": "complete_bash", "COMP_WORDS": words}
            done = await asyncio.to_thread(etha, **variables, COMP_CWORD=str(len(words.split(" ")) - 1))
            assert not done.stderr, done.stderr
            return done.stdout

        assert pair in (await offered(f"etha plot {pair[:8]}")).split()
        assert (await offered(f"etha plot {pair} po")).split() == ["policy"]
        assert (await offered("etha stop --device ")).split() == ["cpu"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_can_be_shown(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_ETHA_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        app([], prog_name="etha")
    assert "_ETHA_COMPLETE" in capsys.readouterr().out


def links(report: dict[str, Any]) -> dict[int, tuple[str, list[str]]]:
    """By pid: the state of the link to an agent, and the pairs that need it."""
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
                assert (pair in pairs) is (pid != mine)
            for line in report["agents"]:
                assert 0 <= line["heartbeat"] < 30 and line["version"] and line["host"]
        await here(site, "status")
        shown = " ".join(capsys.readouterr().out.split())
        assert ("agents that Redis knows" in shown) is (len(pids) > 1)
        assert ("linked: all" in shown) is (len(pids) > 1), shown


async def test_status_says_of_an_agent_on_loopback_of_another_host_that_it_cannot_be_reached(served: Site) -> None:
    from etha.store.records import AgentRecord
    from etha.store.registry import Store

    async with served.client("trainer", 0, timeout=SECONDS) as client:
        status = await client.status()
        async with await Store.open(status["agent"]["redis"], Settings.from_env().namespace, timeout=SECONDS) as store:
            far = {"host": "far", "host_name": "far-away", "address": "127.0.0.1:7000", "public_key": ""}
            record = AgentRecord(id="feed", device="cpu", pid=4711, started_at=1.0, version="old", **far)
            await store.agents.publish(record)
            status = await client.status()
            await store.agents.withdraw()
    (line,) = [line for line in status["agents"] if line["id"] == "feed"]
    assert (line["host"], line["version"], line["links"][0]["link"]) == ("far-away", "old", "none")
    assert "127.0.0.1:7000 is loopback" in line["links"][0]["trouble"]


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
