"""How near plans come to their bounds, and how fast they are made: bench_plan.py [--pairs 1,12] [--repeat N]

For each pair of bench/layouts: bounds in GB a host and a NIC, the busiest NIC out and in, the quality (busiest NIC over
the bound; 1 is the best there can be) beside what a prototype without relays inside hosts reached, and the milliseconds
in which one rank plans, as source and as target: from nothing, and its rows again. Two more processes with other
hash seeds plan everything, too; status 1 where a digest differs.
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

from etha.plan import Plan, PlanStats, Side, build_plan, cells
from etha.planfile import read_sides

#: The prototype's GB on the busiest NIC, out and in.
PROTOTYPE = {
    1: (1.004, 2.008), 2: (1.004, 2.008), 3: (17.64, 17.64), 4: (4.41, 8.82), 5: (9.08, 17.64), 6: (7.63, 7.63),
    7: (7.63, 7.63), 8: (3.75, 17.6), 9: (82.4, 84.0), 10: (172.1, 129.8), 11: (2.01, 2.68), 12: (167.76, 167.77),
    13: (15.4, 16.9), 14: (2.01, 2.01), 15: (3.51, 2.01),
}  # fmt: skip
GOAL = 1.03
RANK = 5


def make(sides: tuple[Side, Side]) -> Plan:
    a, b = sides
    hosts = {"source_hosts": a.hosts, "target_hosts": b.hosts}
    return build_plan(a.specs, b.specs, **hosts, source_agents=a.agents, target_agents=b.agents)


def milliseconds(pair: Pair, side: str, repeat: int) -> tuple[float, float]:
    """(build_plan and for_rank with empty caches, for_rank again), the best of ``repeat``."""
    cold, warm = [], []
    for _ in range(repeat):
        sides = read_sides(*paths(pair))  # layouts anew: they keep what was computed of them
        for cached in (cells.table, cells.joint, cells.overlay):
            cached.cache_clear()
        begin = time.perf_counter()
        plan = make(sides)
        plan.for_rank(side, RANK)
        done = time.perf_counter()
        plan.for_rank(side, RANK)
        cold.append((done - begin) * 1e3)
        warm.append((time.perf_counter() - done) * 1e3)
    return min(cold), min(warm)


def digests(numbers: list[int], seed: str) -> list[str]:
    """Digests of the pairs from a process of its own."""
    command = [sys.executable, __file__, "--digests", "--pairs", ",".join(map(str, numbers))]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def line(pair: Pair, s: PlanStats, seconds: float, times: list[float]) -> str:
    host = (s.bound_host_ingress, s.bound_host_egress_once, s.bound_host_egress_direct)
    nic = (s.bound_nic, s.max_nic_egress, s.max_nic_ingress)
    bound = s.bound_nic / 1e9
    before = max(PROTOTYPE[pair.number]) / bound
    figures = [f"{b / 1e9:8.2f}" for b in host] + [f"{b / 1e9:8.3f}" for b in nic]
    quality = f"{s.quality:8.3f}{' ' if s.quality <= GOAL else '*'} {before:9.3f}"
    return " ".join(
        [f"{pair.number:2} {pair.title:40}", *figures, quality, f"{seconds:6.2f}", *(f"{t:7.1f}" for t in times)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default=",".join(str(p.number) for p in PAIRS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--digests", action="store_true", help="print the digests alone")
    options = parser.parse_args()
    chosen = [p for p in PAIRS if str(p.number) in options.pairs.split(",")]
    if options.digests:
        print("\n".join(make(read_sides(*paths(pair))).digest() for pair in chosen))
        return
    cpu = next((x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")), "?")  # noqa: PTH123, SIM115
    print(f"machine  {platform.machine()}, {cpu}, {platform.system()} {platform.release()}")
    print(f"versions python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}")
    print(f"command  {' '.join([sys.executable.rsplit('/', 1)[-1], *sys.argv])}")
    print("GB a host: in, out once, out directly; GB a NIC: bound, out, in; stats in s; one rank in ms, best of "
          f"{options.repeat}; * above {GOAL}")  # fmt: skip
    heads = [f"{h:>8}" for h in ("in", "once", "direct", "bound", "out", "in", "quality")] + [f"{'prototype':>10}"]
    heads += [f"{'stats':>6}", *(f"{h:>7}" for h in ("source", "again", "target", "again"))]
    print(f"{'':43}", *heads)
    found, above = [], 0
    for pair in chosen:
        plan = make(read_sides(*paths(pair)))
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
    print(f"{len(chosen) - above} of {len(chosen)} pairs at {GOAL} or better; digests of three processes with "
          f"different hash seeds: {'equal' if equal else 'DIFFERENT'}")  # fmt: skip
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
