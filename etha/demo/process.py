"""Processes that must not outlive the demo: adopted, awaited by pidfd, ended.

The launcher is a subreaper: daemons that a job starts (the agent, the embedded server's supervisor) become its children
when the job ends, so none is left behind. Linux only, like Etha.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def adopting() -> Iterator[set[int]]:
    """Make orphaned descendants children of this process in this context. Yields the children that it had before."""
    before = children()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield before
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children(of: int | None = None) -> set[int]:
    """Pids whose parent is ``of`` (default: this process), zombies included."""
    parent = os.getpid() if of is None else of
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # gone between listing and reading
        if int(fields[1]) == parent:
            found.add(int(stat.parent.name))
    return found


def command(pid: int) -> list[str]:
    """The words with which a process was started; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def describe(code: int | None) -> str:
    """An exit status in words."""
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def end(pids: set[int], *, seconds: float) -> set[int]:
    """Send SIGTERM to children of this process, SIGKILL to those still there after ``seconds``, and reap them.

    Returns those that had to be killed.
    """
    if not pids:
        return set()
    descriptors = {os.pidfd_open(pid): pid for pid in pids}
    killed: set[int] = set()
    try:
        for descriptor in descriptors:
            _signal(descriptor, signal.SIGTERM)
        left = _reap(descriptors, seconds)
        for descriptor in left:
            log.warning("process %d did not end within %g s of SIGTERM", descriptors[descriptor], seconds)
            _signal(descriptor, signal.SIGKILL)
            killed.add(descriptors[descriptor])
        _reap({d: descriptors[d] for d in left}, None)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return killed


def _signal(descriptor: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        log.debug("already gone")


def _reap(descriptors: dict[int, int], seconds: float | None) -> set[int]:
    """Wait for all to end, at most ``seconds`` altogether. Returns the descriptors of those still alive."""
    left = set(descriptors)
    deadline = None if seconds is None else time.monotonic() + seconds
    poller = select.poll()
    for descriptor in left:
        poller.register(descriptor, select.POLLIN)
    while left:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = poller.poll(remaining)
        if not ready:
            break
        for descriptor, _ in ready:
            poller.unregister(descriptor)
            left.discard(descriptor)
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
    return left
