"""Records in the agent's log: one line for each that failed, and at debug one for each of the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from etha.observe.records import ERROR, WARNING, Incident, Record, TransferRecord
from etha.observe.sentences import sentence, where

log = logging.getLogger(__name__)

#: Most failures of one round that have a line of their own: who gives up many times a second must not fill the log.
MOST = 5


def log_records(records: Sequence[Record]) -> None:
    """A consumer of ``observe.recorder``.

    A call that ended before its transfer began is no warning, because who asks with a short deadline expects that. What
    was recorded because the agent had logged it is not logged again.
    """
    failed = [record for record in records if record.failed and not _logged(record)]
    for record in failed[:MOST]:
        begun = not isinstance(record, TransferRecord) or record.outcome != "withdrawn"
        log.log(logging.WARNING if begun else logging.INFO, "%s", line(record))
    if len(failed) > MOST:
        log.warning("%d more failures in the same tenth of a second: see `etha events`", len(failed) - MOST)
    if log.isEnabledFor(logging.DEBUG):
        for record in records:
            if not record.failed:
                log.debug("%s", line(record))


def _logged(record: Record) -> bool:
    return isinstance(record, Incident) and record.what in (WARNING, ERROR)


def line(record: Record) -> str:
    """Where it happened, if it concerns a pair, and what."""
    place = where(record)
    return f"{place}: {sentence(record)}" if place else sentence(record)
