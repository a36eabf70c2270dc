"""The logs of a host's agents as ``etha logs`` shows them: merged by time, across rotation, and followed.

DEVICE.log.1, DEVICE.log of each agent --> entries (a line that begins with a time, and those after it) --> merged
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from etha.observe.inotify import FolderWatch
from etha.printable import printable

#: Most bytes that are read of one file: what a service appends to may be of any size.
MOST = 16 << 20
#: The time at the beginning of a line of either format.
_TIME = re.compile(r'(?:\{"time": ")?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d)')


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """A line with a time, and the lines after it that have none."""

    time: float
    device: str
    lines: tuple[str, ...]


class LogFile:
    """One agent's log. ``read`` returns what is new, from the file that was set aside to the one that is written."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self._older = path.with_name(f"{path.name}.1")
        self._open: BinaryIO | None = None
        #: The file that was read before the open one. It is kept open, so that no other file gets its inode.
        self._before: BinaryIO | None = None
        self._rest = b""
        self._time = 0.0

    def read(self) -> list[LogEntry]:
        """The entries since the last call, oldest first."""
        data = self._drain()
        while (path := self._next()) is not None and self._switch(path):
            data += b"\n" if data and not data.endswith(b"\n") else b""
            data += self._drain()
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        return list(self._entries(whole)) if whole else []

    def finish(self) -> list[LogEntry]:
        """The entry of a last line that has no end yet."""
        rest, self._rest = self._rest, b""
        return list(self._entries(rest)) if rest else []

    def close(self) -> None:
        for file in (self._before, self._open):
            if file is not None:
                file.close()
        self._before = self._open = None

    def _drain(self) -> bytes:
        if self._open is None:
            return b""
        size = os.fstat(self._open.fileno()).st_size
        if size < self._open.tell():  # somebody has emptied it
            self._open.seek(0)
        if size - self._open.tell() > MOST:
            self._open.seek(size - MOST)
            self._open.readline()
        return self._open.read()

    def _next(self) -> Path | None:
        """The file to read after the open one: the one that was set aside meanwhile, or the one that is written."""
        older, current = _identity(self._older), _identity(self.path)
        if self._open is None:
            return self._older if older is not None else self.path if current is not None else None
        mine = _identity(self._open.fileno())
        if current is None or current == mine:
            return None
        before = None if self._before is None else _identity(self._before.fileno())
        return self._older if older not in (None, mine, before) else self.path

    def _switch(self, path: Path) -> bool:
        try:
            opened = path.open("rb")
        except OSError:
            return False
        if self._before is not None:
            self._before.close()
        self._before, self._open = self._open, opened
        return True

    def _entries(self, data: bytes) -> Iterator[LogEntry]:
        lines: list[str] = []
        for line in printable(data.decode(errors="replace")).split("\n"):
            if (found := _TIME.match(line)) is not None:
                if lines:
                    yield self._entry(lines)
                lines = []
                with suppress(ValueError, OverflowError):  # a library's line may begin with what only looks like a time
                    self._time = max(self._time, datetime.fromisoformat(found[1]).timestamp())
            lines.append(line)
        yield self._entry(lines)

    def _entry(self, lines: list[str]) -> LogEntry:
        return LogEntry(time=self._time, device=self.device, lines=tuple(lines))


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        found = os.fstat(file) if isinstance(file, int) else file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def logs_in(folder: Path) -> dict[Path, str]:
    """Path and device of every log in a namespace's ``folder``, also if only the older file is left."""
    paths = {path.with_name(path.name.removesuffix(".1")) for path in folder.glob("*.log*")}
    return {path: path.stem for path in sorted(paths) if path.suffix == ".log"}


class LogView:
    """The logs that ``find`` returns (path -> device), together. ``find`` is asked again whenever something changes."""

    def __init__(self, find: Callable[[], Mapping[Path, str]]) -> None:
        self._find = find
        self._files: dict[Path, LogFile] = {}
        self._watch: FolderWatch | None = None

    @property
    def devices(self) -> frozenset[str]:
        """Those whose logs were found."""
        return frozenset(file.device for file in self._files.values())

    def read(self, *, whole: bool = False) -> list[LogEntry]:
        """What is new in all logs, oldest first. ``whole``: also a last line without its end."""
        for path, device in self._find().items():
            if path not in self._files:
                self._files[path] = LogFile(path, device)
        parts = [file.read() + (file.finish() if whole else []) for file in self._files.values()]
        return list(heapq.merge(*parts, key=lambda entry: entry.time))

    def follow(self, folder: Path) -> None:
        """Notice changes from now on: in ``folder``, and in those of the logs that lie elsewhere."""
        self._watch = self._watch or FolderWatch()
        self._watch.add(folder)
        for path in self._files:
            with suppress(OSError):  # it was a log of an agent that has ended, and its folder is gone
                self._watch.add(path.parent)

    def wait(self, reader: int) -> bool:
        """Return True once something has changed since ``follow``, False if nobody reads the pipe ``reader`` any
        more."""
        assert self._watch is not None
        return self._watch.wait(reader)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._watch is not None:
            self._watch.close()
