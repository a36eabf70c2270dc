"""What a pair of N + N agents costs each of them: CPU time of init_pair, register_tensors and a transfer, by N.

    python bench/scale.py [--sizes 2 4 8] [--tensors 100] [--runs 10]
    python bench/scale.py --simulate [--agents 4 8 16] [--ranks 1] [--with one all] [--tensors 10] [--profile AGENT]

Each rank has an agent of its own, on a host of its own (``tcp`` over loopback). In "one" an agent exchanges data with
one other (Shard(0) to Shard(0)), in "all" with all of the other side (Shard(0) to Shard(1)). Numbers are ms of CPU per
agent, the mean of all agents, and Redis's commands per agent. They do not say how long a call takes, because N + N
agents share the cores of this machine.

With ``--simulate`` up to 1,024 agents run in one process and in simulated time (``bench/simulation``), so a phase does
take so long, as far as the simulation is right: ``simulation/__init__.py`` and its files say what is not real. Agents
and services are Etha's own, and so is Redis. Links and streams are not, and no byte of a tensor moves. ``--agents`` are
those of both sides together. In "eight", a rank exchanges data with 8 of the other side. The tables count what agents
send to each other, and what Redis does for them. "CPU ms" has what the agents' code took on this machine and "of it
assumed", which is what links would have taken. ``--profile`` also shows where the time of one agent went.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import harness
import redis
import torch
from simulation import fleet
from simulation.fleet import Options, Phase
from simulation.network import Costs
from simulation.report import details, tables
from torch.distributed.tensor import Shard

from etha import TensorBusClient
from etha.agent.__main__ import raise_descriptor_limit
from etha.demo.process import die_with_parent

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


def simulate(options: argparse.Namespace) -> None:
    """Print the tables of all sizes, of each pattern as soon as it has run."""
    for pattern in options.patterns:
        rows = []
        for agents in options.agents:
            one = Options(
                agents=agents,
                ranks=options.ranks,
                pattern=pattern,
                tensors=options.tensors,
                latency=options.latency / 1e3,
                bandwidth=options.bandwidth * 1e9 / 8,
                costs=Costs(link=_seconds(options.link_cost), message=_seconds(options.message_cost)),
                beats=not options.no_beats,
                timeout=TIMEOUT,
                profile=options.profile,
            )
            try:
                rows.append((one, simulated(one)))
            except RuntimeError as error:  # the other sizes may still run
                print(f"{agents} agents, {pattern!r}: {error}", file=sys.stderr)
        print(f"\n{tables(rows)}\n", flush=True)
        for one, phases in rows:
            for phase in phases:
                print(f"{one.agents} agents, {pattern!r}, {phase.name}\n{details(phase)}")
                if phase.profile:
                    print(f"\n  agent {one.profile}\n{phase.profile}")


def _seconds(milliseconds: list[float]) -> tuple[float, float]:
    loop, beside = milliseconds
    return loop / 1e3, beside / 1e3


def simulated(options: Options) -> list[Phase]:
    """The phases of one simulation, run in a process of its own, which has a memory of its own. RuntimeError."""
    with harness.private_host() as directory:
        url = harness.shared_redis()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_simulated, args=(theirs, os.getpid(), url, directory, options))
        process.start()
        theirs.close()
        try:
            found: list[Phase] | str = ours.recv()
        except EOFError:
            found = "its process was killed"
        finally:
            process.kill()
            process.join()
    if isinstance(found, str):
        raise RuntimeError(f"the simulation failed: {found}")
    return found


def _simulated(pipe: Connection, parent: int, url: str, directory: Path, options: Options) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    raise_descriptor_limit()
    try:
        pipe.send(fleet.measure(url, directory, options))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)  # thousands of tasks are left, and nobody needs their ends


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tensors", type=int, help="default: 100, with --simulate 10")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--agents", type=int, nargs="+", default=[4, 8, 16], help="of both sides together")
    parser.add_argument("--ranks", type=int, default=1, help="of each agent")
    parser.add_argument("--with", dest="patterns", nargs="+", choices=fleet.PATTERNS, default=["one", "all"])
    parser.add_argument("--latency", type=float, default=0.2, help="ms from one host to another")
    parser.add_argument("--bandwidth", type=float, default=10.0, help="Gbit/s of Redis's host")
    # simulation/link_cost.py measures both; the defaults are those of an EPYC's cores.
    ends = "ms of CPU at each end of a {}: on the agent's loop, and in ZeroMQ's threads"
    parser.add_argument("--link-cost", type=float, nargs=2, default=[0.3, 0.4], help=ends.format("new link"))
    parser.add_argument("--message-cost", type=float, nargs=2, default=[0.006, 0.003], help=ends.format("message"))
    parser.add_argument("--no-beats", action="store_true", help="do not simulate the beats of links")
    parser.add_argument("--profile", type=int, metavar="AGENT", help="by number; 0 serves source rank 0")
    options = parser.parse_args()
    options.tensors = options.tensors or (10 if options.simulate else 100)
    print(harness.machine())
    if options.simulate:
        print(
            f"\nper agent: the mean, and in brackets the largest; {options.tensors} tensors, {options.ranks} ranks an "
            f"agent, {options.latency:g} ms between hosts",
            flush=True,
        )
        simulate(options)
        return
    print(f"\nms of CPU per agent (Redis's commands per agent), {options.tensors} tensors\n")
    print("| agents | with | init_pair | register_tensors | first transfer | transfer |\n|---|---|--:|--:|--:|--:|")
    for name, dim in PATTERNS.items():
        for size in options.sizes:
            print(f"| {size} + {size} | {name} | {measure(size, dim, options)} |", flush=True)


if __name__ == "__main__":
    main()
