"""Bytes between two agents: tcp over loopback beside plain sockets, host beside the one-copy limit, in one run.

    python bench/wire.py [--mib 256] [--runs 7] [--streams 4]

Two processes, each the data plane of one agent with a worker's tensors of its own. GB/s is payload over wall time
from the first end's start to the last end's end, the median of several runs after one that warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import harness
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from etha.agent.runtime.lane import Lane
from etha.agent.runtime.run import Execution
from etha.client.memory import tensors
from etha.memory import shared
from etha.memory.handles import describe
from etha.memory.mapping import WorkerMemory
from etha.memory.process import allow_reading, start_time
from etha.memory.views import View
from etha.plan import Layout, Plan, TensorSpec, build_plan
from etha.transport.base import TransportPeer, WireRun
from etha.transport.copy.host import Exhibit, HostMemory
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.listener import DataAddress
from etha.transport.tcp.transport import TcpTransport
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.host_reads import compile_host
from etha.transport.wire.routing import Routing

TOKEN_BYTES = 40
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``ranks`` a side, all of the source on agent a and of the target on agent b."""

    name: str
    shape: tuple[int, ...]
    placement: Placement
    mapped: tuple[bool, bool] = (True, True)
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    ranks: int = 2

    @property
    def plan(self) -> Plan:
        """Shard(0) to the placement."""
        source = TensorSpec(self.shape, self.dtypes[0], Layout((self.ranks,), [Shard(0)]))
        target = TensorSpec(self.shape, self.dtypes[1], Layout((self.ranks,), [self.placement]))
        here, there = ["a"] * self.ranks, ["b"] * self.ranks
        return build_plan({"t": source}, {"t": target}, source_agents=here, target_agents=there, fan_out="direct")

    def routing(self, me: str, host: bool) -> Routing:
        """Agent b reads the workers of agent a, or not."""
        agents = ("a",) * self.ranks, ("b",) * self.ranks
        return Routing(me=me, source=agents[0], target=agents[1], reads=frozenset({("b", "a")} if host else ()))

    @property
    def payload(self) -> int:
        """Bytes of the whole tensor at the narrower dtype."""
        return torch.Size(self.shape).numel() * min(d.itemsize for d in self.dtypes)


def cases(mib: int) -> list[Case]:
    """Shapes of ``mib`` MiB float32."""
    n = mib << 18
    bf16 = torch.bfloat16
    return [
        Case(name="S0->S0, whole segments, etha.empty", shape=(n // 8192, 8192), placement=Shard(0)),
        Case(
            name="S0->S0, whole segments, plain tensors",
            shape=(n // 8192, 8192),
            placement=Shard(0),
            mapped=(False, False),
        ),
        Case(name="S0->S0, plain -> etha.empty", shape=(n // 8192, 8192), placement=Shard(0), mapped=(False, True)),
        Case(
            name="S0->S1, plain -> etha.empty, 16 KiB",
            shape=(n // 8192, 8192),
            placement=Shard(1),
            mapped=(False, True),
        ),
        Case(name="S0->S1, runs of 16 KiB, etha.empty", shape=(n // 8192, 8192), placement=Shard(1)),
        Case(name="S0->S1, runs of 2 KiB, etha.empty", shape=(n // 1024, 1024), placement=Shard(1)),
        Case(name="S0->R, 2 replicas, etha.empty", shape=(n // 8192, 8192), placement=Replicate()),
        Case(
            name="S0->S0, float32 -> bfloat16, etha.empty",
            shape=(n // 8192, 8192),
            placement=Shard(0),
            dtypes=(torch.float32, bf16),
        ),
    ]


class Worker:
    """The local tensors of one side, in this very process, as its agent sees them."""

    def __init__(self, case: Case, side: str) -> None:
        spec = (case.plan.source if side == "a" else case.plan.target)["t"]
        make: Callable[..., torch.Tensor] = tensors.empty if case.mapped[side == "b"] else torch.empty
        self.tensors = [make(spec.local_shape(r) or (), dtype=spec.dtype) for r in range(case.ranks)]
        for i, t in enumerate(self.tensors):
            t.fill_(i + 1 if side == "a" else 0)
        self.memory = WorkerMemory(os.getpid(), start_time(os.getpid()))
        for segment in shared.segments():
            self.memory.attach(segment.id, os.dup(segment.fd), segment.nbytes)
        self.handles = [describe(t) for t in self.tensors]
        self.views: dict[int, dict[int, View]] = {r: {0: self.memory.resolve(h)} for r, h in enumerate(self.handles)}


def plain(conns: Sequence[socket.socket], memory: memoryview, receive: bool) -> Interval:
    """Each socket carries an equal part of ``memory``, on a thread of its own."""
    share = len(memory) // len(conns)

    def move(i: int) -> None:
        part = memory[i * share : (i + 1) * share]
        if not receive:
            conns[i].sendall(part)
            return
        at = 0
        while at < share:
            at += conns[i].recv_into(part[at : at + (4 << 20)], 0, socket.MSG_WAITALL)

    began = time.monotonic()
    threads = [threading.Thread(target=move, args=(i,)) for i in range(len(conns))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return began, time.monotonic()


async def once(lane: Lane, program: object) -> Interval:
    """One run of a program on the lane."""
    over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    began = time.monotonic()
    lane.submit(Execution(program, {}), on_done=over.set_result)  # type: ignore[arg-type]
    if (error := await over) is not None:
        raise error
    return began, time.monotonic()


class Meeting:
    """The two processes in step: a barrier that does not block the loop, and a pipe."""

    def __init__(self, barrier: Barrier, pipe: Connection) -> None:
        self._barrier, self.pipe = barrier, pipe

    async def __call__(self) -> None:
        """Both are here."""
        await asyncio.to_thread(self._barrier.wait, harness.SILENCE)


async def agent(me: str, todo: list[Case], runs: int, streams: int, meet: Meeting) -> dict[str, list[Interval]]:
    """One end of everything: {what: intervals}."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    token = b"t" * TOKEN_BYTES
    plane = DataPlane(
        listener, token_bytes=TOKEN_BYTES, admit=lambda t: {"a": "b", "b": "a"}[me] if t == token else None,
        streams=streams,
    )  # fmt: skip
    meet.pipe.send(listener.getsockname()[1])
    port = meet.pipe.recv()

    async def tokens(n: int) -> Sequence[bytes]:
        return [token] * n

    async with asyncio.TaskGroup() as group:
        door = group.create_task(plane.run())
        found = await measure(
            me, todo, runs, streams, meet, plane, DataAddress(host="127.0.0.1", port=port, tokens=tokens)
        )
        await plane.close()
        door.cancel()
    return found


async def measure(
    me: str, todo: list[Case], runs: int, streams: int, meet: Meeting, plane: DataPlane, address: DataAddress
) -> dict[str, list[Interval]]:
    """All cases in turns with the plain copy, then host, then a small transfer."""
    lane = Lane()
    transport = TcpTransport(plane)
    if me == "a":
        await transport.open([TransportPeer(agent="b", address=address)])
    await meet()
    conns = await bare(me, streams, meet)
    found: dict[str, list[Interval]] = {}
    seq = 0
    for case in todo:
        worker = Worker(case, me)
        views = (worker.views, {}) if me == "a" else ({}, worker.views)
        program = compile_wire(case.plan, case.routing(me, False), *views, streams=streams)
        other = memoryview(bytearray(case.payload))
        for _ in range(runs + 1):
            await meet()
            found.setdefault(f"plain {case.name}", []).append(await asyncio.to_thread(plain, conns, other, me == "b"))
            await meet()
            began = time.monotonic()
            await transport.run(WireRun(program=program, seq=(seq := seq + 1)))
            found.setdefault(f"tcp {case.name}", []).append((began, time.monotonic()))
        await meet()
        if me == "a":
            meet.pipe.send([Exhibit.of(worker.memory, {"t": h}) for h in worker.handles])
        else:
            memories = [HostMemory(exhibit) for exhibit in meet.pipe.recv()]
            sources = {r: memory.views(["t"]) for r, memory in enumerate(memories)}
            here = compile_host(case.plan, case.routing(me, True), sources, worker.views)
            for _ in range(runs + 1):
                found.setdefault(f"host {case.name}", []).append(await once(lane, here))
        await meet()
        del program, worker, views, other
    await small(me, runs * 100, meet, transport, found)
    lane.close()
    return found


async def bare(me: str, streams: int, meet: Meeting) -> list[socket.socket]:
    """Plain sockets between the two."""
    if me == "b":
        with socket.create_server(("127.0.0.1", 0)) as server:
            meet.pipe.send(server.getsockname()[1])
            conns = [server.accept()[0] for _ in range(streams)]
    else:
        port = meet.pipe.recv()
        conns = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    for conn in conns:
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await meet()
    return conns


async def small(me: str, runs: int, meet: Meeting, transport: TcpTransport, found: dict[str, list[Interval]]) -> None:
    """4 KiB, one transfer after the other; both ends' loops take part as they would in an agent."""
    case = Case(name="4 KiB", shape=(1024,), placement=Shard(0), ranks=1)
    worker = Worker(case, me)
    views = (worker.views, {}) if me == "a" else ({}, worker.views)
    program = compile_wire(case.plan, case.routing(me, False), *views)
    intervals = found.setdefault("tcp 4 KiB", [])
    for i in range(runs):
        await meet()
        began = time.monotonic()
        await transport.run(WireRun(program=program, seq=(1 << 32) + i))
        intervals.append((began, time.monotonic()))


def role(
    me: str, todo: list[Case], runs: int, streams: int, barrier: Barrier, pipe: Connection
) -> dict[str, list[Interval]]:
    """A process of the benchmark."""
    allow_reading()
    return asyncio.run(agent(me, todo, runs, streams, Meeting(barrier, pipe)))


def seconds(a: list[Interval] | None, b: list[Interval] | None) -> float:
    """Median from the first start to the last end, the first run left out."""
    both = [x for x in (a, b) if x]
    taken = [max(i[1] for i in run) - min(i[0] for i in run) for run in zip(*both, strict=True)]
    return statistics.median(taken[1:])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--only", default="", help="part of a name")
    args = parser.parse_args()
    print(harness.machine())
    todo = [case for case in cases(args.mib) if args.only in case.name]
    context = multiprocessing.get_context("fork")
    barrier, (left, right) = context.Barrier(2), context.Pipe()
    with harness.private_host():
        a, b = harness.run_ranks(
            [(role, (me, todo, args.runs, args.streams, barrier, pipe)) for me, pipe in (("a", left), ("b", right))]
        )
    limit = harness.copy_limit(args.mib << 20, 2, args.runs)
    print(f"\none copy, 2 threads: {limit:.2f} GB/s;  {args.streams} streams; payload {args.mib} MiB float32\n")
    print(f"{'case':44} {'plain':>7} {'tcp':>7} {'of plain':>9} {'host':>7} {'of limit':>9}")
    for case in todo:
        bare_gbs, tcp_gbs, host_gbs = (
            case.payload / seconds(a.get(f"{what} {case.name}"), b.get(f"{what} {case.name}")) / 1e9
            for what in ("plain", "tcp", "host")
        )
        ratios = tcp_gbs / bare_gbs, host_gbs / limit
        print(f"{case.name:44} {bare_gbs:7.2f} {tcp_gbs:7.2f} {ratios[0]:9.2f} {host_gbs:7.2f} {ratios[1]:9.2f}")
    # The receiver waits already; the barrier wakes both, the later start counts.
    spans = [max(x[1], y[1]) - max(x[0], y[0]) for x, y in zip(a["tcp 4 KiB"], b["tcp 4 KiB"], strict=True)][10:]
    p50, p99 = (harness.quantile(spans, q) * 1e6 for q in (0.5, 0.99))
    print(f"\n4 KiB, from the later start to the later end: p50 {p50:.0f} us, p99 {p99:.0f} us")


if __name__ == "__main__":
    main()
