"""ETHA_TRACE=DIR: this process writes what happens in it to a file of its own there, for ``etha trace``.

    any thread --span(...)--> pending, bounded ... 0.2 s ... -> the writer's thread -> DIR/HOST-ROLE-PID.jsonl

``active`` is None unless a trace is wanted. So a place on the path of a transfer costs one test of it, and enters
nothing here. A trace never hurts what it shows: nobody waits for the disk, what does not fit into memory is dropped and
counted, and a failed write is a warning, once.

A file has one line for each thing that has happened, the first of which is its head (``trace_lines`` reads them):

    {"etha_trace": 1, "host": ..., "role": ..., "pid": ..., "clock": ..., "monotonic_ns": ..., "realtime_ns": ...}
    ["x", track, name, begun, ns, args, [[name, begun, ns], ...], number]    it took so long; parts of it
    ["b", number, track, name, begun, args]     it has begun; its "x" has the same number
    ["n", {...}]                                more about this process
    ["k", key, {...}]                           what streams call by this key
    ["q", agent, number, sent, back] ["r", agent, number, came, went]    a beat at the link's two ends
    ["d", count]                                lines that were dropped

Times are nanoseconds of CLOCK_MONOTONIC. Every agent and worker of a host has the same one, unless a time namespace
shifts it.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from etha.config import Settings
from etha.errors import ConfigError
from etha.observe.trace_lines import FORMAT
from etha.version import __version__

log = logging.getLogger(__name__)

#: Seconds between two writes.
EVERY = 0.2
#: Most lines that wait for the writer, some 20 MB. More are dropped and counted.
MOST = 50_000
#: Most bytes of one write.
CHUNK = 1 << 20
#: Seconds that the end of a process or of a client waits for the last write.
PATIENCE = 2.0

Args = Mapping[str, Any]
#: A part of a span: its name, when it began, and how long it took, in ns.
Part = tuple[str, int, int]

#: The trace of this process; None if none is wanted.
active: Tracer | None = None
_starting = threading.Lock()


class Tracer:
    """Writes one file. Every method may be called on any thread, and returns at once but for ``flush``."""

    def __init__(self, directory: Path, head: Mapping[str, Any]) -> None:
        """ConfigError, which names ETHA_TRACE, if no file can be made."""
        self.path, self._file = _create(directory, f"{head['host_name']}-{head['role']}-{head['pid']}")
        self._pending: deque[tuple[Any, ...] | Mapping[str, Any]] = deque([{"etha_trace": FORMAT, **head}])
        self._numbers = itertools.count(1)
        self._dropped = 0
        self._failed = self._closed = False
        self._encode = msgspec.json.Encoder(enc_hook=str).encode
        self._wake = threading.Event()
        #: Held while the file is written.
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="etha-trace", daemon=True)
        self._thread.start()

    # ---- what happens ---------------------------------------------------------------------------

    def span(
        self,
        track: str,
        name: str,
        begun: int,
        ended: int,
        args: Args | None = None,
        parts: Sequence[Part] = (),
        number: int = 0,
    ) -> None:
        """Something took from ``begun`` to ``ended``. ``number``: what ``begin`` gave for it."""
        self._add(("x", track, name, begun, ended - begun, args or {}, parts, number))

    def begin(self, track: str, name: str, begun: int, args: Args | None = None) -> int:
        """Something has begun that may take long: if the process is killed, the trace shows that it had not ended."""
        number = next(self._numbers)
        self._add(("b", number, track, name, begun, args or {}))
        return number

    def piece(self, track: str, begun: int, about: Args, piece: int, nbytes: int, error: BaseException | None) -> None:
        """A piece of a job is over. ``about`` is of the job, and has the piece's name."""
        args = {**about, "piece": piece, "bytes": nbytes}
        if error is not None:
            args["error"] = f"{type(error).__name__}: {error}"
        self.span(track, args.pop("name", "piece"), begun, time.monotonic_ns(), args)

    def note(self, **about: Any) -> None:
        """Something about this process that its head does not say: "agent", "device", "label"."""
        self._add(("n", about))

    def key(self, key: bytes, about: Args) -> None:
        """What a run's key on streams stands for."""
        self._add(("k", key.hex(), about))

    def beat_returned(self, agent: str, number: int, sent: int, back: int) -> None:
        """A beat to ``agent`` is back."""
        self._add(("q", agent, number, sent, back))

    def beat_answered(self, agent: str, number: int, came: int, went: int) -> None:
        """A beat of ``agent`` was sent back."""
        self._add(("r", agent, number, came, went))

    def _add(self, line: tuple[Any, ...]) -> None:
        if len(self._pending) < MOST:
            self._pending.append(line)
        else:
            self._dropped += 1

    # ---- the writer -----------------------------------------------------------------------------

    def flush(self, timeout: float = PATIENCE) -> None:
        """Return once everything that has happened so far is written, or ``timeout`` seconds have passed."""
        if self._writing.acquire(timeout=timeout):
            try:
                self._write()
            finally:
                self._writing.release()

    def close(self) -> None:
        """Write the rest, and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            os.close(self._file)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(EVERY)
            with self._writing:
                self._write()

    def _write(self) -> None:
        while self._pending:
            lines: list[bytes] = []
            size = 0
            while self._pending and size < CHUNK:
                try:
                    line = self._encode(self._pending.popleft())
                except (TypeError, ValueError, OverflowError, RecursionError):
                    self._dropped += 1
                    continue
                lines.append(line)
                size += len(line) + 1
            if lines and not self._put(b"\n".join(lines) + b"\n"):
                self._dropped += len(lines)
                return
        if (dropped := self._dropped) and self._put(self._encode(("d", dropped)) + b"\n"):
            self._dropped -= dropped

    def _put(self, data: bytes) -> bool:
        """Append to the file. False, with one warning, if that fails."""
        try:
            if not self._failed and os.fstat(self._file).st_nlink == 0:
                raise OSError(0, "it was removed")
            if self._failed:
                data = b"\n" + data  # behind half a line
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            if not self._failed:
                log.warning("the trace %s is not complete: %s; transfers go on", self.path, error.strerror or error)
            self._failed = True
            return False
        return True


def start(settings: Settings, role: str, device: str) -> None:
    """Begin this process's trace, if ETHA_TRACE is set and it has none yet. ConfigError for a directory that is none.

    ``role`` is "worker" or "agent".
    """
    global active
    if settings.trace is None:
        return
    with _starting:
        if active is None:
            active = Tracer(settings.trace, head(settings, role, device))
            atexit.register(active.close)


def stop() -> None:
    """End this process's trace. Idempotent."""
    global active
    ended, active = active, None
    if ended is not None:
        atexit.unregister(ended.close)
        ended.close()


def head(settings: Settings, role: str, device: str) -> dict[str, Any]:
    """The first line of a file. ``clock`` names the clock: equal names, equal times."""
    monotonic, realtime = clocks()
    return {
        "host": settings.host_id,
        "host_name": settings.host_name,
        "namespace": settings.namespace,
        "role": role,
        "pid": os.getpid(),
        "device": device,
        "version": __version__,
        "clock": f"{_boot()}/{_time_namespace()}",
        "monotonic_ns": monotonic,
        "realtime_ns": realtime,
    }


def clocks() -> tuple[int, int]:
    """CLOCK_MONOTONIC and the real time at one moment, in ns: the closest of five readings."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = after - before, (before + after) // 2, real
    assert best is not None
    return best[1], best[2]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def _time_namespace() -> int:
    try:
        return Path("/proc/self/ns/time").stat().st_ino
    except OSError:  # a kernel without them
        return 0


def _create(directory: Path, name: str) -> tuple[Path, int]:
    """A new file of this name. Processes of several PID namespaces may share a directory, and so a name."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:200]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = directory / (f"{safe}.jsonl" if number == 1 else f"{safe}.{number}.jsonl")
            try:
                return path, os.open(path, flags, 0o600)
            except FileExistsError:
                continue
    except OSError as error:
        text = f"ETHA_TRACE={directory}: no trace can be written there: {error.strerror}; name a directory of yours"
        raise ConfigError(text) from None
    raise AssertionError("a number is always free")


def _forked() -> None:
    """A forked child has no writer, and another process id: its clients begin a trace of their own."""
    global active, _starting
    active, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)
