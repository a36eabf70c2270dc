"""Memory of other processes: real children that hold tensors, die, freeze and free."""

from __future__ import annotations

import asyncio
import errno
import gc
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from etha.agent.runtime.lane import Lane
from etha.agent.runtime.run import Execution
from etha.client.memory.tensors import empty
from etha.memory import shared
from etha.memory.handles import TensorHandle, describe
from etha.memory.mapping import WorkerMemory
from etha.memory.process import Beacon, ProcessMemory, allow_reading, start_time
from etha.memory.reach import AccessError, FaultError, ReachError, RevokedError, WorkerGoneError
from etha.memory.revocation import LentPage, RevocationPage
from etha.memory.views import View
from etha.plan import Layout, TensorSpec, build_plan
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import Program
from tests.flow.memory.on_lane import LaneTransport
from tests.processes import CONTEXT, send_signal


def held(pipe: Connection) -> None:
    """A worker: does what it is told with tensors, a beacon and a revocation page of its own."""
    allow_reading()
    tensors: dict[str, torch.Tensor] = {}
    beacon, page = Beacon(), RevocationPage()
    words: list[int] = []

    def make(name: str, shape: tuple[int, ...], mapped: bool, seed: int) -> TensorHandle:
        tensors[name] = empty(shape) if mapped else torch.empty(shape)
        tensors[name].copy_(torch.rand(shape, generator=torch.Generator().manual_seed(seed)))
        return describe(tensors[name])

    does: dict[str, Callable[..., Any]] = {
        "make": make,
        "get": lambda name: tensors[name].contiguous().numpy().tobytes(),
        "segments": lambda: [(s.id, s.fd, s.nbytes) for s in shared.segments()],
        "beacon": lambda: (beacon.address, beacon.token),
        "echoed": lambda: beacon.echoed,
        "page": lambda: page.fd,
        "open": lambda: words.append(page.open()) or words[-1],  # type: ignore[func-returns-value]
        "revoke": lambda: page.revoke(words[-1]),
        "busy": lambda: page.busy(words[-1]),
    }
    while True:
        command, *arguments = pipe.recv()
        pipe.send(does[command](*arguments))


class Child:
    """A worker process and this agent's reach into it."""

    def __init__(self) -> None:
        self.pipe, there = mp.Pipe()
        self.process = CONTEXT.Process(target=held, args=(there,), daemon=True)
        self.process.start()
        there.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.memory = WorkerMemory(self.pid, start_time(self.pid))
        self.ask("echoed")

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.pipe.recv()

    def descriptor(self, fd: int) -> int:
        return os.open(f"/proc/{self.pid}/fd/{fd}", os.O_RDWR)

    def make(self, name: str, shape: tuple[int, ...], mapped: bool, seed: int = 0) -> View:
        handle = self.ask("make", name, shape, mapped, seed)
        for segment, fd, nbytes in self.ask("segments"):
            self.memory.attach(segment, self.descriptor(fd), nbytes)
        return self.memory.resolve(handle)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.ask("get", name)), dtype=torch.float32).view(shape)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self.memory.close()
        self.pipe.close()
        self.process.close()


@pytest.fixture
def children() -> Iterator[Callable[[], Child]]:
    found: list[Child] = []

    def start() -> Child:
        found.append(Child())
        return found[-1]

    yield start
    for child in found:
        child.close()


@pytest.fixture
async def lane() -> AsyncIterator[Lane]:
    found = Lane(threads=2)
    yield found
    await asyncio.to_thread(found.close)


def rows_to_columns(source: Child, target: Child, shape: tuple[int, int], s: bool, t: bool) -> Program:
    """Two ranks a side, all of a side in one child, named s0, s1 and t0, t1."""
    n, m = shape
    plan = build_plan(
        {"x": TensorSpec(shape, torch.float32, Layout((2,), [Shard(0)]))},
        {"x": TensorSpec(shape, torch.float32, Layout((2,), [Shard(1)]))},
        source_agents=["a", "a"],
        target_agents=["a", "a"],
    )
    sources = {r: {0: source.make(f"s{r}", (n // 2, m), s, r)} for r in range(2)}
    targets = {r: {0: target.make(f"t{r}", (n, m // 2), t, 9)} for r in range(2)}
    return compile_local(plan, sources, targets)


@pytest.mark.parametrize("mapped_source", [False, True])
@pytest.mark.parametrize("mapped_target", [False, True])
async def test_bytes_cross_between_two_processes(
    children: Callable[[], Child], lane: Lane, mapped_source: bool, mapped_target: bool
) -> None:
    a, b = children(), children()
    program = rows_to_columns(a, b, (512, 768), mapped_source, mapped_target)
    assert await LaneTransport(lane).run(Execution(program, {})) == 512 * 768 * 4
    whole = torch.cat([a.tensor(f"s{r}", (256, 768)) for r in range(2)])
    assert torch.equal(torch.cat([b.tensor(f"t{r}", (512, 384)) for r in range(2)], dim=1), whole)


def test_a_probe_proves_both_directions(children: Callable[[], Child]) -> None:
    child = children()
    address, token = child.ask("beacon")
    assert not child.ask("echoed")
    child.memory.process.probe(address, token)
    assert child.ask("echoed")
    with pytest.raises(ReachError, match="other bytes"):
        child.memory.process.probe(address, token[::-1])
    for wrong in (0, 1 << 63, 8):
        with pytest.raises(FaultError):
            child.memory.process.probe(wrong, token)


def test_a_process_is_more_than_its_pid(children: Callable[[], Child]) -> None:
    child = children()
    with pytest.raises(WorkerGoneError, match="another"):
        ProcessMemory(child.pid, start_time(child.pid) - 1)
    assert child.memory.process.alive()
    child.kill()
    assert not child.memory.process.alive()
    with pytest.raises(WorkerGoneError):
        ProcessMemory(child.pid, 1)
    with pytest.raises(WorkerGoneError):
        start_time(child.pid)


def table(*rows: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(rows, np.uint64)


def test_tables_of_any_cut_and_length_move_everything(children: Callable[[], Child]) -> None:
    child = children()
    view = child.make("x", (5000, 3), False, 4)
    out = torch.zeros(5000, 3)
    remote = table(*((view.address + 12 * i, 12) for i in range(5000)))
    local = table(*((out.data_ptr() + 60 * i, 60) for i in range(1000)))
    process = child.memory.process
    assert process.read(local, remote) == 60_000
    assert torch.equal(out, child.tensor("x", (5000, 3)))
    out.neg_()
    assert process.write(table((out.data_ptr(), 60_000)), remote[::-1][::-1]) == 60_000
    assert torch.equal(out, child.tensor("x", (5000, 3)))


def test_unmapped_addresses_are_faults_even_in_the_middle(children: Callable[[], Child]) -> None:
    child = children()
    view = child.make("x", (100,), False)
    out = torch.zeros(100)
    with pytest.raises(FaultError, match="freed"):
        child.memory.process.read(table((out.data_ptr(), 400)), table((view.address, 200), (64, 200)))


def test_the_kernels_refusal_has_its_own_error(children: Callable[[], Child]) -> None:
    child = children()
    assert isinstance(child.memory.process.error(errno.EPERM, 0, writes=False), AccessError)


async def test_a_worker_killed_while_pieces_run_ends_its_job_and_not_the_next(
    children: Callable[[], Child], lane: Lane
) -> None:
    a, b, c = children(), children(), children()
    doomed = rows_to_columns(a, b, (4096, 4096), False, True)
    sound = rows_to_columns(c, b, (512, 512), False, True)
    started = threading.Event()

    class Killing(Execution):
        def run(self, piece: int, thread: int) -> int:
            if piece == 5:
                a.kill()  # for certain in the middle
                started.set()
            return super().run(piece, thread)

    transport = LaneTransport(lane)
    with pytest.raises(WorkerGoneError) as raised:
        await transport.run(Killing(doomed, {}))
    assert started.is_set() and raised.value.pid == a.pid
    assert raised.value.owner in (("source", 0), ("source", 1))
    await transport.run(Execution(sound, {}))
    whole = torch.cat([c.tensor(f"s{r}", (256, 512)) for r in range(2)])
    assert torch.equal(torch.cat([b.tensor(f"t{r}", (512, 256)) for r in range(2)], dim=1), whole)


async def test_a_worker_killed_from_outside_is_noticed_too(children: Callable[[], Child], lane: Lane) -> None:
    a, b = children(), children()
    program = rows_to_columns(a, b, (2048, 2048), False, True)
    transport = LaneTransport(lane)
    asyncio.get_running_loop().call_later(0.05, os.kill, a.pid, signal.SIGKILL)
    with pytest.raises(WorkerGoneError):
        async with asyncio.timeout(10):
            while True:
                await transport.run(Execution(program, {}))


async def test_revoked_memory_is_not_touched_and_the_worker_knows(children: Callable[[], Child], lane: Lane) -> None:
    a, b = children(), children()
    program = rows_to_columns(a, b, (512, 512), False, True)
    lent = LentPage(b.descriptor(b.ask("page")))
    before = [b.tensor(f"t{r}", (512, 256)) for r in range(2)]
    guard = lent.guard(b.ask("open"))
    assert b.ask("revoke") is True
    guards = {("target", r): guard for r in range(2)}
    with pytest.raises(RevokedError, match="target rank") as raised:
        await LaneTransport(lane).run(Execution(program, guards))
    assert raised.value.owner in guards
    assert all(torch.equal(b.tensor(f"t{r}", (512, 256)), before[r]) for r in range(2))
    again = lent.guard(b.ask("open"))
    await LaneTransport(lane).run(Execution(program, dict.fromkeys(guards, again)))
    assert not torch.equal(b.tensor("t0", (512, 256)), before[0])
    assert b.ask("revoke") is True and b.ask("busy") is False


def frozen_inside(pipe: Connection, fd: str, word: int) -> None:
    """An agent's lane thread that enters a piece and then is stopped there."""
    guard = LentPage(os.open(fd, os.O_RDWR)).guard(word)
    pipe.send(guard.enter(2))
    pipe.recv()
    guard.leave(2)
    pipe.send(guard.enter(2))


def test_a_frozen_agent_inside_a_piece_is_seen_and_locked_out_when_it_thaws() -> None:
    page = RevocationPage()
    word = page.open()
    here, there = mp.Pipe()
    fd = f"/proc/{os.getpid()}/fd/{page.fd}"
    agent = CONTEXT.Process(target=frozen_inside, args=(there, fd, word), daemon=True)
    agent.start()
    assert here.recv() is True
    assert agent.pid is not None
    send_signal(agent.pid, signal.SIGSTOP)
    assert page.revoke(word) is False and page.busy(word)
    os.kill(agent.pid, signal.SIGCONT)
    here.send(None)
    assert here.recv() is False
    assert not page.busy(word)
    agent.join()
    page.close()


async def test_cancelling_a_run_returns_only_when_nothing_moves(children: Callable[[], Child], lane: Lane) -> None:
    a, b = children(), children()
    program = rows_to_columns(a, b, (2048, 2048), False, True)
    inside = [0]
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Watched(Execution):
        def run(self, piece: int, thread: int) -> int:
            inside[0] += 1
            loop.call_soon_threadsafe(begun.set)
            try:
                return super().run(piece, thread)
            finally:
                inside[0] -= 1

    transport = LaneTransport(lane)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(transport.run(Watched(program, {})))
        await begun.wait()
        task.cancel()
    assert task.cancelled() and inside == [0]
    transport.abort(RuntimeError("first cause"))
    with pytest.raises(RuntimeError, match="first cause"):
        await transport.run(Execution(program, {}))


def counted() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:etha")  # noqa: PTH208


async def test_a_worker_that_came_and_went_leaves_nothing(children: Callable[[], Child], lane: Lane) -> None:
    children()  # the fork server's own descriptors
    before = counted()
    child = Child()
    program = rows_to_columns(child, child, (256, 256), False, True)
    lent = LentPage(child.descriptor(child.ask("page")))
    await LaneTransport(lane).run(Execution(program, {("source", 0): lent.guard(child.ask("open"))}))
    assert counted()[1] > before[1]
    child.close()
    child.memory.close()
    del program, lent, child
    assert counted() == before


def test_a_view_of_a_freed_tensor_faults_or_reads_what_is_there_but_never_kills(
    children: Callable[[], Child],
) -> None:
    """A handle whose segment offset is right but whose owner unmapped it: the agent's mapping stands alone."""
    child = children()
    view = child.make("x", (1 << 20,), True, 3)
    child.kill()
    assert view.flat is not None and float(view.flat.sum()) > 0
    ended = replace(view, flat=None, raw=None, process=child.memory.process)
    with pytest.raises(WorkerGoneError):
        child.memory.process.read(table((view.address, 4)), table((ended.address, 4)))
