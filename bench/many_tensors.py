"""A batch of many small tensors on one host, beside one copy of the same bytes by memmove.

    python bench/many_tensors.py [--tensors 10000] [--kib 16] [--runs 15] [--way local]

One rank sends to one. GB/s is payload over wall time from the first rank's call to the last rank's return, the median
of the runs after one that warms up, when plain tensors have got their huge pages. The limit is memmove with two
threads, measured before and after.
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
#: Memory of the source and of the target.
CASES = (("plain", "plain"), ("plain", "etha.empty"), ("etha.empty", "plain"), ("etha.empty", "etha.empty"))


def rank(
    place: dict[str, str], side: str, memory: str, options: argparse.Namespace, barrier: Barrier
) -> list[tuple[float, float]]:
    """(start, end) of each call of one side."""
    harness.settle(place)
    make = etha.empty if memory == "etha.empty" else torch.zeros
    tensors = {f"t{i}": make((options.kib * 256,)) for i in range(options.tensors)}
    for i, tensor in enumerate(tensors.values()):
        tensor.fill_(i + 1 if side == "source" else 0)
    times = []
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        client.init_pair(
            "bench", side, SIDES[1 - SIDES.index(side)], expected_world_size=1, rank=0,
            device_mesh=(1,), placements=[Shard(0)],
        )  # fmt: skip
        with client.register_tensors("weights", tensors, pair_name="bench") as batch:
            harness.settle_pages()
            for _ in range(options.runs + 1):
                barrier.wait(TIMEOUT)
                start = time.perf_counter()
                batch.transfer("send" if side == "source" else "recv")
                times.append((start, time.perf_counter()))
            barrier.wait(TIMEOUT)
    if any(bool((tensor != i + 1).any()) for i, tensor in enumerate(tensors.values())):
        raise AssertionError(f"the {side} holds other numbers than were sent")
    return times[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--kib", type=int, default=16, help="of each tensor")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--way", choices=("local", "host", "tcp"), default="local")
    options = parser.parse_args()
    nbytes = options.tensors * options.kib << 10
    print(harness.machine())
    limits = [harness.copy_limit(nbytes, 2, options.runs)]
    found = {}
    for case in CASES:
        with harness.private_host() as directory:
            redis = harness.shared_redis()
            barrier = multiprocessing.get_context("fork").Barrier(2)
            roles = [
                (rank, (harness.place(directory, redis, options.way, side), side, memory, options, barrier))
                for side, memory in zip(SIDES, case, strict=True)
            ]
            reported = harness.run_ranks(roles)
        seconds = [max(e for _, e in turn) - min(s for s, _ in turn) for turn in zip(*reported, strict=True)]
        found[case] = statistics.median(seconds)
    limits.append(harness.copy_limit(nbytes, 2, options.runs))
    limit = max(limits)
    print(f"\nmemmove with two threads: {limit:.2f} GB/s\n")
    print(f"{'from':12} {'to':12} {'ms':>8} {'GB/s':>7} {'of limit':>9}")
    for (source, target), seconds in found.items():
        speed = nbytes / seconds / 1e9
        print(f"{source:12} {target:12} {seconds * 1e3:8.1f} {speed:7.2f} {speed / limit:9.2f}")


if __name__ == "__main__":
    main()
