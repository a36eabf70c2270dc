"""How fast a thread copies, reduces and meets another process, alone and beside a busy Python thread, by what runs it.

python bench/inner_loops.py [--mib 64] [--times 9]
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable

import harness
import numpy as np
import torch

from etha import native
from etha.native import DtypeCode, GroupMemory, NativeLibrary, PythonLibrary, ReduceCode, StepKind, run_arguments

#: Bytes that are copied or reduced in one go.
PIECE = 1 << 20
SMALL = 4096
PAGES = 4 << 20


def seconds(work: Callable[[], object], times: int) -> float:
    """Median."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


class BusyThread:
    """A thread that computes in Python as long as the context lasts."""

    def __enter__(self) -> None:
        self.ended = False
        self.thread = threading.Thread(target=self.compute)
        self.thread.start()

    def compute(self) -> None:
        number = 0
        while not self.ended:
            number += 1

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.thread.join()


class Loops:
    """The same work in several ways over two tensors and a target."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensors = [torch.rand(nbytes // 4) for _ in range(3)]
        self.pieces = [list(x.split(PIECE // 4)) for x in self.tensors]
        self.at = [x.data_ptr() for x in self.tensors]
        self.page = mmap.mmap(-1, PAGES)
        self.memory = GroupMemory(rank=0, pages=[ctypes.addressof(ctypes.c_char.from_buffer(self.page))])

    def memmove_each(self) -> None:
        for at in range(0, self.nbytes, PIECE):
            ctypes.memmove(self.at[2] + at, self.at[0] + at, min(PIECE, self.nbytes - at))

    def copy_each(self) -> None:
        for target, source in zip(self.pieces[2], self.pieces[0], strict=True):
            target.copy_(source)

    def foreach_copy(self) -> None:
        torch._foreach_copy_(self.pieces[2], self.pieces[0])

    def add_each(self) -> None:
        for target, one, two in zip(self.pieces[2], self.pieces[0], self.pieces[1], strict=True):
            torch.add(one, two, out=target)

    def foreach_add(self) -> None:
        torch._foreach_copy_(self.pieces[2], self.pieces[0])
        torch._foreach_add_(self.pieces[2], self.pieces[1])

    def program(self, library: NativeLibrary, kind: StepKind) -> Callable[[], object]:
        starts = range(0, self.nbytes, PIECE)
        steps, sources = np.zeros(len(starts), native.STEP), np.zeros(2 * len(starts), native.SOURCE)
        for i, at in enumerate(starts):
            size = min(PIECE, self.nbytes - at)
            steps[i] = (kind, 2, 2, 0, at, at if kind == StepKind.COPY else 2 * i, size)
            if kind == StepKind.REDUCE:
                steps[i]["count"] = size // 4
                sources[2 * i], sources[2 * i + 1] = (0, 0, at), (1, 0, at)
        spaces = np.array(self.at, dtype=np.uint64)
        args = run_arguments(
            self.memory,
            steps,
            sources,
            spaces,
            phase_base=0,
            call_number=0,
            dtype=DtypeCode.F32,
            op=ReduceCode.SUM,
            brief_us=0 if self.nbytes > PIECE else native.BRIEF_US,
        )

        def call() -> None:
            args.next = 0
            assert library.run(args) == 0

        return call


def meet(library: NativeLibrary, busy: bool, brief_us: int, times: int) -> float:
    """Seconds of a call in which two processes wait for each other twice; each has a busy thread, or none."""
    pages = [mmap.mmap(-1, PAGES) for _ in range(2)]
    at = [ctypes.addressof(ctypes.c_char.from_buffer(page)) for page in pages]
    steps = np.zeros(4, native.STEP)
    steps["kind"], steps["count"] = [StepKind.POST, StepKind.WAIT] * 2, [1, 1, 2, 2]
    steps["src_space"] = native.ALL
    nothing, none = np.zeros(0, native.SOURCE), np.zeros(0, np.uint64)

    def member(rank: int) -> float:
        memory, number = GroupMemory(rank=rank, pages=at, spin_us=20), 0

        def call() -> None:
            nonlocal number
            end = time.monotonic_ns() + 10**11
            args = run_arguments(
                memory,
                steps,
                nothing,
                none,
                phase_base=2 * number,
                call_number=number,
                deadline_ns=end,
                brief_us=brief_us,
            )
            assert library.run(args) == 0
            number += 1

        if not busy:
            return seconds(call, times)
        with BusyThread():
            return seconds(call, times)

    child = os.fork()
    if child == 0:
        member(1)
        os._exit(0)
    took = member(0)
    os.waitpid(child, 0)
    return took


def both(work: Callable[[], object], times: int) -> tuple[float, float]:
    """Median seconds alone and beside a busy thread."""
    work()
    alone = seconds(work, times)
    with BusyThread():
        return alone, seconds(work, times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(harness.machine())
    library, python = native.load(), PythonLibrary()
    print("\n| two processes meet twice, us | alone | a busy thread in each |\n|---|---:|---:|")
    for name, chosen, brief in (
        ("futex by ctypes", python, 0),
        (library.name, library, 0),
        (f"{library.name}, brief", library, native.BRIEF_US),
    ):
        row = [meet(chosen, busy, brief, 50 * args.times) * 1e6 for busy in (False, True)]
        print(f"| {name} | {row[0]:,.1f} | {row[1]:,.1f} |")
    large, small = Loops(args.mib << 20), Loops(SMALL)
    print(f"\n| {args.mib} MiB in pieces of {PIECE >> 20} MiB, GB/s | alone | busy | {SMALL} bytes, us | busy |")
    print("|---|---:|---:|---:|---:|")
    rows: list[tuple[str, Callable[[Loops], Callable[[], object]]]] = [
        ("copy: ctypes.memmove", lambda loops: loops.memmove_each),
        ("copy: Tensor.copy_", lambda loops: loops.copy_each),
        ("copy: torch._foreach_copy_", lambda loops: loops.foreach_copy),
        (f"copy: {library.name}", lambda loops: loops.program(library, StepKind.COPY)),
        ("copy: fallback", lambda loops: loops.program(python, StepKind.COPY)),
        ("sum of two: torch.add", lambda loops: loops.add_each),
        ("sum of two: torch._foreach_add_", lambda loops: loops.foreach_add),
        (f"sum of two: {library.name}", lambda loops: loops.program(library, StepKind.REDUCE)),
        ("sum of two: fallback", lambda loops: loops.program(python, StepKind.REDUCE)),
    ]
    for name, work in rows:
        speeds = [large.nbytes / taken / 1e9 for taken in both(work(large), args.times)]
        times = [taken * 1e6 for taken in both(work(small), 50 * args.times)]
        print(f"| {name} | {speeds[0]:.2f} | {speeds[1]:.2f} | {times[0]:.1f} | {times[1]:.1f} |")


if __name__ == "__main__":
    main()
