"""An account of bytes per second that several senders share."""

from __future__ import annotations

import math

import pytest

from etha.transport.rate_limit import BURST, LEAST, MOST, RateLimit


class Clock:
    """A clock that stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_rate_nobody_waits() -> None:
    limit = RateLimit(Clock())
    limit.spend(1 << 40)
    assert limit.rate == math.inf and limit.delay() == 0.0 and limit.quantum == MOST


def test_what_is_sent_takes_its_time() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    limit.lower(1e6)
    limit.lower(2e6)  # another rank of this host
    assert limit.rate == 1e6
    sent, begun = 0, clock.now
    while sent < 5_000_000:
        if (delay := limit.delay()) > 0:
            clock.now += delay
        limit.spend(limit.quantum)
        sent += limit.quantum
    assert sent / (clock.now - begun) == pytest.approx(1e6, rel=0.02)


def test_senders_that_ask_at_once_overdraw_it_once() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    limit.lower(1e6)
    limit.spend(int(BURST * 1e6))
    assert limit.delay() == pytest.approx(0.0, abs=1e-9)
    for _ in range(4):
        limit.spend(limit.quantum)
    assert limit.delay() == pytest.approx(4 * limit.quantum / 1e6)


def test_a_pause_saves_up_a_burst_and_no_more() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    limit.lower(1e6)
    limit.spend(1)
    clock.now += 1000
    limit.spend(int(BURST * 1e6) + 1000)
    assert limit.delay() == pytest.approx(0.001)


def test_a_slow_rate_still_sends_pages() -> None:
    limit = RateLimit(Clock())
    limit.lower(1.0)
    assert limit.quantum == LEAST
