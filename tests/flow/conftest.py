"""A private runtime directory for each flow test; whatever was started in it ends with the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .jobs import Job, wait_gone
from .puppets import Stage
from .team import Team


def started_in(directory: str) -> dict[int, str]:
    """Processes (not ours) whose environment or command line names ``directory``: pid -> command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        daemon = "etha.agent" in command or "etha_agent" in command or "supervisor" in command or "-server" in command
        if daemon and (directory in command or f"ETHA_RUNTIME_DIR={directory}".encode() in environment.split(b"\0")):
            found[int(entry.name)] = command
    return found


def stop_all(directory: str) -> None:
    """Agents first (they drain), then the supervisors of embedded servers, which end their servers."""
    for kind in ("etha.agent", "etha_agent", "supervisor"):
        for pid, command in started_in(directory).items():
            if kind in command:
                try:
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGTERM)
                except ProcessLookupError:
                    continue
                wait_gone(pid)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A runtime directory of its own; whatever was started in it is gone at the end."""
    directory = tempfile.mkdtemp(prefix="etha-t-")
    try:
        yield Path(directory)
    finally:
        stop_all(directory)
        left = started_in(directory)
        shutil.rmtree(directory, ignore_errors=True)
        assert not left, f"processes of this test are still there: {left}"


def forget_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller of pytest has set must not reach the tests."""
    for name in list(os.environ):
        if name.startswith("ETHA_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def common() -> Iterator[Path]:
    """A runtime directory whose agent serves every test that asks for it: such tests use pair names of their own."""
    with private_directory() as directory:
        yield directory


@pytest.fixture
def served(common: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The common runtime directory in this process's environment; its agent starts with the first client."""
    forget_environment(monkeypatch)
    monkeypatch.setenv("ETHA_RUNTIME_DIR", str(common))
    monkeypatch.setenv("ETHA_IDLE", "300")
    return common


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private ETHA_RUNTIME_DIR for one test, also in this process's environment."""
    forget_environment(monkeypatch)
    with private_directory() as directory:
        monkeypatch.setenv("ETHA_RUNTIME_DIR", str(directory))
        yield directory


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """Two trainers and two inference workers, for every test that only needs batches of its own."""
    with private_directory() as directory, Job({"ETHA_RUNTIME_DIR": str(directory), "ETHA_IDLE": "300"}) as job:
        team = Team(job, trainer=2, inference=2)
        yield team
        team.end()


@pytest.fixture
def guests(common: Path) -> Iterator[Job]:
    """Start workers in the common runtime directory."""
    with Job({"ETHA_RUNTIME_DIR": str(common), "ETHA_IDLE": "300"}) as job:
        yield job


@pytest.fixture
def stage(guests: Job, request: pytest.FixtureRequest) -> Stage:
    """Puppets that meet as a pair of this test's own name, at the common agent."""
    return Stage(guests, request.node.name[:100].replace("[", ".").rstrip("]"))


@pytest.fixture
def job(runtime: Path) -> Iterator[Job]:
    """Start workers in the private runtime directory."""
    with Job({"ETHA_RUNTIME_DIR": str(runtime), "ETHA_IDLE": "60"}) as job:
        yield job
