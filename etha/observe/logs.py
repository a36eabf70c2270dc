"""The log of an agent: its lines, their format, and the file that they go to.

    etha agent            standard error: the terminal, or the log of the service that runs it
    started by a client   standard error is RUNTIME_DIR/NAMESPACE/DEVICE.log, which is set aside when it is full

    2026-11-23T06:27:24.123+00:00 INFO cpu 3f2a97c01b5d4e66 etha.agent.services.rendezvous: pair weights formed, epoch 1

Lines that a message or a traceback needs beyond its first are indented, so that only the first one begins with a time.
``ETHA_LOG_FORMAT=json`` writes one object a line with the same fields, and the traceback as a text. This file
configures nothing: the programs do, with what it returns.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from etha.config import MAX_LOG, make_private_again
from etha.printable import printable

#: Stands for an agent whose standard error is no file.
TERMINAL = "-"


class LogSource:
    """Whose lines they are. An agent learns its device and its id after its first lines; "-" until then."""

    __slots__ = ("agent", "device")

    def __init__(self, device: str = "-", agent: str = "-") -> None:
        self.device, self.agent = device, agent


class TextFormatter(logging.Formatter):
    """Time, level, device, agent, logger: message."""

    def __init__(self, source: LogSource) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if trace := _trace(self, record):
            text = f"{text}\n{trace}"
        head = f"{_time(record)} {record.levelname} {self._source.device} {self._source.agent} {record.name}"
        return f"{head}: {printable(text)}".replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One object a line. ``traceback`` is there only if there is one."""

    def __init__(self, source: LogSource) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname,
            "device": self._source.device,
            "agent": self._source.agent,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := _trace(self, record):
            line["traceback"] = trace
        return json.dumps(line)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    return "\n".join([*parts, *([record.stack_info] if record.stack_info else [])])


def formatter(form: str, source: LogSource) -> logging.Formatter:
    """That of ETHA_LOG_FORMAT."""
    return JsonFormatter(source) if form == "json" else TextFormatter(source)


def levels(level: str) -> tuple[int, int]:
    """Levels of the root logger and of Etha's, for ETHA_LOG. Other libraries say what they say at info."""
    own = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}[level]
    return max(own, logging.INFO), own


class AgentLog(logging.Handler):
    """Writes lines to standard error, one ``write`` each.

    If that is the file at ``own(path)``, it does not grow much beyond ``MAX_LOG`` bytes: it becomes ``.log.1``, and
    standard error another file. So it does when somebody has removed or moved the file, or removed its directory.
    What cannot be written, because the disk is full, is lost and counted; the next line that can be written says how
    many were.
    """

    def __init__(self, form: str = "text", source: LogSource | None = None, descriptor: int = 2) -> None:
        super().__init__()
        self.source = source or LogSource()
        self.setFormatter(formatter(form, self.source))
        self._path: Path | None = None
        self._fd = descriptor
        self._lost, self._torn = 0, False

    def own(self, path: Path) -> None:
        """Keep the file at ``path`` small, if standard error is that file; otherwise do nothing."""
        with suppress(OSError):
            self._path = path if _same(os.fstat(self._fd), path.stat(follow_symlinks=False)) else None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, whatever the state of its file."""
        try:
            line = self.format(record)
        except Exception:
            return self.handleError(record)
        if self._path is not None:
            with suppress(OSError):  # no room for another file, or no directory: the line goes to the open one
                self._renew(self._path)
        if self._lost:
            self._tell_lost()
        self._write(line)

    def _tell_lost(self) -> None:
        lost, self._lost = self._lost, 0
        record = logging.makeLogRecord({"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"})
        record.msg, record.args = "%d lines before this one are lost, because they could not be written", (lost,)
        self._write(self.format(record), lost)

    def _write(self, line: str, counts: int = 1) -> None:
        data = (b"\n" if self._torn else b"") + f"{line}\n".encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
                self._torn = bool(data)
        except OSError:  # a full disk, or a terminal that is no longer there
            self._lost += counts

    def _renew(self, path: Path) -> None:
        now = os.fstat(self._fd)
        try:
            there: os.stat_result | None = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            there = None
            make_private_again(path.parent)
        if there is not None and _same(now, there):
            if now.st_size <= MAX_LOG:
                return
            path.replace(path.with_suffix(".log.1"))
        elif there is not None and not stat.S_ISREG(there.st_mode):
            return
        fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.dup2(fresh, self._fd)  # libraries that write to the descriptor use the new file, too
        finally:
            os.close(fresh)


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def log_of(pid: int | str = "self") -> str:
    """The file that is a process' standard error, ``TERMINAL`` if it is none, "" if that cannot be seen."""
    link = Path(f"/proc/{pid}/fd/2")
    try:
        is_file = stat.S_ISREG(link.stat().st_mode)
        return str(link.readlink()).removesuffix(" (deleted)") if is_file else TERMINAL
    except OSError:
        return ""


def shown_log() -> str:
    """``log_of`` this process, as text for others: a path may hold bytes that are no UTF-8."""
    return printable(log_of()).replace("\n", "\\n").encode(errors="backslashreplace").decode()
