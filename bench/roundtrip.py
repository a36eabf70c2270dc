"""A bare request over the bus, worker and agent in two processes: the unit that other latencies are told in.

    python bench/roundtrip.py [--count 20000] [--loop asyncio|uvloop]

Beside it in the same run: the same bytes over a plain socket pair between the same two processes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
import zmq

from etha.bus.codec import Request
from etha.bus.handshake import WorkerHello, WorkerWelcome
from etha.bus.link import AgentLink
from etha.bus.messages import GetStatus, Status
from etha.bus.process import start_time
from etha.bus.server import BusServer, Peer


class Echo:
    """Answers everything at once."""

    def hello(self, peer: Peer, hello: WorkerHello) -> WorkerWelcome:
        return WorkerWelcome(version="0", namespace="bench", device="cpu", redis=None, pid=os.getpid())

    def received(self, peer: Peer, request: Request) -> None:
        peer.reply(request.id, Status(report={}))

    def cancelled(self, peer: Peer, request_id: int) -> None: ...

    def descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None: ...

    def on_disconnected(self, peer: Peer, reason: str) -> None: ...


def runner(name: str) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """``asyncio.run`` or its like on the named loop."""
    return uvloop.run if name == "uvloop" else asyncio.run


def serve(path: Path, ready: Any, stop: Any, pair: socket.socket) -> None:
    """The agent's process: an echo on the bus, and an echo on the socket pair."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with BusServer(path, Echo()):
            ready.set()
            await loop.run_in_executor(None, stop.wait)

    uvloop.run(main())
    while data := pair.recv(65536):
        pair.sendall(data)


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(len(ordered) * p)] * 1e6 for p in (0.5, 0.99))
    return f"p50 {p50:7.1f} us   p99 {p99:7.1f} us"


async def bus(path: Path, count: int) -> list[float]:
    """Seconds of each of ``count`` requests, one after the other."""
    hello = WorkerHello(version="0", namespace="bench", redis=None, host="", pid=os.getpid(), start=start_time())
    times = []
    async with await AgentLink.connect(path, hello, timeout=10.0) as link:
        message = GetStatus()
        for _ in range(count + 200):
            begin = time.perf_counter()
            await link.request(message, timeout=10.0)
            times.append(time.perf_counter() - begin)
    return times[200:]


def plain(pair: socket.socket, count: int) -> list[float]:
    """The same for 64 bytes over a socket pair, blocking."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        pair.sendall(b"x" * 64)
        pair.recv(65536)
        times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument(
        "--loop", choices=["asyncio", "uvloop"], default="uvloop", help="the worker's; the agent's is uvloop"
    )
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as directory, ours:
        path = Path(directory) / "cpu.sock"
        agent = context.Process(target=serve, args=(path, ready, stop, theirs))
        agent.start()
        theirs.close()
        ready.wait()
        times = runner(options.loop)(bus(path, options.count))
        stop.set()
        reference = plain(ours, options.count)
        ours.close()
        agent.join()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},"
        f" libzmq {zmq.zmq_version()}, pyzmq {zmq.__version__}; worker on {options.loop}, {options.count} requests"
    )
    print(f"bus round trip     {percentiles(times)}")
    print(f"socket pair        {percentiles(reference)}")
    ratio = sorted(times)[len(times) // 2] / sorted(reference)[len(reference) // 2]
    print(f"ratio of medians   {ratio:.1f}")


if __name__ == "__main__":
    main()
