"""Latency of a 4 KiB transfer and of a status call, beside bare round trips over the same kind of socket.

    python bench/latency.py [--runs 2000]

A transfer is timed at the receiver, from its call to its return, the sender waiting already or about to. The unit is
the bare bus round trip (bench/roundtrip.py): a request on Etha's bus that an echo answers at once. Beside it one small
message there and back over ZeroMQ ipc, blocking at both ends, with no Etha at all.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import harness
import roundtrip
import torch
import uvloop
import zmq
from torch.distributed.tensor import Replicate

import etha
from etha import TensorBusClient
from etha.bus.server import BusServer

TIMEOUT = 60.0
MESSAGE = b"x" * 100
BUS = "bare bus round trip"


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


def bus_echo(path: Path, up: Event, done: Event) -> None:
    """The agent's end of the bare bus round trip."""

    async def serve() -> None:
        async with BusServer(path, roundtrip.Echo()):
            up.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)

    uvloop.run(serve())


def bus_worker(path: Path, runs: int, up: Event, done: Event) -> list[float]:
    """Seconds of each bare bus round trip, on the loop that a client uses."""
    up.wait(TIMEOUT)
    try:
        return uvloop.run(roundtrip.bus(path, runs))
    finally:
        done.set()


def round_trips(directory: Path, runs: int) -> dict[str, list[float]]:
    """Both kinds of bare round trips between two processes."""
    directory.mkdir(mode=0o700)
    address = f"ipc://{directory}/zmq"
    _, plain = harness.run_ranks([(echo, (address, runs)), (bare, (address, runs))])
    context = multiprocessing.get_context("fork")
    up, done, path = context.Event(), context.Event(), directory / "bus"
    _, bus = harness.run_ranks([(bus_echo, (path, up, done)), (bus_worker, (path, runs, up, done))])
    return {"bare ZeroMQ round trip": plain, BUS: bus}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    runs = parser.parse_args().runs
    print(harness.machine())
    with harness.private_host() as directory:
        before = round_trips(directory / "1", runs)
        barrier = multiprocessing.get_context("fork").Barrier(2)
        reported = harness.run_ranks([(worker, (side, runs, barrier)) for side in ("source", "target")])
        after = round_trips(directory / "2", runs)
    # What stands beside the transfers is the faster of the runs before and after them.
    bare = {name: min(before[name], after[name], key=lambda s: harness.quantile(s, 0.5)) for name in before}
    base = harness.quantile(bare[BUS], 0.5)
    print(f"\n{'microseconds':36} {'p50':>8} {'p99':>8} {'p50 in bus round trips':>23}")
    for name, seconds in (bare | reported[1]).items():
        p50, p99 = harness.quantile(seconds, 0.5), harness.quantile(seconds, 0.99)
        print(f"{name:36} {p50 * 1e6:8.0f} {p99 * 1e6:8.0f} {p50 / base:23.1f}")


if __name__ == "__main__":
    main()
