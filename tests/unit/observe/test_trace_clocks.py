"""Clocks of hosts put on one: NTP's formula, drift, chains of links, hosts without any."""

from __future__ import annotations

import random

import pytest

from etha.observe.trace_clocks import WINDOW, Clocks, Sample, by_real_time

SECOND = 1_000_000_000


def beat(at: int, ahead: int, there: int, back: int, inside: int = 1000) -> Sample:
    """A beat that leaves ``at`` and takes ``there`` and ``back``, to a clock that is ``ahead``."""
    came = at + there + ahead
    return Sample.of(at, came, came + inside, at + there + inside + back)


@pytest.mark.parametrize("ahead", [0, 5 * SECOND, -3 * SECOND, 10**15])
def test_the_error_holds_whatever_way_is_the_slower(ahead: int) -> None:
    draw = random.Random(ahead)
    for _ in range(200):
        sample = beat(draw.randrange(10**12), ahead, draw.randrange(10**7), draw.randrange(10**7))
        assert abs(sample.ahead - ahead) <= sample.error + 1


def test_the_beat_with_the_least_round_trip_counts() -> None:
    clocks = Clocks()
    for there, back in ((900_000, 10_000), (20_000, 21_000), (10_000, 5_000_000)):
        clocks.measured("a", "b", beat(SECOND, 777 * SECOND, there, back))
    shift = clocks.shifts("a")["b"]
    assert abs(shift(778 * SECOND) + 777 * SECOND) <= 500
    assert shift.error == 20_500


def test_drift_is_followed_between_windows() -> None:
    clocks, drift = Clocks(), 50e-6
    for minute in range(30):
        at = minute * WINDOW + SECOND
        clocks.measured("a", "b", beat(at, SECOND + round(at * drift), 30_000, 30_000))
    shift = clocks.shifts("a")["b"]
    for at in range(2 * SECOND, 29 * WINDOW, 7 * SECOND):
        there = at + SECOND + round(at * drift)
        assert abs(there + shift(there) - at) <= 1000


def test_a_chain_joins_hosts_that_have_no_link() -> None:
    clocks = Clocks()
    clocks.measured("b", "a", beat(SECOND, -100 * SECOND, 10_000, 10_000))
    clocks.measured("b", "c", beat(SECOND, 7 * SECOND, 20_000, 20_000))
    clocks.measured("x", "y", beat(SECOND, 7 * SECOND, 20_000, 20_000))
    found = clocks.shifts("a")
    assert set(found) == {"a", "b", "c"}
    assert found["c"](SECOND) == pytest.approx(-107 * SECOND, abs=1)
    assert found["c"].error == 30_000


def test_the_better_chain_is_taken() -> None:
    clocks = Clocks()
    clocks.measured("a", "c", beat(SECOND, 5, 10**7, 10**7))
    clocks.measured("a", "b", beat(SECOND, 5, 1000, 1000))
    clocks.measured("b", "c", beat(SECOND, 5, 1000, 1000))
    assert clocks.shifts("a")["c"].error == 2000


def test_real_time_is_the_last_resort() -> None:
    shift = by_real_time(monotonic=50, realtime=1050, root_monotonic=10, root_realtime=1000)
    assert 50 + shift(50) == 60  # 50 ns later than 1000, when the root's clock was 10
