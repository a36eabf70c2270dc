"""One source host to several target hosts, each with a copy: passed on by the targets beside sent by the source.

    python bench/relay.py [--mib 256] [--hosts 4] [--runs 5] [--streams 4] [--nic MB/s]

A process a host, each the data plane of an agent with a worker's tensors of its own, over loopback: all hosts share
this machine's cores, so what relays save a NIC shows in the bytes that the source sends, and in seconds only with
``--nic``, which has the kernel pace what each host sends. Seconds are from the first start to the last end, the median
of several runs after one that warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterable, Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import harness
import torch
from torch.distributed.tensor import Shard

from etha.client.memory import tensors
from etha.memory.views import view_of
from etha.plan import Layout, Plan, TensorSpec, build_plan
from etha.transport.base import TransportPeer, WireRun
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.listener import DataAddress
from etha.transport.tcp.transport import TcpTransport
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.routing import Routing

TOKEN_BYTES = 40
#: Of socket(7): bytes a second.
SO_MAX_PACING_RATE = 47
WAYS = ("direct", "relay")
#: (start, end) of each run, and the payload that this host has sent and received in all of them.
Found = tuple[list[tuple[float, float]], int, int]


def names(hosts: int) -> list[str]:
    """The source's host, then the targets'."""
    return ["s", *(f"t{i}" for i in range(hosts))]


def plan(shape: tuple[int, int], hosts: int, way: str) -> Plan:
    """Rows over two ranks of one host to a copy on each of the others."""
    here, there = ["s"] * 2, names(hosts)[1:]
    return build_plan(
        {"t": TensorSpec(shape, torch.float32, Layout((2,), [Shard(0)]))},
        {"t": TensorSpec(shape, torch.float32, Layout.replicated(hosts))},
        source_hosts=here, target_hosts=there, source_agents=here, target_agents=there, fan_out=way, carry=False,
    )  # fmt: skip


def pace(plane: DataPlane, peers: Iterable[str], mbytes: float) -> None:
    """Let the streams to ``peers`` together send so much a second."""
    socks = [outlet.sock for peer in peers for streams in plane._sets[peer] for outlet in streams.outlets]
    for sock in socks if mbytes else ():
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(mbytes * 1e6 / len(socks)))


async def host(number: int, args: argparse.Namespace, ports: Any, barrier: Barrier) -> dict[str, Found]:
    """One host: its plane, its tensors, its part of all runs."""
    everybody = names(args.hosts)
    me, token = everybody[number], f"{number:0{TOKEN_BYTES}d}".encode()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    ports[number] = listener.getsockname()[1]
    admitted = {f"{i:0{TOKEN_BYTES}d}".encode(): name for i, name in enumerate(everybody)}
    plane = DataPlane(listener, token_bytes=TOKEN_BYTES, admit=admitted.get, streams=args.streams)
    await asyncio.to_thread(barrier.wait, harness.SILENCE)

    async def tokens(n: int) -> Sequence[bytes]:
        return [token] * n

    shape = (args.mib << 5, 8192)
    held = [tensors.empty((shape[0] // 2, 8192) if me == "s" else shape) for _ in range(2 if me == "s" else 1)]
    views = {r if me == "s" else number - 1: {0: view_of(t.fill_(r + 1))} for r, t in enumerate(held)}
    found: dict[str, Found] = {}
    async with asyncio.TaskGroup() as group:
        door = group.create_task(plane.run())
        for which, way in enumerate(WAYS):
            whole = plan(shape, args.hosts, way)
            routing = Routing(me=me, source=("s", "s"), target=tuple(everybody[1:]))
            program = compile_wire(whole, routing, *((views, {}) if me == "s" else ({}, views)), streams=args.streams)
            transport = TcpTransport(plane)
            for peer in program.sends:
                address = DataAddress(host="127.0.0.1", port=ports[everybody.index(peer)], tokens=tokens)
                await transport.open([TransportPeer(agent=peer, address=address)])
            before = [(t.sent, t.received) for t in plane.traffic.values()]
            spans = []
            for run in range(args.runs + 1):
                await asyncio.to_thread(barrier.wait, harness.SILENCE)
                began = time.monotonic()
                await transport.run(WireRun(program=program, seq=which * 1000 + run))
                spans.append((began, time.monotonic()))
                if run == 0:  # the run that warms up has opened the streams
                    pace(plane, program.sends, args.nic)
            if me != "s":
                half = shape[0] // 2
                assert bool((held[0][:half] == 1).all() and (held[0][half:] == 2).all()), "not what was sent"
                held[0].zero_()
            sent, received = (
                sum(getattr(t, end) for t in plane.traffic.values()) - sum(b[i] for b in before)
                for i, end in enumerate(("sent", "received"))
            )
            found[way] = spans, sent, received
        await asyncio.to_thread(barrier.wait, harness.SILENCE)
        await plane.close()
        door.cancel()
    return found


def role(number: int, args: argparse.Namespace, ports: Any, barrier: Barrier) -> dict[str, Found]:
    """A process of the benchmark."""
    torch.set_num_threads(1)
    return asyncio.run(host(number, args, ports, barrier))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--nic", type=float, default=0.0, help="MB/s that a host sends at most; 0: unpaced")
    args = parser.parse_args()
    print(harness.machine())
    context = multiprocessing.get_context("fork")
    ports, barrier = context.Array("i", args.hosts + 1), context.Barrier(args.hosts + 1)
    with harness.private_host():
        found = harness.run_ranks([(role, (i, args, ports, barrier)) for i in range(args.hosts + 1)])
    payload, runs = args.mib << 20, args.runs + 1
    print(f"\n{args.mib} MiB float32 to a copy on each of {args.hosts} hosts, {args.streams} streams a link\n")
    print(f"{'':8} {'source sends':>13} {'a host takes':>13} {'busiest relay sends':>20} {'seconds':>9}")
    for way in WAYS:
        spans = zip(*(one[way][0] for one in found), strict=True)
        taken = [max(s[1] for s in run) - min(s[0] for s in run) for run in spans][1:]
        copies = [n / payload / runs for n in (found[0][way][1], *(max(f[way][i] for f in found[1:]) for i in (2, 1)))]
        print(f"{way:8} {copies[0]:7.2f} copies {copies[1]:13.2f} {copies[2]:20.2f} {statistics.median(taken):9.3f}")


if __name__ == "__main__":
    main()
