"""Throughput and latency of transfers in all three ways, beside the machine's limits and gloo, all in one run.

    python bench/transfer.py [--sizes 256 1024] [--runs 7] [--ways local,host,tcp] [--verify sample|full]

The sides are on one agent (local), on two agents of one host (host), or on two "hosts", two agents with a host id each
(tcp over this machine's loopback). GB/s is payload (the whole tensor once) over wall time from the first rank's call to
the last rank's return, the median of several runs after one that warms up, when plain tensors have got their huge
pages. "of limit" is the ratio to memmove with two threads, for tcp to a copy over as many plain sockets as a pair of
agents has. --verify measures each case once more with checksums compared at both ends; "of unverified" is its rate over
that without, in the same run.

--device cuda measures both sides on one GPU instead (bench/cards.py), and --save writes that table to a file.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Literal

import cards
import harness
import latency
import torch
import torch.distributed as dist
from sockets import loopback_limit
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import Placement, Shard

import etha
from etha import TensorBusClient
from etha.plan import Layout
from etha.transport.wire.flows import STREAMS

TIMEOUT = 60.0
SIDES = ("source", "target")
#: way -> side -> environment of its workers.
Places = dict[str, dict[str, dict[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table: ``ranks`` a side, target placement, MiB, and where the target tensors lie."""

    ranks: int
    target: Placement
    mib: int
    memory: str
    verify: Literal["sample", "full"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """A float32 matrix of ``mib`` MiB."""
        return (self.mib * harness.MIB // 4 // 8192, 8192)

    @property
    def label(self) -> str:
        return f"{self.ranks} -> {self.ranks}  Shard(0) -> Shard({self.target.dim})  {self.mib:5} MiB"

    def local(self, side: str, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``."""
        placement = Shard(0) if side == "source" else self.target
        return Layout((self.ranks,), [placement]).local_shape(self.shape, rank)


Times = list[tuple[float, float]]


def etha_rank(
    environment: dict[str, str], side: str, rank: int, cases: list[Case], runs: int, barriers: dict[int, Barrier]
) -> list[Times]:
    """One worker of a side through all cases; (start, end) of each call."""
    harness.settle(environment)
    other = {"source": "target", "target": "source"}[side]
    found: list[Times] = []
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        for number, case in enumerate(cases):
            barriers[2].wait(harness.SILENCE)
            if (side, rank) == ("source", 0):
                print(f"... {environment['ETHA_NAMESPACE']}: {case.label} to {case.memory}", file=sys.stderr)
            if rank >= case.ranks:
                found.append([])
                continue
            shape = case.local(side, rank)
            tensor = etha.empty(shape) if side == "target" and case.memory == "etha.empty" else torch.empty(shape)
            tensor.fill_(rank + 1 if side == "source" else 0)
            pair = f"bench-{case.ranks}"
            client.init_pair(
                pair,
                side,
                other,
                expected_world_size=case.ranks,
                rank=rank,
                device_mesh=(case.ranks,),
                placements=[Shard(0)],
            )
            placements = {"w": [Shard(0) if side == "source" else case.target]}
            with client.register_tensors(
                f"b{number}", {"w": tensor}, pair_name=pair, placements=placements, verify=case.verify
            ) as batch:
                verb = "send" if side == "source" else "recv"
                times: Times = []
                harness.settle_pages()
                for _ in range(runs + 1):
                    barriers[case.ranks].wait(TIMEOUT)
                    start = time.perf_counter()
                    batch.transfer(verb)
                    times.append((start, time.perf_counter()))
            if side == "target":
                check(tensor, case)
            found.append(times[1:])
    return found


def check(tensor: torch.Tensor, case: Case) -> None:
    """A benchmark of the wrong bytes is none."""
    whole = case.ranks if isinstance(case.target, Shard) and case.target.dim == 1 else 1
    values = set(tensor.unique().tolist())
    if 0.0 in values or len(values) != whole:
        raise AssertionError(f"{case.label}: the target holds {values}")


def gloo_rank(rank: int, ranks: int, store: str, mibs: list[int], runs: int) -> dict[str, list[Times]]:
    """One process of a world of both sides (sources first): send/recv, and gather then broadcast."""
    world, timeout = 2 * ranks, datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    sources = dist.new_group(list(range(ranks)))
    fan = dist.new_group([0, *range(ranks, world)])
    found: dict[str, list[Times]] = {"send/recv": [], "gather + broadcast": []}
    for mib in mibs:
        shape = Case(ranks=ranks, target=Shard(0), mib=mib, memory="plain").shape
        local = torch.full((shape[0] // ranks, shape[1]), float(rank))
        whole = torch.zeros(shape)
        for name, times in found.items():
            series: Times = []
            for _ in range(runs + 1):
                dist.barrier()
                start = time.perf_counter()
                if name == "send/recv":
                    dist.send(local, rank + ranks) if rank < ranks else dist.recv(local, rank - ranks)
                else:
                    if rank < ranks:
                        dist.gather(local, list(whole.chunk(ranks)) if rank == 0 else None, dst=0, group=sources)
                    if rank == 0 or rank >= ranks:
                        dist.broadcast(whole, 0, group=fan)
                    if rank >= ranks:
                        local.copy_(whole.chunk(ranks)[rank - ranks])
                series.append((start, time.perf_counter()))
            times.append(series[1:])
    dist.destroy_process_group()
    return found


def gb_per_s(nbytes: int, ranks: list[Times]) -> tuple[float, float]:
    """Median and best over the runs of payload / (last return - first call)."""
    walls = [max(end for _, end in run) - min(start for start, _ in run) for run in zip(*ranks, strict=True)]
    return nbytes / statistics.median(walls) / 1e9, nbytes / min(walls) / 1e9


def small_rank(environment: dict[str, str], side: str, runs: int, barrier: Barrier) -> dict[str, list[float]]:
    """One of two workers that exchange 4 KiB (bench/latency.py)."""
    harness.settle(environment)
    return latency.worker(side, runs, barrier)


@dataclass(slots=True)
class Limits:
    """GB/s of the machine by (what, MiB): the best of several measurements, before and after the transfers."""

    runs: int
    sizes: list[int]
    streams: list[int]
    best: dict[tuple[str, int], float] = field(default_factory=dict)

    def measure(self) -> None:
        """Once more."""
        for mib in self.sizes:
            for threads in (1, 2):
                what = f"memmove, {threads} thread{'s' if threads > 1 else ''}"
                self._take(what, mib, harness.copy_limit(mib * harness.MIB, threads, self.runs))
            for count in self.streams:
                self._take(f"loopback, {count} sockets", mib, loopback_limit(mib * harness.MIB, count, self.runs))

    def _take(self, what: str, mib: int, rate: float) -> None:
        self.best[what, mib] = max(rate, self.best.get((what, mib), 0.0))

    def of(self, way: str, mib: int) -> float:
        """What a way of transfers is compared with."""
        return self.best[f"loopback, {STREAMS} sockets" if way == "tcp" else "memmove, 2 threads", mib]


def small_transfers(directory: Path, places: Places, runs: int) -> None:
    """The table of 4 KiB transfers, in bare bus round trips."""
    before = latency.round_trips(directory / "1", runs)
    reported = {}
    for way, at in places.items():
        barrier = multiprocessing.get_context("fork").Barrier(2)
        reported[way] = harness.run_ranks([(small_rank, (at[side], side, runs, barrier)) for side in at])[1]
    after = latency.round_trips(directory / "2", runs)
    # What stands beside the transfers is the faster of the runs before and after them.
    unit = min(harness.quantile(found[latency.BUS], 0.5) for found in (before, after))
    print(f"\n{'4 KiB, microseconds':44} {'p50':>8} {'p99':>8} {'p50 in bus round trips':>23}")
    print(f"{latency.BUS:44} {unit * 1e6:8.0f}")
    for way, found in reported.items():
        for name, seconds in found.items():
            p50, p99 = harness.quantile(seconds, 0.5), harness.quantile(seconds, 0.99)
            print(f"{way:6} {name:37} {p50 * 1e6:8.0f} {p99 * 1e6:8.0f} {p50 / unit:23.1f}")


def ways(text: str) -> list[str]:
    """Of ``--ways``."""
    chosen = text.split(",")
    if unknown := set(chosen) - set(harness.WAYS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of {', '.join(harness.WAYS)}")
    return chosen


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--save", type=Path, metavar="FILE", help="with --device cuda: write the table there, too")
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="MIB", help="default: 256 1024; of a GPU 4 KiB to 4 GiB"
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--small", type=int, default=1000, help="4 KiB transfers of each kind; 0: none")
    parser.add_argument("--verify", choices=["sample", "full"], help="also with checksums compared at both ends")
    parser.add_argument("--ways", type=ways, default=list(harness.WAYS), help="some of local,host,tcp")
    args = parser.parse_args()
    if args.device == "cuda":
        cards.main(args)
        return
    args.sizes = args.sizes or [256, 1024]
    print(harness.machine())

    limits = Limits(args.runs, args.sizes, [1, STREAMS] if "tcp" in args.ways else [])
    limits.measure()
    cases = [
        Case(ranks=ranks, target=target, mib=mib, memory=memory, verify=verify)
        for mib in args.sizes
        for ranks in (1, 2)
        for target in (Shard(0), Shard(1))
        for memory in ("etha.empty", "plain")
        for verify in ([None, args.verify] if args.verify else [None])
    ]
    barriers = {ranks: multiprocessing.get_context("fork").Barrier(2 * ranks) for ranks in (1, 2)}
    with harness.private_host() as directory:
        redis = harness.shared_redis()
        places: Places = {
            way: {side: harness.place(directory, redis, way, side) | {"ETHA_NAMESPACE": way} for side in SIDES}
            for way in args.ways
        }
        reported = {
            way: harness.run_ranks(
                [(etha_rank, (at[side], side, rank, cases, args.runs, barriers)) for side in SIDES for rank in (0, 1)]
            )
            for way, at in places.items()
        }
        gloo = {ranks: gloo_world(directory, ranks, args.sizes, args.runs) for ranks in (1, 2)}
        limits.measure()

        print(f"\n{'limits, best':44} {'GB/s':>7}")
        for (what, mib), rate in limits.best.items():
            print(f"{what:30} {mib:5} MiB".ljust(44), f"{rate:7.2f}")
        print(
            f"\n{'transfer, plain source':44} {'target':12} {'way':6}"
            f"{'GB/s':>7} {'best':>7} {'of limit':>9} {'of send/recv':>13} {'of unverified' if args.verify else '':>14}"
        )
        plain: dict[str, float] = {}
        for number, case in enumerate(cases):
            nbytes = case.mib * harness.MIB
            peer, _ = gloo[case.ranks]["send/recv"][args.sizes.index(case.mib)]
            for way, ranks in reported.items():
                rate, best = gb_per_s(nbytes, [rank[number] for rank in ranks if rank[number]])
                ratios = f"{rate / limits.of(way, case.mib):9.2f} {rate / peer:13.1f}"
                if case.verify is None:
                    plain[way] = rate
                else:  # it stands behind its case without
                    ratios += f" {rate / plain[way]:14.2f}  {case.verify}"
                print(f"{case.label:44} {case.memory:12} {way:6}{rate:7.2f} {best:7.2f} {ratios}")
        print(f"\n{'gloo, plain tensors':44} {'':19}{'GB/s':>7} {'best':>7} {'of limit':>9}")
        for ranks, found in gloo.items():
            for name, rates in found.items():
                for mib, (rate, best) in zip(args.sizes, rates, strict=True):
                    label = f"{ranks} -> {ranks}  {name:20}  {mib:5} MiB"
                    print(f"{label:44} {'plain':19}{rate:7.2f} {best:7.2f} {rate / limits.of('local', mib):9.2f}")
        if args.small:
            small_transfers(directory, places, args.small)


def gloo_world(directory: Path, ranks: int, mibs: list[int], runs: int) -> dict[str, list[tuple[float, float]]]:
    """name -> (median, best) GB/s for each size, with ``ranks`` a side."""
    store = str(directory / f"gloo-{ranks}")
    reported = harness.run_ranks([(gloo_rank, (rank, ranks, store, mibs, runs)) for rank in range(2 * ranks)])
    return {
        name: [gb_per_s(mib * harness.MIB, [rank[name][i] for rank in reported]) for i, mib in enumerate(mibs)]
        for name in reported[0]
    }


if __name__ == "__main__":
    main()
