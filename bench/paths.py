"""Two pairs of one agent over two ways: how much one is slowed while the other's way is dead or slow.

    python bench/paths.py [--rounds 4] [--transfers 250] [--mbit 16] [--beside 32]

Three network namespaces (root, iproute2): one agent in the first, one in each of the others, a veth way to each. The
"other" pair moves 1 MiB, over and over: alone, while a transfer of the "bad" pair stands still because its way loses
all data, and while one crawls at --mbit Mbit/s. Rounds of the three alternate, so that what else the machine does meets
all of them. Times are the sender's, from call to return. Then 4 KiB beside 32 MiB between the same two agents, on a
way of --beside Mbit/s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import torch
from torch.distributed.tensor import Replicate

import etha

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.flow.networks.paths import LINKS, Paths, paths
from tests.flow.networks.tun import enter

BAD, BIG, SMALL, LITTLE = 16 << 20, 32 << 20, 1 << 20, 4 << 10
SIDES = ("source", "target")
TIMEOUT = 120.0


def worker(pipe: Connection, namespace: str, environment: dict[str, str], pair: str, side: str, nbytes: int) -> None:
    """One side of a pair: (transfers, whether to tell when bytes move) -> seconds of each, or how it failed."""
    enter(namespace)
    harness.settle(environment)
    with etha.TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        other = SIDES[side == SIDES[0]]
        client.init_pair(pair, side, other, expected_world_size=1, rank=0, device_mesh=(1,), placements=[Replicate()])
        tensor = etha.empty((nbytes,), dtype=torch.uint8)
        tensor.fill_(1)
        with client.register_tensors("b", {"w": tensor}, pair_name=pair) as batch:
            pipe.send("ready")
            while (wanted := pipe.recv()) is not None:
                count, watch = wanted
                pipe.send(measure(batch, side, count, pipe if watch else None))


def measure(batch: Any, side: str, count: int, pipe: Connection | None) -> list[float] | str:
    """Seconds of each transfer; what it was told where one fails. ``pipe`` hears once that bytes move."""
    reported: list[int] = []

    def progress(done: int, total: int) -> None:
        if pipe is not None and 0 < done < total and not reported:
            reported.append(done)
            pipe.send("moving")

    times = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            batch.transfer("send" if side == SIDES[0] else "recv", progress=progress if pipe is not None else None)
            times.append(time.perf_counter() - began)
    except etha.TransferError as error:
        return f"{type(error).__name__}: {error}"
    return times


class Pair:
    """Both workers of a pair, and what they are told."""

    def __init__(self, name: str, nbytes: int, places: Sequence[tuple[str, dict[str, str]]]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self._processes = [], []
        for side, (namespace, environment) in zip(SIDES, places, strict=True):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(theirs, namespace, environment, name, side, nbytes))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def ready(self) -> None:
        """Both have registered."""
        assert [pipe.recv() for pipe in self.pipes] == ["ready"] * 2

    def begin(self, count: int = 1, *, watch: bool = False) -> None:
        """Let both call; with ``watch`` it returns once bytes have come to the target, and more will."""
        for pipe, side in zip(self.pipes, SIDES, strict=True):
            pipe.send((count, watch and side == SIDES[1]))
        if watch:
            assert self.pipes[1].recv() == "moving"

    def ends(self) -> list[Any]:
        """What both say."""
        return [pipe.recv() for pipe in self.pipes]

    @property
    def moving(self) -> bool:
        """Whether neither has said anything."""
        return not any(pipe.poll() for pipe in self.pipes)

    def times(self, count: int) -> list[float]:
        """The sender's, of so many transfers."""
        self.begin(count)
        found = self.ends()[0]
        if isinstance(found, str):
            raise AssertionError(found)
        return list(found)

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def percentile(times: Sequence[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(times)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def apart(net: Paths, bad: Pair, other: Pair, options: argparse.Namespace) -> None:
    """The table of the other pair, and the ratios."""
    found: dict[str, list[float]] = {"alone": [], "dead": [], "slow": []}
    other.times(options.transfers)
    for number in range(options.rounds):
        for case, times in found.items():
            if case == "alone":
                times += other.times(options.transfers)
                continue
            with net.slow(net.two, options.mbit):
                bad.begin(watch=True)
                with net.hole(net.two) if case == "dead" else nullcontext():
                    times += other.times(options.transfers)
                    if not bad.moving:
                        raise AssertionError("the bad pair's transfer had ended before the other's")
                    if case == "dead":
                        said = bad.ends()
                if case == "slow":
                    said = bad.ends()
            print(f"... round {number + 1}, {case}: the bad pair's ends: {said}"[:200], file=sys.stderr)
    print(f"\n1 MiB to another agent, {options.rounds} x {options.transfers} transfers, milliseconds")
    print("the bad pair's way      p50      p99     p50 / alone  p99 / alone")
    alone = found["alone"]
    for case, times in found.items():
        p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
        ratios = p50 / percentile(alone, 0.5), p99 / percentile(alone, 0.99)
        name = {"alone": "nothing moves on it", "dead": "black-holed", "slow": f"at {options.mbit} Mbit/s"}[case]
        print(f"{name:20} {p50:8.2f} {p99:8.2f} {ratios[0]:12.2f} {ratios[1]:12.2f}")


def beside(net: Paths, big: Pair, little: Pair, options: argparse.Namespace) -> None:
    """4 KiB while 32 MiB move between the same two agents."""
    little.times(20)
    alone = little.times(50)
    times: list[float] = []
    with net.slow(net.two, options.beside):
        throttled = little.times(50)
        big.begin(watch=True)
        while big.moving:
            times += little.times(1)
        took = big.ends()[0]
    print(f"\n4 KiB between the same two agents as 32 MiB, way of {options.beside} Mbit/s, milliseconds")
    print(f"alone p50 {percentile(alone, 0.5):.2f}; slow way, nothing beside it p50 {percentile(throttled, 0.5):.2f}")
    print(
        f"beside 32 MiB p50 {percentile(times, 0.5):.2f}, p99 {percentile(times, 0.99):.2f}, "
        f"mean {1000 * statistics.mean(times):.2f} of {len(times)}; the 32 MiB took {took[0]:.1f} s"
    )


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--transfers", type=int, default=250)
    parser.add_argument("--mbit", type=int, default=16)
    parser.add_argument("--beside", type=int, default=32)
    options = parser.parse_args()
    print(harness.machine())
    with harness.private_host() as directory, paths() as net:
        redis = harness.shared_redis()

        def place(namespace: str) -> tuple[str, dict[str, str]]:
            found = harness.place(directory, redis, "tcp", namespace)
            return namespace, found | {"ETHA_LISTEN": f"{net.address(namespace)}:{LINKS}"}

        one, two, three = map(place, (net.one, net.two, net.three))
        pairs = [
            Pair("bad", BAD, (one, two)),
            Pair("other", SMALL, (one, three)),
            Pair("big", BIG, (one, two)),
            Pair("little", LITTLE, (one, two)),
        ]
        for pair in pairs:
            pair.ready()
        bad, other, big, little = pairs
        apart(net, bad, other, options)
        beside(net, big, little, options)
        for pair in pairs:
            pair.end()


if __name__ == "__main__":
    main()
