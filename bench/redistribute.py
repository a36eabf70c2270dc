"""etha.redistribute beside DTensor.redistribute: bytes, exchanges and time over gloo, 8 ranks of this machine.

    python bench/redistribute.py [--size 8] [--runs 5] [--cases TEXT] [--write FILE]

The first part are the transitions of pytorch#174630, then further ones. Ours runs in its exact order of additions and,
where an all-reduce of the group can do it, once more with ``exact_order=False``. DTensor runs as it is and, where that
merges collectives, once more with flattened meshes registered by hand. Exchanges are collectives, each a round of
waiting for all others. Bytes are what the busiest rank sends, in MiB: ours counted, DTensor's from its collectives with
the cheapest algorithm of each (a ring: all-reduce 2 (n-1)/n, gather and scatter (n-1)/n of the whole tensor). Seconds
are from the first rank's call to the last one's return, median of the runs after one that warms up; all ways in turns
in the same processes, each turn beginning with another one. The last columns are our time over DTensor's (the faster of
its two ways) in the same turn, median. Results are compared: where DTensor's replicas differ from each other, the table
says so.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import etha
from etha.redistribute.exchange import GroupExchange, MessageWire
from etha.redistribute.foreign import all_reduce_for

RANKS = 8
R, P, A = Replicate(), Partial(), Partial("avg")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
COLUMNS = 64
PERMUTED = [5, 2, 7, 0, 3, 6, 1, 4]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A transition; ``flat`` are the axes that one would register a flattened mesh for."""

    mesh: tuple[int, ...]
    source: Sequence[Placement]
    target: Sequence[Placement]
    flat: str = ""
    ranks: Sequence[int] = tuple(range(RANKS))
    uneven: bool = False
    listed: bool = False

    def __str__(self) -> str:
        more = f"{' permuted' if list(self.ranks) != list(range(RANKS)) else ''}{' uneven' if self.uneven else ''}"
        return f"{self.mesh}{more} {_names(self.source)} -> {_names(self.target)}"


def _names(placements: Sequence[Placement]) -> str:
    return "".join(str(p).replace("(sum)", "").replace("(", "").replace(")", "") + " " for p in placements).strip()


LISTED = [
    Case(mesh=(4, 2), source=[P, P], target=[R, R], flat="ab"),
    Case(mesh=(4, 2), source=[P, P], target=[S0, S0], flat="ab"),
    Case(mesh=(4, 2), source=[P, P], target=[S0, S1], flat="ab"),
    Case(mesh=(2, 2, 2), source=[P, P, S0], target=[S0, S0, S0], flat="ab"),
    Case(mesh=(2, 2, 2), source=[P, P, P], target=[R, R, R], flat="abc"),
    Case(mesh=(2, 2, 2), source=[P, S0, P], target=[R, R, R], flat="ac"),
    Case(mesh=(2, 2, 2), source=[P, R, P], target=[R, R, R], flat="ac"),
    Case(mesh=(2, 2, 2), source=[P, P, R], target=[R, R, R], flat="ab"),
    Case(mesh=(4, 2), source=[S0, S0], target=[R, R], flat="ab"),
    Case(mesh=(4, 2), source=[S0, S1], target=[R, R], flat="ab"),
    Case(mesh=(2, 2, 2), source=[P, P, R], target=[S0, S1, R], flat="ab"),
    Case(mesh=(2, 2, 2), source=[S0, S0, R], target=[R, R, R], flat="ab"),
    Case(mesh=(2, 2, 2), source=[P, S0, R], target=[R, R, R], flat="ab"),
]
FURTHER = [
    Case(mesh=(2, 4), source=[R, P], target=[R, R], ranks=PERMUTED),
    Case(mesh=(2, 4), source=[A, P], target=[R, R], flat="ab"),
    Case(mesh=(2, 2, 2), source=[P, P, P], target=[R, S0, R]),
    Case(mesh=(2, 4), source=[P, P], target=[S0, S0], flat="ab", uneven=True),
    Case(mesh=(2, 4), source=[S0, S1], target=[S1, S0]),
    Case(mesh=(2, 4), source=[S0, S0], target=[S1, S1], flat="ab"),
    Case(mesh=(2, 4), source=[S0, S0], target=[R, S0], uneven=True),
    Case(mesh=(2, 4), source=[S0, S1], target=[R, S0]),
    Case(mesh=(2, 4), source=[R, S1], target=[S0, S0]),
    Case(mesh=(2, 4), source=[S1, S0], target=[S0, S1], ranks=PERMUTED),
    Case(mesh=(4, 2), source=[_StridedShard(0, split_factor=2), S0], target=[R, R]),
    Case(mesh=(4, 2), source=[_StridedShard(0, split_factor=2), S0], target=[R, S1]),
    Case(mesh=(2, 2, 2), source=[S0, S1, S0], target=[S1, S0, R]),
    Case(mesh=(2, 2, 2), source=[P, S0, S1], target=[S0, R, R]),
    Case(mesh=(2, 4), source=[P, S0], target=[P, R]),
    Case(mesh=(2, 4), source=[R, S0], target=[S1, R]),
]
#: One collective of DTensor's does these; there is nothing to save.
SINGLE = [
    Case(mesh=(8,), source=[P], target=[R]),
    Case(mesh=(8,), source=[P], target=[S0]),
    Case(mesh=(8,), source=[S0], target=[R]),
    Case(mesh=(8,), source=[S0], target=[S1]),
    Case(mesh=(8,), source=[R], target=[S1]),
    Case(mesh=(8,), source=[P], target=[S0], uneven=True),
    Case(mesh=(8,), source=[S0], target=[R], uneven=True),
]
CASES = [*LISTED, *FURTHER, *SINGLE]


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shard_dim_alltoall", "broadcast")


class Counting(TorchDispatchMode):
    """DTensor's collectives: how many, and what a rank sends in them with the cheapest algorithm of each."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.sent = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(what in str(func) for what in COLLECTIVES):
            self.count += 1
            self.sent += _sent(str(func), args, out)
        return out


def _sent(name: str, args: Any, out: Any) -> float:
    group = next(a for a in reversed(args) if isinstance(a, str) and a not in ("sum", "avg", "max", "min", "product"))
    n = dist.get_world_size(dist.distributed_c10d._resolve_process_group(group))
    part = (n - 1) / n
    if "all_reduce" in name:
        return 2 * args[0].nbytes * part
    if "all_gather" in name:
        return float(out.nbytes * part)
    return float(args[0].nbytes * (1.0 if "broadcast" in name else part))


@contextmanager
def counting_ours() -> Iterator[list[int]]:
    """Bytes that this rank puts on the wire in each exchange while the block runs."""
    sent: list[int] = []
    collective, link, send = GroupExchange.exchange, GroupExchange.link, MessageWire.send

    def count_collective(wire: Any, out: Any, *args: Any) -> None:
        sent.append(out.nbytes)
        collective(wire, out, *args)

    def count_link(*args: Any) -> Any:
        found = link(*args)
        if found is not None:
            sent.append(0)
        return found

    def count_message(wire: Any, tensor: Any, peer: int) -> Any:
        sent[-1] += tensor.nbytes
        return send(wire, tensor, peer)

    GroupExchange.exchange, GroupExchange.link, MessageWire.send = count_collective, count_link, count_message  # type: ignore
    try:
        yield sent
    finally:
        GroupExchange.exchange, GroupExchange.link, MessageWire.send = collective, link, send  # type: ignore


@dataclass(kw_only=True)
class Told:
    """What one rank measured of one way in one case."""

    exchanges: int
    sent: float
    spans: list[tuple[float, float]] = field(default_factory=list)
    bits: int = 0


Way = Callable[[], torch.Tensor]


def worker(rank: int, store: str, cases: Sequence[Case], size: float, runs: int) -> list[dict[str, Told]]:
    """One rank through all cases."""
    logging.disable(logging.WARNING)  # DTensor warns of what it cannot merge; the table shows it
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    try:
        return [measure(rank, case, size, runs) for case in cases]
    finally:
        dist.destroy_process_group()


@cache
def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...], flat: str) -> DeviceMesh:
    """One for all cases: each has process groups of its own, and gloo threads for each."""
    names = ("a", "b", "c")[: len(shape)]
    mesh = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)
    if flat:
        mesh[tuple(flat)]._flatten(flat)
    return mesh


def measure(rank: int, case: Case, size: float, runs: int) -> dict[str, Told]:
    rows = int(size * harness.MIB) // (4 * COLUMNS) - (5 if case.uneven else 0)
    ways: dict[str, Way] = {}
    reported: dict[str, Told] = {}
    for name in ("etha", "unordered", "dtensor", *(["flattened"] if case.flat else [])):
        # A flattened mesh also gives us a group to reduce in.
        mesh = mesh_of(case.mesh, tuple(case.ranks), case.flat if name in ("flattened", "unordered") else "")
        given = source(rank, case, mesh, (rows, COLUMNS))
        if name == "etha":
            ways[name] = lambda given=given: etha.redistribute(given, placements=case.target).to_local()
            with counting_ours() as sent:
                result = ways[name]()
            reported[name] = Told(exchanges=len(sent), sent=sum(sent))
        elif name == "unordered":
            if all_reduce_for(mesh, case.source, case.target, given.dtype) is None:
                continue
            ways[name] = lambda given=given: etha.redistribute(
                given, placements=case.target, exact_order=False
            ).to_local()
            result = ways[name]()
            reported[name] = Told(exchanges=1, sent=0.0)
        else:
            ways[name] = lambda given=given: given.redistribute(placements=case.target).to_local()
            with Counting() as mode:
                result = ways[name]()
            reported[name] = Told(exchanges=mode.count, sent=mode.sent)
        reported[name].bits = hash(result.contiguous().numpy().tobytes())
        del result
    names = list(ways)
    for turn in range(runs + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            begin = time.perf_counter()
            ways[name]()
            if turn:
                reported[name].spans.append((begin, time.perf_counter()))
    return reported


def source(rank: int, case: Case, mesh: DeviceMesh, shape: tuple[int, int]) -> DTensor:
    """Contributions of random numbers, else one tensor; local parts of it as the planner knows them."""
    from etha.plan import Layout

    axes = [i for i, p in enumerate(case.source) if isinstance(p, Partial)]
    place = mesh.get_coordinate()
    assert place is not None
    seed = sum(place[i] * 10**i for i in axes)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    runs = Layout(mesh, case.source).owned(shape, rank)
    assert runs is not None
    for dim, owned in enumerate(runs):
        full = torch.cat([full.narrow(dim, a, b - a) for a, b in owned] or [full.narrow(dim, 0, 0)], dim)
    return DTensor.from_local(full, mesh, case.source, run_check=False, shape=shape, stride=(shape[1], 1))


HEAD = (
    "transition | exchanges etha | DTensor | flattened | sent MiB etha | DTensor | flattened | "
    "ms etha | exact_order=False | DTensor | flattened | etha / DTensor | exact_order=False / DTensor | "
    "replicas of DTensor"
)


def line(case: Case, ranks: list[dict[str, Told]]) -> list[str]:
    """One line of the table, from what all ranks measured."""
    counted: dict[str, tuple[str, str]] = {}
    seconds: dict[str, list[float]] = {}
    for name in ranks[0]:
        reported = [r[name] for r in ranks]
        spans = [[t.spans[i] for t in reported] for i in range(len(reported[0].spans))]
        seconds[name] = [max(b for _, b in s) - min(a for a, _ in s) for s in spans]
        sent = max(t.sent for t in reported) / harness.MIB
        counted[name] = (str(max(t.exchanges for t in reported)), f"{sent:.2f}")
    columns = [counted.get(name, ("", ""))[i] for i in range(2) for name in ("etha", "dtensor", "flattened")]
    for name in ("etha", "unordered", "dtensor", "flattened"):
        columns.append(f"{statistics.median(seconds[name]) * 1e3:.1f}" if name in seconds else "")
    theirs = min((seconds[n] for n in ("dtensor", "flattened") if n in seconds), key=statistics.median)
    for name in ("etha", "unordered"):
        ratios = [ours / peer for ours, peer in zip(seconds.get(name, ()), theirs, strict=False)]
        columns.append(f"{statistics.median(ratios):.2f}" if ratios else "")
    return [str(case), *columns, replicas(case, ranks)]


def replicas(case: Case, ranks: list[dict[str, Told]]) -> str:
    """Whether ranks that hold the same part hold the same bits; ours must."""
    groups: dict[tuple[int, ...], list[int]] = {}
    table = torch.tensor(case.ranks).reshape(case.mesh)
    for rank in range(RANKS):
        place = (table == rank).nonzero()[0].tolist()
        groups.setdefault(tuple(c for c, p in zip(place, case.target, strict=True) if p != R), []).append(rank)
    differ = {name: any(len({ranks[r][name].bits for r in g}) > 1 for g in groups.values()) for name in ranks[0]}
    if differ["etha"]:
        raise AssertionError(f"{case}: replicas of etha.redistribute differ")
    return "differ" if differ["dtensor"] or differ.get("flattened") else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=8, help="MiB of the whole tensor, float32 (default 8)")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each (default 5)")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    cases = [case for case in CASES if options.cases in str(case)]
    with harness.private_host(), tempfile.TemporaryDirectory() as directory:
        roles = [(worker, (r, f"{directory}/store", cases, options.size, options.runs)) for r in range(RANKS)]
        started = harness.machine()
        found = harness.run_ranks(roles)
    rows = [line(case, [rank[i] for rank in found]) for i, case in enumerate(cases)]
    head = HEAD.split(" | ")
    table = [head, ["---", *["---:"] * (len(head) - 2), "---"], *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    better = sum(int(r[1]) < int(r[2]) or float(r[4]) < float(r[5]) for r in rows if r[0] not in map(str, SINGLE))
    many = sum(r[0] not in map(str, SINGLE) for r in rows)
    exact, fastest = [float(r[11]) for r in rows], [min(float(r[11]), float(r[12] or r[11])) for r in rows]
    text += f"\n\nfewer exchanges or fewer bytes than DTensor as it is in {better} of {many}; our time over DTensor's: "
    for name, found in (("in exact order", exact), ("with exact_order=False where that is faster", fastest)):
        mean = math.exp(statistics.fmean(map(math.log, found)))
        text += f"\n{name} {mean:.2f} in the geometric mean, {max(found):.2f} at most, "
        text += f"above 1.05 in {sum(r > 1.05 for r in found)} of {len(found)} transitions"
    print(f"{started}\n\n{text}", flush=True)
    if options.write:
        title = f"# {datetime.date.today()}, redistribute, {options.size:g} MiB, gloo, {RANKS} ranks"
        options.write.write_text(f"{title}\n\n```\n{started}\n```\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
