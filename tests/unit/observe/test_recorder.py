"""Records on their way to their consumers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from etha.observe.recorder import Recorder, WarningRecords
from etha.observe.records import Incident, Record


def incident(number: int) -> Incident:
    return Incident(at=float(number), what="left", reason="")


async def test_records_come_later_and_together() -> None:
    recorder, rounds = Recorder(), list[Sequence[Record]]()
    came = asyncio.Event()

    def take(records: Sequence[Record]) -> None:
        rounds.append(records)
        came.set()

    recorder.subscribe(take)
    recorder.add(incident(1))
    recorder.add(incident(2))
    assert rounds == []
    await came.wait()
    recorder.add(incident(3))
    recorder.flush()
    recorder.flush()
    assert [[record.at for record in some] for some in rounds] == [[1.0, 2.0], [3.0]]


async def test_a_consumer_that_fails_hurts_no_other(caplog: pytest.LogCaptureFixture) -> None:
    recorder, found = Recorder(), list[Record]()

    def fail(records: Sequence[Record]) -> None:
        raise ValueError("a bug")

    recorder.subscribe(fail)
    recorder.subscribe(found.extend)
    recorder.add(incident(1))
    recorder.flush()
    assert len(found) == 1 and "a consumer of records failed" in caplog.text


async def test_warnings_are_incidents_from_any_thread() -> None:
    recorder, found = Recorder(), list[Record]()
    recorder.subscribe(found.extend)
    handler = WarningRecords(recorder)
    log = logging.getLogger("etha.peer.gate")
    log.addHandler(handler)
    try:
        log.info("linked")
        await asyncio.to_thread(log.warning, "refused a link: %s", "its key is no agent's of this namespace")
        logging.getLogger("etha.observe.ring").warning("must not come back as a record")
        await asyncio.sleep(0)
        recorder.flush()
    finally:
        log.removeHandler(handler)
    [one] = found
    assert isinstance(one, Incident) and one.what == "warning" and one.failed
    assert one.reason == "refused a link: its key is no agent's of this namespace"
