"""What the kernel knows about a process: who is at the other end of a socket, and whether it lives.

A pid alone identifies no process, because pids are reused. A pidfd does, or a pid with the start time. Pid 0 is a
process that is not visible in this pid namespace.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from etha.errors import ConfigError

#: Flag in /proc/PID/stat that is set from the first step of exiting, before descriptors close.
_PF_EXITING = 0x4


def check_not_forked(owner: int, what: str = "client") -> None:
    """Raise ConfigError in a child that was forked from process ``owner``, which made ``what``."""
    if os.getpid() != owner:
        raise ConfigError(
            f"this {what} belongs to process {owner}, from which process {os.getpid()} was forked: "
            f"create a client in the child"
        )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Process and effective user at the other end of an AF_UNIX connection, as of connecting."""

    pid: int
    uid: int

    @classmethod
    def of_socket(cls, connection: socket.socket) -> Credentials:
        """By SO_PEERCRED. On the connecting end these are the listener's."""
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return cls(pid, uid)

    @classmethod
    def of_address(cls, address: str) -> Credentials:
        """From ZeroMQ's ``Peer-Address``: ``localhost:UID:GID:PID`` over ipc in libzmq 4.3."""
        _, uid, _, pid = address.rsplit(":", 3)
        return cls(int(pid), int(uid))


def _stat(pid: int) -> list[str]:
    # The command's name is in brackets and may contain anything, including brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_time(pid: int | None = None) -> int:
    """Clock ticks from boot to the start of ``pid`` (default: this process), 0 if it is gone."""
    try:
        return int(_stat(os.getpid() if pid is None else pid)[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_exiting(pid: int) -> bool:
    """Whether ``pid`` is gone, a zombie or exiting."""
    try:
        fields = _stat(pid)
        return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, IndexError, ValueError):
        return True


def is_stopped(pid: int) -> bool:
    """Whether ``pid`` is stopped, by SIGSTOP or a debugger; False if it is gone."""
    try:
        return _stat(pid)[0] in "Tt"
    except (OSError, IndexError):
        return False


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when ``pid`` dies; None if the process is not visible or gone."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
