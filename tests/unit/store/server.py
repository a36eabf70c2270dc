"""A real Redis-compatible server for tests, on a unix socket, and what tests need around it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from etha.store.embedded import find_shipped
from etha.store.process import start_ticks
from etha.store.records import AgentRecord, RankHolder
from etha.store.registry import Store
from tests.processes import send_signal

HOST = "this-host"
_numbers = itertools.count()


#: Both kinds of server: the one that comes with Etha, and a Redis of the system, which is older and has less.
BINARIES = ["shipped", pytest.param("redis-server", marks=pytest.mark.needs("redis-server"))]


def binary_of(kind: str) -> str:
    """The path of a kind in ``BINARIES``."""
    return find_shipped() if kind == "shipped" else kind


class Server:
    """One server in ``directory``, the shipped one if no ``binary`` is given; ``restart`` loses all data."""

    def __init__(self, directory: Path, *options: str, binary: str | None = None) -> None:
        self.path = directory / "r.sock"
        self._command = [binary or find_shipped(), "--port", "0", "--unixsocket", str(self.path), "--save", ""]
        self._command += ["--logfile", "", *options]
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def url(self) -> str:
        return "unix://" + quote(str(self.path))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._directory, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
        self.stop()
        raise RuntimeError(f"{self._command[0]} did not start")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.communicate()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        send_signal(self._process.pid, number)


@contextmanager
def served(directory: Path, *options: str, binary: str | None = None) -> Iterator[Server]:
    server = Server(directory, *options, binary=binary)
    try:
        yield server
    finally:
        server.stop()


def fresh_namespace() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


def agent_record(name: str, host: str = HOST) -> AgentRecord:
    return AgentRecord(
        id=name, host=host, device="cpu", pid=os.getpid(), address="", public_key="", started_at=1.0, version="test"
    )


@asynccontextmanager
async def agent(url: str, namespace: str, name: str, *, host: str = HOST, timeout: float = 5) -> AsyncIterator[Store]:
    """A store whose agent has published its record."""
    async with await Store.open(url, namespace, timeout=timeout) as store:
        await store.agents.publish(agent_record(name, host))
        yield store


def here(agent: str = "a", *, host: str = HOST) -> RankHolder:
    """This very process as a worker."""
    start = start_ticks(os.getpid())
    assert start is not None
    return RankHolder(agent=agent, host=host, pid=os.getpid(), start=start)


def dead(number: int = 1, agent: str = "a", *, host: str = HOST) -> RankHolder:
    """A process that cannot live any more: our pid, but another start."""
    return RankHolder(agent=agent, host=host, pid=os.getpid(), start=number)


@contextmanager
def sleeping(agent: str = "a", *, host: str = HOST) -> Iterator[RankHolder]:
    """Another process of this host that lives while entered, as a worker."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        start = start_ticks(process.pid)
        assert start is not None
        yield RankHolder(agent=agent, host=host, pid=process.pid, start=start)
    finally:
        process.kill()
        process.communicate()
