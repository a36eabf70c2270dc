"""Waits until something changes in a folder, by the kernel's inotify; nothing polls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
from pathlib import Path

_IN_MODIFY, _IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x40, 0x80, 0x100
_IN_DELETE, _IN_DELETE_SELF, _IN_MOVE_SELF, _IN_IGNORED = 0x200, 0x400, 0x800, 0x8000
_ALL = _IN_MODIFY | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_HEAD = struct.Struct("iIII")


class FolderWatch:
    """Watches folders until ``close``."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise self._error("inotify", "see /proc/sys/fs/inotify/max_user_instances")
        self._folders: dict[int, Path] = {}

    def add(self, folder: Path) -> None:
        """Watch what is at ``folder`` now; nothing changes if that is watched already. OSError if it is not there."""
        number = int(self._libc.inotify_add_watch(self._fd, os.fsencode(folder), ctypes.c_uint32(_ALL)))
        if number < 0:
            raise self._error(str(folder), "it cannot be watched")
        self._folders[number] = folder

    def wait(self, reader: int) -> bool:
        """Return True once something has changed, False once nobody reads the other end of the pipe ``reader``."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(reader, 0)  # POLLERR and POLLHUP come unasked
        ready = dict(poll.poll())
        if reader in ready:
            return False
        self.take()
        return True

    def fileno(self) -> int:
        """A descriptor that is readable when something has changed since ``take``."""
        return self._fd

    def take(self) -> None:
        """Read what is there; forget folders that are gone, so that ``add`` watches them again."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                at = 0
                while at < len(data):
                    number, mask, _, size = _HEAD.unpack_from(data, at)
                    at += _HEAD.size + size
                    if mask & (_IN_DELETE_SELF | _IN_MOVE_SELF | _IN_IGNORED):
                        self._folders.pop(number, None)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def _error(what: str, more: str) -> OSError:
        code = ctypes.get_errno()
        return OSError(code, f"{os.strerror(code)} ({more})", what)
