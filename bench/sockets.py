"""The limit of tcp: a copy between two processes over several plain sockets of the loopback, a thread each."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import harness
from wire import Interval, plain


def loopback_limit(nbytes: int, streams: int, runs: int) -> float:
    """Median GB/s of ``nbytes`` over ``streams`` sockets, from the first end's start to the last end's end."""
    context = multiprocessing.get_context("fork")
    barrier, (ours, theirs) = context.Barrier(2), context.Pipe()
    ends = [(end, (nbytes, streams, runs, barrier, pipe)) for end, pipe in ((sender, ours), (receiver, theirs))]
    both = zip(*harness.run_ranks(ends), strict=True)
    return nbytes / statistics.median(max(a[1], b[1]) - min(a[0], b[0]) for a, b in list(both)[1:]) / 1e9


def receiver(nbytes: int, streams: int, runs: int, barrier: Barrier, pipe: Connection) -> list[Interval]:
    """Into memory that has been touched."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        conns = [server.accept()[0] for _ in range(streams)]
    return repeat(conns, nbytes, runs, barrier, receive=True)


def sender(nbytes: int, streams: int, runs: int, barrier: Barrier, pipe: Connection) -> list[Interval]:
    """From memory that has been touched."""
    port = pipe.recv()
    conns = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    return repeat(conns, nbytes, runs, barrier, receive=False)


def repeat(conns: list[socket.socket], nbytes: int, runs: int, barrier: Barrier, *, receive: bool) -> list[Interval]:
    """One run that warms up, then ``runs`` more."""
    memory = memoryview(bytearray(b"\1") * nbytes)
    found = []
    for _ in range(runs + 1):
        barrier.wait(harness.SILENCE)
        found.append(plain(conns, memory, receive))
    for conn in conns:
        conn.close()
    return found
