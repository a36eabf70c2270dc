"""The interpreter's switch interval is short while a blocking call waits, and afterwards what it was."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from etha.client.loop_thread import SHORT_SWITCH, quick_switches

USUAL = 0.005


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def test_it_is_short_inside_and_restored_after_the_last_of_several() -> None:
    with quick_switches():
        with quick_switches():
            assert sys.getswitchinterval() == SHORT_SWITCH
        assert sys.getswitchinterval() == SHORT_SWITCH
    assert sys.getswitchinterval() == USUAL


def test_calls_of_several_threads_that_overlap_in_any_order_end_with_what_was() -> None:
    entered, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def call(number: int) -> None:
        with quick_switches():
            entered.wait()
            leave[number].wait()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    for number in (0, 1):  # who came first leaves first
        assert sys.getswitchinterval() == SHORT_SWITCH
        leave[number].set()
        threads[number].join()
    assert sys.getswitchinterval() == USUAL


def test_an_error_restores_it() -> None:
    with pytest.raises(ZeroDivisionError), quick_switches():
        raise ZeroDivisionError
    assert sys.getswitchinterval() == USUAL


def test_a_shorter_one_of_the_program_stays() -> None:
    sys.setswitchinterval(0.000064)
    with quick_switches():
        assert sys.getswitchinterval() == 0.000064
    assert sys.getswitchinterval() == 0.000064


def test_it_is_restored_to_the_microsecond() -> None:
    for microseconds in range(126, 20_000, 13):
        sys.setswitchinterval(microseconds * 1e-6 + 0.5e-6)
        before = sys.getswitchinterval()
        for _ in range(3):
            with quick_switches():
                assert sys.getswitchinterval() == SHORT_SWITCH
        assert sys.getswitchinterval() == before


def test_what_the_program_sets_meanwhile_stays() -> None:
    with quick_switches():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == 0.02


def test_a_child_forked_meanwhile_has_the_usual_one_and_its_own_calls_work() -> None:
    with quick_switches():
        pid = os.fork()
        if pid == 0:
            good = sys.getswitchinterval() == USUAL
            with quick_switches():
                good = good and sys.getswitchinterval() == SHORT_SWITCH
            os._exit(0 if good and sys.getswitchinterval() == USUAL else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert sys.getswitchinterval() == SHORT_SWITCH
    assert sys.getswitchinterval() == USUAL
