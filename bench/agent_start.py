"""What starting costs: importing etha beside importing torch, and an agent until it answers its first client.

    python bench/agent_start.py [--runs 5] [--before TREE]

CPU seconds are a process's own, user and system, as the kernel counts them. "first client" is a client's connection:
Hello, its revocation page, and the answer whether its memory is within reach. RSS is that of the agent when it has
answered a request for its status and has been idle for two seconds, and that of a process which has imported torch, zmq
and redis and does nothing. With ``--before`` another checkout takes turns with this one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
from footprint import Footprint

HERE = Path(__file__).resolve().parents[1]
TICK = os.sysconf("SC_CLK_TCK")
IDLE = 2.0

TORCH = "import time, torch; print(time.process_time())"
NAMES = """
import time, torch
began = time.process_time()
from etha import AsyncTensorBusClient, TensorBusClient, empty, redistribute, share_module
print(time.process_time() - began)
"""
BARE = "import sys, torch, zmq, redis; print('ready', flush=True); sys.stdin.read()"
#: Says what the agent has used when the connection is open, and waits until it has answered a request for its status.
CLIENT = f"""
import asyncio, os, sys, time
from pathlib import Path
from etha.client.connection import AgentConnection
from etha.bus.messages import GetStatus
from etha.config import Settings

def used(pid):
    fields = Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / {TICK}

async def main():
    settings = Settings.from_env()
    connection = await AgentConnection.open(
        settings, agent=None, device="cpu", redis_url=None, autostart=False, timeout=60.0, on_push=print
    )
    pid, first = connection.link.welcome.pid, used(connection.link.welcome.pid)
    began = time.monotonic()
    await connection.link.request(GetStatus(), timeout=60.0)
    print(first, used(pid), time.monotonic() - began, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await connection.close(5.0)

print("imported", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


def output(code: str, tree: Path) -> float:
    """The number that a fresh interpreter prints, which imports etha from ``tree``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(done.stdout)


def bare() -> float:
    """MiB of a process that has imported torch, zmq and redis."""
    with subprocess.Popen([sys.executable, "-c", BARE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return Footprint.of(process.pid).resident / harness.MIB


def agent(tree: Path) -> dict[str, float]:
    """One agent of ``tree`` and its first client."""
    with tempfile.TemporaryDirectory(prefix="etha-") as directory:
        environment = {**os.environ, "ETHA_RUNTIME_DIR": directory, "PYTHONPATH": str(tree)}
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            cwd="/",
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin is not None and client.stdout is not None
        client.stdout.readline()
        ours, theirs = os.pipe()
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "etha.agent", "--ready-fd", str(theirs)],
            env=environment,
            pass_fds=[theirs],
            stderr=subprocess.DEVNULL,
            cwd="/",
        ) as daemon:
            os.close(theirs)
            with os.fdopen(ours) as said:
                assert said.readline().strip() == "ready"
            ready = time.monotonic() - began
            client.stdin.write("go\n")
            client.stdin.flush()
            first, status, waited = map(float, client.stdout.readline().split())
            time.sleep(IDLE)
            resident = Footprint.of(daemon.pid).resident / harness.MIB
            client.communicate(timeout=60)
            daemon.send_signal(signal.SIGTERM)
        return {
            "seconds until workers can connect": ready,
            "agent's CPU s, first client": first,
            "agent's CPU s, first status": status,
            "seconds from the connection to the first status": waited,
            "agent's RSS, MiB": resident,
        }


def measure(tree: Path) -> dict[str, float]:
    """Everything once."""
    return {"CPU s of import etha's names after torch": output(NAMES, tree), **agent(tree)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns with this one")
    options = parser.parse_args()
    trees = {"before": options.before, "now": HERE} if options.before else {"now": HERE}
    with harness.private_host():
        print(harness.machine())
        found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        torch, plain = [], []
        for _ in range(options.runs):
            torch.append(output(TORCH, HERE))
            plain.append(bare())
            for name, tree in trees.items():
                found[name].append(measure(tree.resolve()))
    print(f"\nmedians of {options.runs}; import torch: {statistics.median(torch):.2f} s of CPU;", end=" ")
    print(f"a process with torch, zmq and redis: {statistics.median(plain):.0f} MiB\n")
    print(f"| | {' | '.join(trees)} |\n|---|{'---:|' * len(trees)}")
    for what in next(iter(found.values()))[0]:
        cells = [f"{statistics.median(run[what] for run in runs):.2f}" for runs in found.values()]
        print(f"| {what} | {' | '.join(cells)} |")
    shares = [
        statistics.median(run["agent's RSS, MiB"] for run in runs) / statistics.median(plain) for runs in found.values()
    ]
    print(f"| agent's RSS / that of the bare process | {' | '.join(f'{share:.2f}' for share in shares)} |")


if __name__ == "__main__":
    main()
