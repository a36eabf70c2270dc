"""A signal that the kernel gives to another thread ends the waits of the main thread, too."""

from __future__ import annotations

import concurrent.futures
import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from etha import interruptible
from etha.interruptible import Latch, holding, readable, settled
from tests.interrupts import InterruptAt

FAR = 3600.0


def held_elsewhere(until: float | None) -> bool:
    lock = threading.RLock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        return holding(lock, lambda: None, until)
    finally:
        done.set()
        thread.join()


def of_a_socket(until: float | None) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return readable(ours, until)


WAITS: dict[str, Callable[[float | None], bool]] = {
    "holding": held_elsewhere,
    "latch": lambda until: Latch().wait(until),
    "settled": lambda until: settled(concurrent.futures.Future(), until),
    "readable": of_a_socket,
}


@contextmanager
def interrupted_elsewhere() -> Iterator[None]:
    """Another thread gets SIGINT while this one waits, so that the signal does not end the system call."""

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, interrupt)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_a_signal_that_another_thread_got_ends_the_wait(name: str, limited: bool) -> None:
    with pytest.raises(KeyboardInterrupt), interrupted_elsewhere():
        WAITS[name](time.monotonic() + FAR if limited else None)


def run_on(main: bool, work: Callable[[], None]) -> None:
    if main:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


@pytest.mark.parametrize("on_main", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_over_in_time(name: str, on_main: bool) -> None:
    found: list[bool] = []

    def run() -> None:
        begun = time.monotonic()
        found.append(WAITS[name](begun + 0.15))
        assert time.monotonic() - begun >= 0.15

    run_on(on_main, run)
    assert found == [False]


@pytest.mark.parametrize("on_main", [False, True])
def test_what_is_there_is_found(on_main: bool) -> None:
    ours, theirs = socket.socketpair()
    found: list[bool] = []

    def run() -> None:
        failed: concurrent.futures.Future[None] = concurrent.futures.Future()
        failed.set_exception(TimeoutError("its own"))
        latch = Latch()
        latch.open()
        latch.open()
        lock, work = threading.RLock(), []
        found.extend([holding(lock, lambda: work.append(1)), latch.wait(), latch.wait(0.0), work == [1]])
        found.extend([readable(ours), settled(failed)])

    with ours, theirs:
        theirs.send(b"1")
        run_on(on_main, run)
    assert found == [True] * 6


def elsewhere(work: Callable[[], bool]) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_an_interrupt_at_any_place_gives_the_lock_back() -> None:
    lock = threading.RLock()
    for number in itertools.count(1):
        if not InterruptAt(number, interruptible).run(lambda: holding(lock, lambda: None)):
            break
        assert elsewhere(lambda: holding(lock, lambda: None, 0.0)), f"place {number}"
    assert number > 5, "places were found"


def test_an_interrupt_at_any_place_leaves_an_open_latch_open() -> None:
    for number in itertools.count(1):
        latch = Latch()
        latch.open()
        if not InterruptAt(number, interruptible).run(latch.wait):
            break
        assert elsewhere(lambda: latch.wait(0.0)), f"place {number}"  # noqa: B023 - it is called at once
        assert latch.wait(0.0)
    assert number > 1, "places were found"


def test_an_interrupt_at_any_place_of_the_one_that_opens_it_leaves_a_latch_open() -> None:
    for number in itertools.count(1):
        latch, found = Latch(), list[bool]()
        waiting = threading.Thread(target=lambda: found.append(latch.wait(time.monotonic() + 60)))  # noqa: B023
        waiting.start()
        interrupted = InterruptAt(number, interruptible).run(latch.open)
        if not latch.is_open:  # whoever opens it does so again
            latch.open()
        waiting.join()
        assert found == [True]
        if not interrupted:
            break
    assert number > 1, "places were found"
