"""Processes of tests are forked from a server that has loaded what they need: torch and pytest take seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")

#: pytest is the main module of every process: each would load it anew.
_modules = ["pytest"]


def preload(*modules: str) -> None:
    """What the server of this run loads besides what other files have named; call it where a test file is imported."""
    _modules.extend(module for module in modules if module not in _modules)
    CONTEXT.set_forkserver_preload([*_modules, "tests.frozen"])


def send_signal(pid: int, number: signal.Signals) -> None:
    """``os.kill``, which returns from SIGSTOP when the process stands still.

    A stop reaches one thread, and that one passes it on. On a busy machine the others have run for milliseconds until
    then, and the process of a group has carried out a whole call.
    """
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        while not _stands_still(pid):
            os.sched_yield()


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or have ended."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            if (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True
