"""A session of the command line with an agent: its status, what happened, and how to end it.

    etha status --> AgentSession --bus--> agent --> its report; events from Redis

An agent neither lists such an observer as a worker nor stays alive for it. Nothing here imports torch, which takes
seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from etha.bus.channel import another_user, dial
from etha.bus.handshake import WorkerHello
from etha.bus.link import AgentLink
from etha.bus.messages import Events, GetEvents, GetPicture, GetRecords, GetStatus, Picture, Records, Status
from etha.bus.process import Credentials, is_exiting, is_stopped, start_time
from etha.config import Settings, agent_path
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, RedisUnavailableError, note_of_log
from etha.observe.logfiles import logs_in
from etha.observe.logs import TERMINAL, log_of
from etha.version import __version__

#: Seconds that an agent which is told to leave at once has before it is killed.
HURRY = 5.0
#: Seconds after which ``stop`` says for whom it waits.
_SAID_AFTER = 1.0


class AgentSession:
    """One session with an agent; made by ``open_session``."""

    def __init__(self, link: AgentLink, timeout: float) -> None:
        self._link, self._timeout = link, timeout

    async def status(self) -> dict[str, Any]:
        """The agent's report on itself, its pairs and batches."""
        status = await self._link.request(GetStatus(), timeout=self._timeout)
        assert isinstance(status, Status)
        return status.report

    async def records(self, since: float, *, failed: bool = False) -> list[dict[str, Any]]:
        """What the files of agents elsewhere say: see ``bus.messages.Records``."""
        records = await self._link.request(GetRecords(since=since, failed=failed), timeout=self._timeout)
        assert isinstance(records, Records)
        return list(records.agents)

    async def events(self, after: str = "", count: int = 100, *, wait: bool = False) -> list[dict[str, Any]]:
        """The last ``count`` events after the one with id ``after``, oldest first. RedisUnavailableError if Redis is
        away. ``wait``: not before there is one, however long Redis is away."""
        events = await self._link.request(GetEvents(after=after, count=count, wait=wait), timeout=self._timeout)
        assert isinstance(events, Events)
        return list(events.events)

    async def picture(self, pair: str, batch: str, source: str = "") -> dict[str, Any]:
        """What the batch moves when side ``source`` sends, as ``etha.picture`` reads it. ConfigError if there is
        none."""
        found = await self._link.request(GetPicture(pair=pair, batch=batch, source=source), timeout=self._timeout)
        assert isinstance(found, Picture)
        return found.picture


@asynccontextmanager
async def open_session(address: str, settings: Settings, *, timeout: float) -> AsyncIterator[AgentSession]:
    """A session with the agent at ``address``. AgentUnavailableError if none listens, ConfigError for the agent of
    another user."""
    path = agent_path(address)
    uid = _owner(path)
    if uid is not None and uid != os.geteuid():
        raise another_user(path, uid)
    hello = WorkerHello(
        version=__version__,
        namespace=settings.namespace,
        redis=None,
        host=settings.host_id,
        pid=os.getpid(),
        start=start_time(),
        observer=True,
    )
    link = await AgentLink.connect(path, hello, timeout=timeout)
    try:
        yield AgentSession(link, timeout)
    finally:
        await link.close()


def addresses(settings: Settings) -> list[str]:
    """Addresses of this host's agents in the namespace, or the one in ETHA_AGENT."""
    if settings.agent:
        return [settings.agent]
    return [f"ipc://{path}" for path in sorted((settings.runtime_dir / settings.namespace).glob("*.sock"))]


class LogFinder:
    """Finds the logs of this host's agents, of one ``device`` if it is given; also of agents that have ended.

    No agent is asked, because it may be frozen. Each is looked at once, because an agent may log that somebody did.
    """

    def __init__(self, settings: Settings, device: str | None = None) -> None:
        self._settings, self._device = settings, device
        self._folder = settings.runtime_dir / settings.namespace
        #: Socket and its inode -> standard error of the agent that listens there.
        self._places: dict[tuple[Path, int], str] = {}
        #: Which agents log elsewhere, and where.
        self.elsewhere: list[str] = []

    def find(self) -> dict[Path, str]:
        """Path -> device."""
        if self._settings.agent:
            found = {agent_path(self._settings.agent).with_suffix(".log"): agent_path(self._settings.agent).stem}
        else:
            found = {path: name for path, name in logs_in(self._folder).items() if self._device in (None, name)}
        for address in addresses(self._settings):
            path = agent_path(address)
            if self._device in (None, path.stem) and (place := self._place(path)) not in ("", TERMINAL):
                found[Path(place)] = path.stem
        return found

    def _place(self, path: Path) -> str:
        try:
            key = path, path.stat().st_ino
        except OSError:
            return ""
        if key not in self._places and (pid := agent_pid(path)):
            self._places[key] = log_of(pid)
            if self._places[key] == TERMINAL:
                self.elsewhere.append(f"the agent of {path.stem} (process {pid}): {note_of_log(TERMINAL)}")
        return self._places.get(key, "")


def _owner(path: Path) -> int | None:
    """Whose socket ``path`` is; None if it is not there.

    Whoever only looks asks this first, because an agent records that it has refused another user's process, and
    operators would find themselves when they look for faults.
    """
    try:
        return path.stat().st_uid
    except OSError:
        return None


def agent_pid(path: Path) -> int:
    """The process that listens at ``path``; 0 if there is none, none that can be seen from here, or another user's."""
    if _owner(path) != os.geteuid():
        return 0
    try:
        with dial(path) as connection:
            return Credentials.of_socket(connection).pid
    except AgentUnavailableError:
        return 0


def none_runs(settings: Settings) -> str:
    """The message if no agent answers: which of them live all the same, else that none runs."""
    silent = list(filter(None, (silence(agent_path(address)) for address in addresses(settings))))
    none = f"no agent is running at {place(settings)}; a client starts one, and so does 'etha agent'"
    return "; ".join(silent) or none


def silence(path: Path) -> str:
    """What to say of the agent at ``path``, which has not answered; "" if its process is gone or cannot be seen."""
    pid = agent_pid(path)
    if not pid or is_exiting(pid):
        return ""
    how = f"it is stopped, `kill -CONT {pid}` lets it go on" if is_stopped(pid) else "it hangs, or the machine is busy"
    return f"the agent of {path.stem}, process {pid}, runs but does not answer: {how}; `etha stop --now` ends it"


def place(settings: Settings) -> str:
    """Where agents of the namespace are looked for."""
    return settings.agent or str(settings.runtime_dir / settings.namespace)


async def look(settings: Settings, *, timeout: float, silent: list[str] | None = None) -> list[dict[str, Any]]:
    """The status of every agent that answers. Others are skipped; ``silent`` gets what to say of those that live."""
    found = []
    for address in addresses(settings):
        try:
            async with open_session(address, settings, timeout=timeout) as session:
                found.append(await session.status())
        except (AgentUnavailableError, AgentLostError):
            # A socket that its agent left behind, an agent that is just leaving, or one that does not answer.
            if silent is not None and (text := silence(agent_path(address))):
                silent.append(text)
    return found


async def picture(settings: Settings, pair: str, batch: str, source: str, *, timeout: float) -> dict[str, Any]:
    """The picture of a batch from the first agent here that has it registered.

    ConfigError lists the pairs and batches that there are. AgentUnavailableError if no agent answers.
    """
    there: list[tuple[str, str]] = []
    answers = False
    for address in addresses(settings):
        try:
            async with open_session(address, settings, timeout=timeout) as session:
                answers = True
                mine = [(line["pair"], line["batch"]) for line in (await session.status())["batches"]]
                if (pair, batch) in mine:
                    return await session.picture(pair, batch, source)
                there += mine
        except (AgentUnavailableError, AgentLostError):
            continue
    if not answers:
        raise AgentUnavailableError(none_runs(settings))
    names = sorted({f"{pair} {batch}" for pair, batch in there})
    raise ConfigError(
        f"no agent here has batch {batch!r} of pair {pair!r}; "
        + (f"there are, as PAIR BATCH: {', '.join(names)}" if names else "no batch is registered")
    )


async def stop(path: Path, *, now: bool, timeout: float, waits: Callable[[str], None]) -> int | None:
    """End the agent at ``path`` and wait until it has ended. Returns its pid; None if there was none.

    It lets running transfers finish. With ``now`` it does not, and an agent that does not react is killed. ``waits`` is
    told for whom this waits if that takes more than a second.
    AgentUnavailableError if it is still there after ``timeout`` seconds.
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
    except (ProcessLookupError, FileNotFoundError):  # the latter from Linux 6.16 on, while it ends
        return None
    try:
        for number in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):
            signal.pidfd_send_signal(process, number)
        until = asyncio.get_running_loop().time() + (min(timeout, HURRY) if now else timeout)
        ended = await _ends(process, _SAID_AFTER)
        if not ended:
            waits(_waiting(path, who.pid, now, timeout))
        if not ended and not await _ends(process, until - asyncio.get_running_loop().time()):
            if not now:
                raise AgentUnavailableError(
                    f"process {who.pid} at {path} has not ended within {timeout:g} s: is it stopped? "
                    f"`etha stop --now` kills it; {note_of_log(log_of(who.pid))}"
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


def _waiting(path: Path, pid: int, now: bool, timeout: float) -> str:
    who = f"waits for the agent of {path.stem}, process {pid}"
    if now:
        return f"{who}, up to {min(timeout, HURRY):g} s: then it is killed"
    if is_stopped(pid):
        return f"{who}, which is stopped: `kill -CONT {pid}` lets it end, `etha stop --now` kills it"
    return f"{who}, up to {timeout:g} s: its running transfers end first; `etha stop --now` does not wait for them"


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
    """Looks repeatedly, and returns each event once."""

    def __init__(self, settings: Settings, *, timeout: float) -> None:
        self._settings, self._timeout = settings, timeout
        self._last = ""

    async def look(self, before: int = 10) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
        """(status of every agent, new events, why there are none). The first call returns the last ``before``
        events."""
        found, events, why = [], [], ""
        for address in addresses(self._settings):
            try:
                async with open_session(address, self._settings, timeout=self._timeout) as session:
                    found.append(await session.status())
                    try:
                        news = await session.events(self._last, 1000 if self._last else before)
                    except RedisUnavailableError as error:
                        why = error.message
                        continue
            except (AgentUnavailableError, AgentLostError):
                continue
            if news:  # all agents of a namespace share one Redis, so the next one is asked only for later events
                self._last = str(news[-1]["id"])
                events += news
        return found, events, why
