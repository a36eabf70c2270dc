"""Hosts of a test as network namespaces: two joined by a veth pair, and a Redis in a third that both reach.

one  10.211.1.1 ------veth------ 10.211.1.2  two
 \\__ 10.211.2.1 __ bridge in `redis`, 10.211.2.3 __ 10.211.2.2 __/
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from etha.store.embedded import find_binary
from tests.flow.jobs import wait_gone

#: What every test with such hosts is marked with.
MARKS = [pytest.mark.needs("ip"), pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces")]

_OPTIONS = ["--bind", "10.211.2.3", "--port", "6379", "--save", "", "--appendonly", "no", "--protected-mode", "no"]


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names of the three namespaces, and the Redis's URL as both others reach it."""

    one: str
    two: str
    redis: str
    url: str

    def run(self, host: str, *words: str) -> str:
        """A command inside a namespace; its output."""
        return ip("netns", "exec", host, *words)

    def cut(self) -> None:
        """Take the link between the two hosts down; the Redis stays in reach."""
        ip("-n", self.one, "link", "set", "direct", "down")

    def mend(self) -> None:
        """And up again."""
        ip("-n", self.one, "link", "set", "direct", "up")


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"ip {' '.join(words)}: {done.stderr}")
    return done.stdout


@contextmanager
def hosts(directory: Path) -> Iterator[Hosts]:
    """Both hosts and the Redis; nothing of them is left at the end."""
    tag = f"etha-{os.getpid()}"
    found = Hosts(f"{tag}-one", f"{tag}-two", f"{tag}-redis", "redis://10.211.2.3:6379/0")
    names = (found.one, found.two, found.redis)
    server = None
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", found.one, "link", "add", "direct", "type", "veth", "peer", "name", "direct", "netns", found.two)
        ip("-n", found.redis, "link", "add", "bridge", "type", "bridge")
        ip("-n", found.redis, "link", "set", "bridge", "up")
        ip("-n", found.redis, "addr", "add", "10.211.2.3/24", "dev", "bridge")
        for number, name in ((1, found.one), (2, found.two)):
            port = f"port{number}"
            ip("-n", name, "link", "add", "office", "type", "veth", "peer", "name", port, "netns", found.redis)
            ip("-n", found.redis, "link", "set", port, "master", "bridge")
            ip("-n", found.redis, "link", "set", port, "up")
            for device, address in (("direct", f"10.211.1.{number}/24"), ("office", f"10.211.2.{number}/24")):
                ip("-n", name, "addr", "add", address, "dev", device)
                ip("-n", name, "link", "set", device, "up")
        server = subprocess.Popen(
            ["ip", "netns", "exec", found.redis, find_binary(), *_OPTIONS, "--dir", str(directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        assert any("Ready to accept" in line for line in server.stdout), "the Redis server did not start"
        yield found
    finally:
        if server is not None:
            server.terminate()
            server.communicate()
        for name in names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), 15)
                wait_gone(int(pid))
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
