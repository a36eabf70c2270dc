"""An agent over a played card, in a process of its own; the test can have its copies stop half way."""

from __future__ import annotations

import contextlib
import os
import threading

from etha.cuda import select as cuda
from tests.fakes.cuda import GPU0, FakeDriver
from tests.flow.jobs import tell, wait_for

#: Seconds for which stopped copies wait for the test.
PATIENCE = 60.0


class Barrier:
    """Stops the copy that would exceed ``allowance`` bytes, and all after it, until the barrier is open."""

    def __init__(self, allowance: int) -> None:
        self._left = allowance
        self._lock = threading.Lock()
        self._open = threading.Event()

    def take(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            stop = self._left < 0
        if stop and not self._open.wait(PATIENCE):
            raise TimeoutError(f"nobody has let the copies go on for {PATIENCE} s")

    def open(self) -> None:
        self._open.set()


def _obey(fake: FakeDriver) -> None:
    """What the test says of the card's copies: "stop copies" after so many bytes, then "go on"."""
    with contextlib.suppress(EOFError, OSError):  # the process ends
        while True:
            barrier = Barrier(wait_for("stop copies"))
            fake.before_copy = barrier.take
            tell("copies will stop")
            wait_for("go on")
            barrier.open()


def serve(device: str) -> list[str]:
    """Until SIGTERM; tells "ready" once it listens. What was broken or never given back."""
    from etha.agent.__main__ import main

    fake = FakeDriver((GPU0,))
    threading.Thread(target=_obey, args=(fake,), daemon=True).start()
    cuda.install_driver(fake)
    read, write = os.pipe()

    def announce() -> None:
        with os.fdopen(read) as pipe:
            tell("ready", pipe.readline())

    thread = threading.Thread(target=announce, daemon=True)
    thread.start()
    code = main(["--device", device, "--ready-fd", str(write)])
    thread.join()
    broken = [] if code == 0 else [f"{device}: status {code}"]
    try:
        fake.check()
    except AssertionError as error:
        broken += [f"{device}: {line}" for line in str(error).splitlines()]
    return broken
