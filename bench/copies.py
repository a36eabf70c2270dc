"""The raw copy paths beside the machine's one-copy limit, measured in turns in one run.

    python bench/copies.py [--mib 256] [--repeat 7]

The limit is memmove between two mapped, touched buffers, with one thread and with two. A path is what an
agent does in a transfer after GO: a compiled program on the lane, sources and targets in other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing as mp
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch.distributed.tensor import Shard

import etha
from etha.agent.runtime.lane import Lane
from etha.agent.runtime.run import Execution
from etha.client.memory import tensors
from etha.memory import shared
from etha.memory.handles import TensorHandle, describe
from etha.memory.huge import Collapser
from etha.memory.mapping import WorkerMemory
from etha.memory.process import allow_reading, start_time
from etha.plan import Layout, Plan, TensorSpec, build_plan
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import Program

PIECE = 8 << 20


def worker(pipe: Connection, shapes: list[tuple[int, ...]], dtype: torch.dtype, mapped: bool, huge: bool) -> None:
    """A worker with local tensors of these shapes; says where they lie and waits."""
    allow_reading()
    held = [tensors.empty(s, dtype) if mapped else torch.empty(s, dtype=dtype) for s in shapes]
    for i, t in enumerate(held):
        t.fill_(i + 1)
    if huge:
        collapser = Collapser()
        collapser.ask((t.data_ptr(), t.nbytes) for t in held)
        collapser.settle()
    pipe.send((os.getpid(), [describe(t) for t in held], [(s.id, s.fd, s.nbytes) for s in shared.segments()]))
    pipe.recv()


class Workers:
    """A process that holds all local tensors of one side."""

    def __init__(self, spec: TensorSpec, ranks: int, mapped: bool, huge: bool = True) -> None:
        here, there = mp.Pipe()
        shapes = [spec.local_shape(r) for r in range(ranks)]
        context = mp.get_context("spawn")
        self.pipe = here
        self.process = context.Process(
            target=worker, args=(there, shapes, spec.dtype, mapped, huge and not mapped), daemon=True
        )
        self.process.start()
        handles: list[TensorHandle]
        pid, handles, segments = here.recv()
        self.memory = WorkerMemory(pid, start_time(pid))
        for name, fd, nbytes in segments:
            self.memory.attach(name, os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), nbytes)
        self.views = {r: {0: self.memory.resolve(handle)} for r, handle in enumerate(handles)}

    def close(self) -> None:
        """End the process and let go of its memory."""
        self.pipe.send(None)
        self.process.join()
        self.memory.close()


class Limit:
    """memmove between two buffers of this process."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.source, self.target = (shared.storage(nbytes) for _ in range(2))

    def seconds(self, threads: int) -> float:
        """One copy of all bytes by this many threads."""
        share = self.nbytes // threads

        def move(i: int) -> None:
            for at in range(i * share, (i + 1) * share, PIECE):
                n = min(PIECE, (i + 1) * share - at)
                ctypes.memmove(self.target.data_ptr() + at, self.source.data_ptr() + at, n)

        began = time.perf_counter()
        started = [threading.Thread(target=move, args=(i,)) for i in range(1, threads)]
        for t in started:
            t.start()
        move(0)
        for t in started:
            t.join()
        return time.perf_counter() - began


async def once(lane: Lane, program: Program) -> float:
    """Seconds of one run of a program on the lane."""
    over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    began = time.perf_counter()
    lane.submit(Execution(program, {}), on_done=over.set_result)
    error = await over
    if error is not None:
        raise error
    return time.perf_counter() - began


def spec(shape: tuple[int, ...], dtype: torch.dtype, ranks: int, placement: object) -> TensorSpec:
    """A tensor over one mesh axis of ``ranks``."""
    return TensorSpec(shape, dtype, Layout((ranks,), [placement]))


def cases(mib: int) -> list[tuple[str, TensorSpec, TensorSpec, int, int, bool, bool]]:
    """(name, source, target, source ranks, target ranks, source mapped, target mapped)."""
    f, b = torch.float32, torch.bfloat16
    n = mib << 18  # float32 elements
    square, wide, narrow = (8192, n // 8192), (n // 1024, 1024), (n // 128, 128)
    found = []

    def add(name: str, shape: tuple[int, ...], to: int, ranks: int, s_map: bool, t_map: bool, dtypes=(f, f)) -> None:  # type: ignore[no-untyped-def]
        found.append(
            (
                name,
                spec(shape, dtypes[0], ranks, Shard(0)),
                spec(shape, dtypes[1], ranks, Shard(to)),
                ranks,
                ranks,
                s_map,
                t_map,
            )
        )

    add("S0->S0 1->1 plain -> etha.empty", square, 0, 1, False, True)
    add("S0->S0 2->2 plain -> etha.empty", square, 0, 2, False, True)
    add("S0->S1 2->2 plain -> etha.empty, 16 KiB runs", square, 1, 2, False, True)
    add("S0->S1 2->2 plain -> etha.empty, 2 KiB runs", wide, 1, 2, False, True)
    add("S0->S1 2->2 plain -> etha.empty, 256 B runs", narrow, 1, 2, False, True)
    add("S0->S0 2->2 plain -> plain", square, 0, 2, False, False)
    add("S0->S1 2->2 plain -> plain, 16 KiB runs", square, 1, 2, False, False)
    add("S0->S1 2->2 plain -> plain, 256 B runs", narrow, 1, 2, False, False)
    add("S0->S0 2->2 etha.empty -> etha.empty", square, 0, 2, True, True)
    add("S0->S1 2->2 etha.empty -> etha.empty, 16 KiB runs", square, 1, 2, True, True)
    add("S0->S1 2->2 etha.empty -> etha.empty, 256 B runs", narrow, 1, 2, True, True)
    add("S0->S0 2->2 etha.empty -> plain", square, 0, 2, True, False)
    add("S0->S0 2->2 plain float32 -> etha.empty bfloat16", square, 0, 2, False, True, (f, b))
    return found


async def measure(mib: int, repeat: int, only: str) -> None:
    """Print the table; each repetition measures the limit and the path in turns."""
    limit = Limit(mib << 20)
    lane = Lane()
    nbytes = mib << 20
    print(f"{'path':52} {'GB/s':>6} {'limit 1':>8} {'limit 2':>8} {'of 2-thread limit':>18}")
    for name, source, target, m, n, s_map, t_map in cases(mib):
        if only not in name:
            continue
        plan: Plan = build_plan({"t": source}, {"t": target}, source_agents=["a"] * m, target_agents=["a"] * n)
        here, there = Workers(source, m, s_map), Workers(target, n, t_map)
        program = compile_local(plan, here.views, there.views)
        taken: list[tuple[float, float, float]] = []
        for _ in range(repeat + 1):
            taken.append((limit.seconds(1), limit.seconds(2), await once(lane, program)))
        del program
        one, two, ours = (statistics.median(t[i] for t in taken[1:]) for i in range(3))
        ratio = statistics.median(
            t[1] / t[2] for t in taken[1:]
        )  # neighbours in time: steadier than the medians' ratio
        gbs: Callable[[float], float] = lambda s: nbytes / s / 1e9  # noqa: E731
        print(f"{name:52} {gbs(ours):6.2f} {gbs(one):8.2f} {gbs(two):8.2f} {ratio:18.2f}", flush=True)
        here.close()
        there.close()
    lane.close()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default="", help="part of a path's name")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()},"
    )
    print(f"torch {torch.__version__}, etha {etha.__version__}: {args.mib} MiB float32, median of {args.repeat}")
    asyncio.run(measure(args.mib, args.repeat, args.only))


if __name__ == "__main__":
    main()
