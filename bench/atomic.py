"""Receive a version all at once: in place, through shadows that are copied, and through shadows that change places.

    python bench/atomic.py [--mib 256] [--tensors 1] [--runs 15] [--way local]
    python bench/atomic.py --alone [--mib 256] [--tensors 64]

One rank sends tensors of etha.empty to one. The three ways are batches of the same source, moved in turns, so what
else the machine does meets all of them. GB/s is payload over wall time from the first rank's call to the last rank's
return, the median of the turns after one that warms up. The limit is memmove with two threads, before and after.

``--alone``: only the exchange of two lists of tensors in one process, per pair, with no other thread and beside one
that adds all the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import harness
import torch
from torch.distributed.tensor import Replicate

import etha
from etha import TensorBusClient
from etha.memory import shared
from etha.memory.pages import Asides

TIMEOUT = 120.0
SIDES = ("source", "target")
#: How a version is received, by the name of its batch.
WAYS: dict[str, Any] = {"in place": False, "atomic": True, "swap": "swap"}

Turn = dict[str, tuple[float, float]]


def rank(place: dict[str, str], side: str, options: argparse.Namespace, barrier: Barrier) -> list[Turn]:
    """(start, end) of each call of one side, by way."""
    harness.settle(place)
    numel = (options.mib << 18) // options.tensors

    def made() -> dict[str, torch.Tensor]:
        return {f"t{i}": etha.empty((numel,)) for i in range(options.tensors)}

    source = made() if side == "source" else {}
    held = {way: source or made() for way in WAYS}
    turns: list[Turn] = []
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        client.init_pair(
            "bench", side, SIDES[1 - SIDES.index(side)], expected_world_size=1, rank=0,
            device_mesh=(1,), placements=[Replicate()],
        )  # fmt: skip
        batches = {
            way: client.register_tensors(
                f"batch-{number}", held[way], pair_name="bench",
                **({"direction": "send"} if side == "source" else {"direction": "recv", "atomic": atomic}),
            )
            for number, (way, atomic) in enumerate(WAYS.items())
        }  # fmt: skip
        for version in range(1, options.runs + 2):
            turn: Turn = {}
            for tensor in source.values():
                tensor.fill_(version)
            for way, batch in batches.items():
                barrier.wait(TIMEOUT)
                start = time.perf_counter()
                result = batch.transfer("send" if side == "source" else "recv")
                turn[way] = start, time.perf_counter()
                if side == "target":
                    swapped = sum(tensor.nbytes for tensor in held[way].values()) if way == "swap" else 0
                    if result.swapped != swapped:
                        raise AssertionError(f"{way}: {result.swapped} bytes were swapped, not {swapped}")
                    if any(bool((tensor[:: 1 << 16] != version).any()) for tensor in held[way].values()):
                        raise AssertionError(f"{way}: version {version} has not come")
            turns.append(turn)
        barrier.wait(TIMEOUT)
    if any(bool((tensor != version).any()) for some in held.values() for tensor in some.values()):
        raise AssertionError(f"the {side} holds other numbers than were sent")
    return turns[1:]


def alone(mib: int, count: int, runs: int) -> None:
    """Print microseconds of one exchange, in a process of one thread and beside a busy one."""
    numel = (mib << 18) // count
    first, second = ([etha.empty((numel,)) for _ in range(count)] for _ in range(2))
    places = [(a.data_ptr(), b.data_ptr()) for a, b in zip(first, second, strict=True)]
    busy = threading.Event()

    def add() -> None:
        some = torch.zeros(1 << 20)
        while busy.is_set():
            some.add_(1)

    for beside in (False, True):
        thread = threading.Thread(target=add)
        if beside:
            busy.set()
            thread.start()
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            with Asides() as asides:
                for a, b in places:
                    shared.exchange(None, a, b, asides)
            seconds.append(time.perf_counter() - start)
        if beside:
            busy.clear()
            thread.join()
        what = "beside a busy thread" if beside else "one thread"
        print(f"{count} exchanges, {what}: {statistics.median(seconds) / count * 1e6:.0f} us each")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of all tensors")
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--way", choices=("local", "tcp"), default="local")
    parser.add_argument("--alone", action="store_true", help="only the exchanges, in this process")
    options = parser.parse_args()
    print(harness.machine())
    if options.alone:
        torch.set_num_threads(1)
        alone(options.mib, options.tensors, options.runs)
        return
    limits = [harness.copy_limit(options.mib << 20, 2, options.runs)]
    with harness.private_host() as directory:
        redis = harness.shared_redis()
        barrier = multiprocessing.get_context("fork").Barrier(2)
        roles = [(rank, (harness.place(directory, redis, options.way, side), side, options, barrier)) for side in SIDES]
        reported = harness.run_ranks(roles)
    limits.append(harness.copy_limit(options.mib << 20, 2, options.runs))
    limit = max(limits)
    print(f"\nmemmove with two threads: {limit:.2f} GB/s\n")
    print(f"{'':10} {'ms':>8} {'GB/s':>7} {'of limit':>9}")
    for way in WAYS:
        turns = [[turn[way] for turn in both] for both in zip(*reported, strict=True)]
        seconds = statistics.median(max(e for _, e in turn) - min(s for s, _ in turn) for turn in turns)
        speed = (options.mib << 20) / seconds / 1e9
        print(f"{way:10} {seconds * 1e3:8.2f} {speed:7.2f} {speed / limit:9.2f}")


if __name__ == "__main__":
    main()
