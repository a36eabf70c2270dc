"""Asks agents elsewhere for lines of their files, and answers them: ``etha events`` on any host shows all hosts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.tasks import Spawn
from etha.config import Settings
from etha.errors import EthaError
from etha.observe.recorder import Recorder
from etha.observe.records import to_line
from etha.observe.ring import RingWriter, read_ring
from etha.peer.introductions import AskRecords, TellRecords
from etha.peer.wire import Scope
from etha.store.records import AgentRecord
from etha.store.registry import Store
from etha.version import __version__

log = logging.getLogger(__name__)

#: Seconds that other agents, and Redis, have to answer.
PATIENCE = 3.0
#: Bytes of lines that one agent tells, the newest ones. An answer has to fit one message on a link.
MAX_LINES = 2 << 20
#: These messages are about no pair, but every message on a link has a scope.
_SCOPE = Scope(pair="records", epoch=0)


class RecordQueries:
    """Questions to linked agents of the same version, and answers to theirs."""

    def __init__(
        self, links: PeerLinks, store: Store, settings: Settings, recorder: Recorder, ring: RingWriter, spawn: Spawn
    ) -> None:
        self._links, self._store, self._settings = links, store, settings
        self._recorder, self._ring, self._spawn = recorder, ring, spawn
        self._asked: dict[int, tuple[str, asyncio.Future[TellRecords]]] = {}
        self._requests = 0
        self._reading = asyncio.Lock()

    async def ask(self, since: float, *, failed: bool) -> list[dict[str, Any]]:
        """One entry for each agent that Redis knows, this one first. Its lines are in its files then, and not told."""
        await self._sync()
        try:
            known = await self._store.agents.all(timeout=PATIENCE)
        except EthaError:
            linked = [peer.agent for peer in self._links.hub.peers()]
            known = [record for agent in linked if (record := self._links.record(agent)) is not None]
        others = [record for record in known if record.id != self._links.me]
        me = {"agent": self._links.me, "host": self._settings.host_name, "device": self._ring.device}
        mine = me | {
            "name": f"agent {me['agent']} of {me['device']} on host {me['host']}",
            "lines": [],
            "why": self._ring.failing,
        }
        return [mine, *await asyncio.gather(*(self._ask(record, since, failed) for record in others))]

    async def _ask(self, record: AgentRecord, since: float, failed: bool) -> dict[str, Any]:
        found: dict[str, Any] = {
            "agent": record.id,
            "host": record.shown_host,
            "device": record.device,
            "name": f"agent {record.id} of {record.device} on host {record.shown_host}",
            "lines": [],
            "why": "",
        }
        through = None if self._links.hub.linked(record.id) else self._links.reach(record.id)
        if through is None and not self._links.hub.linked(record.id):
            here = record.host == self._settings.host_id
            place = "runs with another runtime directory and " if here else ""
            found["why"] = f"it {place}is not linked to an agent that was asked; ask there"
            return found
        if record.version != __version__:
            # An agent drops the link on which it hears something that it does not know.
            found["why"] = f"it does not tell what happened: it has version {record.version}, this one {__version__}"
            return found
        self._requests += 1
        request, future = self._requests, asyncio.get_running_loop().create_future()
        self._asked[request] = (record.id, future)
        try:
            scope = _SCOPE if through is None else Scope(pair=through[0], epoch=through[1])
            self._links.tell(record.id, scope, AskRecords(request=request, since=since, failed=failed))
            async with asyncio.timeout(PATIENCE):
                answer: TellRecords = await future
        except TimeoutError:
            found["why"] = f"it did not answer within {PATIENCE:g} s"
            return found
        finally:
            del self._asked[request]
        found["lines"] = [line for line in answer.lines.decode("utf-8", "replace").split("\n") if line]
        found["left_out"] = answer.left_out
        return found

    async def _sync(self) -> None:
        self._recorder.flush()
        await asyncio.to_thread(self._ring.sync)

    def hear(self, agent: str, scope: Scope, message: AskRecords | TellRecords) -> None:
        """Another agent asks or answers."""
        if isinstance(message, AskRecords):
            self._spawn(self._answer(agent, scope, message))
            return
        asked = self._asked.get(message.request)
        if asked is not None and asked[0] == agent and not asked[1].done():
            asked[1].set_result(message)

    async def _answer(self, agent: str, scope: Scope, message: AskRecords) -> None:
        await self._sync()
        async with self._reading:  # one at a time, because each reads megabytes
            lines, left_out = await asyncio.to_thread(newest_lines, self._ring.directory, message.since, message.failed)
        self._links.tell(agent, scope, TellRecords(request=message.request, lines=lines, left_out=left_out))


def newest_lines(directory: Path, since: float, failed: bool, most: int = MAX_LINES) -> tuple[bytes, int]:
    """Lines of this directory's files with the device that wrote them, and how many had no room in ``most`` bytes.

    Failures come before what went well, and newer ones before older ones, because somebody asks why something failed.
    """
    records = list(enumerate(read_ring(directory, since=since, failed=failed)))
    found: list[tuple[int, bytes]] = []
    size = 0
    for number, (device, record) in sorted(records, key=lambda one: (one[1][1].failed, one[0]), reverse=True):
        line = device.encode() + b" " + to_line(record)
        size += len(line)
        if size > most:
            break
        found.append((number, line))
    return b"".join(line for _, line in sorted(found)), len(records) - len(found)
