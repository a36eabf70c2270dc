"""A starting agent's reports to the process that started it, and the start lock that it holds until it listens.

    pipe to the starter     "ready" or "error CODE TEXT"
    the lock's file         "starting PID", and in a second line "busy CODE TEXT": the reason for a delay

The starter may be gone already. An agent does not give up at its starter's deadline, because the next caller waits for
the start lock and then finds the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from etha.errors import EthaError


class Startup:
    """``ready_fd``: a pipe to the starter. ``lock_fd``: the start lock, which the starter took and shares with the
    agent."""

    def __init__(self, ready_fd: int | None = None, lock_fd: int | None = None) -> None:
        self._pipe, self._lock = ready_fd, lock_fd
        for fd in (ready_fd, lock_fd):
            if fd is not None:
                os.set_inheritable(fd, False)  # the lock ends with this process, not with one that it starts
        self._note()

    def busy(self, error: EthaError) -> None:
        """``error`` delays the start, and may pass."""
        self._note(f"busy {_line(error)}\n")

    def ready(self) -> None:
        """Workers can connect: release the lock, so that the next caller finds the agent."""
        self._end("ready")

    def failed(self, error: EthaError) -> None:
        """The agent did not start. The starter writes the error into the lock's file for other callers."""
        self._end(f"error {_line(error)}")

    def _note(self, more: str = "") -> None:
        if self._lock is not None:
            text = f"starting {os.getpid()}\n{more}".encode(errors="replace")
            os.pwrite(self._lock, text, 0)
            os.ftruncate(self._lock, len(text))

    def _end(self, word: str) -> None:
        pipe, lock = self._pipe, self._lock
        self._pipe = self._lock = None
        if lock is not None:
            if word == "ready":
                # Unlock and not only close, because the starter shares this lock, and maybe a child that it has forked.
                os.ftruncate(lock, 0)
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)  # the starter records the failure and then unlocks
        if pipe is not None:
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(pipe, word.encode(errors="replace") + b"\n")
            os.close(pipe)


def _line(error: EthaError) -> str:
    return f"{error.code} {error.message}".replace("\n", " ")[:2000]
