"""Takes an agent's records, and hands them on later, so that no transfer waits for what is done with them.

transfer settled -> add() ... 0.1 s ... -> every consumer, with all records since   (ring, metrics, Redis, log)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from etha.observe.records import Record

log = logging.getLogger(__name__)

#: Seconds that records wait, so that back-to-back transfers share one round. People do not notice it.
DELAY = 0.1

#: Called on the loop with the records since the last call, oldest first. It must not block.
Consumer = Callable[[Sequence[Record]], None]


class Recorder:
    """The records of one agent, on their way to its consumers. Loop thread only."""

    def __init__(self) -> None:
        self._consumers: list[Consumer] = []
        self._records: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None

    def subscribe(self, consumer: Consumer) -> None:
        """From now on call ``consumer`` with all records. What it raises is logged."""
        self._consumers.append(consumer)

    def add(self, record: Record) -> None:
        """Take a record. It costs about a microsecond."""
        self._records.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY, self.flush)

    def flush(self) -> None:
        """Hand all records on now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        if not records:
            return
        for consumer in self._consumers:
            try:
                consumer(records)
            except Exception:
                log.exception("a consumer of records failed")
