"""What ``etha events`` shows: files of this host's agents, what agents of other hosts tell, and events of Redis.

    this host's files ------------------------------------------+
    local agent --link--> agents of other hosts --> their files +--> merged by time --> lines
    local agent --------> Redis: stream of events --------------+

Files are read directly, so they tell what happened even if no agent runs any more. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, time
from typing import Any, Self

from etha.agent_session import addresses, open_session, silence
from etha.bus.messages import MAX_EVENTS
from etha.config import Settings, agent_path
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError, EthaError
from etha.observe.follow import RingFollower
from etha.observe.history import Happening, in_files, merge, of_event, of_record
from etha.observe.records import Record, from_line
from etha.observe.ring import hosts_of_agents, read_ring, started
from etha.printable import one_line
from etha.units import counted

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
    #: Agents whose files lie in this runtime directory: id -> name of its host.
    here: dict[str, str] = field(default_factory=dict)


async def gather(settings: Settings, *, since: float, failed: bool, timeout: float) -> Gathered:
    """Everything since then that can be found out within about ``timeout`` seconds."""
    gathered = Gathered()
    found: list[Happening] = []
    events: dict[str, dict[str, Any]] = {}
    directory = settings.runtime_dir / settings.namespace
    reached, notes = 0, dict[str, None]()
    silent, heard = dict[str, str](), set[str]()
    for address in addresses(settings):
        try:
            async with open_session(address, settings, timeout=timeout) as session:
                reached += 1
                mine, *others = await session.records(since, failed=failed)
                if agent_path(address).parent == directory:  # ETHA_AGENT may name one elsewhere
                    gathered.here[mine["agent"]] = mine["host"]
                if mine["why"]:
                    notes[f"{mine['name']}: {mine['why']}"] = None
                for agent in others:
                    if agent["why"]:
                        silent[agent["agent"]] = f"{agent['name']}: {agent['why']}"
                        continue
                    lines, unreadable = of_lines(agent["lines"], agent["host"])
                    if unreadable:
                        notes[f"{agent['name']}: {counted(unreadable, 'line')} could not be read"] = None
                    if left_out := agent.get("left_out", 0):
                        notes[f"{agent['name']}: {counted(left_out, 'older line')} had no room; ask there"] = None
                    heard |= {agent["agent"], *(one.details.get("agent", "") for one in lines)}
                    found += lines
                for event in await session.events(count=MAX_EVENTS):
                    events[str(event["id"])] = event
        except (AgentUnavailableError, AgentLostError):
            # A socket that its agent left behind, an agent that is just leaving, or one that does not answer.
            if text := silence(agent_path(address)):
                notes[text] = None
        except EthaError as error:
            notes[error.message] = None
    if not reached:
        notes["no agent here could be asked, so neither were other hosts nor Redis: this host's own files only"] = None
    # After the agents were asked, because each has written then what it knew.
    unread = list[OSError]()
    gathered.here |= hosts_of_agents(directory)
    for device, record in read_ring(directory, since=since, failed=failed, unread=unread):
        found.append(of_record(record, host_of(record, settings, gathered.here), device))
    notes.update((f"{error.filename} could not be read: {error.strerror}", None) for error in unread)
    gathered.last = max(events, key=_order, default="")
    gathered.happenings = [
        one for one in merge(found, events.values(), heard | gathered.here.keys()) if one.at >= since
    ]
    # One agent may be linked to who is not linked to another, and agents of this directory need no link.
    gathered.notes = [*notes, *(note for agent, note in silent.items() if agent not in heard | gathered.here.keys())]
    return gathered


def host_of(record: Record, settings: Settings, agents: dict[str, str]) -> str:
    """The name of the host of the agent that wrote a line of this host's files, as that agent calls it. ``agents`` are
    those that are known, and this one is noted there."""
    agents.update(started(record))
    return agents.setdefault(record.agent, settings.host_name)


def of_lines(lines: Sequence[str], host: str) -> tuple[list[Happening], int]:
    """Lines that an agent of another host tells: the device that wrote each, and the record. Also how many could not be
    read, because a later version or nonsense wrote them."""
    found = []
    for line in lines:
        device, _, record = line.partition(" ")
        with suppress(ValueError, RecursionError):
            found.append(of_record(from_line(record.encode()), host, device))
    return found, len(lines) - len(found)


def _order(event: str) -> tuple[int, int]:
    first, _, second = event.partition("-")
    return (int(first or 0), int(second or 0))


class Follower:
    """What happens from now on; a context. Woken by this host's files, and by Redis through a local agent.

    What agents of other hosts write to Redis comes with it: failures at once, successes summed up.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._queue = asyncio.Queue[Happening | None]()

    def end(self) -> None:
        """Have ``follow`` return. To be called on its loop."""
        self._queue.put_nowait(None)

    def __enter__(self) -> Self:
        self._files = RingFollower(self._settings.ensure_runtime_dir() / self._settings.namespace)
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    async def follow(self, after: Gathered) -> AsyncGenerator[Happening, None]:
        """What has happened since the context was entered and was not in ``after``, until cancelled
        or ended. Close it before the context is left."""
        queue, news = self._queue, asyncio.Event()
        known, agents = frozenset(after.happenings), dict(after.here)

        def changed() -> None:
            news.set()
            self._settings.ensure_runtime_dir()  # it may have been removed
            for device, record in self._files.news():
                queue.put_nowait(of_record(record, host_of(record, self._settings, agents), device))

        loop = asyncio.get_running_loop()
        handle = self._files.fileno()
        loop.add_reader(handle, changed)
        listening = loop.create_task(self._listen(after.last, queue, news, agents))
        try:
            while True:
                if (happening := await queue.get()) is None:
                    return
                if happening not in known:
                    yield happening
        finally:
            loop.remove_reader(handle)
            listening.cancel()

    async def _listen(
        self, last: str, queue: asyncio.Queue[Happening | None], news: asyncio.Event, agents: dict[str, str]
    ) -> None:
        """Put events of Redis into the queue, through whichever local agent answers, but those of local ``agents``."""
        while True:
            news.clear()
            reached = False
            for address in addresses(self._settings):
                try:
                    async with open_session(address, self._settings, timeout=WAIT) as session:
                        while True:
                            for event in await session.events(last or "0", MAX_EVENTS, wait=True):
                                last, reached = str(event["id"]), True
                                if not in_files(event, agents):
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
