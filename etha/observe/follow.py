"""New records in the files of this host's agents, as they are written: woken by inotify."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from etha.observe.inotify import FolderWatch
from etha.observe.records import Record
from etha.observe.ring import device_of, open_ring, records_of, ring_files


class RingFollower:
    """The files of one directory from now on. ``fileno`` is readable when there may be news."""

    def __init__(self, directory: Path) -> None:
        """OSError if the directory cannot be watched."""
        self._directory, self._open = directory, dict[Path, _Tail]()
        self._watch = FolderWatch()
        try:
            self._watch.add(directory)
        except BaseException:
            self._watch.close()
            raise
        for path in ring_files(directory):
            self._follow(path, at_end=True)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._watch.fileno()

    def news(self) -> list[tuple[str, Record]]:
        """(device, record) of what was written since the last call, oldest first.

        The directory may have been removed; the one that is at its place now is watched, if there is one.
        """
        self._watch.take()
        with suppress(OSError):
            self._watch.add(self._directory)
        for path in ring_files(self._directory):
            if not path.name.endswith(".1"):  # it was read under its first name
                self._follow(path, at_end=False)
        found = [(device_of(path), record) for path, tail in self._open.items() for record in tail.read()]
        # The kernel tells of a removed directory only once no file of it is open any more.
        for path in [path for path, tail in self._open.items() if tail.removed]:
            self._open.pop(path).close()
        return sorted(found, key=lambda one: one[1].at)

    def close(self) -> None:
        """Close all descriptors."""
        while self._open:
            self._open.popitem()[1].close()
        self._watch.close()

    def _follow(self, path: Path, *, at_end: bool) -> None:
        if path in self._open or path.name.endswith(".1"):
            return
        try:
            self._open[path] = _Tail(path, at_end=at_end)
        except OSError:  # it is gone again, or is something that an agent has not written
            return


class _Tail:
    """One file, and the one that takes its place when it is full."""

    def __init__(self, path: Path, *, at_end: bool) -> None:
        self._path = path
        self._rest = b""
        self._fd = self._opened()
        if at_end:
            os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> list[Record]:
        """The records that were written since."""
        found = list(self._lines())
        try:
            other = self._opened()
        except OSError:
            return found
        if os.path.sameopenfile(self._fd, other):
            os.close(other)
            return found
        found += self._lines()  # what was written between the first look and the rotation
        os.close(self._fd)
        self._fd, self._rest = other, b""
        return found + self._lines()

    @property
    def removed(self) -> bool:
        """Whether the open file has no name any more. One that was set aside has."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        os.close(self._fd)

    def _opened(self) -> int:
        return open_ring(self._path)

    def _lines(self) -> list[Record]:
        data = self._rest
        while block := os.read(self._fd, 1 << 20):
            data += block
        whole, newline, self._rest = data.rpartition(b"\n")
        return list(records_of(whole)) if newline else []
