"""Two agents' data planes in two processes: whole transfers, and one of them killed, frozen or thawed in the middle."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import PeerLostError
from etha.memory.reach import WorkerGoneError
from etha.memory.views import View, view_of
from etha.plan import Layout, Plan, TensorSpec, build_plan
from etha.transport.base import TransportPeer, WireRun
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.host import Exhibit, HostMemory
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.listener import DataAddress
from etha.transport.tcp.transport import TcpTransport
from etha.transport.wire.compiler import compile_wire
from etha.transport.wire.host_reads import compile_host
from etha.transport.wire.routing import Routing
from tests.flow.memory.test_memory import Child
from tests.processes import CONTEXT, send_signal
from tests.seconds import within
from tests.unit.transport.agents import Gate, WaitingGuard

TOKEN = b"a token of this test, forty bytes long .."
SHAPE = (4096, 1024)
#: More than the kernel takes from a sender whose receiver reads nothing.
LARGE = (32768, 1024)
AGENTS = ("near", "far")


def plan(to: int, shape: tuple[int, int]) -> Plan:
    """Rows to rows or columns, a rank of each side on each agent: both send to both."""
    return build_plan(
        {"t": TensorSpec(shape, torch.float32, Layout((2,), [Shard(0)]))},
        {"t": TensorSpec(shape, torch.float32, Layout((2,), [Shard(to)]))},
        source_agents=AGENTS,
        target_agents=AGENTS[::-1] if to == 0 else AGENTS,
        fan_out="direct",
        source_hosts=AGENTS,
        target_hosts=AGENTS[::-1] if to == 0 else AGENTS,
    )


class End:
    """One agent: its tensors, its data plane, its part of the transfers."""

    def __init__(self, me: str, to: int, shape: tuple[int, int]) -> None:
        rank = AGENTS.index(me)
        taken = 1 - rank if to == 0 else rank
        whole = plan(to, shape)
        self.me = me
        self.source = torch.full((shape[0] // 2, shape[1]), float(rank + 1))
        self.target = torch.zeros(whole.target["t"].local_shape(taken) or ())
        ways = Routing(me=me, source=AGENTS, target=AGENTS[::-1] if to == 0 else AGENTS)
        views = ({rank: {0: view_of(self.source)}}, {taken: {0: view_of(self.target)}})
        self.program = compile_wire(whole, ways, *views)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        other = AGENTS[1 - rank]
        self.plane = DataPlane(
            listener, token_bytes=len(TOKEN), admit=lambda token: other if token == TOKEN else None, copy_slots=8
        )
        self.transport = TcpTransport(self.plane)
        self.other = other

    async def open(self, port: int) -> None:
        async def tokens(n: int) -> Sequence[bytes]:
            return [TOKEN] * n

        address = DataAddress(host="127.0.0.1", port=port, tokens=tokens)
        await self.transport.open([TransportPeer(agent=self.other, address=address)])

    async def move(self, seq: int) -> int:
        return await self.transport.run(WireRun(program=self.program, seq=seq))


def far(pipe: Connection, to: int, shape: tuple[int, int]) -> None:
    """The other process: opens, moves, or moves and never ends, as it is told."""

    async def main() -> None:
        end = End("far", to, shape)
        async with asyncio.TaskGroup() as group:
            group.create_task(end.plane.run())
            pipe.send(end.port)
            while True:
                command, value = await asyncio.to_thread(pipe.recv)
                match command:
                    case "open":
                        await end.open(value)
                        pipe.send("opened")
                    case "move":
                        try:
                            pipe.send(await end.move(value))
                        except PeerLostError as error:
                            pipe.send(error)
                    case "target":
                        pipe.send(end.target.numpy().tobytes())

    asyncio.run(main())


class Far:
    """The other process as this one sees it."""

    def __init__(self, to: int, shape: tuple[int, int]) -> None:
        self.pipe, there = mp.Pipe()
        self.process = CONTEXT.Process(target=far, args=(there, to, shape), daemon=True)
        self.process.start()
        there.close()
        self.port = self.pipe.recv()

    def tell(self, command: str, value: int = 0) -> None:
        self.pipe.send((command, value))

    async def hear(self) -> Any:
        async with asyncio.timeout(10):
            return await asyncio.to_thread(self.pipe.recv)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        send_signal(self.process.pid, number)


@asynccontextmanager
async def joined(to: int, shape: tuple[int, int] = SHAPE) -> AsyncIterator[tuple[End, Far]]:
    """Both agents, with streams both ways."""
    other = Far(to, shape)
    near = End("near", to, shape)
    try:
        async with asyncio.TaskGroup() as group:
            door = group.create_task(near.plane.run())
            other.tell("open", near.port)
            await near.open(other.port)
            assert await other.hear() == "opened"
            try:
                yield near, other
            finally:
                await near.plane.close()
                door.cancel()
    finally:
        other.process.kill()
        other.process.join()
        other.pipe.close()


def whole(near: End, payload: bytes, to: int) -> bool:
    """Every element of both targets."""
    there = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(near.target.shape)
    if to == 0:
        return bool((near.target == 2).all() and (there == 1).all())
    half = SHAPE[0] // 2
    return all(bool((t[:half] == 1).all() and (t[half:] == 2).all()) for t in (there,)) and bool(
        (near.target[half:] == 2).all()
    )


@pytest.mark.parametrize("to", [0, 1], ids=["straight", "packed"])
async def test_both_directions_at_once_over_and_over(to: int) -> None:
    async with joined(to) as (near, other):
        for seq in range(1, 6):
            near.target.zero_()
            other.tell("move", seq)
            moved = await near.move(seq)
            assert moved == await other.hear() == near.program.total
        other.tell("target")
        payload = await other.hear()
        if to == 1:  # its own half is copied locally, which is not the wire's work
            there = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(near.target.shape)
            assert bool((there[: SHAPE[0] // 2] == 1).all()) and bool((near.target[SHAPE[0] // 2 :] == 2).all())
        else:
            assert whole(near, payload, to)
        assert near.plane.traffic["far"].sent == near.plane.traffic["far"].received == 5 * near.program.total // 2


async def test_a_killed_agent_ends_the_run_within_milliseconds() -> None:
    async with joined(0) as (near, other):
        moving = asyncio.ensure_future(near.move(1))  # the other never moves: sockets are full, nothing arrives
        await asyncio.sleep(0.1)
        assert not moving.done()
        began = time.monotonic()
        other.signal(signal.SIGKILL)
        other.process.join(5)
        near.plane.drop("far")  # as the link does, which ends with the process; no stream of the run had begun to come
        with pytest.raises(PeerLostError, match="far") as caught:
            async with asyncio.timeout(5):
                await moving
        assert time.monotonic() - began < 0.5 and caught.value.reason in ("closed", "died")
        with pytest.raises(PeerLostError, match="far"):  # and cannot be opened again
            await near.move(2)


async def test_a_frozen_agent_does_not_hold_up_an_abort() -> None:
    async with joined(0) as (near, other):
        other.signal(signal.SIGSTOP)
        moving = asyncio.ensure_future(near.move(1))
        await asyncio.sleep(0.1)
        assert not moving.done()
        began = time.monotonic()
        near.transport.stop(TimeoutError("three beats missed"))
        with pytest.raises(TimeoutError, match="beats"):
            await moving
        assert time.monotonic() - began < 0.5
        other.signal(signal.SIGCONT)
        # Thawed, it takes part in a transfer that is long over: nothing comes, nobody is harmed.
        other.tell("move", 2)
        assert await near.move(2) == near.program.total == await other.hear()
        other.tell("target")
        assert whole(near, await other.hear(), 0)


async def test_an_agent_that_stops_in_the_middle_is_heard_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(0, LARGE) as (near, other):
        loop, begun, match = asyncio.get_running_loop(), asyncio.Event(), near.plane.match

        def arrived(inlet: Any, header: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            return match(inlet, header)

        monkeypatch.setattr(near.plane, "match", arrived)
        other.tell("move", 1)
        async with asyncio.timeout(60):
            await begun.wait()  # its first bytes are here, and it waits for us
        began = time.monotonic()
        # It stops once one of the other's streams is in the run, and has sent nothing yet. If none were, or the other
        # had sent all, only the agents' link would tell it, which is not here.
        gate = Gate(lambda: near.transport.stop(ValueError("no")))
        guards: Any = {("source", 0): WaitingGuard(gate), ("target", 1): gate}
        moving = near.transport.run(WireRun(program=near.program, seq=1, guards=guards))
        with pytest.raises(ValueError, match="no"):
            await moving
        error = await other.hear()
        assert isinstance(error, PeerLostError) and time.monotonic() - began < within(1.0)


# ---- host, with a worker in a process of its own ----------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
def test_another_agents_worker_is_read_in_place_and_its_death_is_named(mapped: bool) -> None:
    worker = Child()
    reader: HostMemory | None = None
    try:
        view = worker.make("x", (64, 64), mapped, seed=5)
        handle = worker.ask("make", "x", (64, 64), mapped, 5)
        for segment, fd, nbytes in worker.ask("segments"):
            worker.memory.attach(segment, worker.descriptor(fd), nbytes)
        del view
        reader = HostMemory(Exhibit.of(worker.memory, {"x": handle}))
        spec = TensorSpec((64, 64), torch.float32, Layout((1,), [Shard(0)]))
        whole = build_plan({"x": spec}, {"x": spec}, source_agents=["far"], target_agents=["near"], fan_out="direct")
        ways = Routing(me="near", source=("far",), target=("near",), reads=frozenset({("near", "far")}))
        target = torch.zeros(64, 64)
        targets: dict[int, dict[int, View]] = {0: {0: view_of(target)}}
        program = compile_host(whole, ways, {0: reader.views(["x"])}, targets)
        work = Workspace()
        for i in range(len(program.pieces)):
            program.run(i, work)
        assert torch.equal(target, worker.tensor("x", (64, 64)))
        worker.kill()
        if not mapped:  # a mapped segment outlives its worker; the control plane tells of its death
            with pytest.raises(WorkerGoneError):
                program.run(0, work)
        with pytest.raises(WorkerGoneError):
            HostMemory(Exhibit(pid=worker.pid, started=1, segments=(), tensors={"x": handle}))
    finally:
        if reader is not None:
            reader.close()
        worker.close()
