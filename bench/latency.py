"""Latency of a 4 KiB transfer and of a status call, beside bare round trips over the same kind of socket.

    python bench/latency.py [--runs 2000]

A transfer is timed at the receiver, from its call to its return, the sender waiting already or about to. The bare
round trip is one small message there and back over ZeroMQ ipc, blocking at both ends, with no Etha at all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import harness
import torch
import zmq
from torch.distributed.tensor import Replicate

import etha
from etha import TensorBusClient

TIMEOUT = 60.0
MESSAGE = b"x" * 100


def worker(side: str, runs: int, barrier: Barrier) -> dict[str, list[float]]:
    """One rank of a side: ``runs`` transfers back to back, then (at the target) status calls."""
    other = {"source": "target", "target": "source"}[side]
    found: dict[str, list[float]] = {}
    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        client.init_pair(
            "bench", side, other, expected_world_size=1, rank=0, device_mesh=(1,), placements=[Replicate()]
        )
        for memory in ("etha.empty", "plain"):
            tensor = etha.empty(1024) if memory == "etha.empty" else torch.empty(1024)
            tensor.fill_(1.0 if side == "source" else 0.0)
            with client.register_tensors(memory, {"w": tensor}, pair_name="bench") as batch:
                barrier.wait(TIMEOUT)
                verb = "send" if side == "source" else "recv"
                found[f"4 KiB transfer, {memory} tensors"] = timed(lambda b=batch, v=verb: b.transfer(v), runs)
            assert bool((tensor == 1).all())
        if side == "target":
            found["status()"] = timed(client.status, runs)
        barrier.wait(TIMEOUT)
    return found


def timed(call: object, runs: int) -> list[float]:
    """Seconds of each of ``runs`` calls, after some to warm up."""
    assert callable(call)
    seconds = []
    for _ in range(runs + 50):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[50:]


def echo(address: str, runs: int) -> None:
    """The far end of the bare round trip."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        for _ in range(runs + 50):
            router.send_multipart(router.recv_multipart())


def bare(address: str, runs: int) -> list[float]:
    """Seconds of each bare round trip."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)

        def once() -> None:
            dealer.send(MESSAGE)
            dealer.recv()

        return timed(once, runs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    print(harness.machine())
    with harness.private_host() as directory:
        before = bare_round_trips(directory / "before", runs)
        barrier = multiprocessing.get_context("fork").Barrier(2)
        told = harness.run_ranks([(worker, (side, runs, barrier)) for side in ("source", "target")])
        after = bare_round_trips(directory / "after", runs)
    base = min(harness.quantile(before, 0.5), harness.quantile(after, 0.5))
    print(f"\n{'microseconds':36} {'p50':>8} {'p99':>8} {'p50 in round trips':>19}")
    for name, seconds in {"bare ZeroMQ round trip": before + after, **told[1]}.items():
        p50, p99 = harness.quantile(seconds, 0.5), harness.quantile(seconds, 0.99)
        print(f"{name:36} {p50 * 1e6:8.0f} {p99 * 1e6:8.0f} {p50 / base:19.1f}")


def bare_round_trips(path: Path, runs: int) -> list[float]:
    """Bare round trips between two processes over a socket at ``path``."""
    address = f"ipc://{path}"
    _, seconds = harness.run_ranks([(echo, (address, runs)), (bare, (address, runs))])
    return list(seconds)


if __name__ == "__main__":
    main()
