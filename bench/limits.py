"""Transfers on one host beside the machine's limit, case by case, each transfer in turn with a copy at that limit.

    python bench/limits.py [--mib 256] [--runs 15] [--only PART]

The limit is ``memmove`` with two threads over as many bytes in one piece, also for many tensors, on huge pages where
the kernel gives them. For a cast it is torch's own pass over the same elements with two threads, and for a snapshot,
which is a copy, one copy. Each round is one copy at the limit and then one transfer, while nothing else of the
benchmark runs. "of limit" is the median of the rounds' ratios, because what others do on the machine changes both from
one minute to the next. A transfer's time is from the first rank's call to the last rank's return; a snapshot's is that
of the call that takes it.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import multiprocessing
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Literal

import harness
import torch
from torch.distributed.tensor import Placement, Shard

import etha
from etha import TensorBusClient
from etha.demo.llama import llama, tensor_parallel_placement
from etha.plan import Layout

TIMEOUT = 120.0
#: Rounds that warm up: after them plain tensors have their huge pages, and what is prepared once is prepared.
WARM = 3
F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of a case: its global shape, and how both sides shard it."""

    shape: tuple[int, ...]
    source: Placement
    target: Placement


@dataclass(frozen=True, kw_only=True)
class Case:
    """``run``: bytes of a row that lies in one piece, if Shard(0) becomes Shard(1). ``how``: "", "swap", "snapshot".
    ``model``: "" for one matrix; "small", 10,000 tensors of 16 KiB; "llama", the 291 tensors of Llama-3-8B scaled to
    1 GiB, from FSDP to tensor parallelism."""

    ranks: int
    to: int = 0
    source: Literal["plain", "mapped"]
    target: Literal["plain", "mapped"]
    goal: float
    run: int = 16384
    way: str = "local"
    how: str = ""
    model: Literal["", "small", "llama"] = ""
    dtypes: tuple[torch.dtype, torch.dtype] = (F32, F32)

    @property
    def label(self) -> str:
        """What stands in the table."""
        layouts = "FSDP -> TP  " if self.model == "llama" else f"S(0) -> S({self.to})"
        words = [f"{self.ranks} -> {self.ranks}  {layouts}  {self.source:6} -> {self.target:6}  {self.way:5}"]
        words += [f"runs of {self.run} B"] if self.run != 16384 else []
        words += [word for word in (self.how, self.model) if word]
        if self.dtypes[0] is not self.dtypes[1]:
            words.append(" -> ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
        return "  ".join(words)

    def tensors(self, mib: int) -> dict[str, Part]:
        """By name; ``mib`` MiB of them in the wider dtype, if it is one matrix."""
        if self.model == "small":
            return {f"t{i}": Part(shape=(4096,), source=Shard(0), target=Shard(0)) for i in range(10_000)}
        if self.model == "llama":
            return {
                name: Part(shape=shape, source=Shard(0), target=tensor_parallel_placement(name))
                for name, shape in llama(1.0).items()
            }
        itemsize = max(dtype.itemsize for dtype in self.dtypes)
        columns = self.run * self.ranks // itemsize
        return {"w": Part(shape=((mib << 20) // itemsize // columns, columns), source=Shard(0), target=Shard(self.to))}

    def numel(self, mib: int) -> int:
        """Elements of all ranks of the target."""
        return sum(
            math.prod(Layout((self.ranks,), [part.target]).local_shape(part.shape, rank))
            for part in self.tensors(mib).values()
            for rank in range(self.ranks)
        )

    def nbytes(self, mib: int) -> int:
        """Bytes of all ranks of the target, in the source's dtype."""
        return self.numel(mib) * self.dtypes[0].itemsize


def cases(mib: int) -> list[Case]:
    """The cases, with the ratio that each shall reach."""
    found = []
    for way in ("local", "host"):
        for ranks in (1, 2):
            for to in (0, 1):
                both = {"ranks": ranks, "to": to, "way": way}
                mapped = 0.95 if mib >= 1024 else 0.93 if way == "local" else 0.9
                found.append(Case(source="mapped", target="mapped", goal=mapped, **both))
                found.append(Case(source="plain", target="mapped", goal=0.85, **both))
                found.append(Case(source="plain", target="plain", goal=0.75, **both))
    found.append(Case(ranks=1, to=0, source="mapped", target="mapped", how="swap", goal=0.8))
    found.append(Case(ranks=1, to=0, source="plain", target="plain", how="snapshot", goal=0.9))
    for run, mapped, plain in ((2048, 0.75, 0.4), (256, 0.5, 0.2)):
        found.append(Case(ranks=2, to=1, source="mapped", target="mapped", run=run, goal=mapped))
        found.append(Case(ranks=2, to=1, source="plain", target="plain", run=run, goal=plain))
    found.append(Case(ranks=1, source="mapped", target="mapped", model="small", goal=0.6))
    found.append(Case(ranks=1, source="plain", target="plain", model="small", goal=0.45))
    for ranks, goal in ((1, 0.75), (2, 0.7)):
        found.append(Case(ranks=ranks, source="plain", target="plain", model="llama", goal=goal, dtypes=(BF16, BF16)))
    for dtypes in ((F32, BF16), (BF16, F32)):
        for memory in ("mapped", "plain"):
            found.append(Case(ranks=1, to=0, source=memory, target=memory, dtypes=dtypes, goal=0.9))  # type: ignore[arg-type]
    return found


class Limit:
    """The copy beside which a case is measured."""

    def __init__(self, case: Case, mib: int) -> None:
        numel = case.numel(mib)
        self._pool = ThreadPoolExecutor(2)
        self._cast = case.dtypes[0] is not case.dtypes[1]
        if self._cast:
            torch.set_num_threads(2)
            self._tensors = torch.ones(numel, dtype=case.dtypes[0]), torch.ones(numel, dtype=case.dtypes[1])
            return
        self._nbytes = case.nbytes(mib)
        self._memory = [mmap.mmap(-1, self._nbytes) for _ in range(2)]
        for memory in self._memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._pages = [(ctypes.c_char * self._nbytes).from_buffer(memory) for memory in self._memory]
        self._to, self._from = (ctypes.addressof(page) for page in self._pages)
        for page in self._pages:
            ctypes.memset(page, 1, self._nbytes)

    def seconds(self) -> float:
        """One pass over all bytes with two threads."""
        start = time.perf_counter()
        if self._cast:
            self._tensors[1].copy_(self._tensors[0])
        else:
            part = self._nbytes // 2

            def move(i: int) -> None:
                ctypes.memmove(self._to + i * part, self._from + i * part, part)

            list(self._pool.map(move, range(2)))
        return time.perf_counter() - start


def limit_role(case: Case, mib: int, rounds: int, barrier: Barrier) -> list[float]:
    """The seconds of each round's copy, while the ranks wait."""
    limit, found = Limit(case, mib), []
    for _ in range(rounds):
        barrier.wait(TIMEOUT)
        found.append(limit.seconds())
        barrier.wait(TIMEOUT)
        barrier.wait(TIMEOUT)
    return found


def rank_role(
    environment: dict[str, str], case: Case, side: str, rank: int, mib: int, rounds: int, barrier: Barrier
) -> list[tuple[float, float]]:
    """(start, end) of each round's call of one rank."""
    harness.settle(environment)
    sends = side == "source"
    make: Any = etha.empty if (case.source if sends else case.target) == "mapped" else torch.empty
    placements = {name: part.source if sends else part.target for name, part in case.tensors(mib).items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, part in case.tensors(mib).items():
        shape = Layout((case.ranks,), [placements[name]]).local_shape(part.shape, rank)
        tensors[name] = make(shape, dtype=case.dtypes[0 if sends else 1]).fill_(0)
    options: dict[str, Any] = {"atomic": "swap"} if case.how == "swap" and not sends else {}
    if case.how == "swap":
        options["direction"] = "send" if sends else "recv"
    found: list[tuple[float, float]] = []
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        client.init_pair(
            "limits", side, "target" if sends else "source", expected_world_size=case.ranks, rank=rank,
            device_mesh=(case.ranks,), placements=[Shard(0)],
        )  # fmt: skip
        layouts = {name: [placement] for name, placement in placements.items()}
        with client.register_tensors("b", tensors, pair_name="limits", placements=layouts, **options) as batch:
            harness.settle_pages()
            for turn in range(1, rounds + 1):
                if sends:
                    for tensor in tensors.values():
                        tensor.fill_(turn)
                barrier.wait(TIMEOUT)
                barrier.wait(TIMEOUT)
                start = time.perf_counter()
                if sends and case.how == "snapshot":
                    future = batch.transfer("send", snapshot=True)
                    found.append((start, time.perf_counter()))
                    future.result()
                else:
                    batch.transfer("send" if sends else "recv")
                    found.append((start, time.perf_counter()))
                barrier.wait(TIMEOUT)
                if not sends and any(bool((t.view(-1)[::4099] != turn).any()) for t in tensors.values()):
                    raise AssertionError(f"{case.label}: round {turn} has not come")
            barrier.wait(TIMEOUT)
    return found


def measure(case: Case, mib: int, runs: int) -> tuple[float, float, float]:
    """(seconds of a transfer, GB/s of the limit, ratio), medians."""
    rounds = WARM + runs
    with harness.private_host() as directory:
        redis = harness.shared_redis()
        barrier = multiprocessing.get_context("fork").Barrier(1 + 2 * case.ranks)
        ranks = [(side, rank) for side in ("source", "target") for rank in range(case.ranks)]
        roles: list[Any] = [
            (rank_role, (harness.place(directory, redis, case.way, side), case, side, rank, mib, rounds, barrier))
            for side, rank in ranks
        ]
        *called, limits = harness.run_ranks([*roles, (leaves_last, (case, mib, rounds, barrier))])
    if case.how == "snapshot":
        called = called[:1]
    taken = [max(end for _, end in turn) - min(begin for begin, _ in turn) for turn in zip(*called, strict=True)]
    ratios = [limit / seconds for limit, seconds in zip(limits[WARM:], taken[WARM:], strict=True)]
    return (
        statistics.median(taken[WARM:]),
        case.nbytes(mib) / statistics.median(limits[WARM:]) / 1e9,
        statistics.median(ratios),
    )


def leaves_last(case: Case, mib: int, rounds: int, barrier: Barrier) -> list[float]:
    """``limit_role``, and then wait until every rank may leave."""
    found = limit_role(case, mib, rounds, barrier)
    barrier.wait(TIMEOUT)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of a case with one matrix")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a row's name")
    options = parser.parse_args()
    print(harness.machine())
    chosen = [case for case in cases(options.mib) if options.only in case.label]
    if not chosen:
        parser.error(f"no row has {options.only!r} in its name; without --only all are measured, which shows the names")
    print(
        f"\nRanks of the source -> ranks of the target; a matrix has {options.mib} MiB. local: one agent; host: two"
        "\non a host. GB/s of the transfer, and of the copy at the machine's limit. of limit: median of the ratios of"
        "\neach transfer to the copy before it, so it is not the ratio of the two columns."
    )
    print(f"\n{'':62} {'ms':>8} {'GB/s':>7} {'limit':>7} {'of limit':>9} {'goal':>5}")
    for case in chosen:
        seconds, limit, ratio = measure(case, options.mib, options.runs)
        speed = case.nbytes(options.mib) / seconds / 1e9
        figures = f"{seconds * 1e3:8.1f} {speed:7.2f} {limit:7.2f} {ratio:9.2f} {case.goal:5.2f}"
        print(f"{case.label:62} {figures}{'' if ratio >= case.goal else '  missed'}", flush=True)


if __name__ == "__main__":
    main()
