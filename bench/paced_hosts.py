"""Hosts of a benchmark: a network namespace each, joined by one switch, each with a NIC of a given rate both ways.

    process "host N" --eth0-- veth --port of a bridge--   tbf on both ends: what a host sends, and what it is sent

The kernel paces, so agents, Gloo and Redis share a NIC as they do between machines. ``isolate`` starts the benchmark
again in a user and network namespace of its own, so it needs no root, and all of this ends with its processes.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_CLONE_NEWNET = 0x40000000
#: Set for the benchmark in its own namespaces.
_INSIDE = "BENCH_PACED_HOSTS"
_BRIDGE, NIC = "switch", "eth0"
#: Most hosts of one run.
MOST = 250
#: Frames as between hosts of a cluster.
_MTU = 9000
#: Seconds of the rate that go at once, and for which a frame may wait for its turn.
_BURST, _QUEUE = 0.002, 0.02


def isolate() -> None:
    """Go on in namespaces that this benchmark has for itself."""
    if os.environ.get(_INSIDE) == "1":
        return
    os.environ[_INSIDE] = "1"
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    try:
        os.execvp("unshare", ["unshare", *user, "--net", sys.executable, *sys.argv])
    except FileNotFoundError:
        sys.exit("unshare is missing: install util-linux")


def make_switch() -> None:
    """The bridge between all hosts. Call it once, before any host enters."""
    _ip(f"link set lo up\nlink add {_BRIDGE} type bridge\nlink set {_BRIDGE} up\n", [])


def address(number: int) -> str:
    """Of host ``number``."""
    return f"10.99.0.{number + 1}"


def enter(number: int, rate: float) -> None:
    """This process, which has one thread, is host ``number`` from now on, with ``rate`` bytes a second each way."""
    assert 0 <= number < MOST
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(
            ctypes.get_errno(), "a network namespace could not be made: run as root, or allow user namespaces"
        )
    switch = ["nsenter", f"--net=/proc/{os.getppid()}/ns/net"]
    port = f"port{number}"
    _ip(
        f"link add {port} mtu {_MTU} type veth peer name {NIC} mtu {_MTU} netns {os.getpid()}\n"
        f"link set {port} master {_BRIDGE}\nlink set {port} up\n",
        switch,
    )
    _ip(f"link set lo up\naddress add {address(number)}/24 dev {NIC}\nlink set {NIC} up\n", [])
    for device, prefix in ((port, switch), (NIC, [])):
        _call([*prefix, "tc", "qdisc", "replace", "dev", device, "root", *_pacing(rate)])


def sent() -> int:
    """Bytes that this host's NIC has sent so far, headers included."""
    # Not /sys, which shows the namespace in which it was mounted.
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{NIC}:"))
    return int(line.partition(":")[2].split()[8])


def _pacing(rate: float) -> list[str]:
    burst = max(4 * 65536, int(rate * _BURST))
    return f"tbf rate {int(rate * 8)}bit burst {burst} limit {burst + int(rate * _QUEUE)}".split()


def _ip(commands: str, prefix: list[str]) -> None:
    _call([*prefix, "ip", "-batch", "-"], commands)


def _call(command: list[str], text: str | None = None) -> None:
    try:
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise OSError(f"{error.filename} is missing: install iproute2 and util-linux") from error
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)} failed: {error.stderr.strip()}") from error
