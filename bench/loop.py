"""Does the agent's loop answer while gigabytes move? Status calls during back-to-back transfers of 1 GiB.

python bench/loop.py [--mib 1024] [--seconds 10] [--calls 1000]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Event

import harness
import torch
from torch.distributed.tensor import Replicate

import etha
from etha import TensorBusClient

TIMEOUT = 60.0


def mover(side: str, mib: int, seconds: float, moving: Event) -> tuple[int, float]:
    """One rank of a side: transfers back to back for ``seconds``; how many, and in what time.

    The source decides when it is enough and says so by the version of the last one.
    """
    other = {"source": "target", "target": "source"}[side]
    make = torch.empty if side == "source" else etha.empty
    tensor = make(mib * harness.MIB // 4).fill_(1.0)
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        client.init_pair(
            "bench", side, other, expected_world_size=1, rank=0, device_mesh=(1,), placements=[Replicate()]
        )
        with client.register_tensors("loop", {"w": tensor}, pair_name="bench") as batch:
            start, count, last = time.perf_counter(), 0, False
            while not last:
                if side == "source":
                    last = time.perf_counter() - start > seconds
                    batch.transfer("send", version="last" if last else count)
                else:
                    last = batch.transfer("recv").version == "last"
                count += 1
                moving.set()
            return count, time.perf_counter() - start


def caller(calls: int, seconds: float, moving: Event) -> list[float]:
    """``calls`` status calls of a third worker, spread over ``seconds``; seconds of each."""
    found = []
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        client.status()
        if not moving.wait(TIMEOUT):
            raise TimeoutError("no transfer has begun")
        begin = time.perf_counter()
        for i in range(calls):
            time.sleep(max(0.0, begin + i * seconds / calls - time.perf_counter()))  # a steady rate, not a wait
            start = time.perf_counter()
            client.status()
            found.append(time.perf_counter() - start)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--calls", type=int, default=1000)
    args = parser.parse_args()
    print(harness.machine())
    moving = multiprocessing.get_context("fork").Event()
    with harness.private_host():
        _, (count, took), calls = harness.run_ranks(
            [
                (mover, ("source", args.mib, args.seconds + 1, moving)),
                (mover, ("target", args.mib, args.seconds + 1, moving)),
                (caller, (args.calls, args.seconds, moving)),
            ]
        )
    print(
        f"\n{count} transfers of {args.mib} MiB in {took:.1f} s: {count * args.mib * harness.MIB / took / 1e9:.2f} GB/s"
    )
    p50, p99 = (harness.quantile(calls, q) * 1e3 for q in (0.5, 0.99))
    print(f"{len(calls)} status() calls meanwhile: p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {max(calls) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
