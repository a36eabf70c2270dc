"""Processes of tests are forked from a server that has loaded what they need: torch and pytest take seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
from collections.abc import Iterable
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


class Strays:
    """Processes that may outlive whoever started them, and are ended at the end.

    They are held by a descriptor and not by their number, which the kernel gives to another process after some thousand
    more: who ends a number later ends somebody else.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    def hold(self, pids: Iterable[int]) -> None:
        """Call it while they live. Those that were held and have ended are let go."""
        for pid, held in list(self._held.items()):
            if select.select([held], [], [], 0)[0]:
                os.close(self._held.pop(pid))
        for pid in pids:
            if pid not in self._held:
                self._held[pid] = os.pidfd_open(pid)

    def end(self, patience: float) -> None:
        """SIGKILL; returns when they are gone."""
        for held in self._held.values():
            try:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(held, signal.SIGKILL)
                select.select([held], [], [], patience)
            finally:
                os.close(held)
        self._held.clear()


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped, or have ended."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends meanwhile
            if (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True
