"""Descriptors, other users, and garbage on both sockets of the bus: one log line, and nobody else notices."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from etha.bus.channel import dial
from etha.bus.codec import Failure, Reply, Request, decode, encode
from etha.bus.handshake import Attach, Descriptors, HandshakeDone, WorkerHello, WorkerWelcome
from etha.bus.link import AgentLink
from etha.bus.packets import MAX_DESCRIPTORS, MAX_PACKET, close_all
from etha.bus.server import BusServer
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError, ProtocolError
from tests.flow.jobs import Job
from tests.unit.bus.echo import Echo, EchoService, hello, open_descriptors


@pytest_asyncio.fixture
async def service() -> AsyncIterator[EchoService]:
    service = EchoService()
    yield service
    close_all(service.fds)


@pytest_asyncio.fixture
async def path(service: EchoService, tmp_path: Path) -> AsyncIterator[Path]:
    async with BusServer(tmp_path / "cpu.sock", service):
        yield tmp_path / "cpu.sock"


@pytest_asyncio.fixture
async def link(path: Path) -> AsyncIterator[AgentLink]:
    """A good citizen, who must notice nothing."""
    async with await AgentLink.connect(path, hello(), timeout=5.0) as link:
        yield link
        assert await link.request(Echo(text="all is well"), timeout=5.0) == Echo(text="all is well")


@pytest.fixture
def dropped(caplog: pytest.LogCaptureFixture) -> Any:
    """What Etha's log says of things that were dropped or refused."""
    ours = ("WARNING", "ERROR")
    return lambda: [r.getMessage() for r in caplog.records if r.levelname in ours and r.name.startswith("etha")]


async def closed(connection: socket.socket) -> bytes:
    """What the other end sends until it closes."""
    connection.setblocking(False)
    said = b""
    try:
        while data := await asyncio.get_running_loop().sock_recv(connection, 65536):
            said += data
    except ConnectionResetError:
        pass
    connection.close()
    return said


async def test_descriptors_arrive_usable_and_close_on_exec(link: AgentLink, service: EchoService) -> None:
    memory = os.memfd_create("tensor")
    os.write(memory, b"bytes of a tensor")
    await link.send_descriptors({"segment": "ab", "nbytes": 17}, [memory], timeout=5.0)
    (got,) = service.fds
    assert ("descriptors", "{'segment': 'ab', 'nbytes': 17}") in service.events
    assert os.pread(got, 100, 0) == b"bytes of a tensor"
    assert fcntl.fcntl(got, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(memory)


async def test_many_senders_wait_for_room_and_all_arrive(link: AgentLink, service: EchoService) -> None:
    async with asyncio.TaskGroup() as group:
        for i in range(100):
            group.create_task(link.send_descriptors({"i": i, "pad": "x" * 20_000}, [0], timeout=10.0))
    assert len(service.fds) == 100
    assert len([e for e in service.events if e[0] == "descriptors"]) == 100


async def test_descriptors_may_be_refused(link: AgentLink, dropped: Any) -> None:
    with pytest.raises(ConfigError, match="not these"):
        await link.send_descriptors({"refuse": True}, [0], timeout=5.0)
    with pytest.raises(EthaError, match="ZeroDivisionError"):
        await link.send_descriptors({"break": True}, [0], timeout=5.0)
    with pytest.raises(ProtocolError, match="at most"):
        await link.send_descriptors({}, [0] * (MAX_DESCRIPTORS + 1), timeout=5.0)
    assert len(dropped()) == 1


async def test_a_packet_that_is_too_large_ends_the_session_that_sent_it(
    path: Path, link: AgentLink, service: EchoService, dropped: Any
) -> None:
    bad = await AgentLink.connect(path, hello(), timeout=5.0)
    with pytest.raises(AgentLostError):
        await bad.send_descriptors({"pad": "x" * MAX_PACKET}, [0], timeout=5.0)
    await service.until("gone", "died", os.getpid())
    assert len(dropped()) == 1


@pytest.mark.parametrize(
    "packets",
    [
        [b"garbage"],
        [b"\x00" * (MAX_PACKET + 1)],
        [encode(Request(1, None, Descriptors(header={})))],
        [encode(Request(1, None, Attach(session="no such")))],
        [encode(Reply(1, HandshakeDone()))],
    ],
)
async def test_garbage_on_the_descriptor_socket_closes_that_connection(
    path: Path, link: AgentLink, service: EchoService, dropped: Any, packets: list[bytes]
) -> None:
    before = open_descriptors()
    stranger = dial(path)
    for packet in packets:
        socket.send_fds(stranger, [packet], [0, 1])
    await closed(stranger)
    assert len(dropped()) == 1
    assert service.fds == []
    assert open_descriptors() == before


async def test_a_connection_that_comes_and_goes_is_no_news(path: Path, link: AgentLink, dropped: Any) -> None:
    dial(path).close()
    await link.request(Echo(text="the agent has had its turn"))
    assert dropped() == []


async def test_more_descriptors_than_allowed_close_the_connection(path: Path, link: AgentLink, dropped: Any) -> None:
    before = open_descriptors()
    stranger = dial(path)
    socket.send_fds(stranger, [b"x"], [0] * (MAX_DESCRIPTORS + 10))
    await closed(stranger)
    assert len(dropped()) == 1
    assert open_descriptors() == before


async def test_a_session_is_attached_once(path: Path, link: AgentLink, dropped: Any) -> None:
    second = dial(path)
    second.send(encode(Request(1, None, Attach(session=link.welcome.session))))
    answer = decode(await closed(second))
    assert isinstance(answer, Failure)
    assert "already" in answer.error.message
    assert len(dropped()) == 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10, b"\xff" * 200])
async def test_bytes_that_are_not_zeromq(path: Path, link: AgentLink, dropped: Any, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.setblocking(False)
        stranger.connect(str(path))
        stranger.sendall(garbage)
        async with asyncio.timeout(5.0):
            while not dropped():
                await link.request(Echo(text="served meanwhile"))
        assert len(dropped()) == 1
        assert "does not speak ZeroMQ" in dropped()[0] or "does not speak ZMTP 3" in dropped()[0]


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([b"garbage"], 1),
        ([b""], 1),
        ([b"a", b"b", b"c"], 1),
        ([encode(Reply(1, HandshakeDone()))], 0),
    ],
)
async def test_zeromq_messages_that_are_not_ours(
    path: Path, link: AgentLink, dropped: Any, parts: list[bytes], lines: int
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(f"ipc://{path}")
        stranger.send_multipart(parts)
        stranger.send(encode(Request(9, None, Echo(text="no hello"))))
        answer = decode(await asyncio.to_thread(stranger.recv))
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, AgentLostError)
    assert len(dropped()) == lines + 1  # and one for the request without a session


async def test_a_session_that_sends_garbage_is_ended(path: Path, link: AgentLink, service: EchoService) -> None:
    bad = await AgentLink.connect(path, hello(), timeout=5.0)
    bad._channel._socket.send(b"garbage")
    assert "ended the session" in str(await asyncio.shield(bad.lost))
    assert ("gone", "closed", os.getpid()) in service.events


async def test_no_request_is_served_before_the_descriptor_connection_stands(path: Path, service: EchoService) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as early:
        early.connect(f"ipc://{path}")
        early.send(encode(Request(1, None, hello())))
        early.send(encode(Request(2, None, Echo(text="early"))))
        welcome = decode(await asyncio.to_thread(early.recv))
        refusal = decode(await asyncio.to_thread(early.recv))
    assert isinstance(welcome, Reply) and isinstance(welcome.message, WorkerWelcome)
    assert isinstance(refusal, Failure) and "before Attach" in refusal.error.message
    assert service.requests == []


async def test_a_session_that_never_attaches_is_ended(
    tmp_path: Path, service: EchoService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etha.bus.server.ATTACH_TIMEOUT", 0.05)
    async with BusServer(tmp_path / "cpu.sock", service):
        with zmq.Context() as context, context.socket(zmq.DEALER) as early:
            early.connect(f"ipc://{tmp_path / 'cpu.sock'}")
            early.send(encode(Request(1, None, hello())))
            await service.until("gone", "closed", os.getpid())
        stranger = dial(tmp_path / "cpu.sock")
        assert await closed(stranger) == b""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter, as nobody's agent should have; TMPDIR itself may be closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="etha-t-", dir="/var/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def as_nobody(path: Path, said_hello: WorkerHello) -> list[str]:
    """What a process of another user hears from the link, from the bus itself and from the descriptor socket."""
    os.setuid(65534)

    async def polite() -> str:
        try:
            await AgentLink.connect(path, said_hello, timeout=5.0)
        except (ConfigError, AgentUnavailableError) as error:
            return str(error)
        return "connected"

    def rude() -> str:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"ipc://{path}")
            dealer.send(encode(Request(1, None, said_hello)))
            answer = decode(dealer.recv())
            return answer.error.message if isinstance(answer, Failure) else "welcome"

    said = [asyncio.run(polite())]
    if os.access(path, os.W_OK):
        said.append(rude())
        connection = dial(path)
        connection.setblocking(True)
        said.append(repr(connection.recv(100)))
        connection.close()
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused_by_the_sockets_mode_and_by_the_kernels_word(
    open_directory: Path, service: EchoService, dropped: Any
) -> None:
    path = open_directory / "cpu.sock"
    with Job({}) as job:
        async with BusServer(path, service):
            (shut_out,) = await asyncio.to_thread(job.start(as_nobody, path, hello()).result)
            assert "it belongs to another user" in shut_out
            for name in (path, path.with_suffix(".fds")):
                os.chmod(name, 0o666)  # noqa: PTH101
            polite, rude, descriptors = await asyncio.to_thread(job.start(as_nobody, path, hello()).result)
    assert f"runs as uid {os.geteuid()}, this process as uid 65534" in polite
    assert "serves no process of uid 65534" in rude
    assert descriptors == "b''"
    assert service.peers == []
    assert len([line for line in dropped() if "65534" in line]) >= 2
