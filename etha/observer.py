"""A look at an agent by who is no worker of it: its status, and what happened. For the command line.

    etha status --> Observer --bus--> agent --> its report; events from Redis

An agent does not list an observer and does not stay for it. Nothing here imports torch, which takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from etha.bus.channel import dial
from etha.bus.handshake import WorkerHello
from etha.bus.link import AgentLink
from etha.bus.messages import Events, GetEvents, GetStatus, Status
from etha.bus.process import Credentials, start_time
from etha.config import Settings, agent_path
from etha.errors import AgentLostError, AgentUnavailableError, RedisUnavailableError
from etha.version import __version__

#: Seconds that an agent which is told to leave at once has before it is killed.
HURRY = 5.0


class Observer:
    """One session with an agent; made by ``observe``."""

    def __init__(self, link: AgentLink, timeout: float) -> None:
        self._link, self._timeout = link, timeout

    async def status(self) -> dict[str, Any]:
        """What the agent says of itself, its pairs and batches."""
        status = await self._link.request(GetStatus(), timeout=self._timeout)
        assert isinstance(status, Status)
        return status.report

    async def events(self, after: str = "", count: int = 100) -> list[dict[str, Any]]:
        """The last ``count`` events after the one with id ``after``, oldest first; RedisUnavailableError."""
        events = await self._link.request(GetEvents(after=after, count=count), timeout=self._timeout)
        assert isinstance(events, Events)
        return list(events.events)


@asynccontextmanager
async def observe(address: str, settings: Settings, *, timeout: float) -> AsyncIterator[Observer]:
    """Observe the agent at ``address`` while entered; AgentUnavailableError where none listens."""
    hello = WorkerHello(
        version=__version__,
        namespace=settings.namespace,
        redis=None,
        host=settings.host_id,
        pid=os.getpid(),
        start=start_time(),
        observer=True,
    )
    link = await AgentLink.connect(agent_path(address), hello, timeout=timeout)
    try:
        yield Observer(link, timeout)
    finally:
        await link.close()


def addresses(settings: Settings) -> list[str]:
    """Addresses of this host's agents in the namespace, or the one that ETHA_AGENT names."""
    if settings.agent:
        return [settings.agent]
    return [f"ipc://{path}" for path in sorted((settings.runtime_dir / settings.namespace).glob("*.sock"))]


async def look(settings: Settings, *, timeout: float) -> list[dict[str, Any]]:
    """The status of every agent that answers; what is left of others is passed over."""
    found = []
    for address in addresses(settings):
        try:
            async with observe(address, settings, timeout=timeout) as observer:
                found.append(await observer.status())
        except (AgentUnavailableError, AgentLostError):
            continue  # a socket that its agent left behind, or an agent that leaves just now
    return found


async def stop(path: Path, *, now: bool, timeout: float) -> int | None:
    """End the agent at ``path`` and wait until it has; its pid, None when none was there.

    It lets running transfers finish; ``now``: it does not, and one that does not react is killed. AgentUnavailableError
    for one that is still there after ``timeout`` seconds.
    """
    try:
        with dial(path) as connection:
            who = Credentials.of_socket(connection)
    except AgentUnavailableError:
        return None
    if not who.pid:
        raise AgentUnavailableError(f"the agent at {path} lives in another PID namespace: stop it from there")
    try:
        process = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return None
    try:
        for number in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):
            signal.pidfd_send_signal(process, number)
        if not await _ends(process, min(timeout, HURRY) if now else timeout):
            if not now:
                raise AgentUnavailableError(
                    f"process {who.pid} at {path} has not ended within {timeout:g} s: is it stopped? "
                    f"`etha stop --now` kills it"
                )
            signal.pidfd_send_signal(process, signal.SIGKILL)
            await _ends(process, timeout)
    except ProcessLookupError:
        pass  # it has ended by itself meanwhile
    except PermissionError:
        raise AgentUnavailableError(
            f"process {who.pid} at {path} belongs to uid {who.uid}: only it may stop it"
        ) from None
    finally:
        os.close(process)
    return who.pid


async def _ends(process: int, timeout: float) -> bool:
    """Whether the process of this pidfd ends in time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
    return True


class Watch:
    """Looks again and again, and tells each event once."""

    def __init__(self, settings: Settings, *, timeout: float) -> None:
        self._settings, self._timeout = settings, timeout
        self._last = ""

    async def look(self, before: int = 10) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
        """(status of every agent, new events, why there are none); at first the last ``before`` events."""
        found, events, why = [], [], ""
        for address in addresses(self._settings):
            try:
                async with observe(address, self._settings, timeout=self._timeout) as observer:
                    found.append(await observer.status())
                    try:
                        news = await observer.events(self._last, 1000 if self._last else before)
                    except RedisUnavailableError as error:
                        why = error.message
                        continue
            except (AgentUnavailableError, AgentLostError):
                continue
            if news:  # all agents of a namespace have one Redis: the next one tells only what came since
                self._last = str(news[-1]["id"])
                events += news
        return found, events, why
