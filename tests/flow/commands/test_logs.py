"""The logs of real agents: their format, ``etha logs``, and the errors that name them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import etha
from etha.errors import ConfigError
from etha.observe.inotify import FolderWatch
from etha.observe.logfiles import logs_in
from tests.flow.commands.running import agent
from tests.flow.commands.running import etha as command

LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) \S+ ([0-9a-f]{16}|-) [a-z_.]+: .+"
)


def log_at(runtime: Path) -> Path:
    return runtime / "default" / "cpu.log"


async def started() -> dict[str, Any]:
    """What the agent that a client has just started, or found, says of itself."""
    async with etha.AsyncTensorBusClient(timeout=60.0) as client:
        return dict((await client.status())["agent"])


async def test_an_agent_has_the_log_settings_of_who_starts_it_and_says_where_it_logs(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETHA_LOG", "debug")
    monkeypatch.setenv("ETHA_LOG_FORMAT", "json")
    shown = await started()
    assert shown["log"] == str(log_at(runtime)) and command("stop").returncode == 0
    lines = [json.loads(line) for line in log_at(runtime).read_text().splitlines()]
    assert {line["device"] for line in lines} == {"cpu"} and lines[-1]["agent"] == shown["id"]
    assert {"DEBUG", "INFO"} <= {line["level"] for line in lines}
    assert not [line for line in lines if line["level"] == "DEBUG" and not line["logger"].startswith("etha")]


async def test_another_level_is_given_by_an_agent_that_nobody_needs_and_refused_by_one_in_use(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await started()
    assert all(LINE.fullmatch(line) for line in log_at(runtime).read_text().splitlines())
    monkeypatch.setenv("ETHA_LOG", "debug")
    second = await started()
    assert first["pid"] != second["pid"]
    async with etha.AsyncTensorBusClient(timeout=60.0) as client:
        await client.status()
        monkeypatch.setenv("ETHA_LOG", "warning")
        caplog.clear()
        assert (await started())["pid"] == second["pid"]
        assert "runs with ETHA_LOG=debug instead of ETHA_LOG=warning" in caplog.text
    assert command("stop").returncode == 0
    assert " DEBUG cpu " in log_at(runtime).read_text()


@pytest.mark.parametrize(("name", "value"), [("ETHA_LOG", "verbose"), ("ETHA_LOG_FORMAT", "xml")])
async def test_what_cannot_be_a_setting_starts_no_agent(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}' is not "):
        etha.AsyncTensorBusClient()
    shown = command("status")
    assert shown.returncode == 1 and f"config: {name}='{value}'" in shown.stderr and "Traceback" not in shown.stderr
    assert logs_in(runtime / "default") == {}


def test_an_agent_in_the_foreground_logs_in_the_same_format_and_at_debug_if_it_is_told_verbosely(runtime: Path) -> None:
    line = [sys.executable, "-m", "etha", "-v", "agent"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "serves cpu" not in process.stderr.readline():
                assert process.poll() is None
            shown = json.loads(command("status", "--json").stdout)  # that a session is over is said at debug
            assert (shown["agent"]["log"], shown["agent"]["metrics"]) == ("-", "")
        finally:
            process.terminate()
        lines = process.stderr.read().splitlines()
    assert all(LINE.fullmatch(line) for line in lines) and any(" DEBUG cpu " in line for line in lines)


def logs(*words: str) -> str:
    shown = command("logs", *words)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


async def test_logs_are_shown_of_agents_that_run_and_that_have_left(runtime: Path) -> None:
    shown = command("logs")
    assert shown.returncode == 1 and "no agent has logged at" in shown.stderr and "Traceback" not in shown.stderr
    await started()
    here = log_at(runtime).read_text()
    assert "serves cpu" in here and logs() == here
    assert logs("--lines", "1") == here.splitlines()[-1] + "\n" and logs("--lines", "0") == ""
    assert command("stop").returncode == 0
    other = runtime / "default" / "cuda-GPU-1.log.1"
    other.write_text("2000-01-01T00:00:00.000+00:00 INFO cuda-GPU-1 a etha: long ago\nfrom C\n")
    first, second, *rest = logs().splitlines()
    assert first.startswith("cuda-GPU-1 | 2000-") and second == "cuda-GPU-1 | from C"
    assert all(line.startswith("cpu | ") for line in rest)
    assert logs("--device", "cpu") == log_at(runtime).read_text()
    assert "Traceback" not in command("logs", "--device", "x").stderr


def test_where_an_agent_in_the_foreground_logs_is_said(runtime: Path) -> None:
    with agent() as pid:
        shown = command("logs")
    where = "log of the agent: its terminal or its service"
    assert f"the agent of cpu (process {pid}): {where}" in " ".join(shown.stderr.split())
    assert (shown.returncode, shown.stdout) == (0, "")


def test_the_log_of_an_agent_in_the_foreground_is_shown_if_it_is_a_file(runtime: Path, tmp_path: Path) -> None:
    watch, pipe = FolderWatch(), os.pipe()
    watch.add(tmp_path)
    with (tmp_path / "service.log").open("w") as file:
        with subprocess.Popen([sys.executable, "-m", "etha", "agent"], stderr=file) as process:
            try:
                while "serves cpu" not in (tmp_path / "service.log").read_text():
                    assert watch.wait(pipe[1])
                assert "serves cpu" in logs()
            finally:
                process.terminate()
                watch.close()
                for end in pipe:
                    os.close(end)


@contextmanager
def following(*words: str) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "etha", "logs", "--follow", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def until(process: subprocess.Popen[str], text: str) -> str:
    """Read lines until one has ``text``."""

    def read() -> str:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if text in line:
                return seen
        pytest.fail(f"no {text!r} in {seen}")

    return await asyncio.to_thread(read)


async def test_logs_are_followed_before_the_first_agent_across_rotation_and_restart(runtime: Path) -> None:
    with following() as process:
        await started()
        assert "serves cpu" in await until(process, "serves cpu")
        log_at(runtime).rename(log_at(runtime).with_name("cpu.log.1"))
        assert command("stop").returncode == 0
        await started()
        seen = await until(process, "serves cpu")
        assert seen.count("serves cpu") == 1
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert await asyncio.to_thread(process.wait, 60) == 0, "it ends although no line comes"
        assert process.stderr.read() == ""


def test_a_pipe_that_is_closed_early_is_no_error(runtime: Path) -> None:
    log_at(runtime).parent.mkdir(mode=0o700)
    log_at(runtime).write_text("2000-01-01T00:00:00.000+00:00 INFO cpu a etha: again and again\n" * 20000)
    for words in ("logs", "logs --follow"):
        shown = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {sys.executable} -m etha {words} | head -1"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert shown.stderr == "" and shown.stdout.count("again") == 2 and shown.returncode == 0


def test_ctrl_c_ends_following(runtime: Path) -> None:
    with following() as process:
        log_at(runtime).parent.mkdir(mode=0o700, exist_ok=True)
        log_at(runtime).write_text("2000-01-01T00:00:00.000+00:00 INFO cpu a etha: here\n")
        assert process.stdout is not None and process.stderr is not None
        assert "here" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and process.stderr.read() == ""


def test_logs_import_no_torch(runtime: Path) -> None:
    log_at(runtime).parent.mkdir(mode=0o700)
    log_at(runtime).write_text("here\n")
    code = "import sys; sys.argv = ['etha', 'logs']; import atexit; from etha.cli import main\n" + (
        "atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert shown.stdout == "here\nFalse\n"


def test_the_log_of_a_gpus_agent_is_read_where_no_gpu_is_visible(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = "2000-01-01T00:00:00.000+00:00 INFO cuda-1a a etha: the driver broke\n"
    log_at(runtime).parent.mkdir(mode=0o700)
    log_at(runtime).with_name("cuda-1a.log").write_text(line)
    log_at(runtime).write_text("of the CPU\n")
    command = [sys.executable, "-m", "etha", "logs", "--device", "cuda:0"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, line) and "these are the logs of cuda-1a" in shown.stderr
    log_at(runtime).with_name("cuda-2b.log").write_text(line)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 1 and "--device cuda-1a or cuda-2b" in " ".join(shown.stderr.split())
