"""Records on their way to their consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from etha.observe.recorder import Recorder
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
