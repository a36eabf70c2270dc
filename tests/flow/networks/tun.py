"""A way between two namespaces that takes its time: each packet arrives ``delay`` seconds after it was sent.

with delayed(End(net.one, "10.211.1.1"), End(net.two, "10.211.1.2"), 0.2):
    ...         # what the two addresses say to each other goes this way, connections that stood before included

A process of its own holds a TUN device in each namespace; when it ends, so do the devices and their routes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

TUN = Path("/dev/net/tun")
#: What every test with such a way is marked with.
MARKS = [pytest.mark.skipif(not TUN.exists(), reason=f"needs {TUN}")]

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500
#: Packets taken from one device before those that are due go on.
_BURST = 64


class End(NamedTuple):
    """One end of a way: an address that its namespace has already."""

    namespace: str
    address: str


def enter(namespace: str) -> None:
    """Go to a network namespace: this thread, and the threads and processes that it starts from now on."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    finally:
        os.close(handle)


def _open(namespace: str, name: str) -> int:
    enter(namespace)
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _lead(devices: tuple[int, int], delay: float) -> None:
    """Carry packets both ways until this process is ended."""
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    poll = select.poll()
    for device in devices:
        poll.register(device, select.POLLIN)
    while True:
        dues = [queue[0][0] for queue in waiting if queue]
        left = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready = {device for device, _ in poll.poll(None if left is None else left * 1000)}
        for side, device in enumerate(devices):
            if device in ready:
                for _ in range(_BURST):
                    try:
                        waiting[side].append((time.monotonic() + delay, os.read(device, 65536)))
                    except BlockingIOError:
                        break
            while waiting[side] and waiting[side][0][0] <= time.monotonic():
                _, packet = waiting[side].popleft()
                try:
                    os.write(devices[1 - side], packet)
                except OSError as error:  # the other end is not up yet, or no more: the packet is lost, as on a wire
                    if error.errno != errno.EIO:
                        raise


@contextmanager
def delayed(one: End, two: End, delay: float) -> Iterator[None]:
    """What goes between the two addresses takes ``delay`` seconds each way; as before after the block."""
    name = "slow-" + one.address.rpartition(".")[0].rpartition(".")[2]
    words = [sys.executable, "-m", __name__, one.namespace, two.namespace, name, str(delay)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the forwarder did not start"
            for here, there in ((one, two), (two, one)):
                ip = ["ip", "-n", here.namespace]
                subprocess.run([*ip, "link", "set", name, "up", "mtu", str(_MTU), "txqueuelen", "10000"], check=True)
                route = [f"{there.address}/32", "dev", name, "src", here.address]
                subprocess.run([*ip, "route", "add", *route], check=True)
            yield
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    first, second, device_name, seconds = sys.argv[1:]
    opened = (_open(first, device_name), _open(second, device_name))
    print("ready", flush=True)
    _lead(opened, float(seconds))
