"""An agent that runs but does not answer, as after SIGSTOP: no command says that there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from etha.agent_session import none_runs
from etha.bus.process import is_stopped
from etha.config import Settings
from tests.flow.commands.running import agent
from tests.flow.commands.test_cli import here
from tests.processes import send_signal

STOP = [sys.executable, "-c", "import sys; from etha.cli import main; sys.argv = ['etha', 'stop']; main()"]


@contextmanager
def frozen() -> Iterator[int]:
    """An agent that is stopped; it goes on afterwards."""
    with agent() as pid:
        send_signal(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            os.sched_yield()
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("command", ["status", "events"])
def test_a_frozen_agent_is_told_from_none(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with frozen() as pid:
        status = here(monkeypatch, command)
        printed = " ".join(capsys.readouterr().err.split())
        assert status == (1 if command == "status" else 0)
        named = f"the agent of cpu, process {pid}, runs but does not answer: "
        assert f"{named}it is stopped, `kill -CONT {pid}` lets it go on; `etha stop --now` ends it" in printed
        assert "no agent is running" not in printed
        assert f"process {pid}, runs but does not answer" in none_runs(Settings.from_env())


def test_stop_says_for_whom_it_waits(runtime: Path) -> None:
    with frozen() as pid, subprocess.Popen(STOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stop:
        assert stop.stderr is not None and stop.stdout is not None
        said = stop.stderr.readline()
        assert f"waits for the agent of cpu, process {pid}, which is stopped" in said
        os.kill(pid, signal.SIGCONT)
        assert stop.stdout.readline() == f"stopped the agent that was process {pid}\n"
