"""A site: directories, host ids and a Redis where workers of a test live, as its way says.

with open_site(Way.TCP) as site:
    client = site.client("inference", 0)        # its agent starts with its first call
    Job(site.env).start(function, at=("trainer", 0))
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import etha
from tests.flow.jobs import Job, wait_gone
from tests.flow.nursery import MESH
from tests.flow.team import Team
from tests.flow.ways import Way
from tests.unit.store.server import served


def started_in(directory: str) -> dict[int, str]:
    """Processes (not ours) whose environment or command line names ``directory``: pid -> command."""
    found = {}
    mark = f"ETHA_RUNTIME_DIR={directory}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if "multiprocessing.forkserver" in command:  # it names all that it loads
            continue
        daemon = "etha.agent" in command or "etha_agent" in command or "supervisor" in command or "-server" in command
        if daemon and (directory in command or any(line.startswith(mark) for line in environment)):
            found[int(entry.name)] = command
    return found


def stop_all(directory: str) -> None:
    """Agents first (they drain), then the supervisors of embedded servers, which end their servers."""
    for kinds in (("etha.agent", "etha_agent"), ("supervisor",)):
        ending = [pid for pid, command in started_in(directory).items() if any(kind in command for kind in kinds)]
        for pid in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
        for pid in ending:
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


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with ``variables`` and without what the caller of pytest has set for Etha."""
    kept = dict(os.environ)
    for name in kept:
        if name.startswith("ETHA_") or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


class Site:
    """``redis``: URL of the Redis that all places share; None: the embedded server of the one place."""

    def __init__(self, way: Way, directory: Path, redis: str | None) -> None:
        self.way, self.directory, self.redis = way, directory, redis

    def at(self, place: str) -> dict[str, str]:
        """What the environment of a worker at ``place`` says of Etha."""
        found = {"ETHA_RUNTIME_DIR": str(self.directory / place), "ETHA_IDLE": "300"}
        if self.way is not Way.LOCAL:
            found["ETHA_HOST_ID"] = self.way.host(place)
        if self.way is Way.FAR:
            found[MESH] = "1"
        if self.redis is not None:
            found["ETHA_REDIS_URL"] = self.redis
        return found

    def env(self, side: str, rank: int) -> dict[str, str]:
        """The environment of one worker."""
        return self.at(self.way.place(side, rank))

    def client(self, side: str, rank: int, *, place: str | None = None, **options: Any) -> etha.AsyncTensorBusClient:
        """A client in this process with the settings of a worker of that side and rank, or of ``place``."""
        with environment(self.at(place or self.way.place(side, rank))):
            return etha.AsyncTensorBusClient(**options)

    def blocking(self, side: str, rank: int, **options: Any) -> etha.TensorBusClient:
        """The same, for threads."""
        with environment(self.env(side, rank)):
            return etha.TensorBusClient(**options)


@contextlib.contextmanager
def open_site(way: Way, redis: str | None = None) -> Iterator[Site]:
    """A site of its own; without ``redis`` (a URL) several agents share a server that ends with it."""
    with private_directory() as directory, contextlib.ExitStack() as stack:
        if redis is None and way is not Way.LOCAL:
            redis = stack.enter_context(served(directory)).url
        # Agents take back what they have written: they end before their Redis.
        stack.callback(stop_all, str(directory))
        yield Site(way, directory, redis)


class Commons:
    """For each way a site, a team at it, and a rough site for who kills agents; made when first asked for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._sites: dict[tuple[Way, str], Site] = {}
        self._teams: dict[Way, Team] = {}

    def site(self, way: Way, kind: str = "common") -> Site:
        """Its tests use pair names of their own; no test kills an agent of the "common" one."""
        if (way, kind) not in self._sites:
            self._sites[way, kind] = self._stack.enter_context(open_site(way))
        return self._sites[way, kind]

    def team(self, way: Way) -> Team:
        """Two trainers and two inference workers; new ones after a test that failed."""
        team = self._teams.get(way)
        if team is None or team.spoilt:
            if team is not None:
                team.job.end()
            job = self._stack.enter_context(Job(self.site(way).env))
            team = self._teams[way] = Team(job, trainer=2, inference=2)
            self._stack.callback(team.end)
        return team
