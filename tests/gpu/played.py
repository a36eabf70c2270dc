"""An agent over a played card, in a process of its own."""

from __future__ import annotations

import os
import threading

from etha.cuda import driver as cuda
from tests.fakes.cuda import GPU0, FakeDriver
from tests.flow.jobs import tell


def serve(device: str) -> list[str]:
    """Until SIGTERM; tells "ready" once it listens. What was broken or never given back."""
    from etha.agent.__main__ import main

    fake = FakeDriver((GPU0,))
    cuda.install(fake)
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
