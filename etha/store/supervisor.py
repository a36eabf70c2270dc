"""The small process above the embedded Redis server: starts it, holds the lock, ends when nobody needs the server.

    python supervisor.py RUNTIME_DIR --binary PATH [--grace S] [--timeout S] [--report FD]

It also ends as soon as its socket is no longer at its path, because the next agent would start another server there.
Agents that lose this server find that one, so there are never two for long.

One line goes to FD, which is then closed: ``running PID`` or ``failed TEXT``. There are two locks. ``redis.start`` is
held while somebody starts a server, so that others block until that is decided. ``redis.lock`` is held as long as a
supervisor lives, and contains its pid. It uses only the standard library and is run by its path, without the package.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

SOCKET, LOCK, START = "redis.sock", "redis.lock", "redis.start"
_PR_SET_PDEATHSIG = 1
#: inotify events that may end or replace an entry of a directory, or the directory.
_IN_REMOVED = 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
_COUNT_AGENTS = b"""
local count, cursor = 0, '0'
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', 'etha:{*}:agent:*', 'COUNT', 1000)
  cursor, count = page[1], count + #page[2]
until cursor == '0'
return count
"""


class StartFailed(Exception):
    """The server could not be started. The text goes to whoever asked for it."""


def ask(path: Path, *words: bytes, timeout: float) -> bytes:
    """First line of the server's answer to one command, without the line end. OSError if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(timeout)
        link.connect(str(path))
        link.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
        answer = b""
        while not answer.endswith(b"\r\n") and len(answer) < 4096:
            if not (more := link.recv(4096)):
                raise ConnectionResetError("closed while answering")
            answer += more
        return answer.removesuffix(b"\r\n")


def answers(path: Path, timeout: float) -> bool:
    """Whether a server answers PING at ``path``."""
    try:
        return ask(path, b"PING", timeout=timeout) == b"+PONG"
    except OSError:
        return False


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Interrupt whatever blocks inside after ``seconds`` (by SIGALRM, because this process has one thread)."""

    def ring(*_: object) -> None:
        raise StartFailed(f"{what}: not within {seconds:.1f} s")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def lock(path: Path) -> int:
    """Wait for the lock at ``path``. It is held until the descriptor is closed."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def start_server(binary: str, path: Path) -> tuple[subprocess.Popen[bytes], deque[bytes]]:
    """Start the server and return it, with the last lines of its log, once it is ready. It dies with this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def die_with_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    options = ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700", "--dir", str(path.parent)]
    options += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", "", "--loglevel", "notice"]
    server = subprocess.Popen(
        [binary, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=path.parent,
        preexec_fn=die_with_parent,
    )
    assert server.stdout is not None
    tail: deque[bytes] = deque(maxlen=20)
    try:
        for line in server.stdout:
            tail.append(line)
            if b"ready to accept connections" in line.lower():
                break
        else:
            raise StartFailed(f"{binary} ended with {server.wait()}: " + b" | ".join(tail).decode(errors="replace"))
        if not answers(path, 5):
            raise StartFailed(f"{binary} is up but does not answer at {path}")
    except BaseException:
        server.kill()
        server.wait()
        raise
    return server, tail


class ServerSocket:
    """A server's socket in its directory, told from another socket that comes to the same path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._own = identity(os.stat(path.name, dir_fd=self._folder))
        #: Readable when something was removed from the directory; -1 if the kernel does not report that.
        self.changes = watch(path.parent)

    @property
    def stands(self) -> bool:
        """Whether the path still leads to our socket."""
        try:
            return identity(self.path.stat()) == self._own
        except OSError:
            return False

    def clear(self) -> None:
        """Remove the socket if it is ours. In a directory that has taken the place of ours, nothing is touched."""
        with contextlib.suppress(OSError):
            if identity(os.stat(self.path.name, dir_fd=self._folder)) == self._own:
                os.unlink(self.path.name, dir_fd=self._folder)


def identity(found: os.stat_result) -> tuple[int, int]:
    """What tells a file from any other that exists at the same time."""
    return found.st_dev, found.st_ino


def watch(folder: Path) -> int:
    """A descriptor that is readable when something was removed from ``folder``; -1 if there is none.

    ``observe.inotify`` does the same for others. This file is run by its path, without the package, so it has its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handle = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if handle >= 0 and libc.inotify_add_watch(handle, os.fsencode(folder), ctypes.c_uint32(_IN_REMOVED)) < 0:
        os.close(handle)
        return -1
    return handle


def serve(server: subprocess.Popen[bytes], place: ServerSocket, grace: float, ready: Callable[[], None]) -> int:
    """Serve until the end: SIGTERM, the server ends or is no longer at its path, or no agent had a lease for ``grace``
    s.

    ``ready`` is called as soon as a SIGTERM would be noticed.
    """
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stop = []
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ready()
    assert server.stdout is not None
    os.set_blocking(server.stdout.fileno(), False)
    with selectors.DefaultSelector() as inputs:
        inputs.register(wake_read, selectors.EVENT_READ)
        inputs.register(server.stdout, selectors.EVENT_READ)
        if place.changes >= 0:
            inputs.register(place.changes, selectors.EVENT_READ)
        last_needed = time.monotonic()
        look = min(5.0, grace / 4)
        next_look = last_needed + look
        while not stop and server.poll() is None and place.stands:
            for key, _ in inputs.select(max(0.0, next_look - time.monotonic())):
                # Read the log so that the server never blocks on it; its content is not needed any more.
                if not os.read(key.fd, 65536):
                    inputs.unregister(key.fileobj)
            if time.monotonic() < next_look:
                continue
            if needed(place.path):
                last_needed = time.monotonic()
            elif time.monotonic() - last_needed >= grace:
                break
            next_look = time.monotonic() + look
    return end(server, place)


def needed(path: Path) -> bool:
    """Whether any agent in any namespace has a lease. A server too busy to answer counts as needed."""
    try:
        return ask(path, b"EVAL", _COUNT_AGENTS, b"0", timeout=5) != b":0"
    except OSError:
        return True


def end(server: subprocess.Popen[bytes], place: ServerSocket) -> int:
    """Stop the server. Returns 0 if it was running until now.

    It is killed, because it has nothing to save, and a gentle end would remove whatever is at its path then.
    """
    was_running = server.poll() is None
    server.kill()
    server.wait()
    place.clear()
    return 0 if was_running else 1


class Report:
    """Where the one line goes. Closed once it is written, or with the process."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def wanted(self) -> bool:
        """Whether whoever asked still waits, because a server for nobody would be in the way of the next."""
        if self._handle is None:
            return True
        poll = select.poll()
        poll.register(self._handle, 0)
        return not poll.poll(0)

    def say(self, line: str) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):  # nobody waits any more
                os.write(self._handle, line.replace("\n", " ").encode()[:4000] + b"\n")

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def supervise(runtime: Path, binary: str, grace: float, timeout: float, report: Report) -> int:
    """Serve, or find that another supervisor does."""
    os.umask(0o077)
    path = runtime / SOCKET
    until = time.monotonic() + timeout
    with deadline(timeout, "starting the embedded Redis server"):
        starting = lock(runtime / START)
        if answers(path, min(5.0, timeout)):
            report.say(f"running {os.getpid()}")
            return 0
    with deadline(until - time.monotonic(), f"the Redis server at {path} neither answers nor ends"):
        held = lock(runtime / LOCK)
    if not report.wanted():
        return 1
    with deadline(until - time.monotonic(), f"starting {binary}"):
        server, _ = start_server(binary, path)
    try:
        place = ServerSocket(path)
    except OSError as error:
        server.kill()
        server.wait()
        raise StartFailed(f"{path} was removed while its server started: {error.strerror}") from None
    os.ftruncate(held, 0)
    os.write(held, b"%d\n" % os.getpid())

    def ready() -> None:
        report.say(f"running {os.getpid()}")
        report.close()
        os.close(starting)

    return serve(server, place, grace, ready)


def close_inherited(but: int) -> None:
    """Close what this process got from its parent, except the standard streams and ``but``.

    uvloop's subprocesses keep whatever is inheritable there, such as a launcher's pipe or port. Whoever waits for the
    pipe's end would wait for as long as the server lives.
    """
    for entry in list(Path("/proc/self/fd").iterdir()):
        if (descriptor := int(entry.name)) > 2 and descriptor != but:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(descriptor)


def main(arguments: list[str]) -> int:
    """Detach from the parent process, then supervise."""
    parser = argparse.ArgumentParser(description="Supervisor of the embedded Redis server.")
    parser.add_argument("runtime", type=Path)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--grace", type=float, default=60.0, help="seconds without any agent before leaving")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for the start")
    parser.add_argument("--report", type=int, help="descriptor for the one line that says how it went; else detach not")
    given = parser.parse_args(arguments)
    # Detached, the process is nobody's child: it leaves no zombie in the agent, and no Ctrl-C of its terminal.
    if given.report is not None:
        close_inherited(given.report)
        if os.fork():
            return 0
        os.setsid()

    report = Report(given.report)
    try:
        return supervise(given.runtime.absolute(), given.binary, given.grace, given.timeout, report)
    except (StartFailed, OSError) as error:
        report.say(f"failed {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
