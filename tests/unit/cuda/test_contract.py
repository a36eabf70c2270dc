"""The fake GPU does what tests/gpu asks of a real one."""

from __future__ import annotations

import pytest

from tests.fakes.cuda import FakeDriver
from tests.unit.cuda.contract import copies_events_and_streams, memory_and_events_of_another_process

_drivers: list[FakeDriver] = []


def make() -> FakeDriver:
    """One a process."""
    if not _drivers:
        _drivers.append(FakeDriver())
    return _drivers[0]


def test_copies_events_and_streams() -> None:
    gpu = make()
    copies_events_and_streams(gpu)
    _drivers.pop().check()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True], ids=["the exporter ends", "the exporter is killed"])
def test_memory_and_events_of_another_process(kill: bool) -> None:
    assert memory_and_events_of_another_process(make, kill=kill) == []
    _drivers.pop().check()
