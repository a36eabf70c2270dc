"""How long a join keeps whom waiting: `members.state` between a replica that trains and one that comes.

    python bench/group_state.py [--mib N] [--runs N]

Two processes. One trains alone; the other joins with ``mib`` MiB of weights to load, leaves, and joins again. Both say
how long their ``begin()`` of the epoch took; the first step together ends when both have everything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import MIB, machine, private_host

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "etha.groups.host.etha_group", "etha.groups.members"])
#: Bytes of one tensor.
TENSOR = 4 * MIB


def model(mib: int) -> torch.nn.Module:
    """Weights of ``mib`` MiB, in tensors of 4 MiB."""
    found = torch.nn.ParameterList()
    for _ in range(mib * MIB // TENSOR):
        found.append(torch.randn(TENSOR // 4))
    return found


def step(members: Any, group: Any) -> tuple[float, float, Any]:
    """One step; seconds of ``begin()`` and of the whole step, and the quorum."""
    before = time.perf_counter()
    quorum = members.begin()
    begun = time.perf_counter()
    group.allreduce([torch.ones(1)]).wait()
    members.commit()
    return begun - before, time.perf_counter() - before, quorum


def joined(name: str, mib: int) -> tuple[Any, Any]:
    from etha import groups

    members = groups.Members("bench", replica=name)
    members.state(model(mib))
    return members, groups.ManagedProcessGroup(members)


def stays(pipe: Connection, mib: int) -> None:
    """Trains until it is told to end; says how long each step took that changed the epoch and had a newcomer."""
    torch.set_num_threads(1)
    members, group = joined("stays", mib)
    while not pipe.poll():
        begin, whole, quorum = step(members, group)
        if quorum.epoch == 1 and quorum.changed:
            pipe.send("ready")
        elif quorum.changed and len(members._seats) == 2:
            pipe.send((begin, whole))
    members.leave()


def comes(pipe: Connection, mib: int, runs: int) -> None:
    """Joins and leaves ``runs`` times."""
    torch.set_num_threads(1)
    for _ in range(runs):
        members, group = joined("comes", mib)
        begin, _, quorum = step(members, group)
        assert quorum.recovered
        members.leave()
        pipe.send(begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    print(machine())
    with private_host():
        one, two = CONTEXT.Pipe(), CONTEXT.Pipe()
        staying = CONTEXT.Process(target=stays, args=(one[1], options.mib))
        staying.start()
        assert one[0].recv() == "ready"
        coming = CONTEXT.Process(target=comes, args=(two[1], options.mib, options.runs))
        coming.start()
        rows = [(*one[0].recv(), two[0].recv()) for _ in range(options.runs)]
        coming.join()
        one[0].send("end")
        staying.join()
    print(f"{options.mib} MiB, {options.runs} joins, medians (first join) in seconds")
    for number, what in enumerate(("begin() of the source", "its whole step", "begin() of the newcomer")):
        values = [row[number] for row in rows]
        print(f"  {what:25} {statistics.median(values):7.3f} ({values[0]:.3f})")


if __name__ == "__main__":
    main()
