"""What ``etha events`` shows: files of this host's agents, what agents of other hosts tell, and events of Redis.

    this host's files ------------------------------------------+
    local agent --link--> agents of other hosts --> their files +--> merged by time --> lines
    local agent --------> Redis: stream of events --------------+

Files are read directly, so they tell what happened even if no agent runs any more. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, time
from typing import Any, Self

from etha.agent_session import addresses, open_session
from etha.bus.messages import MAX_EVENTS
from etha.config import Settings
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError
from etha.observe.follow import RingFollower
from etha.observe.history import Happening, merge, of_event, of_record, written_by_agent
from etha.observe.records import from_line
from etha.observe.ring import read_ring
from etha.printable import one_line

#: Seconds for which a question for news waits before it is asked again.
WAIT = 3600.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_since(text: str, now: float) -> float:
    """Seconds since 1970 of "10m", "2h", "1d" (ago) or a time of today or an ISO time, local if it names no zone.
    ConfigError else."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip()):
        return now - float(found[1]) * _UNITS[found[2]]
    if re.match(r"\d\d:", text.strip()):
        with suppress(ValueError):
            return datetime.combine(datetime.fromtimestamp(now), time.fromisoformat(text.strip())).timestamp()
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        raise ConfigError(
            f"--since {text!r}: give 30s, 10m, 2h, 1d, a time of today like 14:00, or one like 2026-01-31T14:00"
        ) from None


@dataclass(slots=True)
class Gathered:
    """``notes`` say what is missing, and why."""

    happenings: list[Happening] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: Id of the newest event of Redis; "" if there is none.
    last: str = ""
    #: Host names whose agents' files were read.
    hosts: set[str] = field(default_factory=set)


async def gather(settings: Settings, *, since: float, failed: bool, timeout: float) -> Gathered:
    """Everything since then that can be found out within about ``timeout`` seconds."""
    gathered = Gathered(hosts={settings.host_name})
    found: list[Happening] = []
    events: dict[str, dict[str, Any]] = {}
    reached, notes = 0, dict[str, None]()
    for address in addresses(settings):
        try:
            async with open_session(address, settings, timeout=timeout) as session:
                reached += 1
                for agent in await session.records(since, failed=failed):
                    if agent["why"]:
                        notes[f"{agent['name']}: {agent['why']}"] = None
                        continue
                    gathered.hosts.add(agent["host"])
                    found += [of_line(line, agent["host"]) for line in agent["lines"]]
                for event in await session.events(count=MAX_EVENTS):
                    events[str(event["id"])] = event
        except (AgentUnavailableError, AgentLostError):
            continue  # a socket that its agent left behind, or an agent that is just leaving
        except EthaError as error:
            notes[error.message] = None
    if not reached:
        notes["no agent here could be asked, so neither were other hosts nor Redis: this host's own files only"] = None
    # After the agents were asked, because each has written then what it knew.
    directory, unread = settings.runtime_dir / settings.namespace, list[OSError]()
    found += [
        of_record(record, settings.host_name, device)
        for device, record in read_ring(directory, since=since, failed=failed, unread=unread)
    ]
    notes.update((f"{error.filename} could not be read: {error.strerror}", None) for error in unread)
    gathered.last = max(events, key=_order, default="")
    gathered.happenings = [one for one in merge(found, events.values(), gathered.hosts) if one.at >= since]
    gathered.notes = list(notes)
    return gathered


def of_line(line: str, host: str) -> Happening:
    """A line that an agent of another host tells: the device that wrote it, and the record."""
    device, _, record = line.partition(" ")
    return of_record(from_line(record.encode()), host, device)


def _order(event: str) -> tuple[int, int]:
    first, _, second = event.partition("-")
    return (int(first or 0), int(second or 0))


class Follower:
    """What happens from now on; a context. Woken by this host's files, and by Redis through a local agent.

    What agents of other hosts write to Redis comes with it: failures at once, successes summed up.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> Self:
        self._files = RingFollower(self._settings.ensure_runtime_dir() / self._settings.namespace)
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    async def follow(self, after: Gathered) -> AsyncGenerator[Happening, None]:
        """What has happened since the context was entered and was not in ``after``, until cancelled."""
        queue, news = asyncio.Queue[Happening](), asyncio.Event()
        known = frozenset(after.happenings)

        def changed() -> None:
            news.set()
            for device, record in self._files.news():
                queue.put_nowait(of_record(record, self._settings.host_name, device))

        loop = asyncio.get_running_loop()
        loop.add_reader(self._files.fileno(), changed)
        listening = loop.create_task(self._listen(after.last, queue, news))
        try:
            while True:
                if (happening := await queue.get()) not in known:
                    yield happening
        finally:
            loop.remove_reader(self._files.fileno())
            listening.cancel()

    async def _listen(self, last: str, queue: asyncio.Queue[Happening], news: asyncio.Event) -> None:
        """Put events of Redis into the queue, through whichever local agent answers."""
        while True:
            news.clear()
            reached = False
            for address in addresses(self._settings):
                try:
                    async with open_session(address, self._settings, timeout=WAIT) as session:
                        while True:
                            for event in await session.events(last or "0", MAX_EVENTS, wait=True):
                                last, reached = str(event["id"]), True
                                if not (written_by_agent(event) and event.get("on") == self._settings.host_name):
                                    queue.put_nowait(of_event(event))
                except EthaError:
                    continue
            if not reached:
                await news.wait()  # a file or a socket of an agent is new


def time_text(at: float) -> str:
    """Local time to milliseconds."""
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}.{int(at * 1000) % 1000:03d}"


def line(happening: Happening) -> str:
    """One line for people."""
    parts = [time_text(happening.at), happening.place, happening.where, happening.text]
    return one_line("  ".join(filter(None, parts)))
