"""Takes an agent's records, and hands them on later, so that no transfer waits for what is done with them.

transfer settled -> add() ... 0.1 s ... -> every consumer, with all records since   (ring, metrics, Redis, log)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from etha.observe.records import ERROR, WARNING, Incident, Record

log = logging.getLogger(__name__)

#: Seconds that records wait, so that back-to-back transfers share one round. People do not notice it.
DELAY = 0.1

#: Characters of a warning that are kept.
MAX_WARNING = 2000
#: Loggers whose warnings are recorded by other means, with more detail, or must not be.
_SILENT = ("etha.observe", "etha.peer.hub")

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


class WarningRecords(logging.Handler):
    """Makes an incident of each warning that an agent logs: refused links, Redis away, streams that closed.

    What may come often is logged at a limited rate already. Any thread may log.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.WARNING)
        self._recorder, self._loop = recorder, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Record one line, without its traceback, which the log has."""
        if record.name.startswith(_SILENT):
            return
        what = ERROR if record.levelno >= logging.ERROR else WARNING
        incident = Incident(at=record.created, what=what, reason=record.getMessage()[:MAX_WARNING])
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._recorder.add, incident)
