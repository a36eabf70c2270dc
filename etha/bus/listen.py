"""The agent's files: one lock, and AF_UNIX listeners that only the lock's owner makes.

A second ``bind`` of ZeroMQ silently takes over a live ipc path. So listeners are made here, under a flock, and their
mode is set before they are visible. Sockets that a dead agent left are replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from etha.config import check_socket_path
from etha.errors import ConfigError


class PathLock:
    """An exclusive flock on ``path``, which holds the owner's pid as text and is never removed."""

    def __init__(self, path: Path, what: str) -> None:
        """Take it. ConfigError names the owner if another process has it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise ConfigError(
                f"process {owner or '?'} already serves {what}: one agent per device and namespace; "
                f"use that one, another ETHA_NAMESPACE or another ETHA_RUNTIME_DIR"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd: int | None = fd

    def release(self) -> None:
        """Release it; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SocketEntry:
    """A socket file that was bound just now, as opposed to one that appears at the same path later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = self._look()

    def remove(self) -> None:
        """Remove it if it is still the same file. The directory may have been removed, and another agent may use the
        path now."""
        if self._own is not None and self._look() == self._own:
            self._path.unlink(missing_ok=True)

    def _look(self) -> tuple[int, int] | None:
        try:
            found = self._path.lstat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def listen(path: Path, kind: socket.SocketKind, backlog: int = 1024) -> socket.socket:
    """A listening AF_UNIX socket at ``path``, mode 0600. The caller holds the lock that guards it."""
    check_socket_path(path)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), 0o600)  # bind takes this mode over, so the file never has a wider one
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener.bind(os.fspath(path))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    return listener
