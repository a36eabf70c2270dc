"""Three hosts of a test as network namespaces, where the first has a way of its own to each of the others.

two  10.213.2.2 ------veth------ 10.213.2.1  one  10.213.3.1 ------veth------ 10.213.3.2  three

Their Redis is reached by a unix socket. Each way can be made slow, and let nothing through to a port.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.flow.jobs import wait_gone
from tests.flow.networks.namespaces import ip

#: What every test with such hosts is marked with.
MARKS = [
    pytest.mark.needs("ip", "tc"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
]

#: Ports of each agent; data on the next one.
LINKS = 7000
DATA = LINKS + 1


@dataclass(frozen=True, slots=True)
class Paths:
    """Names of the namespaces."""

    one: str
    two: str
    three: str

    def address(self, host: str) -> str:
        """Of a host as its peers reach it; of the first one on its way to the second."""
        return {self.one: "10.213.2.1", self.two: "10.213.2.2", self.three: "10.213.3.2"}[host]

    def _device(self, host: str) -> str:
        return {self.two: "way2", self.three: "way3"}[host]

    @contextmanager
    def slow(self, host: str, mbit: int) -> Iterator[None]:
        """What the first host sends to ``host`` goes at this rate while the block runs."""
        tc = ["ip", "netns", "exec", self.one, "tc", "qdisc"]
        where = ["dev", self._device(host), "root"]
        bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "50ms"]
        done = subprocess.run([*tc, "add", *where, *bucket], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this kernel makes no way slow: {done.stderr.strip()}")
        try:
            yield
        finally:
            subprocess.run([*tc, "del", *where], check=True)

    @contextmanager
    def hole(self, host: str, port: int = DATA) -> Iterator[None]:
        """What the first host sends to this port of ``host`` is lost without a word while the block runs."""
        rule = ["to", self.address(host), "ipproto", "tcp", "dport", str(port), "priority", "10", "blackhole"]
        ip("-n", self.one, "rule", "add", *rule)
        try:
            yield
        finally:
            ip("-n", self.one, "rule", "del", *rule)


@contextmanager
def paths() -> Iterator[Paths]:
    """The three hosts; nothing of them is left at the end."""
    tag = f"etha-{os.getpid()}"
    found = Paths(f"{tag}-p1", f"{tag}-p2", f"{tag}-p3")
    names = (found.one, found.two, found.three)
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for number, name in ((2, found.two), (3, found.three)):
            way = f"way{number}"
            ip("-n", found.one, "link", "add", way, "type", "veth", "peer", "name", way, "netns", name)
            for host, last in ((found.one, 1), (name, 2)):
                ip("-n", host, "addr", "add", f"10.213.{number}.{last}/24", "dev", way)
                ip("-n", host, "link", "set", way, "up")
        # The first host says one address of its own to everybody.
        ip("-n", found.three, "route", "add", "10.213.2.1/32", "via", "10.213.3.1")
        yield found
    finally:
        for name in names:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                os.kill(int(pid), 15)
                wait_gone(int(pid))
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
