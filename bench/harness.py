"""What the benchmarks share: processes with roles, a private runtime directory, the machine's own limits.

Every process is forked from the one that has torch loaded; agents and servers that they start end with the run.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import etha
from etha.config import Settings
from etha.demo.launch import stop
from etha.demo.process import adopting, die_with_parent
from etha.store.embedded import ensure_embedded

MIB = 1 << 20
#: Seconds that any one benchmark process may be silent.
SILENCE = 900.0


def machine() -> str:
    """Machine, versions and command, as every benchmark prints first."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?"
    )
    memory = int(next(line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))) >> 20
    return "\n".join(
        [
            f"machine   {cpu}, {len(os.sched_getaffinity(0))} cores, {memory} GiB, Linux {platform.release()}",
            f"versions  etha {etha.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            f"command   python {' '.join(sys.argv)}",
            f"load      {os.getloadavg()[0]:.2f} at the start",
        ]
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


@contextmanager
def private_host() -> Iterator[Path]:
    """A runtime directory of this run's own; its agent and embedded server are ended at the end."""
    resource_tracker.ensure_running()  # before `adopting`: it ends with this process only
    with tempfile.TemporaryDirectory(prefix="etha-") as directory, adopting() as before:
        for name in [name for name in os.environ if name.startswith("ETHA_")]:
            del os.environ[name]
        os.environ["ETHA_RUNTIME_DIR"] = f"{directory}/run"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            yield Path(directory)
        finally:
            stop(before)


#: How two sides can lie: on one agent, on two agents of one host, on two hosts.
WAYS = ("local", "host", "tcp")


def shared_redis() -> str:
    """The URL of a Redis that agents with other runtime directories may use, too; ends with the private host."""
    return asyncio.run(ensure_embedded(Settings.from_env(), timeout=30.0, grace=SILENCE))


def place(directory: Path, redis: str, way: str, name: str) -> dict[str, str]:
    """Etha's variables for the workers of the side at ``name``, as ``way`` says; for ``settle``."""
    agent = "one" if way == "local" else name
    return {
        "ETHA_REDIS_URL": redis,
        "ETHA_RUNTIME_DIR": str(directory / f"{way}-{agent}"),
        "ETHA_HOST_ID": f"bench-host-{name}" if way == "tcp" else "bench-host",
    }


def settle(environment: dict[str, str]) -> None:
    """Be a worker at that place; before its first client."""
    os.environ.update(environment)


def settle_pages(seconds: float = 60.0) -> None:
    """Wait until the client has asked the kernel for huge pages under all that was registered, as it does in the time
    between the transfers of a job."""
    for thread in threading.enumerate():
        if thread.name == "etha-huge-pages":
            thread.join(seconds)


def loopback_bytes() -> int:
    """What this machine has sent over its loopback so far, headers included."""
    line = next(line for line in _lines("/proc/net/dev") if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


Role = Callable[..., Any]


def run_ranks(roles: Sequence[tuple[Role, tuple[Any, ...]]]) -> list[Any]:
    """Run each role in a process of its own; their results in order. Any failure ends all and is raised."""
    context = multiprocessing.get_context("fork")
    parent, ranks, pipes = os.getpid(), [], []
    for role, args in roles:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, parent, role, args))
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)
    try:
        return _collect(pipes)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _rank(pipe: Connection, parent: int, role: Role, args: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    try:
        pipe.send((True, role(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for i, pipe in enumerate(pipes) if i not in results], timeout=SILENCE)
        if not ready:
            raise TimeoutError(f"no benchmark process answered for {SILENCE:.0f} s")
        for pipe in ready:
            good, value = pipe.recv()
            if not good:
                raise RuntimeError(f"a benchmark process failed:\n{value}")
            results[pipes.index(pipe)] = value
    return [results[i] for i in range(len(pipes))]


def copy_limit(nbytes: int, threads: int, runs: int) -> float:
    """Median GB/s of one ``memmove`` of ``nbytes`` between two mapped, touched pieces of memory."""
    with mmap.mmap(-1, nbytes) as source, mmap.mmap(-1, nbytes) as target:
        pages = [(ctypes.c_char * nbytes).from_buffer(memory) for memory in (source, target)]
        addresses = [ctypes.addressof(page) for page in pages]
        for address in addresses:
            ctypes.memset(address, 1, nbytes)
        part = -(-nbytes // threads)

        def move(i: int) -> None:
            ctypes.memmove(addresses[1] + i * part, addresses[0] + i * part, min(part, nbytes - i * part))

        with ThreadPoolExecutor(threads) as pool:
            seconds = []
            for _ in range(runs + 1):
                start = time.perf_counter()
                list(pool.map(move, range(threads)))
                seconds.append(time.perf_counter() - start)
        del pages
    return nbytes / statistics.median(seconds[1:]) / 1e9


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a part ``q`` of ``values`` lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
