"""Every order of events in small publications, by the rule that the scripts in Redis apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from etha.agent.protocol import sources
from etha.agent.protocol.sources import Sources
from tests.unit.agent.protocol.source_walking import Budget, walk, world

PASS = (True, True, True)
#: What happens, and how many states that gives. A change of the numbers is a change of the rule.
WORLDS: dict[str, tuple[Budget, dict[str, Any], int]] = {
    "all that may go wrong once": (Budget(), {}, 13_295),
    "the publisher gives one copy": (Budget(lapses=0, deaths=0), {"copies": 1}, 295),
    "one slot": (Budget(lapses=0), {"slots": 1}, 1513),
    "one that does not serve": (Budget(deaths=0), {"serves": (0, 1)}, 1641),
    "publishers die and come again": (Budget(publishers=2, lapses=0, failures=0, deaths=0), {}, 1498),
    "publishers die that give one copy": (Budget(publishers=1, lapses=0, deaths=0), {"copies": 1}, 1371),
    "an agent falls silent": (Budget(silences=1, lapses=0, deaths=0), {}, 1101),
    "an agent falls silent that has the only copy": (Budget(silences=1, lapses=0, deaths=0), {"copies": 1}, 1105),
    "two places": (Budget(puts=3, lapses=0, deaths=0), {"places": 2}, 1691),
    "three slots": (Budget(puts=3, lapses=0, failures=0, deaths=0), {"slots": 3, "places": 2}, 760),
    "one that holds a part": (Budget(lapses=0), {"kinds": ("part", "a")}, 1_046),
    "publishers die, and one holds a part": (Budget(publishers=2, lapses=0, deaths=0), {"kinds": ("part", "a")}, 2_986),
    "two that hold different parts": (
        Budget(lapses=0, failures=0, deaths=0),
        {"subscribers": 3, "kinds": ("part", "rest", "a"), "copies": 1},
        1_410,
    ),
    "two pass on": (Budget(lapses=0, deaths=0), {"passes": PASS}, 973),
    "one of two that pass on is launched again": (Budget(puts=1, lapses=0, failures=0), {"passes": PASS}, 370),
    "claims of two that pass on lapse": (Budget(puts=1, failures=0, deaths=0), {"passes": PASS}, 597),
    "three pass on": (Budget(puts=1, lapses=0, deaths=0), {"subscribers": 3, "passes": PASS}, 9_842),
    "one passes on, and one does not serve": (
        Budget(lapses=0, deaths=0),
        {"subscribers": 2, "serves": (1, 0), "passes": (True, False), "copies": 1},
        488,
    ),
    "publishers die, and two pass on": (Budget(publishers=1, lapses=0, deaths=0), {"passes": PASS}, 6_479),
    "three subscribers": (Budget(lapses=0, failures=0, deaths=0), {"subscribers": 3}, 2372),
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_order_of_events_breaks_what_always_holds(name: str) -> None:
    budget, options, states = WORLDS[name]
    assert walk(world(budget, **options)) == states


def found(name: str, match: str) -> None:
    """The walk of world ``name`` finds what is wrong with the rule."""
    budget, options, _ = WORLDS[name]
    with pytest.raises(AssertionError, match=match):
        walk(world(budget, **options))


def test_the_walk_finds_a_place_that_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lapse(self: Sources) -> None:
        for number in sorted(self.expired):
            del self.hops[number]
        self.expired.clear()

    monkeypatch.setattr(Sources, "_lapse", lapse)
    found("all that may go wrong once", "counts 1 readers and has 0")


def test_the_walk_finds_a_holder_that_serves_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sources, "_serve_on", lambda self, name: None)
    found("three subscribers", "does not serve any more|waits for more than")


def test_the_walk_finds_a_put_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.Holder, "claimable", lambda self: [slot.seq > 0 for slot in self.slots])
    found("two places", "a put waits for readers|all 2 slots")


def test_the_walk_finds_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Sources.fits
    monkeypatch.setattr(
        Sources, "fits", lambda self, ask, *at: fits(self, replace(ask, newer_than=max(0, ask.newer_than - 1)), *at)
    )
    monkeypatch.setattr(sources.Holder, "offer", lambda self: self.newest + 1 if self.used < self.places else 0)
    found("two places", "asked for more than 1 and is given 1|hops go on for ever")


def test_the_walk_finds_a_subscriber_that_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher has given its copies, and those who have them have ended."""
    monkeypatch.setattr(Sources, "enough", lambda self, ask, one, slot: one.publisher and self.seq > 0)
    found("the publisher gives one copy", "waits for more than")


def test_the_walk_finds_one_who_waits_for_what_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sources, "_end_passed", lambda self, hop: None)
    found("two pass on", "passes on what does not come")
