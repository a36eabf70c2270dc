"""Other users of the host at a real agent: not in, not by its files and not by its sockets; and where it listens."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest
import zmq

from etha.bus.channel import dial
from etha.bus.codec import Failure, Request, decode, encode
from tests.flow.jobs import Job
from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way
from tests.unit.bus.echo import hello

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def reachable() -> Iterator[Site]:
    """A site whose parent directories everybody may enter, so that only etha's own modes keep others out."""
    with ExitStack() as stack:
        kept, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), "/var/tmp"
        tempfile.tempdir = None
        try:
            site = stack.enter_context(open_site(Way.LOCAL))
        finally:
            tempfile.tempdir = None
            if kept is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = kept
        site.directory.chmod(0o755)
        yield site


def attempts(runtime: str, paths: list[str]) -> dict[str, str]:
    """As another user: what each act on the agent's files ends with."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    found = {}

    def attempt(name: str, act: object) -> None:
        try:
            found[name] = repr(act())  # type: ignore[operator]
        except OSError as error:
            found[name] = type(error).__name__

    attempt("list", lambda: list(Path(runtime).iterdir()))
    for path in paths:
        attempt(f"open {Path(path).name}", lambda p=path: os.open(p, os.O_RDONLY))  # type: ignore[misc]
        if path.endswith((".sock", ".fds")):
            kind = socket.SOCK_STREAM if path.endswith(".sock") else socket.SOCK_SEQPACKET
            attempt(
                f"connect {Path(path).name}",
                lambda p=path, k=kind: socket.socket(socket.AF_UNIX, k).connect(p),  # type: ignore[misc]
            )
    return found


def knocks(path: str) -> list[str]:
    """As another user, at sockets whose mode would let everybody in: what the bus and the descriptor socket say."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 10_000
        dealer.connect(f"ipc://{path}")
        dealer.send(encode(Request(1, None, hello())))
        answer = decode(dealer.recv())
    connection = dial(Path(path))
    connection.setblocking(True)
    return [answer.error.message if isinstance(answer, Failure) else "welcome", repr(connection.recv(100))]


@root
async def test_the_files_and_sockets_of_an_agent_are_its_users_alone(reachable: Site) -> None:
    site = reachable
    async with Sides(site, "weights") as sides:
        await sides.meet()
        runtime = site.directory / "a"
        paths = [runtime, *runtime.rglob("*")]
        for path in paths:
            mode = path.lstat().st_mode
            assert stat.S_IMODE(mode) & 0o077 == 0, f"{path} has mode {stat.S_IMODE(mode):o}"
            # Redis makes its own socket, with a bit that means nothing there.
            allowed = {0o700} if stat.S_ISDIR(mode) else {0o600, 0o700} if stat.S_ISSOCK(mode) else {0o600}
            assert stat.S_IMODE(mode) in allowed, f"{path} has mode {stat.S_IMODE(mode):o}"
        sockets = [p for p in paths if stat.S_ISSOCK(p.lstat().st_mode)]
        assert {p.name for p in sockets} >= {"cpu.sock", "cpu.fds"}
        with Job({}) as job:
            denied = job.start(attempts, str(runtime), [str(p) for p in paths]).result()
            assert len(denied) > 5 and set(denied.values()) == {"PermissionError"}, denied
            # Directories open to all: now the sockets' own modes, and those of all files.
            for path in (runtime, runtime / "default"):
                path.chmod(0o755)
            inside = job.start(attempts, str(runtime), [str(p) for p in paths if not p.is_dir()]).result()
            del inside["list"]
            assert set(inside.values()) <= {"PermissionError", "OSError"}, inside
            # Sockets open to all: now the kernel's word on who is at the other end.
            for name in ("cpu.sock", "cpu.fds"):
                (runtime / "default" / name).chmod(0o666)
            bus, descriptors = job.start(knocks, str(runtime / "default" / "cpu.sock")).result()
        assert f"serves no process of uid {NOBODY}" in bus and descriptors == "b''"
        log = (runtime / "default" / "cpu.log").read_text()
        assert log.count(f"uid {NOBODY}") >= 2
        await sides.ask_all()


def listening(pid: int) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket, IPv4 or IPv6, that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and fields[9] in inodes:
                raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.append((str(ip_address(raw)), int(port, 16)))
    return found


def udp_of(pid: int) -> list[str]:
    """Inodes of UDP sockets that a process has."""
    own = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line for name in ("udp", "udp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return [line for line in lines if f"socket:[{line.split()[9]}]" in own]


async def test_nothing_listens_on_other_than_loopback_unless_told() -> None:
    with open_site(Way.LOCAL) as site:
        async with Sides(site, "weights") as sides:
            report = (await sides.clients["trainer", 0].status())["agent"]
            found = listening(report["pid"])
            assert len(found) == 2, "links and data"
            assert all(ip_address(address).is_loopback for address, _ in found), found
            assert udp_of(report["pid"]) == []
            redis = servers(site.directory)
            assert redis, "the embedded server"
            assert all(listening(pid) == [] for pid in redis), "it has a unix socket and no port"


def servers(directory: Path) -> list[int]:
    """The processes that are the Redis of a site."""
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and serves(p, directory)]


def serves(process: Path, directory: Path) -> bool:
    """Whether a process is the Redis of a site."""
    try:
        return b"-server" in (process / "cmdline").read_bytes() and str(directory).encode() in (
            process / "cmdline"
        ).read_bytes() + os.fsencode((process / "cwd").readlink())
    except OSError:
        return False
