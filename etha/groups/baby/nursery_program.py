"""The nursery: a process that has imported torch and forks children on request, in milliseconds.

Started as ``python -m etha.groups.baby.nursery_program FD TRAINER_PID``. It has one thread, so forking is safe. It dies
with the trainer's thread that started it, and each child dies with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys

import torch

from etha.groups.baby.child_program import serve
from etha.groups.baby.messages import ForkChild, NurseryReply, ReapChild, receive, send

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Be killed when the parent ends; end now if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main(connection: socket.socket, trainer: int) -> None:
    """Serve until the trainer ends the connection."""
    die_with(trainer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer
    torch.set_num_threads(1)  # a forked process has no pool of threads, and trainers use the other cores
    gc.collect()
    gc.freeze()
    send(connection, NurseryReply())
    while (got := receive(connection)) is not None:
        message, fds = got
        if isinstance(message, ForkChild):
            send(connection, NurseryReply(pid=_fork(connection, fds[0])))
            os.close(fds[0])
        elif isinstance(message, ReapChild):
            os.waitpid(message.pid, 0)
            send(connection, NurseryReply(pid=message.pid))


def _fork(connection: socket.socket, fd: int) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        connection.close()
        die_with(nursery)
        serve(socket.socket(fileno=fd))
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
