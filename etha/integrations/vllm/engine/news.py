"""Words from an engine's workers to the process of EngineCore on the same host, which may be busy with a step."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable

# Under vLLM's own root, so that vLLM's handlers print it.
log = logging.getLogger("vllm.etha")


class News:
    """Where workers of this host report. ``heard`` is called with each text, on a thread."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.name = f"etha-engine-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket.bind("\0" + self.name)
        threading.Thread(target=self._read, args=(heard,), name="etha-news", daemon=True).start()

    def _read(self, heard: Callable[[str], None]) -> None:
        while True:
            heard(self._socket.recv(200).decode(errors="replace"))


def report(name: str, text: str) -> None:
    """Inform the engine that listens as ``name``. One on another host is informed by its own workers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
        try:
            speaker.sendto(text.encode(), "\0" + name)
        except OSError as error:
            log.debug("the engine does not hear %r: %s", text, error)
