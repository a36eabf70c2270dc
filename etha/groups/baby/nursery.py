"""The trainer's end of its nurseries: one that forks children, and a spare that takes its place when it is lost.

The first one is started by exec, which takes as long as importing torch. It forks the spare in milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from etha.errors import GroupAbortedError, GroupError, GroupTimeoutError
from etha.groups.baby.messages import ForkChild, ForkSpare, NurseryReply, ReapChild, only, pair, receive, send
from etha.memory.process import allow_reading

log = logging.getLogger(__name__)

#: What runs in the first nursery.
PROGRAM = "etha.groups.baby.nursery_program"
#: Seconds in which a nursery that runs has answered. If it is stopped, another takes its place after _LOOK seconds.
_ANSWER, _LOOK = 2.0, 0.05


class Nursery:
    """One nursery process, and the socket over which it is asked."""

    def __init__(self, family: _Family) -> None:
        self.family = family
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self.ours, self.theirs = pair()
        self.pid = 0
        self.lost = False
        self.children: set[int] = set()

    def be_ready(self, seconds: float | None) -> None:
        """Wait until the process says that it is ready."""
        self.ours.settimeout(seconds)
        try:
            only(receive(self.ours), NurseryReply)
        except OSError:
            self.lost = True
        self._ready.set()

    def fork(self, child: socket.socket, until: float, ended: threading.Event) -> int:
        """A new child that serves ``child``; its pid. OSError if the nursery is lost, TimeoutError if it is late, or if
        nobody needs the child any more (``ended``)."""
        while not self._ready.wait(max(0.0, min(_LOOK, until - time.monotonic()))):
            if ended.is_set() or time.monotonic() >= until:
                raise TimeoutError
        reply = self._ask(ForkChild(), (child.fileno(),), until)
        self.children.add(reply.pid)
        return reply.pid

    def fork_spare(self) -> Nursery | None:
        """Another nursery like this one; None if there can be none. OSError if this nursery is lost."""
        spare = Nursery(self.family)
        try:
            spare.pid = self._ask(ForkSpare(), (spare.theirs.fileno(),), time.monotonic() + _ANSWER).pid
            spare.theirs.close()
            if spare.pid:
                spare.be_ready(_ANSWER)
        finally:
            if not spare._ready.is_set():
                spare.forget()
        return spare if spare.pid and not spare.lost else None

    def reap(self, pid: int) -> None:
        """Have a dead child waited for. If the nursery is lost, init does that when the nursery has ended."""
        self.children.discard(pid)
        if not self.lost:
            with contextlib.suppress(OSError):
                self._ask(ReapChild(pid=pid), (), time.monotonic() + _ANSWER)
        if self.lost and not self.children:
            self.close()

    def _ask(self, message: Any, fds: tuple[int, ...], until: float) -> NurseryReply:
        with self._lock:
            if self.lost:
                raise ConnectionError("the nursery is lost")
            try:
                send(self.ours, message, fds, socket.MSG_DONTWAIT)
                self._wait_for_answer(min(until, time.monotonic() + _ANSWER))
                reply: NurseryReply = only(receive(self.ours), NurseryReply)
                return reply
            except BaseException:
                # An answer that comes late, or after Ctrl-C, must not be taken for that of the next question.
                self.lost = True
                raise

    def _wait_for_answer(self, until: float) -> None:
        watch = select.poll()
        watch.register(self.ours, select.POLLIN)
        while not watch.poll(_LOOK * 1000):
            if time.monotonic() >= until:
                raise TimeoutError("the nursery does not answer")
            if _is_stopped(self.pid):
                raise ConnectionError("the nursery is stopped")

    def close(self) -> None:
        """Kill the nursery, and with it all its children."""
        self.lost = True
        self.family.kill(self)

    def forget(self) -> None:
        """Close the descriptors; in a forked process they belong to the parent."""
        self.lost = True
        self.ours.close()
        self.theirs.close()


class _Family:
    """A nursery that was started by exec, its spares, and the thread that is the parent of them all.

    The thread lives as long as any of them, because the kernel ends them when the thread ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._living: dict[int, Nursery] = {}  # by pidfd
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.first = Nursery(self)
        allow_reading()
        threading.Thread(target=self._own, name="etha-nursery", daemon=True).start()

    def want_spare(self) -> None:
        """Have the current nursery fork a spare."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def kill(self, nursery: Nursery) -> None:
        """Kill a nursery that still lives."""
        with self._lock:
            for fd, each in self._living.items():
                if each is nursery:
                    with contextlib.suppress(ProcessLookupError):  # it has been waited for at this moment
                        signal.pidfd_send_signal(fd, signal.SIGKILL)

    def forget(self) -> None:
        """In a forked process: close the descriptors."""
        self._lock = threading.Lock()
        for fd, nursery in self._living.items():
            os.close(fd)
            nursery.forget()
        self._living.clear()
        self.first.forget()
        if self._wake >= 0:
            os.close(self._wake)

    def _own(self) -> None:
        first = self.first
        command = [sys.executable, "-m", PROGRAM, str(first.theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[first.theirs.fileno()], stdin=subprocess.DEVNULL)
        first.pid = process.pid
        first.theirs.close()
        self._add(first)
        first.be_ready(None)
        self.want_spare()
        while self._living:
            watch = select.poll()
            for fd in (self._wake, *self._living):
                watch.register(fd, select.POLLIN)
            for fd, _ in watch.poll():
                if fd == self._wake:
                    os.eventfd_read(fd)
                    self._make_spare()
                else:
                    self._bury(fd)
        process.returncode = 0  # it has been waited for
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _add(self, nursery: Nursery) -> None:
        with self._lock:
            self._living[os.pidfd_open(nursery.pid)] = nursery

    def _bury(self, fd: int) -> None:
        nursery = self._living[fd]
        nursery.lost = True
        os.waitpid(nursery.pid, 0)
        with self._lock:
            del self._living[fd]
            os.close(fd)
        nursery.ours.close()
        _replace_spare(nursery)

    def _make_spare(self) -> None:
        """A spare of the current nursery, unless there is one. Without it, the next nursery is started by exec."""
        global _spare
        nursery = _current
        if nursery is None or nursery.lost or nursery.family is not self or (_spare is not None and not _spare.lost):
            return
        try:
            spare = nursery.fork_spare()
        except OSError as error:
            log.debug("no spare nursery: %s", error)
            return
        if spare is not None:
            self._add(spare)
            _spare = spare


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "Tt"


_lock = threading.Lock()
_current: Nursery | None = None
_spare: Nursery | None = None
#: What has descriptors that forked processes must close.
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def prepare() -> Nursery:
    """The nursery of this process; the spare or a new one if there is none. Does not wait for it."""
    global _current, _spare
    with _lock:
        if _current is not None and not _current.lost:
            return _current
        if _current is not None and not _current.children:
            _current.close()
        spare, _spare = _spare, None
        if spare is None or spare.lost:
            family = _Family()
            _holders.add(family)
            _current = family.first
        else:
            _current = spare
            spare.family.want_spare()
        return _current


def _replace_spare(lost: Nursery) -> None:
    """A nursery has died: if it was the spare, the current one forks another."""
    if lost is _spare and _current is not None:
        _current.family.want_spare()


def spare() -> Nursery | None:
    """The nursery that takes the current one's place, if there is one already."""
    return _spare


def close_all() -> None:
    """Kill the nursery and its spare."""
    global _current, _spare
    with _lock:
        for each in (_spare, _current):
            if each is not None:
                each.close()
        _current = _spare = None


def fork_child(child: socket.socket, until: float, ended: threading.Event) -> tuple[Nursery, int]:
    """A new child that serves ``child``, and its nursery. Lost nurseries are replaced until the deadline.

    GroupAbortedError once ``ended`` is set: the first nursery may take seconds.
    """
    while True:
        nursery = prepare()
        try:
            return nursery, nursery.fork(child, until, ended)
        except OSError as error:
            if ended.is_set():
                raise GroupAbortedError("configure was ended before it had a child process") from None
            if time.monotonic() >= until:
                raise GroupTimeoutError("no child process could be forked in time") from error
            if not nursery.lost:
                raise GroupError(f"no child process could be forked: {error}") from error


def hold(holder: Any) -> None:
    """Call ``holder.forget()`` in processes that are forked from this one."""
    _holders.add(holder)


def _in_fork() -> None:
    """A DataLoader's worker would otherwise keep the sockets of a trainer open that has died."""
    global _current, _spare, _lock
    _lock, _current, _spare = threading.Lock(), None, None
    for holder in list(_holders):
        holder.forget()
    _holders.clear()


os.register_at_fork(after_in_child=_in_fork)
atexit.register(close_all)
