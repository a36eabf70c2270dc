"""What of an agent's records becomes an entry of the stream of events in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from etha.agent.runtime import event_writer, tasks
from etha.agent.runtime.event_writer import EventWriter
from etha.observe.records import Culprit, Incident, Payload, TransferRecord


class Stream:
    """A store that only has the stream."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.more = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def report_event(self, fields: Mapping[str, object], *, timeout: float) -> None:
        async with asyncio.timeout(None if timeout > 1e6 else timeout):
            await self.gate.wait()
        self.entries.append(dict(fields))
        self.more.set()

    async def reach(self, count: int) -> list[dict[str, Any]]:
        while len(self.entries) < count:
            self.more.clear()
            await self.more.wait()
        return self.entries


def transfer(number: int, **fields: Any) -> TransferRecord:
    given: dict[str, Any] = {
        "at": 1000.0 + number,
        "pairs": ("weights",),
        "batch": "model",
        "outcome": "committed",
        "seq": number,
        "version": number + 99,
        "source": "trainer",
        "target": "inference",
        "ranks": (("trainer", 0),),
        "payload": Payload(sent=2, whole=4_000_000),
        "seconds": number / 100,
    }
    return TransferRecord(**given | fields)


def aborted(seq: int, **fields: Any) -> TransferRecord:
    return transfer(seq, outcome="aborted", code="peer_lost", reason="inference rank 0 died", **fields)


def writer(stream: Stream, group: asyncio.TaskGroup) -> EventWriter:
    def spawn(work: Coroutine[Any, Any, None]) -> None:
        group.create_task(work)

    return EventWriter(stream, spawn, agent="a1", host="h", device="cpu")  # type: ignore[arg-type]


async def test_successes_are_summed_up_and_failures_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "EVERY", 0.2)
    stream = Stream()
    async with asyncio.TaskGroup() as group:
        events = writer(stream, group)
        events.take([transfer(seq) for seq in range(1, 813)])
        events.take([aborted(900), aborted(901), aborted(902)])
        [failure] = await stream.reach(1)
        assert (
            failure["kind"] == "transfer_aborted"
            and failure["seq"] == 900
            and failure["on"] == "h"
            and failure["agent"] == "a1"
        )
        assert "inference rank 0 died" in failure["text"]
        summary = (await stream.reach(2))[1]
        assert summary["kind"] == "transfers" and summary["pair"] == "weights"
        assert summary["text"] == (
            "812 transfers of batch 'model', versions 100..911, 3.25 GB, slowest 8.12 s; "
            "2 more failures of the kind that was reported before"
        )
        events.take([transfer(1)])
        text = (await stream.reach(3))[2]["text"]
        assert text == "1 transfer of batch 'model', version 100, 4 MB, 10 ms"
        await events.close()
    assert len(stream.entries) == 3, "an idle batch writes nothing"


async def test_one_agent_of_a_batch_writes() -> None:
    stream, other = Stream(), (("inference", 0), ("inference", 1))
    blamed = (Culprit(side="trainer", rank=0),)
    async with asyncio.TaskGroup() as group:
        events = writer(stream, group)
        events.take([transfer(1, ranks=other), aborted(2, ranks=other)])
        events.take([aborted(3, ranks=other, culprits=blamed)])  # the agent that would write may be dead
        events.take([transfer(4, ranks=(("inference", 1),), seq=None, outcome="withdrawn", superseded=True)])
        events.take([transfer(5, ranks=(("inference", 1),), seq=None, outcome="withdrawn", code="transfer_timeout")])
        events.take([Incident(at=1.0, what="started", reason="", failed=False)])
        events.take([Incident(at=1.0, what="link_lost", reason="the agent x is gone")])
        await events.close()
    kinds = [(entry["kind"], entry.get("seq")) for entry in stream.entries]
    assert kinds == [("transfer_aborted", 3), ("transfer_withdrawn", None), ("link_lost", None)]


async def test_what_redis_missed_comes_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_writer, "MAX_WAITING", 3)
    stream = Stream()
    stream.gate.clear()
    async with asyncio.TaskGroup() as group:
        events = writer(stream, group)
        for seq in range(5):
            events.take([aborted(seq, ranks=(("trainer", 0), ("inference", seq)))])
        stream.gate.set()
        await stream.reach(3)
        assert [entry["seq"] for entry in stream.entries] == [2, 3, 4]
        await events.close()


async def test_a_leaving_agent_does_not_wait_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LAST_WORDS", 0.05)
    stream = Stream()
    stream.gate.clear()
    async with asyncio.TaskGroup() as group:
        events = writer(stream, group)
        events.take([aborted(1)])
        await events.close()
        assert stream.entries == []
        stream.gate.set()
