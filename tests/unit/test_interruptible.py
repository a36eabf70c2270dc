"""A signal that the kernel gives to another thread ends the waits of the main thread, too."""

from __future__ import annotations

import concurrent.futures
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from etha.interruptible import acquire, readable, settled, wait

FAR = 3600.0


def held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def of_a_socket(until: float | None) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return readable(ours, until)


WAITS: dict[str, Callable[[float | None], bool]] = {
    "acquire": lambda until: acquire(held(), until),
    "wait": lambda until: wait(threading.Event(), math.inf if until is None else until),
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


@pytest.mark.parametrize("on_main", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_over_in_time(name: str, on_main: bool) -> None:
    found: list[bool] = []

    def run() -> None:
        begun = time.monotonic()
        found.append(WAITS[name](begun + 0.15))
        assert time.monotonic() - begun >= 0.15

    if on_main:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize("on_main", [False, True])
def test_what_is_there_is_found(on_main: bool) -> None:
    ours, theirs = socket.socketpair()
    found: list[bool] = []

    def run() -> None:
        event = threading.Event()
        event.set()
        failed: concurrent.futures.Future[None] = concurrent.futures.Future()
        failed.set_exception(TimeoutError("its own"))
        found.extend([acquire(threading.Lock()), wait(event, 0.0), readable(ours), settled(failed)])

    with ours, theirs:
        theirs.send(b"1")
        if on_main:
            run()
        else:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert found == [True] * 4
