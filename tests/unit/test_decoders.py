"""Decoders are made by one thread at a time, also where signals and forks come in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

import msgspec
import pytest

from etha.decoders import decoder, made_alone


class Part(msgspec.Struct):
    number: int


class Whole(msgspec.Struct):
    parts: list[Part]


def test_a_decoder_decodes() -> None:
    assert decoder(Whole).decode(msgspec.msgpack.encode({"parts": [{"number": 3}]})) == Whole(parts=[Part(number=3)])


def test_two_threads_never_make_something_at_once() -> None:
    inside: list[int] = []
    seen: list[int] = []
    began, release = threading.Event(), threading.Event()

    def make() -> None:
        inside.append(1)
        seen.append(len(inside))
        began.set()
        release.wait(10)
        inside.pop()

    threads = [threading.Thread(target=made_alone, args=(make,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    release.set()
    for thread in threads:
        thread.join(10)
    assert seen == [1] * 4


def test_an_error_is_that_of_the_maker() -> None:
    def make() -> None:
        raise TypeError("no such field")

    with pytest.raises(TypeError, match="no such field"):
        made_alone(make)
    assert made_alone(lambda: 1) == 1


def test_a_signal_handler_may_make_one_while_the_main_thread_makes_one() -> None:
    found: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        found.append(made_alone(lambda: "in the handler"))

    def make() -> str:
        signal.raise_signal(signal.SIGUSR1)
        assert found
        return "in the main thread"

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert made_alone(make) == "in the main thread"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == ["in the handler"]


def test_a_child_finds_nothing_half_made() -> None:
    """A fork waits for whoever makes one, and the child can make others."""
    began, release, done = threading.Event(), threading.Event(), []

    def make() -> None:
        began.set()
        release.wait(10)
        done.append(True)

    making = threading.Thread(target=made_alone, args=(make,))
    making.start()
    assert began.wait(10)
    threading.Timer(0.05, release.set).start()
    child = os.fork()
    if not child:
        os._exit(0 if done and made_alone(lambda: 7) == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    making.join(10)
    assert made_alone(lambda: 8) == 8


def test_all_messages_of_the_bus_have_their_decoders_when_they_are_imported() -> None:
    """So no two threads of a user make one at the same time."""
    count = "import etha.bus.handshake, etha.bus.messages; from etha.bus.codec import MESSAGES, _decoder as made; "
    count += "print(made.cache_info().currsize, len(MESSAGES))"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    made, registered = map(int, done.stdout.split())
    assert made == registered > 60
