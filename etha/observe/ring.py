"""The files in which an agent keeps its records, also after it has left: lines of JSON, bounded by rotation.

    cpu.transfers.jsonl, cpu.transfers.jsonl.1    what went well: transfers, and snapshots that were superseded
    cpu.failures.jsonl,  cpu.failures.jsonl.1     everything else, so that no number of successes pushes it out

All agents of a device, one after the other, append to the same files. A thread writes them, because a disk may hang.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from etha.config import make_private_again
from etha.observe.records import WARNING, Culprit, Incident, Record, TransferRecord, from_line, to_line

log = logging.getLogger(__name__)

TRANSFERS, FAILURES = ".transfers.jsonl", ".failures.jsonl"
#: Bytes at which a file is set aside; one older file is kept. The runtime directory may lie in memory, so all four
#: together stay below 24 MiB: about 14,000 transfers (hours of a training loop), and as many failures or more.
MAX_TRANSFERS, MAX_FAILURES = 4 << 20, 8 << 20
#: Records that wait for a disk that hangs, about 20 MiB. Further ones are dropped and counted.
MAX_WAITING = 20_000
#: Bytes of one write.
_BLOCK = 64 << 10
#: Seconds that a leaving agent waits for its last records to be written.
LAST_WORDS = 2.0


def well(record: Record) -> bool:
    """Whether a record belongs to the file of what went well."""
    return isinstance(record, TransferRecord) and not record.failed


class RingFile:
    """One file and the older one beside it. Not thread-safe; several processes may append."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._fd = -1
        self._torn = False

    def append(self, lines: bytes) -> None:
        """Append whole lines. OSError if that fails; a line may be half written then, and the next one begins anew."""
        self._open()
        if os.fstat(self._fd).st_size + len(lines) > self._limit:
            self._rotate()
        data = b"\n" + lines if self._torn else lines
        self._torn = True
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._torn = False

    def close(self) -> None:
        """Close the file. Appending opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Have the file open that is at the path now."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                if _identity(os.lstat(self._path)) == _identity(os.fstat(self._fd)):
                    return
            self.close()
        # No symlink is followed, and a FIFO does not block.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self._path, flags, 0o600)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                raise PermissionError(f"{self._path} is not a file of this user")
            self._torn = info.st_size > 0 and os.pread(fd, 1, info.st_size - 1) != b"\n"  # its writer was killed
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _rotate(self) -> None:
        """Set the file aside, unless another process is doing that."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with contextlib.suppress(FileNotFoundError):
            if _identity(os.lstat(self._path)) == _identity(os.fstat(self._fd)):
                self._path.replace(older(self._path))
        self.close()  # and with it the lock
        self._open()


def older(path: Path) -> Path:
    """Where a full file is set aside."""
    return path.with_name(f"{path.name}.1")


def _identity(info: os.stat_result) -> tuple[int, int]:
    return (info.st_dev, info.st_ino)


class RingWriter:
    """Writes an agent's records in a thread of its own. ``take`` is a consumer of ``observe.recorder``.

    What cannot be written is dropped and counted. One warning says so, and a record once writing works again.
    """

    def __init__(self, directory: Path, device: str, agent: str = "") -> None:
        """``agent``: its id, which each line holds, because several agents may append to the same files."""
        self.directory, self.device, self._agent = directory, device, agent
        self._files = {
            True: RingFile(directory / f"{device}{TRANSFERS}", MAX_TRANSFERS),
            False: RingFile(directory / f"{device}{FAILURES}", MAX_FAILURES),
        }
        self._waiting: deque[Record] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = self._busy = False
        self._dropped = 0
        self._warned = False
        self._why = "the disk hangs"
        #: Why records could not be written the last time; "" if they could. Whoever reads the files misses them.
        self.failing = ""

    def take(self, records: Sequence[Record]) -> None:
        """Have these records written soon. Returns at once."""
        with self._changed:
            room = max(0, MAX_WAITING - len(self._waiting))
            self._waiting.extend(records[:room])
            self._dropped += len(records) - len(records[:room])
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="etha-ring", daemon=True)
            self._thread.start()

    def sync(self) -> None:
        """Return once everything that was taken is written, or after two seconds. Not for the loop's thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._busy, LAST_WORDS)

    def close(self) -> None:
        """Write what is left, within two seconds: a disk may hang."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LAST_WORDS)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._waiting and not self._closing:
                    self._changed.wait()
                self._busy = True
                records = list(self._waiting)
                self._waiting.clear()
                dropped, self._dropped = self._dropped, 0
            if not records:
                break
            self._write(records, dropped)
        for file in self._files.values():
            file.close()

    def _write(self, records: list[Record], dropped: int) -> None:
        records = [*self._made_again(), *records]
        lost, failure = 0, None
        for kept in self._files:
            left, error = self._append(kept, [record for record in records if well(record) is kept])
            lost, failure = lost + left, error or failure
        if dropped and failure is None:  # not while it goes on: a note for each round would push real failures out
            text = (
                f"{dropped} records were dropped, because files in {self.directory} could not be written: {self._why}"
            )
            left, failure = self._append(False, [Incident(at=time.time(), what="records_dropped", reason=text)])
            dropped = dropped if left else 0
        if failure is not None:
            lost += dropped
        with self._changed:
            self._dropped += lost
        if failure is not None and not self._warned:
            text = "records of transfers cannot be written to %s (%s); they are dropped until that works again"
            log.warning(text, self.directory, failure)
        self._warned = failure is not None
        self._why = self._why if failure is None else failure.strerror or str(failure)
        self.failing = "" if failure is None else f"its records cannot be written to {self.directory}: {self._why}"

    def _made_again(self) -> list[Record]:
        """Have a directory, and say so if somebody has removed it: with it went the socket."""
        if not make_private_again(self.directory):
            return []
        text = (
            f"{self.directory} was removed while the agent of {self.device} (process {os.getpid()}) was running; it "
            f"made the directory again, but its socket is gone: only workers that are connected already can use this "
            f"agent. Let no cleaner remove the directory, or set ETHA_RUNTIME_DIR to one that stays; end the process "
            f"to have another agent"
        )
        log.warning("%s", text)
        return [Incident(at=time.time(), what=WARNING, reason=text)]

    def _append(self, kept: bool, records: list[Record]) -> tuple[int, OSError | None]:
        """Append to one of the two files. Returns how many records could not be, and why."""
        done, file = 0, self._files[kept]
        try:
            for block, count in _blocks(records, self._agent):
                file.append(block)
                done += count
        except OSError as error:
            file.close()
            return len(records) - done, error
        return 0, None


def _blocks(records: Sequence[Record], agent: str) -> Iterator[tuple[bytes, int]]:
    """Lines of some records at a time, and of how many."""
    block, count = bytearray(), 0
    for record in records:
        block += to_line(record, agent)
        count += 1
        if len(block) >= _BLOCK:
            yield bytes(block), count
            block, count = bytearray(), 0
    if block:
        yield bytes(block), count


# ---- reading ------------------------------------------------------------------------------------


def ring_files(directory: Path, *, failed: bool = False) -> list[Path]:
    """The files of all devices in a namespace's directory, older ones first. ``failed``: only those of failures."""
    endings = (FAILURES,) if failed else (TRANSFERS, FAILURES)
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except FileNotFoundError:
        return []
    current = [directory / name for name in names if name.endswith(endings)]
    return [file for path in current for file in (older(path), path)]


def device_of(path: Path) -> str:
    """The device whose agents wrote a file."""
    return path.name.removesuffix(".1").removesuffix(TRANSFERS).removesuffix(FAILURES)


def open_ring(path: Path) -> int:
    """A descriptor for reading. OSError if there is none, also for what is no regular file: nobody waits for a FIFO."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


def read_file(path: Path, since: float = 0.0) -> list[Record]:
    """The records of one file from ``since`` on. Lines that are no records are skipped; a missing file has none.

    OSError if it cannot be read.
    """
    return [record for record in records_of(_read(path)) if record.at >= since]


def _read(path: Path) -> bytes:
    try:
        fd = open_ring(path)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def records_of(data: bytes) -> Iterator[Record]:
    """The records of whole lines."""
    for line in data.split(b"\n"):
        if line:
            with contextlib.suppress(ValueError, RecursionError):  # half a line, garbage, or one of a later version
                yield from_line(line)


def read_ring(
    directory: Path, *, since: float = 0.0, failed: bool = False, unread: list[OSError] | None = None
) -> list[tuple[str, Record]]:
    """(device, record) of all devices, oldest first. ``failed``: only what somebody should look at.

    A file that cannot be read is left out; its error is appended to ``unread``.
    """
    found: list[tuple[str, Record]] = []
    for path in ring_files(directory, failed=failed):
        try:
            records = read_file(path, since)
        except OSError as error:
            if unread is not None:
                unread.append(error)
            continue
        found += [(device_of(path), record) for record in records if record.failed or not failed]
    return sorted(found, key=lambda one: one[1].at)


def hosts_of_agents(directory: Path) -> dict[str, str]:
    """Agents that started in a namespace's directory, as far as its files go back: id -> name of its host."""
    found = {}
    for path in ring_files(directory, failed=True):
        with contextlib.suppress(OSError):  # who reads its records says so
            lines = [line for line in _read(path).split(b"\n") if b'"what":"started"' in line]
            for record in records_of(b"\n".join(lines)):
                found.update(started(record))
    return found


def started(record: Record) -> dict[str, str]:
    """The agent whose start a record tells: id -> name of its host; empty if it tells something else."""
    if not isinstance(record, Incident) or record.what != "started":
        return {}
    return {agent.agent: agent.host for agent in record.culprits if agent.agent}


#: How a line says that an agent came, left, or was found dead. Quotes inside of a text are escaped, so none has this.
_LIVES = tuple(f'"what":"{what}"'.encode() for what in ("started", "left", "killed"))


def ended_badly(directory: Path, device: str) -> Culprit | None:
    """The agent that used a device's files last, if it has neither left nor another has come after it; else None.

    One line is decoded, however full the files are, because a starting agent's loop runs meanwhile.
    """
    path = directory / f"{device}{FAILURES}"
    for file in (path, older(path)):
        with contextlib.suppress(OSError):
            for record in _lives_backwards(_read(file)):
                return record.culprits[0] if record.what == "started" and record.culprits else None
    return None


def _lives_backwards(data: bytes) -> Iterator[Incident]:
    end = len(data)
    while (at := max(data.rfind(mark, 0, end) for mark in _LIVES)) >= 0:
        end = data.rfind(b"\n", 0, at) + 1
        stop = data.find(b"\n", at)
        for record in records_of(data[end : stop if stop >= 0 else None]):
            if isinstance(record, Incident):
                yield record
