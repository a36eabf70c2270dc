"""Deaths, silences and forks on both ends of the bus, with real processes and real signals."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from etha.bus import channel, server
from etha.bus.codec import Cancel, Failure, Request
from etha.bus.link import GRACE, AgentLink, Answer
from etha.bus.server import BusServer
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, TransferTimeoutError
from tests.flow.jobs import Job, Worker, tell, wait_for, wait_gone
from tests.seconds import within
from tests.unit.bus.echo import Echo, EchoService, Feed, Hold, hello

#: Seconds within which a death is heard; the kernel takes milliseconds, a loaded machine more.
SOON = 0.5
CLONE_NEWPID = 0x20000000


@pytest.fixture
def job() -> Iterator[Job]:
    with Job({}) as job:
        yield job


async def off(function: Any, *args: Any) -> Any:
    """Run what blocks off the loop."""
    return await asyncio.to_thread(function, *args)


def serve(path: Path) -> None:
    async def main() -> None:
        async with BusServer(path, EchoService()):
            tell("ready")
            await off(wait_for, "stop")

    asyncio.run(main())


async def agent(job: Job, path: Path) -> Worker:
    process = job.start(serve, path)
    await off(process.expect, "ready")
    return process


def work(path: Path, mode: str) -> None:
    async def main() -> None:
        link = await AgentLink.connect(path, hello(), timeout=5.0)
        tell("ready")
        if mode == "hold":
            await link.request(Hold())
        elif mode == "exit":
            os._exit(0)
        elif mode == "let go":
            await off(wait_for, "go")
            link.abort()
            await off(wait_for, "stop")
        elif mode == "leave a child":
            if (child := os.fork()) == 0:
                signal.pause()
            tell("child", child)
            await off(wait_for, "stop")
        elif mode == "read nothing":
            for id in range(2, 12):
                link._channel.post(Request(1000 + id, None, Feed(count=1000, size=100, id_zero=True)))
            wait_for("stop")  # and the loop stands still

    channel.HIGH_WATER = 50
    asyncio.run(main())


async def worker(job: Job, path: Path, mode: str) -> Worker:
    process = job.start(work, path, mode)
    await off(process.expect, "ready")
    return process


async def test_a_killed_worker_is_heard_of_at_once(tmp_path: Path, job: Job) -> None:
    service = EchoService()
    async with BusServer(tmp_path / "cpu.sock", service):
        process = await worker(job, tmp_path / "cpu.sock", "hold")
        await service.asked(1)
        begin = time.monotonic()
        process.kill()
        await service.until("gone", "died", process.pid)
        assert time.monotonic() - begin < within(SOON)
        assert service.peers[0].disconnected
        service.peers[0].reply(service.requests[0].id, Echo(text="to nobody"))


async def test_a_worker_that_ends_without_goodbye_has_died(tmp_path: Path, job: Job) -> None:
    service = EchoService()
    async with BusServer(tmp_path / "cpu.sock", service):
        process = await worker(job, tmp_path / "cpu.sock", "exit")
        await service.until("gone", "died", process.pid)


async def test_a_worker_that_lets_go_without_goodbye_has_died(tmp_path: Path, job: Job) -> None:
    service = EchoService()
    async with BusServer(tmp_path / "cpu.sock", service):
        process = await worker(job, tmp_path / "cpu.sock", "let go")
        begin = time.monotonic()
        process.go("go")
        await service.until("gone", "died", process.pid)
        assert time.monotonic() - begin < within(SOON)
        process.go("stop")


async def test_a_killed_worker_is_heard_of_though_its_child_holds_its_sockets(tmp_path: Path, job: Job) -> None:
    service = EchoService()
    async with BusServer(tmp_path / "cpu.sock", service):
        process = await worker(job, tmp_path / "cpu.sock", "leave a child")
        child = await off(process.expect, "child")
        try:
            process.kill()
            await service.until("gone", "died", process.pid)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_worker_that_reads_nothing_loses_its_session_and_blocks_nobody(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "HIGH_WATER", 50)
    service = EchoService()
    async with BusServer(tmp_path / "cpu.sock", service):
        other = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
        process = await worker(job, tmp_path / "cpu.sock", "read nothing")
        await service.until("gone", "died", process.pid)
        assert await other.request(Echo(text="fine"), timeout=5.0) == Echo(text="fine")
        await other.close()
        process.go("stop")
    assert caplog.text.count("does not read") == 1


async def test_pushes_about_a_request_are_dropped_rather_than_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HIGH_WATER", 50)
    service = EchoService()
    async with BusServer(tmp_path / "cpu.sock", service):
        link = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
        async with asyncio.TaskGroup() as group:
            held = group.create_task(link.request(Hold()))
            await service.asked(1)
            for _ in range(50_000):  # in one go: this loop is the reader's too
                service.peers[0].push(Echo(text="x" * 500), service.requests[0].id)
            assert not service.peers[0].disconnected
            held.cancel()
        await link.close()


async def test_a_killed_agent_fails_everything_pending_at_once(tmp_path: Path, job: Job) -> None:
    process = await agent(job, tmp_path / "cpu.sock")
    link = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
    other = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
    assert link.agent_pid == process.pid
    async with asyncio.TaskGroup() as group:
        held = [group.create_task(lost(link.request(Hold()))) for _ in range(3)]
        await other.request(Echo(text="the held ones have arrived too"))
        begin = time.monotonic()
        process.kill()
        error = await asyncio.shield(link.lost)
        assert time.monotonic() - begin < within(SOON)
    assert f"the agent (process {process.pid}) died" in str(error)
    assert [task.result() for task in held] == [str(error)] * 3
    assert await lost(link.request(Echo(text="x"))) == str(error)
    with pytest.raises(AgentUnavailableError, match=r"is gone|died"):
        await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
    await other.close()
    await link.close()

    await agent(job, tmp_path / "cpu.sock")
    async with await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0) as link:
        assert await link.request(Echo(text="again")) == Echo(text="again")


async def test_a_call_that_finds_its_agent_killed_before_the_loop_has_heard_says_so(tmp_path: Path, job: Job) -> None:
    process = await agent(job, tmp_path / "cpu.sock")
    link = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
    process.kill()
    wait_gone(process.pid)
    with pytest.raises(AgentLostError, match=f"the agent .process {process.pid}. died") as caught:
        while True:  # until the socket has heard
            link._channel.post(Cancel(0))
    assert caught.value.outcome == "withdrawn"
    await link.close()


async def lost(coroutine: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(AgentLostError) as caught:
        await coroutine
    return str(caught.value)


async def test_a_frozen_agent_hangs_no_call_and_serves_on_when_it_thaws(tmp_path: Path, job: Job) -> None:
    process = await agent(job, tmp_path / "cpu.sock")
    link = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
    process.kill(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(AgentUnavailableError, match=r"did not answer within 0\.2 s: is it stopped"):
        await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=0.2)
    with pytest.raises(TransferTimeoutError):
        await link.request(Echo(text="x"), timeout=0.1, on_timeout=lambda: TransferTimeoutError("late"))
    reported: list[Answer | None] = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(link.request(Hold(), timeout=10.0, on_cancel=reported.append))
        await asyncio.sleep(0)
        task.cancel()
    assert (task.cancelled(), reported) == (True, [None])
    with pytest.raises(AgentLostError, match="Descriptors"):
        await link.send_descriptors({}, [0], timeout=0)
    assert time.monotonic() - begin < 0.2 + 0.1 + 3 * GRACE + 2.0  # what is added is for a busy machine
    process.kill(signal.SIGCONT)
    assert await link.request(Echo(text="thawed"), timeout=5.0) == Echo(text="thawed")
    await link.close()


async def test_the_agents_death_confirms_a_cancellation(tmp_path: Path, job: Job) -> None:
    process = await agent(job, tmp_path / "cpu.sock")
    link = await AgentLink.connect(tmp_path / "cpu.sock", hello(), timeout=5.0)
    reported: list[Answer | None] = []
    async with asyncio.TaskGroup() as group:
        task = group.create_task(link.request(Hold(deaf=True), on_cancel=reported.append))
        await link.request(Echo(text="it has arrived"))
        task.cancel()
        await asyncio.sleep(0)
        process.kill()
    (answer,) = reported
    assert isinstance(answer, Failure)
    assert isinstance(answer.error, AgentLostError)


def fork_and_use(path: Path) -> tuple[str, str]:
    """What a forked child hears from its parent's link, and what the parent gets afterwards."""

    async def main() -> tuple[str, str]:
        async with await AgentLink.connect(path, hello(), timeout=5.0) as link:
            ours, theirs = os.pipe()
            if (child := os.fork()) == 0:
                # Another loop in the child: the parent's is not to be touched either.
                asyncio._set_running_loop(None)
                os.write(theirs, asyncio.run(in_child(link)).encode())
                os._exit(0)
            os.close(theirs)
            said = await off(os.read, ours, 1000)
            os.close(ours)
            assert (await off(os.waitpid, child, 0))[1] == 0
            answer = await link.request(Echo(text="parent"), timeout=5.0)
            return said.decode(), answer.text

    async def in_child(link: AgentLink) -> str:
        link.abort()
        await link.close()
        try:
            await link.request(Echo(text="child"))
        except ConfigError as error:
            async with await AgentLink.connect(path, hello(), timeout=5.0) as own:
                return f"{error} {(await own.request(Echo(text='own'))).text}"
        return "no error"

    return asyncio.run(main())


async def test_a_forked_child_is_told_to_make_its_own_and_harms_nothing(tmp_path: Path, job: Job) -> None:
    async with BusServer(tmp_path / "cpu.sock", EchoService()):
        process = job.start(fork_and_use, tmp_path / "cpu.sock")
        child, parent = await off(process.result)
        assert f"belongs to process {process.pid}" in child
        assert "create a client in the child own" in child
        assert parent == "parent"


def in_own_pid_namespace(path: Path) -> None:
    """Process 1 of a pid namespace of its own, where the agent cannot be seen; it lives until it is told."""

    async def main() -> None:
        link = await AgentLink.connect(path, hello(), timeout=5.0)
        answer = await link.request(Echo(text="from inside"), timeout=5.0)
        tell("inside", (os.getpid(), link.agent_pid, answer.text))
        await link.lost
        tell("lost")

    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        tell("inside", None)
        return
    if (child := os.fork()) == 0:
        asyncio.run(main())
        os._exit(0)
    tell("child", child)
    os.waitpid(child, 0)


async def test_a_worker_in_another_pid_namespace_is_served_and_both_hear_of_the_end(tmp_path: Path, job: Job) -> None:
    service = EchoService()
    bus = BusServer(tmp_path / "cpu.sock", service)
    async with bus:
        process = job.start(in_own_pid_namespace, tmp_path / "cpu.sock")
        inside = await off(process.expect, "inside")
        if inside is None:
            pytest.skip("needs the right to make a pid namespace")
        child = await off(process.expect, "child")
        assert inside == (1, 0, "from inside")
        (peer,) = service.peers
        assert (peer.hello.pid, peer.pid) == (1, child)
        await bus.close("leaving")
        await off(process.expect, "lost")
    await off(process.result)
    async with BusServer(tmp_path / "cpu.sock", service):
        process = job.start(in_own_pid_namespace, tmp_path / "cpu.sock")
        await off(process.expect, "inside")
        child = await off(process.expect, "child")
        os.kill(child, signal.SIGKILL)
        await service.until("gone", "died", child)
