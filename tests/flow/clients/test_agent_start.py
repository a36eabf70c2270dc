"""An agent that has not imported torch yet: whom it greets, what it answers, what waits, and what a failure says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etha.agent import __main__ as program
from etha.agent.early_service import EarlyService
from etha.agent.startup import Startup
from etha.bus.codec import Request
from etha.bus.link import AgentLink
from etha.bus.messages import GetStatus, Status, WaitOffer
from etha.bus.process import start_time
from etha.bus.sessions import Peer
from etha.client.connection import AgentConnection
from etha.config import Settings
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError, ProtocolError
from tests.unit.bus.echo import hello

TIMEOUT = 30.0
received = EarlyService.received

#: A worker that asks for something, says so, and waits for its end.
WORKER = """
import asyncio
from etha.bus.messages import GetStatus
from etha.client.connection import AgentConnection
from etha.config import Settings

async def main():
    connection = await AgentConnection.open(
        Settings.from_env(), agent=None, device="cpu", redis_url=None, autostart=False, timeout=30.0, on_push=print
    )
    asked = asyncio.create_task(connection.link.request(GetStatus(), timeout=30.0))
    await asyncio.sleep(0)
    print("asked", flush=True)
    await asked

asyncio.run(main())
"""


async def connect(**wishes: str) -> AgentConnection:
    settings = Settings.from_env({**os.environ, **wishes})
    return await AgentConnection.open(
        settings, agent=None, device="cpu", redis_url=None, autostart=False, timeout=TIMEOUT, on_push=lambda _: None
    )


class Start:
    """An agent in this process that imports what it needs once ``go`` is set, or fails as ``error`` says."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.error: Exception | None = None
        #: Set once a request waits for the agent.
        self.kept = asyncio.Event()

    def received(self, service: EarlyService, peer: Peer, request: Request) -> None:
        received(service, peer, request)
        if request.id in peer.requests:
            self.kept.set()

    async def wait(self) -> None:
        await self.go.wait()
        if self.error is not None:
            raise self.error

    @asynccontextmanager
    async def serving(self, **options: float) -> AsyncIterator[asyncio.Task[None]]:
        """The agent's task, from the moment that workers can connect."""
        ready, ours = os.pipe()
        stop = asyncio.Event()
        task = asyncio.create_task(
            program.serve(Settings.from_env(), startup=Startup(ours), stop=stop, idle=options.get("idle"))
        )
        try:
            assert await asyncio.to_thread(os.read, ready, 100) == b"ready\n"
            yield task
        finally:
            os.close(ready)
            stop.set()
            self.go.set()
            await asyncio.wait({task})


def started(story: Callable[[Start], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        start = Start()
        monkeypatch.setattr(program, "import_agent", start.wait)
        monkeypatch.setattr(EarlyService, "received", lambda *args: start.received(*args))
        async with asyncio.timeout(TIMEOUT * 2):
            await story(start)

    asyncio.run(main())


def workers(status: object) -> list[int]:
    assert isinstance(status, Status)
    return [worker["pid"] for worker in status.report["agent"]["workers"] if worker["memory"] == "direct"]


def test_workers_connect_before_torch_and_what_they_ask_waits(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(start: Start) -> None:
        async with start.serving() as agent:
            staying, leaving = await connect(), await connect()
            assert staying.reaches and not staying.why_not
            asked = [asyncio.create_task(link.request(GetStatus(), timeout=TIMEOUT)) for link in (staying.link,) * 2]
            withdrawn = asyncio.create_task(leaving.link.request(GetStatus(), timeout=TIMEOUT))
            worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, stdout=subprocess.PIPE)
            assert worker.stdout is not None
            assert await worker.stdout.readline() == b"asked\n"
            observer = await AgentLink.connect(
                Settings.from_env().socket_path("cpu"),
                hello(observer=True, namespace="default", redis=None, start=start_time()),
                timeout=TIMEOUT,
                on_push=lambda _: None,
            )
            watched = asyncio.create_task(observer.request(GetStatus(), timeout=TIMEOUT))
            leaving.abort()
            with pytest.raises(AgentLostError):
                await withdrawn
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
            assert not any(task.done() for task in (*asked, watched, agent))
            start.go.set()
            for task in (*asked, watched):
                assert workers(await task) == [os.getpid()]
            with pytest.raises(ProtocolError, match="descriptors of unknown kind"):  # said by the agent
                await staying.link.send_descriptors({"nothing": True}, [staying.page.fd], timeout=TIMEOUT)
            await staying.close(TIMEOUT)
            await observer.close()

    started(story, monkeypatch)


def test_a_request_with_an_error_is_answered_when_the_agent_is_there(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(start: Start) -> None:
        async with start.serving():
            connection = await connect()
            wrong = WaitOffer(batch="b", epoch=1)
            asked = asyncio.create_task(connection.link.request(wrong, timeout=TIMEOUT))
            await start.kept.wait()
            start.go.set()
            with pytest.raises(EthaError):
                await asked
            await connection.close(TIMEOUT)

    started(story, monkeypatch)


def test_a_request_ends_at_its_deadline_or_when_it_is_cancelled(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(start: Start) -> None:
        async with start.serving():
            connection = await connect()
            staying = asyncio.create_task(connection.link.request(GetStatus(), timeout=TIMEOUT))
            with pytest.raises(
                AgentUnavailableError, match=rf"in time; waited for process {os.getpid()}.*Give more time"
            ):
                await connection.link.request(GetStatus(), timeout=0.05)
            start.kept.clear()
            cancelled = asyncio.create_task(connection.link.request(GetStatus(), timeout=TIMEOUT))
            await start.kept.wait()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert not staying.done()
            start.go.set()
            assert workers(await staying) == [os.getpid()]
            await connection.close(TIMEOUT)

    started(story, monkeypatch)


def test_who_cannot_be_served_hears_it_at_once(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(start: Start) -> None:
        async with start.serving():
            connection = await connect()
            with pytest.raises(ConfigError, match="ETHA_ENCRYPT=1 is set here"):
                await connect(ETHA_ENCRYPT="1")
            start.go.set()
            await connection.close(TIMEOUT)

    started(story, monkeypatch)


def test_an_agent_that_cannot_import_answers_with_the_reason(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(start: Start) -> None:
        start.error = OSError("libtorch_cpu.so: cannot open shared object file")
        async with start.serving() as agent:
            connection = await connect()
            asked = asyncio.create_task(connection.link.request(GetStatus(), timeout=TIMEOUT))
            await start.kept.wait()
            start.go.set()
            with pytest.raises(EthaError, match=r"the agent cannot run: libtorch_cpu\.so"):
                await asked
            await asyncio.wait({agent})
            assert isinstance(agent.exception(), OSError)
            connection.abort()

    started(story, monkeypatch)


@pytest.mark.slow
def test_an_agent_greets_before_it_has_imported_torch(runtime: Path) -> None:
    """In a process of its own: what the bus, Redis and the greeting need brings neither torch nor the agent."""
    code = (
        "import sys, etha.agent.__main__, etha.commands.agents; "
        "print([m for m in ('torch', 'etha.agent.server', 'etha.plan', 'etha.transport') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
