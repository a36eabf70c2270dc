"""What membership costs: epochs, steps in which nothing changes, and a lost replica.

    python bench/members.py [--runs N]

Replicas of one rank share an agent and its own Redis. `epoch`: the same replicas form their next epoch after one of
them has ended the last one's group, from the first call of `begin()` to the end of the last one. `step`: `begin()` and
`commit()` of a step in which nothing changed, and how many commands Redis gets meanwhile, beside those of an idle time
as long. `loss`: from the SIGKILL of one of two until the other one has committed its next step.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import redis
import torch
from harness import machine, private_host, shared_redis

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "etha.groups.host.etha_group", "etha.groups.members"])
STEPS = 300


def joined(name: str, number: int, size: int) -> tuple[Any, Any]:
    """A replica that has formed the first epoch with the others."""
    from etha import groups

    torch.set_num_threads(1)
    logging.getLogger("etha").setLevel(logging.ERROR)  # each lost epoch is a warning
    members = groups.Members(name, replica=f"r{number}", min_replicas=size)
    group = groups.ManagedProcessGroup(members)
    step(members, group)
    return members, group


def step(members: Any, group: Any) -> bool:
    """One step with a call."""
    members.begin()
    group.allreduce([torch.ones(4)]).wait()
    return bool(members.commit())


def forms(pipe: Connection, number: int, size: int, runs: int) -> None:
    """Says of each epoch when this replica began and when it was in; then seconds of steps without a change."""
    members, group = joined(f"epochs-{size}", number, size)
    for _ in range(runs):
        members.begin()
        if number == 0:
            group.abort()
        group.allreduce([torch.ones(4)]).wait()
        assert not members.commit()
        pipe.send("lost")
        pipe.recv()
        start = time.monotonic()
        assert members.begin().changed
        pipe.send((start, time.monotonic()))
        assert members.commit()
    pipe.recv()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        members.begin()
        members.commit()
        times.append(time.perf_counter() - start)
    pipe.send(statistics.median(times))
    pipe.recv()
    members.leave()


def survives(pipe: Connection, number: int, name: str) -> None:
    """Trains until the other replica is lost; says when its first step without it was committed."""
    members, group = joined(name, number, 2)
    members.min_replicas = 1
    pipe.send(os.getpid())
    while not (step(members, group) and group.size() == 1):
        pass
    pipe.send(time.monotonic())
    members.leave()


def start(body: Any, size: int, *args: Any) -> tuple[list[Any], list[Connection]]:
    """``size`` processes that run ``body``, and the pipes to them."""
    processes, pipes = [], []
    for number in range(size):
        here, there = CONTEXT.Pipe()
        processes.append(CONTEXT.Process(target=body, args=(there, number, *args), daemon=True))
        processes[-1].start()
        pipes.append(here)
    return processes, pipes


def say(pipes: list[Connection]) -> None:
    for pipe in pipes:
        pipe.send("go")


def epochs(size: int, runs: int, commands: Any) -> str:
    """One row: an epoch of ``size`` replicas, a step of them, and Redis's commands in STEPS steps."""
    processes, pipes = start(forms, size, size, runs)
    times = []
    for _ in range(runs):
        assert all(pipe.recv() == "lost" for pipe in pipes)
        say(pipes)
        found = [pipe.recv() for pipe in pipes]
        times.append(max(end for _, end in found) - min(begin for begin, _ in found))
    before, begun = commands(), time.monotonic()
    say(pipes)
    steps = [pipe.recv() for pipe in pipes]
    after, ended = commands(), time.monotonic()
    time.sleep(ended - begun)
    idle = commands() - after
    say(pipes)
    for process in processes:
        process.join()
    return (
        f"| {size} | {statistics.median(times) * 1e3:.1f} | {statistics.median(steps) * 1e3:.3f} "
        f"| {after - before} | {idle} |"
    )


def loss(number: int) -> float:
    """Seconds from the SIGKILL of one of two replicas until the other one has committed a step without it."""
    processes, pipes = start(survives, 2, f"loss-{number}")
    pids = [pipe.recv() for pipe in pipes]
    begin = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    seconds = float(pipes[0].recv()) - begin
    for process in processes:
        process.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    print(machine())
    with private_host():
        client = redis.Redis.from_url(shared_redis())
        client.ping()

        def commands() -> int:
            return int(client.info("stats")["total_commands_processed"])

        print("\n| replicas | epoch, ms | step, ms | commands in 300 steps | in an idle time as long |")
        print("|---:|---:|---:|---:|---:|")
        for size in (2, 8):
            print(epochs(size, options.runs, commands), flush=True)
        times = [loss(number) for number in range(options.runs)]
        print(f"\nloss: {statistics.median(times) * 1e3:.0f} ms, at most {max(times) * 1e3:.0f}")


if __name__ == "__main__":
    main()
