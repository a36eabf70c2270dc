"""What records, files, metrics and events cost a 4 KiB transfer: the same transfers by an agent with and one without.

    python bench/observability.py [--runs 200] [--blocks 20] [--before TREE]

Each worker holds two clients, one of each agent, and takes turns: a block of transfers with one, a block with the
other, so that whatever else the machine does meets both. "off" is an agent that makes no records; with ``--before`` it
is that of another checkout, which also lacks phases, logs and whatever else came since.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import harness
import torch
from torch.distributed.tensor import Replicate

import etha

TIMEOUT = 60.0
MODES = ("off", "on")


#: An agent without records, as a program: it imports no more than an agent does.
OFF = """
import sys
from etha.agent import __main__ as program
from etha.agent.services import transfers
from etha.observe.recorder import Recorder
transfers.settled_transfer = lambda *args: None
Recorder.add = lambda self, record: None
sys.exit(program.main(sys.argv[1:]))
"""


@contextmanager
def agent(mode: str, directory: Path, before: str | None) -> Iterator[tuple[str, int]]:
    """The runtime directory of a running agent, and its pid."""
    runtime = f"{directory}/{mode}"
    environment = {**os.environ, "ETHA_RUNTIME_DIR": runtime}
    reader, writer = os.pipe()
    program, cwd = ["-m", "etha.agent"], None
    if mode == "on":
        environment["ETHA_METRICS"] = "127.0.0.1:0"
    elif before is None:
        program = ["-c", OFF]
    else:
        environment["PYTHONPATH"] = cwd = before
    command = [sys.executable, *program, "--ready-fd", str(writer)]
    process = subprocess.Popen(command, env=environment, pass_fds=[writer], cwd=cwd, stderr=subprocess.DEVNULL)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            assert lines.read().strip() == "ready", f"the agent {mode!r} does not start"
        yield runtime, process.pid
    finally:
        process.terminate()
        process.wait(TIMEOUT)


def cpu_seconds(pid: int) -> float:
    """Seconds for which the threads of a process that live have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def worker(
    side: str, runtimes: dict[str, tuple[str, int]], runs: int, blocks: int, barrier: Barrier
) -> dict[str, list[tuple[float, float]]]:
    """Median seconds of a transfer, and the agent's seconds of CPU for it, in each block by mode."""
    other = {"source": "target", "target": "source"}[side]
    verb = "send" if side == "source" else "recv"
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in runtimes}
    with ExitStack() as stack:
        batches = {}
        for mode, (runtime, _) in runtimes.items():
            os.environ["ETHA_RUNTIME_DIR"] = runtime
            client = stack.enter_context(etha.TensorBusClient(device="cpu", timeout=TIMEOUT, autostart=False))
            client.init_pair(
                "bench", side, other, expected_world_size=1, rank=0, device_mesh=(1,), placements=[Replicate()]
            )
            batches[mode] = client.register_tensors("b", {"w": torch.ones(1024)}, pair_name="bench")
        for block in range(-1, blocks):
            for mode in MODES if block % 2 else MODES[::-1]:
                barrier.wait(TIMEOUT)
                seconds, used = [], cpu_seconds(runtimes[mode][1])
                for _ in range(runs):
                    start = time.perf_counter()
                    batches[mode].transfer(verb)
                    seconds.append(time.perf_counter() - start)
                if block >= 0:
                    used = (cpu_seconds(runtimes[mode][1]) - used) / runs
                    found[mode].append((harness.quantile(seconds, 0.5), used))
        barrier.wait(TIMEOUT)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--before", help="another checkout, whose agent is the one without")
    args = parser.parse_args()
    print(harness.machine())
    with harness.private_host() as directory, ExitStack() as stack:
        runtimes = {mode: stack.enter_context(agent(mode, directory, args.before)) for mode in MODES}
        barrier = get_context("fork").Barrier(2)
        roles = [(worker, (side, runtimes, args.runs, args.blocks, barrier)) for side in ("source", "target")]
        found = harness.run_ranks(roles)[1]
    print(f"\nmedians of {args.blocks} blocks of {args.runs} transfers of 4 KiB, microseconds")
    for what, at in (("a transfer at its receiver", 0), ("the agent's CPU for it", 1)):
        off, on = ([block[at] for block in found[mode]] for mode in MODES)
        ratios = [b / a for a, b in zip(off, on, strict=True)]
        low, middle, high = (100 * (harness.quantile(ratios, q) - 1) for q in (0.25, 0.5, 0.75))
        medians = [harness.quantile(values, 0.5) * 1e6 for values in (off, on)]
        print(
            f"{what:28} off {medians[0]:6.1f}  on {medians[1]:6.1f}  "
            f"costs {middle:+.1f} % (quartiles {low:+.1f} % and {high:+.1f} %)"
        )


if __name__ == "__main__":
    main()
