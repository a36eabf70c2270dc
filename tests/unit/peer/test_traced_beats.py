"""While a trace is written, both ends of a link note its beats, from which the clocks of hosts are put on one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etha.observe import trace
from etha.observe.trace_clocks import Sample
from etha.peer.link import TRACED_BEATS
from etha.peer.messages import Done
from tests.unit.peer.agents import SCOPE, Namespace, agent, until


class Noted:
    """What a Tracer is told of beats: (agent, number) -> times."""

    def __init__(self) -> None:
        self.returned: dict[tuple[str, int], tuple[int, int]] = {}
        self.answered: dict[tuple[str, int], tuple[int, int]] = {}

    def beat_returned(self, agent: str, number: int, sent: int, back: int) -> None:
        assert (agent, number) not in self.returned
        self.returned[agent, number] = (sent, back)

    def beat_answered(self, agent: str, number: int, came: int, went: int) -> None:
        assert (agent, number) not in self.answered
        self.answered[agent, number] = (came, went)


async def test_a_link_that_opens_is_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: Any = Noted()
    monkeypatch.setattr(trace, "active", noted)
    namespace = Namespace()
    async with agent("a", namespace, beat=60) as a, agent("b", namespace, beat=60) as b:
        await asyncio.gather(a.open(b), b.open(a))
        await until(lambda: len(noted.returned) == 2 * (TRACED_BEATS + 1))
        a.send(b, Done(seq=7))
        assert await b.heard(1) == [("a", SCOPE, Done(seq=7))]
    other = {"a": "b", "b": "a"}
    assert noted.answered.keys() == {(other[to], number) for to, number in noted.returned}
    for (to, number), (sent, back) in noted.returned.items():
        came, went = noted.answered[other[to], number]
        assert sent <= came <= went <= back
        sample = Sample.of(sent, came, went, back)
        assert abs(sample.ahead) <= sample.error  # they share a clock


async def test_without_a_trace_beats_are_numbered_from_one_and_none_goes_out_at_once() -> None:
    assert trace.active is None
    namespace = Namespace()
    async with agent("a", namespace, beat=60) as a, agent("b", namespace, beat=60) as b:
        await a.open(b)
        link = a.hub._links["b"]
        assert (link._beats, link.sent) == (0, 1)
        link.beat(1000)
        await until(lambda: link.round_trip is not None)
        assert (link._beats, link.sent) == (1, 2)
