"""The trainer's end of its nursery: one for the process, started when it is first needed, replaced when it is lost."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from etha.errors import GroupError, GroupTimeoutError
from etha.groups.baby.messages import ForkChild, NurseryReply, ReapChild, only, pair, receive, send
from etha.memory.process import allow_reading

#: Seconds in which a nursery that runs has answered. One that is stopped does not; another takes its place.
_ANSWER = 2.0


class Nursery:
    """One nursery process and the thread that started it.

    The thread lives as long as the process, because the kernel ends the process when the thread ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._ours, self._theirs = pair()
        self._process: subprocess.Popen[bytes] | None = None
        self.lost = False
        self.children: set[int] = set()
        allow_reading()
        threading.Thread(target=self._own, name="etha-nursery", daemon=True).start()

    def _own(self) -> None:
        command = [
            sys.executable,
            "-m",
            "etha.groups.baby.nursery_program",
            str(self._theirs.fileno()),
            str(os.getpid()),
        ]
        self._process = subprocess.Popen(command, pass_fds=[self._theirs.fileno()], stdin=subprocess.DEVNULL)
        self._theirs.close()
        try:
            only(receive(self._ours), NurseryReply)
        except OSError:
            self.lost = True
        self._ready.set()
        self._process.wait()
        self.lost = True

    def fork(self, child: socket.socket, until: float) -> int:
        """A new child that serves ``child``; its pid. OSError if the nursery is lost, TimeoutError if it is late."""
        if not self._ready.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError
        reply = self._ask(ForkChild(), (child.fileno(),), until)
        self.children.add(reply.pid)
        return reply.pid

    def reap(self, pid: int) -> None:
        """Have a dead child waited for. If the nursery is lost, init does that."""
        self.children.discard(pid)
        if not self.lost:
            try:
                self._ask(ReapChild(pid=pid), (), time.monotonic() + _ANSWER)
            except OSError:
                self.lost = True

    def _ask(self, message: Any, fds: tuple[int, ...], until: float) -> NurseryReply:
        with self._lock:
            if self.lost:
                raise ConnectionError("the nursery is lost")
            seconds = until - time.monotonic()
            self._ours.settimeout(min(_ANSWER, max(0.001, seconds)))
            try:
                send(self._ours, message, fds)
                reply: NurseryReply = only(receive(self._ours), NurseryReply)
                return reply
            except OSError:
                # A late answer must not be taken for that of the next question.
                self.lost = True
                raise

    def close(self) -> None:
        """Kill the nursery, and with it all its children."""
        self.lost = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._ours.close()

    def forget(self) -> None:
        """In a forked process: close the descriptors, which belong to the parent."""
        self.lost = True
        self._ours.close()
        self._theirs.close()


_lock = threading.Lock()
_current: Nursery | None = None
#: What has descriptors that forked processes must close.
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def prepare() -> Nursery:
    """The nursery of this process; starts one if there is none. Does not wait for it."""
    global _current
    with _lock:
        if _current is None or _current.lost:
            if _current is not None and not _current.children:
                _current.close()
            _current = Nursery()
            _holders.add(_current)
        return _current


def fork_child(child: socket.socket, until: float) -> tuple[Nursery, int]:
    """A new child that serves ``child``, and its nursery. Lost nurseries are replaced until the deadline."""
    while True:
        nursery = prepare()
        try:
            return nursery, nursery.fork(child, until)
        except OSError as error:
            if time.monotonic() >= until:
                raise GroupTimeoutError("no child process could be forked in time") from error
            if not nursery.lost:
                raise GroupError(f"no child process could be forked: {error}") from error


def hold(holder: Any) -> None:
    """Call ``holder.forget()`` in processes that are forked from this one."""
    _holders.add(holder)


def _in_fork() -> None:
    """A DataLoader's worker would otherwise keep the sockets of a trainer open that has died."""
    global _current, _lock
    _lock, _current = threading.Lock(), None
    for holder in list(_holders):
        holder.forget()
    _holders.clear()


def _at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_in_fork)
atexit.register(_at_exit)
