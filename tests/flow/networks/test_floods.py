"""Thousands of connections that say nothing, at every listener of an agent: it lives, and transfers go on."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from etha.errors import AgentUnavailableError
from tests.flow.sites import Commons, Site
from tests.flow.ways import Way
from tests.fuzz.ground import Ground

#: Half-open connections of one flood, and how many of them the flooder holds open at once.
FLOOD = 5_000
#: Lines that all floods of one test may leave in an agent's log.
LINES = 100


@contextmanager
def descriptors(pid: int, limit: int) -> Iterator[None]:
    """An agent that may open ``limit`` descriptors, until the end of the test."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def many_sockets() -> Iterator[None]:
    """This process may hold a whole flood."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FLOOD + 500:
        pytest.skip(f"this process may open {hard} files, a flood takes {FLOOD}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FLOOD + 500), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Flood:
    """``FLOOD`` connections to one address, which say a few ``words`` or nothing, and stay until the end."""

    def __init__(self, family: int, address: tuple[str, int] | str, words: bytes = b"") -> None:
        self._family, self._address, self._words = family, address, words
        self._held: list[socket.socket] = []

    async def run(self) -> None:
        """Open all of them; one that the agent does not take at once is waited for."""
        loop = asyncio.get_running_loop()
        for _ in range(FLOOD):
            stranger = socket.socket(self._family, socket.SOCK_STREAM)
            stranger.setblocking(False)
            self._held.append(stranger)
            with suppress(ConnectionError, BlockingIOError):  # a full backlog of a local socket says so at once
                async with asyncio.timeout(20):
                    await loop.sock_connect(stranger, self._address)
                    stranger.send(self._words)

    def end(self) -> None:
        for stranger in self._held:
            stranger.close()


@pytest_asyncio.fixture
async def ground(commons: Commons) -> AsyncIterator[Ground]:
    async with Ground(commons.site(Way.TCP, "flood")) as ground:
        yield ground
        await ground.transfer()
    assert not ground.bugs(), ground.bugs()[0]


async def ports(ground: Ground) -> tuple[str, int, int]:
    """Host and link port of the receiving agent, and its process."""
    record = (await ground.sides.clients["inference", 0].status())["agent"]
    host, _, port = record["address"].rpartition(":")
    return host, int(port), int(record["pid"])


def open_by(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def lines(log: Path) -> int:
    return len(log.read_text(errors="replace").splitlines())


#: The first words of ZMTP, after which libzmq listens.
SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"


@pytest.mark.parametrize(
    ("where", "words", "limit"),
    [
        ("links", b"", 1024),
        pytest.param("links", b"", 4096, marks=pytest.mark.more),
        pytest.param("links", SIGNATURE, 1024, marks=pytest.mark.more),
        pytest.param("data", b"", 1024, marks=pytest.mark.more),
        pytest.param("data", b"", 4096, marks=pytest.mark.more),
        ("data", b"x", 1024),
        pytest.param("workers", b"", 1024, marks=pytest.mark.more),
        ("workers", SIGNATURE, 4096),
    ],
)
async def test_a_flood_of_half_open_connections(ground: Ground, where: str, words: bytes, limit: int) -> None:
    host, port, pid = await ports(ground)
    place = ground.site.way.place("inference", 0)
    log = ground.site.directory / place / "default" / "cpu.log"
    family, address = {
        "links": (socket.AF_INET, (host, port)),
        "data": (socket.AF_INET, (host, port + 1)),
        "workers": (socket.AF_UNIX, str(ground.socket(place))),
    }[where]
    with many_sockets(), descriptors(pid, limit):
        before = lines(log)
        flood = Flood(family, address, words)
        try:
            async with asyncio.TaskGroup() as group:
                flooding = group.create_task(flood.run())
                transfers = 0
                while not flooding.done() or not transfers:
                    await ground.transfer()
                    transfers += 1
            await ground.transfer()
        finally:
            flood.end()
        await ground.transfer()
        assert (await ports(ground))[2] == pid, "the agent has died, and another answers"
        assert lines(log) - before < LINES


async def test_more_workers_than_an_agent_has_descriptors_for_are_told_so(ground: Ground) -> None:
    _, _, pid = await ports(ground)
    site: Site = ground.site
    refused: list[AgentUnavailableError] = []
    used = open_by(pid)
    async with AsyncExitStack() as clients:
        with descriptors(pid, used + 48):
            for _ in range(24):
                client = await clients.enter_async_context(site.client("inference", 0, autostart=False))
                try:
                    await client.status()
                except AgentUnavailableError as error:
                    refused.append(error)
            await ground.transfer()
            assert 0 < len(refused) < 24
            assert all("file descriptors" in error.message for error in refused), refused[0].message
            await clients.aclose()
            async with site.client("inference", 0, autostart=False) as late:
                await late.status()  # there is room again
    assert (await ports(ground))[2] == pid, "the agent has died, and another answers"
