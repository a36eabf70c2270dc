"""Further bus connections of a session: requests that come on one are answered on it, and its end ends nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from etha.bus.codec import Envelope, Failure, Malformed, Push, Reply, Request
from etha.bus.direct import DirectConnection
from etha.bus.link import AgentLink
from etha.bus.server import MAX_DIRECT, BusServer
from etha.errors import AgentLostError, RegistrationError
from etha.native.direct import Exchanged
from tests.flow.clients.test_bus_requests import connected
from tests.unit.bus.echo import Echo, EchoService, Fail, Feed, Hold

ROUNDS = 20


@pytest_asyncio.fixture
async def service() -> EchoService:
    return EchoService()


@pytest_asyncio.fixture
async def path(service: EchoService, tmp_path: Path) -> AsyncIterator[Path]:
    async with BusServer(tmp_path / "cpu.sock", service):
        yield tmp_path / "cpu.sock"


async def joined(link: AgentLink) -> DirectConnection:
    found = await DirectConnection.connect(link._path, link.welcome.session, link.agent_pid)
    assert found is not None
    return found


def talk(connection: DirectConnection, id: int, message: Any) -> list[Any]:
    """What a blocked thread hears about its request, to its answer."""
    connection.begin(Request(id, 5.0, message))
    heard: list[Any] = []
    while not heard or isinstance(heard[-1], Push):
        assert connection.exchange(5) is Exchanged.HEARD
        while (envelope := connection.peek()) is not None:
            connection.take()
            heard.append(envelope)
    return heard


async def test_a_request_is_answered_on_its_own_connection(path: Path) -> None:
    async with connected(path) as link:
        connection = await joined(link)
        for turn in range(ROUNDS):
            asked = asyncio.create_task(link.request(Echo(text="loop"), timeout=5.0))
            (answer,) = await asyncio.to_thread(talk, connection, 1000 + turn, Echo(text=str(turn)))
            assert answer == Reply(1000 + turn, Echo(text=str(turn)))
            assert await asked == Echo(text="loop")
        connection.close()


async def test_answers_of_any_size_and_pushes_before_them(path: Path) -> None:
    async with connected(path) as link:
        connection = await joined(link)
        for size in (1, 300, 30_000):
            heard = await asyncio.to_thread(talk, connection, 1000 + size, Feed(count=3, size=size))
            assert [push.message.text for push in heard[:-1]] == ["x" * size] * 3
            assert heard[-1] == Reply(1000 + size, Feed(count=3, size=size))
        connection.close()


async def test_a_loop_may_go_on_with_a_request_at_any_place(path: Path) -> None:
    """What the thread has looked at and not taken, what has come since, and what is still to come."""
    async with connected(path) as link:
        for exchanges in range(4):
            connection = await joined(link)
            connection.begin(Request(2000 + exchanges, 5.0, Feed(count=3, size=40_000)))
            for _ in range(exchanges + 1):
                await asyncio.to_thread(connection.exchange, 5)
                connection.peek()
            heard: list[Envelope | Malformed] = []
            over = asyncio.Event()

            def hear(envelope: Envelope | Malformed, heard: Any = heard, over: Any = over) -> None:
                heard.append(envelope)
                if isinstance(envelope, Reply):
                    over.set()

            connection.follow(hear)
            await over.wait()
            assert [type(envelope) for envelope in heard] == [Push, Push, Push, Reply]
            connection.close()


async def test_the_end_of_one_ends_no_session_and_loses_no_answer(path: Path, service: EchoService) -> None:
    async with connected(path) as link:
        connection = await joined(link)
        held = asyncio.create_task(link.request(Hold(), timeout=60.0))
        connection.begin(Request(999, 5.0, Hold()))
        assert await asyncio.to_thread(connection.exchange, 0.01) is Exchanged.SLICE_OVER
        await asyncio.to_thread(connection.exchange, 0.01)
        connection.close()
        assert await link.request(Echo(text="here"), timeout=5.0) == Echo(text="here")
        assert not any(event[0] == "gone" for event in service.events)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held


async def test_a_session_takes_some_further_connections_and_not_more(path: Path) -> None:
    async with connected(path) as link:
        taken = [await joined(link) for _ in range(MAX_DIRECT)]
        with pytest.raises(AgentLostError, match=f"it has {MAX_DIRECT} further connections"):
            await joined(link)
        taken.pop().close()
        await link.request(Echo(text="the agent has seen it"), timeout=5.0)
        taken.append(await joined(link))
        for connection in taken:
            connection.close()


async def test_nobody_joins_what_is_no_session(path: Path) -> None:
    async with connected(path) as link:
        for session in ("", "00" * 16, link.welcome.session[:-1]):
            with pytest.raises(AgentLostError, match="no such session"):
                await DirectConnection.connect(path, session, link.agent_pid)
        with pytest.raises(AgentLostError, match="another process"):
            await DirectConnection.connect(path, link.welcome.session, link.agent_pid + 1)


async def test_after_the_session_it_is_over(path: Path, service: EchoService) -> None:
    async with connected(path) as link:
        connection = await joined(link)
    assert await asyncio.to_thread(connection.exchange, 5) is Exchanged.ENDED
    connection.close()
    connection.close()


async def test_a_failure_is_an_answer(path: Path) -> None:
    async with connected(path) as link:
        connection = await joined(link)
        (answer,) = await asyncio.to_thread(talk, connection, 7000, Fail(how="typed"))
        assert isinstance(answer, Failure) and isinstance(answer.error, RegistrationError)
        connection.close()
