"""The log of an agent without a terminal: standard error is a file, which is rotated when it is full."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from etha.config import MAX_LOG


class RotatingLog(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error. While that is the file ``path``, it does not grow much beyond ``MAX_LOG`` bytes."""

    path: Path | None = None

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, then check the file's size."""
        super().emit(record)
        if self.path is not None:
            try:
                self._rotate(self.path)
            except OSError:
                self.handleError(record)

    def _rotate(self, path: Path) -> None:
        fd = sys.stderr.fileno()
        now = os.fstat(fd)
        if now.st_size <= MAX_LOG:
            return
        there = path.stat()
        if (now.st_dev, now.st_ino) != (there.st_dev, there.st_ino):
            return  # standard error is another terminal, pipe or file
        path.replace(path.with_suffix(".log.1"))
        fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.dup2(fresh, fd)  # libraries that write to the descriptor use the new file, too
        finally:
            os.close(fresh)
