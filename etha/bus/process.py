"""What the kernel says about a process: who is at the other end of a socket, and does it live.

A pid alone identifies nobody, pids are reused: a pidfd does, or pid and start time together. A pid of
0 is a process in a pid namespace that cannot be seen from here.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from etha.errors import ConfigError

#: Bit of /proc/PID/stat's flags that is set from the first step of exiting, before descriptors close.
_PF_EXITING = 0x4


def check_not_forked(owner: int, what: str = "client") -> None:
    """ConfigError in a child that was forked from process ``owner``, which has made ``what``."""
    if os.getpid() != owner:
        raise ConfigError(
            f"this {what} belongs to process {owner}, from which process {os.getpid()} was forked: "
            f"create a client in the child"
        )


@dataclass(frozen=True, slots=True)
class Credentials:
    """Process and effective user at the other end of an AF_UNIX connection when it connected."""

    pid: int
    uid: int

    @classmethod
    def of_socket(cls, connection: socket.socket) -> Credentials:
        """By SO_PEERCRED; on the connecting end these are the listener's."""
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return cls(pid, uid)

    @classmethod
    def of_address(cls, address: str) -> Credentials:
        """From ZeroMQ's ``Peer-Address``: ``localhost:UID:GID:PID`` over ipc in libzmq 4.3."""
        _, uid, _, pid = address.rsplit(":", 3)
        return cls(int(pid), int(uid))


def _stat(pid: int) -> list[str]:
    # The command's name is in brackets and may hold anything, brackets too.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_time(pid: int | None = None) -> int:
    """Clock ticks from boot to the start of ``pid`` (default: this process), 0 when it is gone."""
    try:
        return int(_stat(os.getpid() if pid is None else pid)[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_exiting(pid: int) -> bool:
    """True when ``pid`` is gone, a zombie or on its way out."""
    try:
        fields = _stat(pid)
        return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, IndexError, ValueError):
        return True


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when ``pid`` dies; None when it cannot be seen or is gone."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
