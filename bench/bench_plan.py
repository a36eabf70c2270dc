"""How near plans come to their bounds, and how fast they are made: bench_plan.py [--pairs 1,12] [--repeat N] [--rows]

The plans are those that agents execute (``build_agent_plan``), as ``etha plan`` shows them. For each pair of
bench/layouts: bounds in GB a host and a NIC, the busiest NIC out and in, the quality (busiest NIC over the bound; 1
is the best there can be) beside what a prototype without relays inside hosts reached, and the CPU milliseconds in
which one rank plans, as source and as target: from nothing, and its rows again. Two more processes with other hash
seeds plan everything, too; status 1 where a digest differs. --rows prints the rows of docs/planning.md's table instead.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time

import numpy as np
import torch
from pairs import PAIRS, Pair, paths

from etha.commands.planfile import plan_of, read_plan, read_sides
from etha.plan import PlanStats
from etha.plan.layouts import cells

#: The prototype's GB on the busiest NIC, out and in.
PROTOTYPE = {
    1: (1.004, 2.008), 2: (1.004, 2.008), 3: (17.64, 17.64), 4: (4.41, 8.82), 5: (9.08, 17.64), 6: (7.63, 7.63),
    7: (7.63, 7.63), 8: (3.75, 17.6), 9: (82.4, 84.0), 10: (172.1, 129.8), 11: (2.01, 2.68), 12: (167.76, 167.77),
    13: (15.4, 16.9), 14: (2.01, 2.01), 15: (3.51, 2.01),
}  # fmt: skip
GOAL = 1.03
RANK = 5


def milliseconds(pair: Pair, side: str, repeat: int) -> tuple[float, float]:
    """(build_plan and for_rank with empty caches, for_rank again), the best of ``repeat``."""
    cold, warm = [], []
    for _ in range(repeat):
        sides = read_sides(*paths(pair))  # layouts anew: they keep what was computed of them
        for cached in (cells.table, cells.joint, cells.overlay):
            cached.cache_clear()
        begin = time.process_time()
        plan = plan_of(*sides)
        plan.for_rank(side, RANK)
        done = time.process_time()
        plan.for_rank(side, RANK)
        cold.append((done - begin) * 1e3)
        warm.append((time.process_time() - done) * 1e3)
    return min(cold), min(warm)


def digests(numbers: list[int], seed: str) -> list[str]:
    """Digests of the pairs from a process of its own."""
    command = [sys.executable, __file__, "--digests", "--pairs", ",".join(map(str, numbers))]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def planned(s: PlanStats) -> list[str]:
    """What a plan determines: GB a host (in, out once, out directly), GB a NIC (bound, out, in), quality."""
    host = (s.bound_host_ingress, s.bound_host_egress_once, s.bound_host_egress_direct)
    nic = (s.bound_nic, s.max_nic_egress, s.max_nic_ingress)
    return [f"{b / 1e9:.2f}" for b in host] + [f"{b / 1e9:.3f}" for b in nic] + [f"{s.quality:.3f}"]


def line(pair: Pair, s: PlanStats, seconds: float, times: list[float]) -> str:
    before = max(PROTOTYPE[pair.number]) / (s.bound_nic / 1e9)
    *figures, quality = planned(s)
    cells = [f"{figure:>7}" for figure in figures]
    cells += [f"{quality:>6}{' ' if s.quality <= GOAL else '*'}", f"{before:9.3f}", f"{seconds:5.2f}"]
    return " | ".join([f"| {pair.number:2}", f"{pair.title:41}", *cells, *(f"{t:6.1f}" for t in times)]) + " |"


def table_line(pair: Pair, s: PlanStats, times: list[float]) -> str:
    """A row of docs/planning.md's table; ``times`` are those of ``line``."""
    cells = [str(pair.number), pair.title, *planned(s)[3:], *(f"{t:.1f}" for t in times[::2])]
    return f"| {' | '.join(cells)} |"


HEADS = (
    ("#", 2), ("pair", 41), ("in", 7), ("once", 7), ("direct", 7), ("bound", 7), ("out", 7), ("in", 7),
    ("quality", 7), ("prototype", 9), ("stats", 5), ("source", 6), ("again", 6), ("target", 6), ("again", 6),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default=",".join(str(p.number) for p in PAIRS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--digests", action="store_true", help="print the digests alone")
    parser.add_argument("--rows", action="store_true", help="print the rows of docs/planning.md's table")
    options = parser.parse_args()
    chosen = [p for p in PAIRS if str(p.number) in options.pairs.split(",")]
    if options.digests:
        print("\n".join(read_plan(*paths(pair)).digest() for pair in chosen))
        return
    cpu = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), "?")  # noqa: PTH123, SIM115
    print(f"machine  {platform.machine()}, {cpu}, {platform.system()} {platform.release()}")
    print(f"versions python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}")
    print(f"command  {' '.join([sys.executable.rsplit('/', 1)[-1], *sys.argv])}")
    print("GB a host: in, out once, out directly; GB a NIC: bound, out, in; stats in s; one rank in ms of CPU, best of "
          f"{options.repeat}; * above {GOAL}\n")  # fmt: skip
    if options.rows:
        for pair in chosen:
            times = [t for side in ("source", "target") for t in milliseconds(pair, side, options.repeat)]
            print(table_line(pair, read_plan(*paths(pair)).stats(), times), flush=True)
        return
    print("| " + " | ".join(f"{head:{width}}" for head, width in HEADS) + " |")
    print("|" + "|".join("-" * (width + 1) + ("-" if i == 1 else ":") for i, (_, width) in enumerate(HEADS)) + "|")
    found, above = [], 0
    for pair in chosen:
        plan = read_plan(*paths(pair))
        found.append(plan.digest())
        begin = time.perf_counter()
        s = plan.stats()
        seconds = time.perf_counter() - begin
        times = [t for side in ("source", "target") for t in milliseconds(pair, side, options.repeat)]
        above += s.quality > GOAL
        print(line(pair, s, seconds, times), flush=True)
    numbers = [p.number for p in chosen]
    others = [digests(numbers, seed) for seed in ("1", "4711")]
    equal = all(other == found for other in others)
    print(f"\n{len(chosen) - above} of {len(chosen)} pairs at {GOAL} or better; digests of three processes with "
          f"different hash seeds: {'equal' if equal else 'DIFFERENT'}")  # fmt: skip
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
