"""The nursery: a process that has imported torch and forks children on request, in milliseconds.

Started as ``python -m etha.groups.baby.nursery_program FD TRAINER_PID``. It has one thread, so forking is safe. It dies
with the trainer's thread that started it, and each child dies with it. A spare nursery is forked as a child of that
thread too, so it lives on when this one is killed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from etha.groups.baby import child_program
from etha.groups.baby.messages import ForkChild, ForkSpare, NurseryReply, ReapChild, receive, send

_PR_SET_PDEATHSIG = 1
_CLONE_PARENT = 0x8000
#: Number of the system call clone, by machine.
_CLONE = {"x86_64": 56, "aarch64": 220}
# PyDLL: the interpreter's lock is not given up, so it is in the same state on both sides of a fork.
_libc = ctypes.PyDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Be killed when the parent ends; end now if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main(connection: socket.socket, trainer: int) -> None:
    """Serve until the trainer ends the connection."""
    die_with(trainer)
    own = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer
    torch.set_num_threads(1)  # a forked process has no pool of threads, and trainers use the other cores
    gc.collect()
    gc.freeze()
    send(connection, NurseryReply())
    while (got := receive(connection)) is not None:
        message, fds = got
        if isinstance(message, ForkChild):
            send(connection, NurseryReply(pid=_fork(connection, fds[0])))
        elif isinstance(message, ForkSpare):
            pid = _fork_sibling()
            if pid == 0 and os.getpid() != own:
                own = os.getpid()
                die_with(trainer)
                connection.close()
                connection = socket.socket(fileno=fds.pop())
            send(connection, NurseryReply(pid=pid))
        elif isinstance(message, ReapChild):
            os.waitpid(message.pid, 0)
            send(connection, NurseryReply(pid=message.pid))
        for fd in fds:
            os.close(fd)


def _fork_sibling() -> int:
    """Fork, but as a child of this process's own parent. Returns 0 in the new process, and where it cannot be done.

    Libraries do not hear of this fork. With one thread, which goes on to serve another socket, they need not; a library
    that has made threads would wait for ever for those that the new process does not have. NumPy's has made some, and
    ends them before an ordinary fork, so there is one first.
    """
    number = _CLONE.get(os.uname().machine)
    if number is None:
        return 0
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return 0
    return max(0, int(_libc.syscall(number, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)))


def _fork(connection: socket.socket, fd: int) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        connection.close()
        die_with(nursery)
        child_program.serve(socket.socket(fileno=fd))
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
