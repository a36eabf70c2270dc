"""Requests over a real bus: answers, errors, pushes, deadlines, cancellation, goodbyes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from etha.bus.codec import Failure, Push, Reply
from etha.bus.link import GRACE, AgentLink, Answer
from etha.bus.server import BusServer
from etha.config import MAX_SOCKET_PATH
from etha.errors import (
    AgentLostError,
    AgentUnavailableError,
    ConfigError,
    EthaError,
    ProtocolError,
    RegistrationError,
    TransferAbortedError,
    TransferTimeoutError,
)
from tests.unit.bus.echo import Echo, EchoService, Fail, Feed, Hold, hello, open_descriptors, texts


@pytest_asyncio.fixture
async def service() -> EchoService:
    return EchoService()


@pytest_asyncio.fixture
async def path(service: EchoService, tmp_path: Path) -> AsyncIterator[Path]:
    async with BusServer(tmp_path / "cpu.sock", service):
        yield tmp_path / "cpu.sock"


@asynccontextmanager
async def connected(path: Path, **options: Any) -> AsyncIterator[AgentLink]:
    async with await AgentLink.connect(path, hello(), timeout=5.0, **options) as link:
        yield link


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def test_a_request_is_answered(path: Path) -> None:
    async with connected(path) as link:
        assert await link.request(Echo(text="hi"), timeout=5.0) == Echo(text="hi")
        assert link.welcome.pid == link.agent_pid == os.getpid()


async def test_the_agent_knows_the_worker_by_the_kernels_word(path: Path, service: EchoService) -> None:
    async with await AgentLink.connect(path, hello(pid=1, start=2), timeout=5.0):
        (peer,) = service.peers
        assert (peer.pid, peer.uid, peer.hello.pid) == (os.getpid(), os.geteuid(), 1)
        assert peer.start > 2


async def test_many_requests_at_once_get_each_its_own_answer(path: Path) -> None:
    async with connected(path) as link:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(link.request(Echo(text=str(i)), timeout=20.0)) for i in range(800)]
        assert [int(task.result().text) for task in asked] == list(range(800))


async def test_sessions_of_one_process_are_told_apart(path: Path, service: EchoService) -> None:
    async with connected(path) as one, connected(path) as two:
        assert one.welcome.session != two.welcome.session
        assert await two.request(Echo(text="b")) == Echo(text="b")
        await one.close()
        await service.until("gone", "closed", os.getpid())
        assert await two.request(Echo(text="c")) == Echo(text="c")


async def test_typed_errors_cross_with_data_and_the_remote_traceback(path: Path) -> None:
    async with connected(path) as link:
        with pytest.raises(RegistrationError, match="refused") as caught:
            await link.request(Fail(how="typed"), timeout=5.0)
        assert caught.value.violations[0].name == "w"
        assert "in received" in (caught.value.remote_traceback or "")


async def test_a_mistake_in_the_agent_is_an_answer_too(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(path) as link:
        with pytest.raises(EthaError, match="the agent failed on Fail: ZeroDivisionError: one over nothing"):
            await link.request(Fail(how="foreign"), timeout=5.0)
        with pytest.raises(ProtocolError, match="cannot be encoded"):
            await link.request(Fail(how="unsendable"), timeout=5.0)
        assert await link.request(Echo(text="still"), timeout=5.0) == Echo(text="still")


async def test_pushes_come_before_the_answer_and_to_their_request(path: Path) -> None:
    news: list[Any] = []
    mine: list[Any] = []
    async with connected(path, on_push=news.append) as link:
        await link.request(Feed(count=3, size=2), timeout=5.0, on_push=mine.append)
        assert texts(mine) == ["xx"] * 3
        await link.request(Feed(count=2, id_zero=True), timeout=5.0, on_push=mine.append)
        assert (len(mine), texts(news)) == (3, ["x", "x"])


async def test_a_callback_that_fails_harms_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(push: Any) -> None:
        raise ValueError("mine")

    async with connected(path) as link:
        assert await link.request(Feed(count=2), timeout=5.0, on_push=broken) == Feed(count=2)
    assert caplog.text.count("the callback for Echo failed") == 2


async def test_what_a_worker_says_unasked_is_heard_and_not_answered(path: Path, service: EchoService) -> None:
    async with connected(path) as link:
        link.tell(Echo(text="by the way"))
        await service.until("told", "by the way")
        assert service.requests == []
        assert await link.request(Echo(text="still there"), timeout=5.0) == Echo(text="still there")
    link.tell(Echo(text="too late"))  # to nobody


@pytest.mark.parametrize("how", ["typed", "foreign"])
async def test_what_a_worker_says_may_be_refused_and_its_session_goes_on(
    path: Path, service: EchoService, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(path) as link:
        link.tell(Fail(how=how))
        await service.until("told", how)
        assert await link.request(Echo(text="still there"), timeout=5.0) == Echo(text="still there")
    assert {"typed": "refused", "foreign": "one over nothing"}[how] in caplog.text


async def test_a_push_about_a_request_that_only_the_agent_may_send_ends_the_session(path: Path) -> None:
    async with connected(path) as link:
        link._channel.post(Push(1, Echo(text="a push under an id")))
        assert "ended the session" in (await link.lost).message


async def test_what_remains_of_the_time_travels(path: Path, service: EchoService) -> None:
    async with connected(path) as link:
        now = asyncio.get_running_loop().time()
        await link.request(Echo(text="a"), timeout=7.0)
        await link.request(Echo(text="b"))
        assert service.requests[0].deadline == pytest.approx(now + 7.0, abs=0.5)
        assert service.requests[1].left is None


async def test_an_agent_that_says_nothing_is_given_a_second_of_grace(path: Path, service: EchoService) -> None:
    async with connected(path) as link:
        begin = time.monotonic()
        with pytest.raises(TransferTimeoutError, match="mine"):
            await link.request(Hold(deaf=True), timeout=0.1, on_timeout=lambda: TransferTimeoutError("mine"))
        assert 0.1 + GRACE <= time.monotonic() - begin < 0.1 + GRACE + 0.5
        await service.until("cancelled", service.requests[0].id)
        with pytest.raises(AgentLostError, match=r"did not answer Hold within 0 s and 1 s of grace"):
            await link.request(Hold(deaf=True), timeout=0)


async def test_a_cancelled_request_waits_for_the_agents_word(path: Path, service: EchoService) -> None:
    reported: list[Answer | None] = []
    async with connected(path) as link:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(link.request(Hold(), timeout=60.0, on_cancel=reported.append))
            await service.until("received", "Hold")
            begin = time.monotonic()
            task.cancel()
        assert time.monotonic() - begin < GRACE / 2
        assert task.cancelled()
        (answer,) = reported
        assert isinstance(answer, Failure)
        assert isinstance(answer.error, TransferAbortedError)
        assert await link.request(Echo(text="after")) == Echo(text="after")


async def test_a_cancelled_request_without_confirmation_ends_in_a_second(path: Path, service: EchoService) -> None:
    reported: list[Answer | None] = []
    async with connected(path) as link:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(link.request(Hold(deaf=True), timeout=0.2, on_cancel=reported.append))
            await service.until("received", "Hold")
            begin = time.monotonic()
            task.cancel()
        assert GRACE <= time.monotonic() - begin < GRACE + 0.5
        assert (task.cancelled(), reported) == (True, [None])


async def test_an_impatient_second_cancel_does_not_wait(path: Path, service: EchoService) -> None:
    reported: list[Answer | None] = []
    async with connected(path) as link:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(link.request(Hold(deaf=True), on_cancel=reported.append))
            await service.until("received", "Hold")
            task.cancel()
            await service.until("cancelled", service.requests[0].id)
            begin = time.monotonic()
            task.cancel()
        assert time.monotonic() - begin < GRACE / 2
        assert (task.cancelled(), reported) == (True, [None])


async def test_an_answer_that_came_before_the_cancel_is_told(path: Path, service: EchoService) -> None:
    reported: list[Answer | None] = []
    async with connected(path) as link:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(link.request(Hold(deaf=True), on_cancel=reported.append))
            await service.asked(1)
            link._received(Reply(service.requests[0].id, Echo(text="done")))
            task.cancel()
        assert task.cancelled()
        assert [a.message for a in reported if isinstance(a, Reply)] == [Echo(text="done")]


async def test_asyncio_timeout_around_requests_loses_no_answer(path: Path) -> None:
    """What zmq.asyncio gets wrong: waits that are cut short at every moment, answers that must all come."""
    async with connected(path) as link:
        for i in range(300):
            with_cut = asyncio.timeout(i * 2e-6)
            try:
                async with with_cut:
                    assert await link.request(Echo(text=str(i)), timeout=5.0) == Echo(text=str(i))
            except TimeoutError:
                assert with_cut.expired()
        assert await link.request(Echo(text="last"), timeout=5.0) == Echo(text="last")
        assert link._calls == {}


async def test_a_malformed_request_is_answered_and_named(
    path: Path, service: EchoService, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(path) as link:
        with pytest.raises(ProtocolError, match=r"test_echo: Expected `str`, got `int` - at `\$\.text`"):
            await link.request(Echo(text=3), timeout=5.0)  # type: ignore[arg-type]
        assert await link.request(Echo(text="on")) == Echo(text="on")
    assert len([r for r in caplog.records if "dropped" in r.message]) == 1


async def test_a_message_of_another_version_is_refused_by_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from etha.bus import codec

    real = codec.encode

    def newer(envelope: Any) -> bytes:
        return real(envelope).replace(b"\xa1v" + bytes([codec.PROTOCOL]), b"\xa1v" + bytes([codec.PROTOCOL + 1]), 1)

    monkeypatch.setattr("etha.bus.channel.encode", newer)
    with pytest.raises(ProtocolError, match=f"speaks protocol {codec.PROTOCOL + 1}, this one {codec.PROTOCOL}"):
        await AgentLink.connect(path, hello(), timeout=5.0)


async def test_a_refused_hello_raises_what_the_agent_said(path: Path, service: EchoService) -> None:
    service.refuse = "the agent's Redis is redis://a, yours redis://b"
    with pytest.raises(ConfigError, match="redis://a, yours redis://b"):
        await AgentLink.connect(path, hello(), timeout=5.0)
    assert ("gone", "closed", os.getpid()) not in service.events


async def test_close_is_heard_before_it_returns_and_fails_what_waits(path: Path, service: EchoService) -> None:
    async with connected(path) as link:
        async with asyncio.TaskGroup() as group:
            held = group.create_task(_lost(link, Hold()))
            await service.until("received", "Hold")
            await link.close()
            assert ("gone", "closed", os.getpid()) in service.events
        assert "closed" in held.result()
        await link.close()
        link.abort()
        assert "closed" in await _lost(link, Echo(text="x"))
        assert isinstance(link.lost.result(), AgentLostError)


async def _lost(link: AgentLink, asked: Any) -> str:
    with pytest.raises(AgentLostError) as caught:
        await link.request(asked)
    return str(caught.value)


async def test_an_agent_that_leaves_answers_first_and_says_goodbye(tmp_path: Path) -> None:
    service = EchoService()
    server = BusServer(tmp_path / "cpu.sock", service)
    async with server:
        link = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
        async with asyncio.TaskGroup() as group:
            held = group.create_task(link.request(Hold()))
            hopeless = group.create_task(_lost(link, Hold(deaf=True)))
            await service.asked(2)
            service.peers[0].reply(service.requests[0].id, Echo(text="at last"))
            begin = time.monotonic()
            await server.close("draining")
            assert time.monotonic() - begin < 0.5
        assert held.result() == Echo(text="at last")
        assert "said goodbye: draining" in hopeless.result()
        assert service.events.count(("gone", "closed", os.getpid())) == 1
    assert names(tmp_path) == ["cpu.lock"]


async def test_nobody_listens(tmp_path: Path, path: Path) -> None:
    with pytest.raises(AgentUnavailableError, match="nothing is there"):
        await AgentLink.connect(tmp_path / "no.sock", hello(), timeout=5.0)
    with pytest.raises(ConfigError, match="shorten ETHA_RUNTIME_DIR"):
        await AgentLink.connect(tmp_path / ("x" * MAX_SOCKET_PATH), hello(), timeout=5.0)


async def test_a_second_server_is_refused_and_a_dead_ones_sockets_are_replaced(path: Path) -> None:
    with pytest.raises(ConfigError, match=f"process {os.getpid()} already serves {path}"):
        async with BusServer(path, EchoService()):
            pytest.fail("two servers on one path")
    async with connected(path) as link:
        assert await link.request(Echo(text="the first one")) == Echo(text="the first one")
    assert [mode(path), mode(path.with_suffix(".fds")), mode(path.with_suffix(".lock"))] == [0o600] * 3


async def test_stale_sockets_of_a_dead_agent_are_replaced(tmp_path: Path) -> None:
    dead = "import socket, sys\nfor p in sys.argv[1:]: socket.socket(socket.AF_UNIX).bind(p)"
    paths = [tmp_path / "cpu.sock", tmp_path / "cpu.fds"]
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", dead, *map(str, paths)], check=True)
    with pytest.raises(AgentUnavailableError):
        await AgentLink.connect(paths[0], hello(), timeout=5.0)
    async with BusServer(paths[0], EchoService()), connected(paths[0]) as link:
        assert await link.request(Echo(text="new")) == Echo(text="new")


async def test_sessions_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def life() -> None:
        async with BusServer(tmp_path / "cpu.sock", EchoService()):
            for _ in range(5):
                async with connected(tmp_path / "cpu.sock") as link:
                    await link.request(Echo(text="x"))
            with pytest.raises(EthaError):
                await AgentLink.connect(tmp_path / "no.sock", hello(), timeout=1.0)

    await life()
    before = open_descriptors()
    await life()
    until = time.monotonic() + 5
    while len(open_descriptors()) > len(before):  # libzmq closes those of a closed socket on a thread of its own
        assert time.monotonic() < until, (before, open_descriptors())


def test_it_works_on_uvloop(tmp_path: Path) -> None:
    async def main() -> None:
        async with BusServer(tmp_path / "cpu.sock", EchoService()), connected(tmp_path / "cpu.sock") as link:
            for i in range(50):
                assert await link.request(Echo(text=str(i)), timeout=5.0) == Echo(text=str(i))
            await link.send_descriptors({}, [0], timeout=5.0)

    uvloop.run(main())
