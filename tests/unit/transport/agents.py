"""Several agents in one process, joined by real loopback sockets, for the tests of the wire."""

from __future__ import annotations

import asyncio
import hmac
import os
import random
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from etha.config import STAGING
from etha.memory.handles import describe
from etha.memory.mapping import WorkerMemory
from etha.memory.process import start_time
from etha.memory.revocation import Guard
from etha.memory.views import View, view_of
from etha.plan import Plan, TensorSpec, build_plan, simulate
from etha.transport.base import TransportPeer, WireRun
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.program import Member, Program
from etha.transport.loan import Lender
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.listener import DataAddress
from etha.transport.tcp.tls import Identity
from etha.transport.tcp.transport import TcpTransport
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.flows import BUCKET, STREAMS, WireProgram
from etha.transport.wire.host_reads import compile_host
from etha.transport.wire.routing import Routing

TOKEN = 40
Local = dict[int, dict[str, torch.Tensor]]


def listening() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    listener.setblocking(False)
    return listener


class Agent:
    """A data plane with a port, and a book of the tokens that it has given out."""

    def __init__(
        self,
        name: str,
        *,
        staging: int = STAGING,
        streams: int = STREAMS,
        differences: str = "auto",
        identity: Identity | None = None,
    ) -> None:
        self.name, self._identity = name, identity
        self._given: dict[bytes, str] = {}
        listener = listening()
        self.port = listener.getsockname()[1]
        self.plane = DataPlane(
            listener,
            token_bytes=TOKEN,
            admit=self._admit,
            staging=staging,
            streams=streams,
            differences=differences,
            identity=identity,
        )
        self.transport = TcpTransport(self.plane)

    def _admit(self, token: bytes) -> str | None:
        found = [t for t in self._given if hmac.compare_digest(t, token)]
        return self._given.pop(found[0]) if found else None

    def address_for(self, peer: str) -> DataAddress:
        async def tokens(n: int) -> Sequence[bytes]:
            fresh = [secrets.token_bytes(TOKEN) for _ in range(n)]
            self._given.update(dict.fromkeys(fresh, peer))
            return fresh

        fingerprint = None if self._identity is None else self._identity.fingerprint
        return DataAddress(host="127.0.0.1", port=self.port, tokens=tokens, fingerprint=fingerprint)


@asynccontextmanager
async def agents(
    names: Sequence[str],
    *,
    staging: int = STAGING,
    streams: int = STREAMS,
    differences: str = "auto",
    encrypted: bool = False,
) -> AsyncIterator[dict[str, Agent]]:
    found = {
        name: Agent(
            name,
            staging=staging,
            streams=streams,
            differences=differences,
            identity=Identity.fresh() if encrypted else None,
        )
        for name in names
    }
    async with asyncio.TaskGroup() as group:
        doors = [group.create_task(agent.plane.run()) for agent in found.values()]
        try:
            yield found
        finally:
            for agent in found.values():
                await agent.plane.close()
            for door in doors:
                door.cancel()


class Gate:
    """In place of a call's guard: who is about to touch its memory waits until the loop has done something."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._loop, self._act, self.done = asyncio.get_running_loop(), act, threading.Event()

    def enter(self, thread: int) -> bool:
        self._loop.call_soon_threadsafe(self._run)
        return self.done.wait(5)

    def _run(self) -> None:
        if not self.done.is_set():
            self._act()
            self.done.set()

    def leave(self, thread: int) -> None:
        pass


class WaitingGuard:
    """Who is about to touch this memory waits until a gate elsewhere has let somebody in."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def enter(self, thread: int) -> bool:
        return self._gate.done.wait(5)

    def leave(self, thread: int) -> None:
        pass


def views(local: Local, names: Sequence[str], me: WorkerMemory | None) -> dict[int, dict[int, View]]:
    """Mapped views, or private ones through ``me``."""
    number = {name: i for i, name in enumerate(names)}
    return {
        r: {number[k]: view_of(x) if me is None else me.resolve(describe(x)) for k, x in held.items()}
        for r, held in local.items()
    }


@lru_cache
def memory_of(pid: int) -> WorkerMemory:
    """One for all jobs, because each holds a descriptor."""
    return WorkerMemory(pid, start_time(pid))


@dataclass
class Job:
    """A plan over named agents, tensors for all ranks, and which memory is private."""

    plan: Plan
    source_agents: tuple[str, ...]
    target_agents: tuple[str, ...]
    source: Local
    target: Local
    private: tuple[bool, bool] = (False, False)
    reads: frozenset[tuple[str, str]] = frozenset()
    staging: int = STAGING
    bucket_size: int = BUCKET
    streams: int = STREAMS
    memory: WorkerMemory = field(default_factory=lambda: memory_of(os.getpid()))

    @property
    def agents(self) -> list[str]:
        return sorted({*self.source_agents, *self.target_agents})

    def routing(self, me: str) -> Routing:
        return Routing(me=me, source=self.source_agents, target=self.target_agents, reads=self.reads)

    def views_of(self, me: str) -> tuple[dict[int, dict[int, View]], dict[int, dict[int, View]]]:
        """Sources that ``me`` reaches, and its targets."""
        routing = self.routing(me)
        here = {r: t for r, t in self.source.items() if routing.reach(me, self.source_agents[r])}
        there = {r: t for r, t in self.target.items() if self.target_agents[r] == me}
        return (
            views(here, self.plan.names, self.memory if self.private[0] else None),
            views(there, self.plan.names, self.memory if self.private[1] else None),
        )

    def wire(self, me: str) -> WireProgram:
        sources, targets = self.views_of(me)
        return compile_wire(
            self.plan, self.routing(me), sources, targets,
            staging=self.staging, bucket_size=self.bucket_size, streams=self.streams,
        )  # fmt: skip

    def here(self, me: str) -> Program:
        return compile_host(self.plan, self.routing(me), *self.views_of(me))

    def expected(self) -> Local:
        found = {r: {k: x.clone() for k, x in held.items()} for r, held in self.target.items()}
        simulate(self.plan, {r: {k: x.clone() for k, x in h.items()} for r, h in self.source.items()}, found)
        return found


def run_here(program: Program) -> None:
    work = Workspace()
    for i in range(len(program.pieces)):
        program.run(i, work)


async def transfer(
    job: Job,
    at: Mapping[str, Agent],
    seq: int = 1,
    guards: Mapping[str, Mapping[Member, Guard]] | None = None,
    lend: Callable[[WireProgram], Lender | None] = lambda program: None,
) -> dict[str, WireProgram]:
    """One whole transfer over all agents of a job, each doing its part; who sends opens the streams.

    ``lend`` makes the lender of an agent's program.
    """
    programs = {name: job.wire(name) for name in job.agents}
    for name, program in programs.items():
        peers = [TransportPeer(agent=peer, address=at[peer].address_for(name)) for peer in program.sends]
        await at[name].transport.open(peers)
    runs = {
        name: WireRun(
            program=program, seq=seq, key=bytes(32), guards=(guards or {}).get(name, {}), lender=lend(program)
        )
        for name, program in programs.items()
    }
    for name, run in runs.items():
        await at[name].plane.prepare(run)
    for name in job.agents:
        await asyncio.to_thread(run_here, job.here(name))
    async with asyncio.TaskGroup() as group:
        order = list(runs)
        random.Random(seq).shuffle(order)
        for name in order:
            group.create_task(at[name].transport.run(runs[name]))
    for name in job.agents:
        at[name].transport.settled()
    return programs


def bits(t: torch.Tensor) -> bytes:
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def same(got: Local, expected: Local) -> None:
    for r, held in got.items():
        for k, x in held.items():
            assert bits(x) == bits(expected[r][k]), (k, r)


def make_plan(
    source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec], here: Sequence[str], there: Sequence[str]
) -> Plan:
    where = {"source_hosts": here, "target_hosts": there}
    return build_plan(source, target, source_agents=here, target_agents=there, **where, fan_out="direct")
