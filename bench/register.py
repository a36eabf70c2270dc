"""Milliseconds of register_tensors: the first time, closed and registered again, and after a relaunch of the pair.

    python bench/register.py [--tensors 1000] [--ranks 1] [--runs 5] [--ways local,tcp] [--memory plain]

Every rank of both sides registers the same names between two barriers; the time is the slowest rank's. The sides are
on one agent (local), on two agents of one host (host), or on two hosts by their ids (tcp). A relaunch closes the
clients, and init_pair forms the next epoch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.synchronize import Barrier

import harness
import torch
from torch.distributed.tensor import Shard

import etha
from etha import TensorBusClient

TIMEOUT = 120.0
SIDES = ("source", "target")


def worker(
    place: dict[str, str], side: str, rank: int, options: argparse.Namespace, barrier: Barrier
) -> dict[str, list[float]]:
    """Seconds of each registration of one rank."""
    harness.settle(place)
    make = etha.empty if options.memory == "etha.empty" else torch.empty
    tensors = {f"layers.{i // 8}.part{i % 8}.weight": make((8 + i % 8, 8)) for i in range(options.tensors)}
    found: dict[str, list[float]] = {"first": [], "again": [], "after a relaunch": []}
    for launch in range(options.runs + 1):
        with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
            other = SIDES[1 - SIDES.index(side)]
            client.init_pair(
                "bench", side, other, expected_world_size=options.ranks, rank=rank,
                device_mesh=(options.ranks,), placements=[Shard(0)],
            )  # fmt: skip
            for turn in range(options.runs + 1 if launch == 0 else 1):
                barrier.wait(TIMEOUT)
                start = time.perf_counter()
                batch = client.register_tensors("weights", tensors, pair_name="bench")
                seconds = time.perf_counter() - start
                found["after a relaunch" if launch else "again" if turn else "first"].append(seconds)
                barrier.wait(TIMEOUT)
                batch.close()
            barrier.wait(TIMEOUT)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ways", default="local,tcp")
    parser.add_argument("--memory", choices=("etha.empty", "plain"), default="plain")
    options = parser.parse_args()
    print(harness.machine())
    print(f"\n{'milliseconds, ' + str(options.tensors) + ' tensors':36} {'best':>8} {'median':>8}")
    for way in options.ways.split(","):
        with harness.private_host() as directory:
            redis = harness.shared_redis()
            barrier = multiprocessing.get_context("fork").Barrier(2 * options.ranks)
            roles = [
                (worker, (harness.place(directory, redis, way, side), side, rank, options, barrier))
                for side in SIDES
                for rank in range(options.ranks)
            ]
            reported = harness.run_ranks(roles)
        for what in reported[0]:
            slowest = [max(seconds) * 1e3 for seconds in zip(*(one[what] for one in reported), strict=True)]
            print(f"{way + ', ' + what:36} {min(slowest):8.1f} {statistics.median(slowest):8.1f}", flush=True)


if __name__ == "__main__":
    main()
