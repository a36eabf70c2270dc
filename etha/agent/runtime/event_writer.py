"""Writes what the agent records to the stream of events in Redis: failures and changes at once, successes summed up.

The stream is capped, so one entry for each transfer would push the history out within seconds. Of a batch that is
busy there is one entry every ten seconds, of one that is idle none. Of several agents of a batch only one writes: that
of source rank 0, or if that is to blame or lost, that of target rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from etha.agent.runtime import tasks
from etha.agent.runtime.tasks import Spawn, ends_within, outage
from etha.errors import EthaError
from etha.observe.records import Incident, Record, TransferRecord
from etha.observe.sentences import sentence
from etha.store.registry import Store
from etha.units import seconds, size

log = logging.getLogger(__name__)

#: Seconds that one entry sums up.
EVERY = 10.0
#: Entries that wait while Redis is away. Older ones are dropped: the agent's own file has them.
MAX_WAITING = 1000
#: Characters of one entry's text.
MAX_TEXT = 1000
#: Incidents that Redis knows without this: the agent's own record comes and goes.
_KNOWN = ("started", "left")


@dataclass(slots=True)
class _Summary:
    """The transfers of one batch in one direction that were committed since the last entry, and repeated failures."""

    count: int = 0
    first: int | str | None = None
    last: int | str | None = None
    nbytes: int = 0
    slowest: float = 0.0
    repeated: int = 0

    def take(self, record: TransferRecord) -> None:
        label = record.seq if record.version is None else record.version
        self.first = label if not self.count else self.first
        self.last = label
        self.count += 1
        self.nbytes += record.payload.whole
        self.slowest = max(self.slowest, record.seconds)

    def text(self, batch: str) -> str:
        """ "812 transfers of batch 'weights', versions 100..911, 3.2 GB, slowest 0.2 s"."""
        parts = []
        if self.count:
            s = "s" if self.count > 1 else ""
            versions = f"version{s} {self.first}{f'..{self.last}' if s else ''}"
            slowest = f"{'slowest ' if s else ''}{seconds(self.slowest)}"
            parts.append(f"{self.count} transfer{s} of batch {batch!r}, {versions}, {size(self.nbytes)}, {slowest}")
        if self.repeated:
            parts.append(f"{self.repeated} more failures of the kind that was reported before")
        return "; ".join(parts)


class EventWriter:
    """A consumer of ``observe.recorder``. Loop thread only."""

    def __init__(self, store: Store, spawn: Spawn, *, agent: str, host: str, device: str) -> None:
        self._store, self._spawn, self._me = store, spawn, {"agent": agent, "on": host, "device": device}
        self._waiting: deque[dict[str, object]] = deque(maxlen=MAX_WAITING)
        self._writing = self._closed = False
        self._lock = asyncio.Lock()
        self._summaries: dict[tuple[str, str], _Summary] = {}
        #: Kinds of failures since the last round, by batch: only the first of each is an entry.
        self._reported: set[tuple[str, str, str, str]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, records: Sequence[Record]) -> None:
        """Write failures and changes, and sum up the rest."""
        for record in records:
            if isinstance(record, Incident):
                if record.what not in _KNOWN:
                    self._report(record, record.what, record.pair, record.batch, record.code)
            elif record.superseded or not _speaks(record):
                continue
            else:
                pair = record.pairs[0] if record.pairs else ""
                if record.failed:
                    kind = f"transfer_{record.outcome}"
                    self._report(record, kind, pair, record.batch, f"{record.code} {record.ranks}")
                else:
                    self._summary(pair, record.batch).take(record)

    async def close(self) -> None:
        """Write what is left, within two seconds."""
        self._round()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not await ends_within(tasks.LAST_WORDS, self._write(tasks.LAST_WORDS)):
            log.info("Redis does not know the last %d events of this agent", len(self._waiting))

    # ---- inside -------------------------------------------------------------------------------

    def _report(self, record: Record, kind: str, pair: str, batch: str, like: str) -> None:
        key = (kind, pair, batch, like)
        if key in self._reported:
            self._summary(pair, batch).repeated += 1
            return
        self._reported.add(key)
        self._schedule()
        self._enqueue(entry_of(record, kind, pair, batch))

    def _summary(self, pair: str, batch: str) -> _Summary:
        self._schedule()
        return self._summaries.setdefault((pair, batch), _Summary())

    def _schedule(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._round)

    def _round(self) -> None:
        """Ten seconds after the first of them: one entry for each batch."""
        self._timer = None
        summaries, self._summaries = self._summaries, {}
        self._reported.clear()
        now = round(time.time(), 3)
        for (pair, batch), summary in summaries.items():
            entry = {
                "kind": "transfers",
                "pair": pair,
                "batch": batch,
                "at": now,
                "text": summary.text(batch)[:MAX_TEXT],
            }
            self._enqueue(entry | ({"failed": 1} if summary.repeated else {}))

    def _enqueue(self, entry: dict[str, object]) -> None:
        self._waiting.append({name: value for name, value in (entry | self._me).items() if value != ""})
        if not self._writing and not self._closed:
            self._writing = True
            self._spawn(self._work())

    async def _work(self) -> None:
        try:
            await self._write(math.inf)
        finally:
            self._writing = False

    async def _write(self, timeout: float) -> None:
        async with self._lock:
            while self._waiting:
                entry = self._waiting[0]
                try:
                    await self._store.report_event(entry, timeout=timeout)
                except EthaError as error:
                    outage(log, "Redis does not know that %s: %s", entry.get("text"), error)
                if self._waiting and self._waiting[0] is entry:
                    self._waiting.popleft()


def entry_of(record: Record, kind: str, pair: str, batch: str) -> dict[str, object]:
    """What Redis is told of a record. ``failed`` is there if somebody should look at it."""
    entry: dict[str, object] = {"kind": kind, "pair": pair, "batch": batch, "at": round(record.at, 3)}
    if isinstance(record, TransferRecord) and record.seq is not None:
        entry["seq"] = record.seq
    if record.failed:
        entry["failed"] = 1
    return entry | {"code": record.code, "text": sentence(record)[:MAX_TEXT]}


def _speaks(record: TransferRecord) -> bool:
    """Whether this agent is the one of the batch that reports the transfer."""
    if record.seq is None:
        return True  # only this agent knows of it
    first = (record.source, 0)
    if first in record.ranks:
        return True
    blamed = {(culprit.side, culprit.rank) for culprit in record.culprits}
    return record.failed and first in blamed and (record.target, 0) in record.ranks
