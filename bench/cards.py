"""Transfers between two jobs on one GPU, beside the card's own copy: what ``bench/transfer.py --device cuda`` prints.

The limit of a row is a ``torch.copy_`` on the device of the same elements, dtypes and, for a resharding, of the same
number of contiguous bytes, timed by CUDA events in the same run (median). A transfer is timed from the first rank's
call to the last rank's return; GB/s is payload, the whole tensor once, at the narrower dtype. No process but the
ranks touches CUDA, for it does not survive a fork.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import harness
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from etha import TensorBusClient
from etha.cuda.select import driver
from etha.demo.llama import tensor_parallel_placement

TIMEOUT = 120.0
SIDES = ("source", "target")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB, 4 * GIB)
#: What the issue asks for: of the limit at 1 GiB, and milliseconds.
GOALS = {"contiguous": 0.9, "resharded": 0.75, "4 KiB": 1.5, "10,000 tensors": 20.0}


@dataclass(frozen=True, slots=True)
class One:
    """A tensor of a case: its global shape and both ends."""

    shape: tuple[int, ...]
    source: Placement
    target: Placement
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * min(dtype.itemsize for dtype in self.dtypes)

    def local(self, side: str, ranks: int, rank: int, device: str) -> torch.Tensor:
        """What a rank of ``side`` holds when all has arrived: every element tells its place."""
        placement = self.source if side == "source" else self.target
        lines = []
        for dim, size in enumerate(self.shape):
            line = torch.arange(size, device=device) % (251 if dim == 0 else 13)
            if isinstance(placement, Shard) and placement.dim == dim:
                chunks = line.chunk(ranks)
                line = chunks[rank] if rank < len(chunks) else line[:0]
            lines.append(line.float().reshape([-1 if d == dim else 1 for d in range(len(self.shape))]))
        found = lines[0] + lines[1] / 16 if len(lines) > 1 else lines[0]
        found = found.to(self.dtypes[0])
        return found if side == "source" else found.to(self.dtypes[1])


@dataclass(frozen=True, slots=True)
class Case:
    """``kind`` as in GOALS; ``runs`` transfers are timed after two that warm up."""

    kind: str
    label: str
    ranks: int
    tensors: tuple[One, ...]
    runs: int

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)


def matrix(nbytes: int) -> tuple[int, int]:
    """A float32 matrix of so many bytes, with an even number of rows and columns."""
    columns = min(8192, max(2, 1 << (int(math.log2(nbytes // 4)) // 2)))
    return nbytes // 4 // columns, columns


def size(nbytes: int) -> str:
    """4 KiB, 256 MiB, 1 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def small_llama(layers: int = 111, hidden: int = 1024, kv: int = 256, ffn: int = 3584) -> Iterator[One]:
    """Llama's tensors at smaller widths, bf16, from FSDP (rows) to tensor parallelism; 9 a layer and 3."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (32064, hidden),
        "norm": (hidden,),
        "lm_head": (32064, hidden),
    }
    for i in range(layers):
        for name, rows, columns in (
            ("q_proj", hidden, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden), ("o_proj", hidden, hidden),
            ("gate_proj", ffn, hidden), ("up_proj", ffn, hidden), ("down_proj", hidden, ffn),
        ):  # fmt: skip
            shapes[f"layers.{i}.{name}"] = (rows, columns)
        shapes |= {f"layers.{i}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, shape in shapes.items():
        yield One(shape, Shard(0), tensor_parallel_placement(name), (torch.bfloat16, torch.bfloat16))


def cases(sizes: tuple[int, ...], runs: int) -> list[Case]:
    """All rows of the table."""
    f32, bf16 = torch.float32, torch.bfloat16
    found = [
        Case("contiguous", f"1 -> 1 contiguous, {size(n)}", 1, (One(matrix(n), Shard(0), Shard(0)),), runs)
        for n in sizes
    ]
    found += [
        Case("resharded", f"2 -> 2 Shard(0) -> Shard(1), {size(n)}", 2, (One(matrix(n), Shard(0), Shard(1)),), runs)
        for n in sizes
    ]
    found += [
        Case(
            "cast",
            f"1 -> 1 float32 -> bfloat16, {size(n)}",
            1,
            (One(matrix(n), Shard(0), Shard(0), (f32, bf16)),),
            runs,
        )
        for n in sizes
    ]
    model = tuple(small_llama())
    found.append(Case("model", f"2 -> 2 FSDP -> TP, {len(model):,} tensors of a Llama", 2, model, runs))
    many = tuple(One((16 + i % 1009,), Replicate(), Replicate()) for i in range(10_000))
    found.append(Case("10,000 tensors", "1 -> 1, 10,000 tensors of 64 B to 4 KiB", 1, many, runs))
    found.append(Case("4 KiB", "1 -> 1, latency of 4 KiB", 1, (One((1024,), Replicate(), Replicate()),), 1000))
    return found


def finish(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def rank(
    device: str, side: str, number: int, every: list[Case], barriers: dict[int, Barrier]
) -> list[list[tuple[float, float]]]:
    """One worker through all cases; (start, end) of each call."""
    other = {"source": "target", "target": "source"}[side]
    found: list[list[tuple[float, float]]] = []
    with TensorBusClient(device=device, timeout=TIMEOUT) as client:
        for index, case in enumerate(every):
            barriers[2].wait(harness.SILENCE)
            if (side, number) == ("source", 0):
                print(f"... {case.label}", file=sys.stderr)
            if number >= case.ranks:
                found.append([])
                continue
            pair = f"bench-{case.ranks}"
            client.init_pair(pair, side, other, case.ranks, (case.ranks,), [Replicate()], rank=number)
            given = {f"t{i}": one.local(side, case.ranks, number, device) for i, one in enumerate(case.tensors)}
            if side == "target":
                for tensor in given.values():
                    tensor.zero_()
            with client.register_tensors(
                f"b{index}",
                given,
                pair_name=pair,
                placements={
                    f"t{i}": [one.source if side == "source" else one.target] for i, one in enumerate(case.tensors)
                },
                shapes={f"t{i}": one.shape for i, one in enumerate(case.tensors)},
                direction="send" if side == "source" else "recv",
            ) as batch:
                times = []
                for _ in range(case.runs + 2):
                    finish(device)
                    barriers[case.ranks].wait(TIMEOUT)
                    start = time.perf_counter()
                    batch.transfer("send" if side == "source" else "recv")
                    times.append((start, time.perf_counter()))
            if side == "target":
                for i, one in enumerate(case.tensors):
                    if not torch.equal(given[f"t{i}"], one.local(side, case.ranks, number, device)):
                        raise AssertionError(f"{case.label}: tensor {i} of rank {number} holds other elements")
            found.append(times[2:])
            del given
    return found


def seconds(device: str, work: Callable[[], object], runs: int) -> float:
    """Median of ``work`` on the device, by CUDA events."""
    found = []
    for _ in range(runs + 2):
        if device == "cpu":
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[2:])


def limits(device: str, every: list[Case]) -> list[float]:
    """Of each case the seconds of the card's own copy of one tensor of as many elements and the same dtypes."""
    found = []
    for case in every:
        dtypes, elements = case.tensors[0].dtypes, sum(math.prod(one.shape) for one in case.tensors)
        source = torch.ones(elements, dtype=dtypes[0], device=device)
        target = torch.empty(elements, dtype=dtypes[1], device=device)
        found.append(seconds(device, lambda a=target, b=source: a.copy_(b), 21))
        del source, target
    return found


def machine_of(device: str) -> list[str]:
    """Date, card and versions, one line each; empty where there is no GPU."""
    if device != "cpu" and not torch.cuda.is_available():
        return []
    lines = [f"date      {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"]
    if device != "cpu":
        card = torch.cuda.get_device_properties(device)
        module = Path("/sys/module/nvidia/version")
        known = module.read_text().strip() if module.exists() else "?"
        versions = driver().versions()
        lines += [
            f"card      {card.name}, {card.total_memory / GIB:.0f} GiB, sm_{card.major}{card.minor}",
            f"driver    {known}, CUDA {versions['driver']}; torch's CUDA {torch.version.cuda}, "
            f"bindings {versions['bindings']}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
        ]
    try:
        lines.append(f"triton    {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        lines.append("triton    not installed: strided copies are torch's, one by one")
    return lines


def line(case: Case, series: list[list[tuple[float, float]]], limit: float) -> str:
    """One row of the table."""
    walls = [max(end for _, end in run) - min(start for start, _ in run) for run in zip(*series, strict=True)]
    median, rate, own = (
        statistics.median(walls),
        case.nbytes / statistics.median(walls) / 1e9,
        case.nbytes / limit / 1e9,
    )
    goal = GOALS.get(case.kind)
    if goal is None or (goal < 1 and case.nbytes != GIB):
        reported = ""
    elif goal < 1:
        reported = f"{goal} of the limit: {'met' if rate / own >= goal else 'MISSED'}"
    else:
        reported = f"{goal} ms: {'met' if median * 1e3 <= goal else 'MISSED'}"
    times = f"{median * 1e3:.3f} | {min(walls) * 1e3:.3f}"
    return f"| {case.label} | {times} | {rate:.1f} | {own:.1f} | {rate / own:.3f} | {reported} |"


def measure(device: str, sizes: tuple[int, ...], runs: int) -> str:
    """The whole report as markdown; SystemExit where there is no GPU."""
    [about] = harness.run_ranks([(machine_of, (device,))])
    if not about:
        raise SystemExit(
            f"bench/transfer.py --device cuda: torch {torch.__version__} sees no GPU, nothing was measured"
        )
    every = cases(sizes, runs)
    barriers = {ranks: multiprocessing.get_context("fork").Barrier(2 * ranks) for ranks in (1, 2)}
    with harness.private_host():
        [before] = harness.run_ranks([(limits, (device, every))])
        reported = harness.run_ranks([(rank, (device, side, n, every, barriers)) for side in SIDES for n in (0, 1)])
        [after] = harness.run_ranks([(limits, (device, every))])
    rows = [
        line(case, [one[i] for one in reported if one[i]], min(before[i], after[i])) for i, case in enumerate(every)
    ]
    head = ["transfer", "ms, median", "ms, best", "GB/s", "card's copy, GB/s", "ratio", "goal"]
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows]
    return "\n".join(["```", harness.machine(), *about, "```", "", *table, ""])


def main(args: argparse.Namespace) -> None:
    """Measure, print, and save where asked."""
    sizes = tuple(mib * MIB for mib in args.sizes) if args.sizes else SIZES
    report = measure("cuda:0", sizes, args.runs)
    print(report)
    if args.save is not None:
        args.save.write_text(f"# Transfers on one GPU\n\n{report}", encoding="utf-8")
