"""Agents that clients start in tests are forked from a process that has torch loaded: loading it takes two seconds.

    autostart in a test or a worker -- arguments, environment, limits, descriptors --> nursery -- fork --> agent

The agent is what autostart makes otherwise: a daemon without a parent, with that environment and these arguments, also
in /proc. A nursery serves the processes of one run of pytest. What it cannot imitate is started as a user's agent is:
another program than ``etha.agent``, another user or namespace, another PYTHONPATH. So is everything in a test that uses
the fixture ``cold``, and with ``--cold``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import secrets
import select
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etha.client import agent_process

#: Bytes for the arguments and the environment of an agent, where /proc shows those of the nursery.
_ROOM = 1 << 16
#: Bytes of one request.
_MOST = 1 << 17
_KINDS = ("net", "pid", "mnt", "user", "ipc")
_LIMITS = ("NOFILE", "FSIZE", "AS", "CORE", "NPROC", "MEMLOCK")
_DESCRIPTORS = ("--ready-fd", "--start-lock")
_ROOT = Path(__file__).resolve().parents[2]

#: Set in an agent's environment: up to how many agents are all linked with each other. Only tests set that.
MESH = "MESH_OF_TESTS"

#: How this process asks the nursery; None: it asks none.
_address: str | None = None
_process: subprocess.Popen[bytes] | None = None


# ---- who asks -----------------------------------------------------------------------------------


def open_nursery() -> None:
    """Start the nursery of this process and its workers. Nobody waits until it has loaded torch."""
    global _process
    address = f"\0etha-nursery-{os.getpid()}-{secrets.token_hex(8)}"  # seen in this network namespace only
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        foreign = (*agent_process._FOREIGN_PREFIXES, "ETHA_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        env |= {"PYTHONPATH": os.pathsep.join([str(_ROOT), *_paths(env)]), "ROOM": "x" * _ROOM}
        _process = subprocess.Popen(
            [sys.executable, "-m", "tests.flow.nursery", str(listener.fileno()), "x" * _ROOM],
            stdin=subprocess.PIPE,
            env=env,
            pass_fds=[listener.fileno()],
        )
    use(address)


def close_nursery() -> None:
    """Its agents live on."""
    global _process
    use(None)
    if _process is not None:
        process, _process = _process, None
        process.communicate()
        assert process.returncode == 0


def address() -> str | None:
    """What a worker of this process hands to ``use``."""
    return _address


def use(address: str | None) -> None:
    """From now on, autostart in this process asks the nursery at ``address``; None: it starts agents by itself."""
    global _address
    _address = address
    agent_process.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        **{**vars(subprocess), "run": subprocess.run if address is None else _run}
    )


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """No nursery within: agents start as a user's do."""
    before = _address
    use(None)
    try:
        yield
    finally:
        use(before)


def _run(command: Sequence[str], **options: Any) -> Any:
    """``subprocess.run`` as autostart calls it."""
    module = command[command.index("-m") + 1] if "-m" in command else None
    if module == "etha.agent" and _paths(options["env"]) == _paths(os.environ):
        with contextlib.suppress(ConnectionRefusedError):  # in a network namespace of its own
            return _ask(command[command.index("-m") + 2 :], **options)
    return subprocess.run(command, **options)


def _ask(words: Sequence[str], *, env: dict[str, str], stderr: int, pass_fds: Sequence[int], **options: Any) -> Any:
    descriptors = [words[words.index(option) + 1] for option in _DESCRIPTORS]
    assert descriptors == [str(fd) for fd in pass_fds]
    assert options["start_new_session"] and (options["cwd"], options["umask"]) == ("/", 0o077)
    request = {"words": words, "env": env, "limits": {name: _limit(name) for name in _LIMITS}, "like": _like()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as nursery:
        assert _address is not None
        nursery.connect(_address)
        socket.send_fds(nursery, [json.dumps(request).encode()], [*pass_fds, stderr])
        answer = nursery.recv(100)
    if answer == b"other":
        raise ConnectionRefusedError
    assert answer == b"forked", answer
    return subprocess.CompletedProcess(words, 0)


def _limit(name: str) -> tuple[int, int]:
    return resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))


def _like() -> list[str]:
    """The user and the namespaces of the calling thread."""
    here = Path("/proc/thread-self/ns")
    return [f"{os.geteuid()}/{os.getegid()}", *(str((here / kind).readlink()) for kind in _KINDS)]


def _paths(env: Mapping[str, str]) -> list[str]:
    entries = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [entry for entry in map(os.path.abspath, entries) if entry != str(_ROOT)]


# ---- the nursery --------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> list[str]:
    """Fork an agent for each request, until the tests are over; in the agent, return its arguments."""
    like = _like()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            sys.exit(0)
        asker, _ = listener.accept()
        with asker:
            text, fds, _, _ = socket.recv_fds(asker, _MOST, len(_DESCRIPTORS) + 1)
            if not text:
                continue
            request = json.loads(text)
            if request["like"] != like:
                asker.send(b"other")
            elif (child := os.fork()) == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)
                asker.close()
                listener.close()
                return _become(request, fds)
            else:
                os.waitpid(child, 0)
                with contextlib.suppress(BrokenPipeError):  # who asked may have been killed meanwhile
                    asker.send(b"forked")
            for fd in fds:
                os.close(fd)


def _become(request: dict[str, Any], fds: list[int]) -> list[str]:
    """Be the process that autostart would have made; its arguments."""
    words = list(request["words"])
    *shared, log = fds
    for option, fd in zip(_DESCRIPTORS, shared, strict=True):
        words[words.index(option) + 1] = str(fd)
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for fd, number in ((null, 0), (null, 1), (log, 2)):
        os.dup2(fd, number)
    os.close(null)
    os.close(log)
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limits)
    os.environ.clear()
    os.environ.update(request["env"])
    _show([sys.executable, "-m", "etha.agent", *words], request["env"])
    random.seed()
    return words


def _show(command: list[str], env: dict[str, str]) -> None:
    """Write the command line and the environment where /proc reads them: there the nursery has left room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end, env_start, env_end = (int(field) for field in fields[45:49])
    for first, last, lines in (
        (start, end, command),
        (env_start, env_end, [f"{name}={value}" for name, value in env.items()]),
    ):
        text = b"".join(line.encode(errors="surrogateescape") + b"\0" for line in lines)
        assert len(text) < last - first, f"{len(text)} bytes where there is room for {last - first}"
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, text, len(text))


def _main() -> int:
    from etha.agent.__main__ import main
    from etha.agent.protocol import epoch_links
    from tests import frozen  # noqa: F401

    words = _serve(socket.socket(fileno=int(sys.argv[1])))
    epoch_links.MESH = int(os.environ.get(MESH, epoch_links.MESH))
    return main(words)


if __name__ == "__main__":
    sys.exit(_main())
