"""What a pair of N + N agents costs each of them: CPU time of init_pair, register_tensors and a transfer, by N.

    python bench/scale.py [--sizes 2 4 8] [--tensors 100] [--runs 10]

Each rank has an agent of its own, on a host of its own (``tcp`` over loopback). In "one" an agent exchanges data with
one other (Shard(0) to Shard(0)), in "all" with all of the other side (Shard(0) to Shard(1)). Numbers are ms of CPU per
agent, the mean of all agents, and Redis's commands per agent. They do not say how long a call takes, because N + N
agents share the cores of this machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from multiprocessing.synchronize import Barrier
from pathlib import Path

import harness
import redis
import torch
from torch.distributed.tensor import Shard

from etha import TensorBusClient

TIMEOUT = 300.0
SIDES = ("source", "target")
#: The dim that the target shards, by how many others an agent exchanges data with.
PATTERNS = {"one": 0, "all": 1}


def seconds_of(pid: int) -> float:
    """CPU seconds that the threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


def rank(
    place: dict[str, str], side: str, number: int, dim: int, options: argparse.Namespace, size: int, barrier: Barrier
) -> list[tuple[float, int]]:
    """The agent's CPU seconds and Redis's commands so far, when it has been met and after each phase."""
    harness.settle(place)
    shape = [32 * size, 32 * size]
    shape[dim] //= size
    value = 1.0 if side == "source" else 0.0
    tensors = {f"t{i}": torch.full(shape, value * (i + 1)) for i in range(options.tensors)}
    server = redis.Redis.from_url(place["ETHA_REDIS_URL"])
    found: list[tuple[float, int]] = []

    with TensorBusClient(device="cpu", timeout=TIMEOUT) as client:
        agent = int(client.status()["agent"]["pid"])

        def note() -> None:
            barrier.wait(TIMEOUT)
            found.append((seconds_of(agent), int(server.info("stats")["total_commands_processed"])))
            barrier.wait(TIMEOUT)

        note()
        client.init_pair(
            "scale", side, SIDES[1 - SIDES.index(side)], expected_world_size=size, rank=number,
            device_mesh=(size,), placements=[Shard(dim)],
        )  # fmt: skip
        note()
        with client.register_tensors("weights", tensors, pair_name="scale") as batch:
            note()
            batch.transfer("send" if side == "source" else "recv")  # compiles the plan
            note()
            for _ in range(options.runs):
                batch.transfer("send" if side == "source" else "recv")
            note()
            barrier.wait(TIMEOUT)
    server.close()
    if any(bool((tensor != i + 1).any()) for i, tensor in enumerate(tensors.values())):
        raise AssertionError(f"rank {number} of the {side} holds other numbers than were sent")
    return found


def measure(size: int, dim: int, options: argparse.Namespace) -> str:
    """A row: ms of CPU and Redis's commands of each phase, per agent."""
    with harness.private_host() as directory:
        url = harness.shared_redis()
        barrier = multiprocessing.get_context("fork").Barrier(2 * size)
        roles = []
        for side, its in zip(SIDES, (0, dim), strict=True):
            for number in range(size):
                place = harness.place(directory, url, "tcp", f"{side}-{number}")
                roles.append((rank, (place, side, number, its, options, size, barrier)))
        reported = harness.run_ranks(roles)
    cells = []
    for phase in range(1, 5):
        runs = options.runs if phase == 4 else 1
        used = statistics.mean(each[phase][0] - each[phase - 1][0] for each in reported) / runs
        commands = statistics.mean(each[phase][1] - each[phase - 1][1] for each in reported) / (2 * size) / runs
        cells.append(f"{used * 1e3:7.1f} ({commands:.1f})")
    return " | ".join(cells)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    print(harness.machine())
    print(f"\nms of CPU per agent (Redis's commands per agent), {options.tensors} tensors\n")
    print("| agents | with | init_pair | register_tensors | first transfer | transfer |\n|---|---|--:|--:|--:|--:|")
    for name, dim in PATTERNS.items():
        for size in options.sizes:
            print(f"| {size} + {size} | {name} | {measure(size, dim, options)} |", flush=True)


if __name__ == "__main__":
    main()
