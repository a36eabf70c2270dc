"""Planning time per rank for a model of 1,000 tensors: python bench/plan.py [--repeat N]

Prints machine, versions and command, then one line per layout pair: a cold plan (caches of the process
empty), the rows of another rank of the same plan, a warm plan (a second registration) and the proof.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from etha.plan import Layout, TensorSpec, build_plan
from etha.plan.layouts import cells

LIMIT_MS = 20.0
LAYERS = 142  # 7 tensors each and 6 more make 1,000


def model() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, kind) of 1,000 tensors in a transformer's proportions."""
    h, kv, ffn, vocab = 4096, 1024, 14336, 128256
    for layer in range(LAYERS):
        yield f"layers.{layer}.qkv", (h + 2 * kv, h), "column"
        yield f"layers.{layer}.o", (h, h), "row"
        yield f"layers.{layer}.gate", (ffn, h), "column"
        yield f"layers.{layer}.up", (ffn, h), "column"
        yield f"layers.{layer}.down", (h, ffn), "row"
        yield f"layers.{layer}.norm1", (h,), "norm"
        yield f"layers.{layer}.norm2", (h,), "norm"
    yield "embed", (vocab, h), "column"
    yield "head", (vocab, h), "column"
    for extra in range(4):
        yield f"norm{extra}", (h,), "norm"


def tensor_parallel(kind: str) -> Placement:
    return {"column": Shard(0), "row": Shard(1), "norm": Replicate()}[kind]


def fsdp(n: int) -> Callable[[str], Layout]:
    one = Layout((n,), [Shard(0)])
    return lambda kind: one


def tp(n: int, replicas: int = 1) -> Callable[[str], Layout]:
    made = {k: Layout((replicas, n), [Replicate(), tensor_parallel(k)]) for k in ("column", "row", "norm")}
    return lambda kind: made[kind]


def fsdp_tp(n: int, m: int) -> Callable[[str], Layout]:
    made = {
        "column": Layout((n, m), [_StridedShard(0, split_factor=m), Shard(0)]),
        "row": Layout((n, m), [Shard(0), Shard(1)]),
        "norm": Layout((n, m), [Shard(0), Replicate()]),
    }
    return lambda kind: made[kind]


def hsdp(n: int, m: int) -> Callable[[str], Layout]:
    one = Layout((n, m), [Replicate(), Shard(0)])
    return lambda kind: one


def partial(n: int, m: int) -> Callable[[str], Layout]:
    one = Layout((n, m), [Partial(), Shard(0)])
    return lambda kind: one


PAIRS: list[tuple[str, Callable[[str], Layout], Callable[[str], Layout]]] = [
    ("FSDP8 -> TP8", fsdp(8), tp(8)),
    ("FSDP4 x TP2 -> TP8", fsdp_tp(4, 2), tp(8)),
    ("HSDP 2x4 -> TP2 x 4", hsdp(2, 4), tp(2, 4)),
    ("HSDP 3x8 -> TP4 x 5, uneven replicas", hsdp(3, 8), tp(4, 5)),
    ("Partial 4 x FSDP2 -> TP8", partial(4, 2), tp(8)),
    ("FSDP64 -> TP8 x 8", fsdp(64), tp(8, 8)),
    ("FSDP128 x TP8 -> TP8 x 128", fsdp_tp(128, 8), tp(8, 128)),
]


def clear() -> None:
    for cached in (cells.table, cells.joint, cells.overlay):
        cached.cache_clear()


def once(source: Callable[[str], Layout], target: Callable[[str], Layout], one_agent: bool) -> list[float]:
    """Milliseconds of: cold source rank, cold target rank, warm target rank; rows; check (small meshes only)."""
    here = {n: TensorSpec(s, torch.bfloat16, source(k)) for n, s, k in model()}
    there = {n: TensorSpec(s, torch.bfloat16, target(k)) for n, s, k in model()}
    m, n = (max(int(spec.layout.ranks.max()) + 1 for spec in side.values()) for side in (here, there))
    agents = {"source_agents": ["cpu"] * m, "target_agents": ["cpu"] * n} if one_agent else {}
    times = []
    for side, fresh in (("source", True), ("target", True), ("target", False)):
        if fresh:
            clear()
        begin = time.perf_counter()
        plan = build_plan(here, there, **agents)
        rows = len(plan.for_rank(side, 1))
        times.append((time.perf_counter() - begin) * 1e3)
    times.append(rows)
    begin = time.perf_counter()
    plan.digest()
    times.append((time.perf_counter() - begin) * 1e3)
    begin = time.perf_counter()
    if m * n <= 256:
        plan.check()
    times.append((time.perf_counter() - begin) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    cpu = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), "?")  # noqa: PTH123, SIM115
    print(f"machine  {platform.machine()}, {cpu}, {platform.system()} {platform.release()}")
    print(f"versions python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}")
    print(f"command  {' '.join([sys.executable.rsplit('/', 1)[-1], *sys.argv])}")
    print(f"1,000 bf16 tensors, one rank; ms, median of {repeat}; limit {LIMIT_MS:.0f} ms")
    heads = (f"{h:>11}" for h in ("source cold", "target cold", "warm", "rows", "digest", "check", "cold/limit"))
    print(f"{'pair':40} {'agents':>6}", *heads)
    for name, source, target in PAIRS:
        for one_agent in (True, False):
            runs = [once(source, target, one_agent) for _ in range(repeat)]
            s, t, warm, rows, digest, check = (statistics.median(column) for column in zip(*runs, strict=True))
            figures = [f"{s:11.1f}", f"{t:11.1f}", f"{warm:11.1f}", f"{rows:11.0f}", f"{digest:11.1f}"]
            figures += [f"{check:11.1f}" if check > 0.5 else f"{'-':>11}", f"{max(s, t) / LIMIT_MS:11.2f}"]
            print(f"{name:40} {'one' if one_agent else 'each':>6}", *figures)


if __name__ == "__main__":
    main()
