"""Etha over tcp beside gather-then-broadcast over gloo: 24 mesh cases, one tensor, 8 ranks to 8 ranks on another host.

    python bench/meshes.py [--size 64] [--runs 5] [--cases TEXT] [--memory plain] [--write FILE]

The two "hosts" are two agents with a host id and a runtime directory each; all bytes go over this machine's loopback.
Both ways run in turns in the same 16 processes, and every element of every target is compared each time. Seconds are
from the first rank's call to the last rank's return, the median after one run that warms up.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from footprint import Footprint, forget_peak
from gather_broadcast import GatherBroadcast, crossings
from mesh_cases import CASES, PAIRS, RANKS, MeshCase, held, ideal_bytes, numbers, part
from torch._C._distributed_c10d import FileStore

import etha
from etha import TensorBusClient

TIMEOUT = 120.0
ROWS = 4096
HOSTS = {"source": "a", "target": "b"}


@dataclass(slots=True, kw_only=True)
class Series:
    """What one rank measured of one way in one case: a value for each run, in seconds and bytes."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    #: Above the tensors: of this process, and (rank 0 of a side) of its agent.
    process: list[int] = field(default_factory=list)
    agent: list[int] = field(default_factory=list)
    #: Loopback traffic of the machine, headers included (rank 0 of the source).
    wire: list[int] = field(default_factory=list)
    staging: list[int] = field(default_factory=list)


Told = dict[str, Series]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where one rank of a run stands."""

    side: str
    rank: int
    cases: tuple[MeshCase, ...]
    shape: tuple[int, int]
    runs: int
    memory: str
    environment: dict[str, str]
    store: str
    barrier: Barrier
    #: Whether it also measures the memory of its agent.
    watches: bool

    @property
    def world_rank(self) -> int:
        return self.rank + (RANKS if self.side == "target" else 0)

    def meet(self) -> None:
        """All ranks are here."""
        self.barrier.wait(TIMEOUT)


def worker(stand: Stand) -> list[Told]:
    """One rank through all cases."""
    harness.settle(stand.environment)
    limit = datetime.timedelta(seconds=TIMEOUT)
    world = 2 * RANKS
    dist.init_process_group(
        "gloo", store=FileStore(stand.store, world), rank=stand.world_rank, world_size=world, timeout=limit
    )
    whole = numbers(stand.shape)
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        agent = int(client.status()["agent"]["pid"]) if stand.watches else 0
        idle = Footprint.of(agent).own if agent else 0
        found = [case_of(stand, case, number, whole, client, agent, idle) for number, case in enumerate(stand.cases)]
    dist.destroy_process_group()
    return found


def case_of(
    stand: Stand, case: MeshCase, number: int, whole: torch.Tensor, client: TensorBusClient, agent: int, idle: int
) -> Told:
    """One case, both ways in turns."""
    side, other = stand.side, "target" if stand.side == "source" else "source"
    layout = case.layout(side)
    expected = held(whole, layout, stand.rank) if side == "source" else part(whole, layout, stand.rank)
    tensor = (etha.empty if stand.memory == "etha.empty" else torch.empty)(tuple(expected.shape))
    tensor.copy_(expected)
    mesh = case.source_mesh if side == "source" else case.target_mesh
    client.init_pair(
        f"mesh-{number}", side, other, expected_world_size=RANKS, rank=stand.rank, device_mesh=mesh,
        placements=list(layout.placements),
    )  # fmt: skip
    theirs = GatherBroadcast(case.source, case.target, stand.shape, stand.world_rank, RANKS, tensor)
    reported: Told = {"etha": Series(), "gloo": Series()}
    with client.register_tensors(
        f"case-{number}", {"w": tensor}, pair_name=f"mesh-{number}", shapes={"w": stand.shape}
    ) as batch:

        def ours() -> None:
            result = batch.transfer("send" if side == "source" else "recv")
            reported["etha"].staging.append(result.peak_staging)

        for _ in range(stand.runs + 1):
            for name, move, buffers in (("etha", ours, 0), ("gloo", theirs.run, theirs.buffers)):
                if side == "target":
                    tensor.fill_(-1)
                timed(stand, reported[name], move, buffers, agent, idle)
                if not torch.equal(tensor, expected):
                    raise AssertionError(f"{case.name}: {name} left wrong elements on {side} rank {stand.rank}")
    theirs.close()
    return reported


def timed(stand: Stand, series: Series, move: Callable[[], None], buffers: int, agent: int, idle: int) -> None:
    """One run between two meetings of all ranks; what it used is added to ``series``."""
    stand.meet()  # nobody fills or compares any more
    forget_peak()
    if agent:
        forget_peak(agent)
    before, sent = Footprint.of(), harness.loopback_bytes()
    stand.meet()
    began = time.perf_counter()
    move()
    series.spans.append((began, time.perf_counter()))
    stand.meet()
    series.wire.append(harness.loopback_bytes() - sent)
    series.process.append(max(0, Footprint.of().peak - before.resident) + buffers)
    if agent:
        after = Footprint.of(agent)
        series.agent.append(max(0, after.peak - after.shared - idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; lists are (etha, gloo)."""

    case: MeshCase
    needed: int
    seconds: list[float]
    wire: list[int]
    #: The process with the most above its tensors, and all processes together, agents included.
    most: list[int]
    total: list[int]
    staging: int

    @classmethod
    def of(cls, case: MeshCase, shape: tuple[int, int], reported: list[Told]) -> Row:
        """From what all ranks told; the first run warmed up and counts for memory only."""
        seconds, wire, most, total = [], [], [], []
        for name in ("etha", "gloo"):
            ranks = [t[name] for t in reported]
            runs = list(zip(*(r.spans for r in ranks), strict=True))[1:]
            seconds.append(statistics.median(max(e for _, e in run) - min(b for b, _ in run) for run in runs))
            wire.append(int(statistics.median(ranks[0].wire[1:])))
            peaks = [max(r.process) for r in ranks]
            if name == "etha":
                peaks += [max(r.agent) for r in ranks if r.agent]
            most.append(max(peaks))
            total.append(sum(peaks))
        needed = ideal_bytes(*case.specs(shape), ["a"] * RANKS, ["b"] * RANKS)
        staging = max(max(t["etha"].staging) for t in reported)
        return cls(case=case, needed=needed, seconds=seconds, wire=wire, most=most, total=total, staging=staging)

    @property
    def cells(self) -> list[str]:
        """The line's texts."""
        mib = [f"{n / harness.MIB:.1f}" for n in (self.needed, *self.wire, *self.most, *self.total, self.staging)]
        ours, theirs = self.seconds
        return [self.case.name, f"{ours * 1e3:.0f}", f"{theirs * 1e3:.0f}", f"{theirs / ours:.2f}", *mib]


HEADINGS = [
    "case", "etha ms", "gloo ms", "gloo / etha", "needed MiB", "wire etha", "wire gloo", "peak of one etha",
    "peak of one gloo", "peak of all etha", "peak of all gloo", "staging",
]  # fmt: skip
NOTE = """\
needed: distinct bytes that the target host lacks. wire: loopback traffic of the whole run, headers included; of gloo's,
{times} x the tensor crosses from host to host (its broadcast is a binomial tree), the rest stays on one. peak: resident
memory above the tensors, buffers included, of the process with the most and of all 16 together, with both agents.
staging: the most that an agent reports (TransferResult.peak_staging)."""


def group(directory: Path, redis: str, number: int, cases: tuple[MeshCase, ...], args: argparse.Namespace) -> list[Row]:
    """The cases of one pair of meshes in 16 fresh processes and two fresh agents."""
    shape = (ROWS, args.size * harness.MIB // 4 // ROWS)
    barrier = multiprocessing.get_context("fork").Barrier(2 * RANKS)
    stands = [
        Stand(
            side=side, rank=rank, cases=cases, shape=shape, runs=args.runs, memory=args.memory,
            environment=harness.place(directory, redis, args.way, HOSTS[side]) | {"ETHA_NAMESPACE": f"meshes-{number}"},
            store=str(directory / f"gloo-{number}"), barrier=barrier,
            watches=rank == 0 and (side == "source" or args.way != "local"),
        )
        for side in HOSTS
        for rank in range(RANKS)
    ]  # fmt: skip
    reported = harness.run_ranks([(worker, (stand,)) for stand in stands])
    return [Row.of(case, shape, [rank[i] for rank in reported]) for i, case in enumerate(cases)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, metavar="MIB", help="of the tensor, at most 64 (float32)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", default="", help="part of a case's name")
    parser.add_argument("--memory", choices=["plain", "etha.empty"], default="plain", help="where all tensors lie")
    parser.add_argument("--way", choices=harness.WAYS, default="tcp", help="how the two sides are placed")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table as Markdown")
    args = parser.parse_args()
    if not 1 <= args.size <= 64:
        parser.error("--size: 1 to 64 MiB, so that every element is another float32")
    head = harness.machine()
    print(head)
    rows: list[Row] = []
    widths = [max(len(case.name) for case in CASES), *(len(h) for h in HEADINGS[1:])]
    line: Callable[[list[str]], str] = lambda cells: "  ".join(  # noqa: E731
        c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    )
    print(f"\n{args.size} MiB float32, {args.memory} tensors, {args.way}, median of {args.runs}\n{line(HEADINGS)}")
    with harness.private_host() as directory:
        redis = harness.shared_redis()
        for number, meshes in enumerate(PAIRS):
            mine = (c for c in CASES if (c.source_mesh, c.target_mesh) == meshes)
            if cases := tuple(c for c in mine if args.cases in c.name):
                for row in group(directory, redis, number, cases, args):
                    rows.append(row)
                    print(line(row.cells), flush=True)
    if not rows:
        parser.error(f"no case has {args.cases!r} in its name")
    ratios = [row.seconds[1] / row.seconds[0] for row in rows]
    ahead = sum(ratio > 1 for ratio in ratios)
    verdict = f"ahead in {ahead} of {len(rows)}; gloo / etha {min(ratios):.2f} to {max(ratios):.2f}, " + (
        f"median {statistics.median(ratios):.2f}"
    )
    note = NOTE.format(times=crossings(RANKS))
    print(f"\n{verdict}\n\n{note}")
    if args.write is not None:
        args.write.write_text(markdown(head, args, rows, verdict, note), encoding="utf-8")
        print(f"written to {args.write}", file=sys.stderr)


def markdown(head: str, args: argparse.Namespace, rows: list[Row], verdict: str, note: str) -> str:
    """The run as a page of bench/results."""
    table = [HEADINGS, ["---", *(["---:"] * (len(HEADINGS) - 1))], *(row.cells for row in rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    title = f"# {datetime.date.today().isoformat()}, meshes, {args.size} MiB, {args.way}, {args.memory} tensors"
    return "\n".join([title, "", "```", head, "```", "", *lines, "", f"Etha {verdict}.", "", note, ""])


if __name__ == "__main__":
    main()
