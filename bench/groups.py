"""Process groups: ProcessGroupEtha and ProcessGroupBabyGloo beside torch's own Gloo, in one run.

    python bench/groups.py [--save FILE] [--runs N] [--only PART ...]

Every member has one group of each kind at the same time and calls them in turns, so that all of them meet the same
machine. A row is the median of all calls of its kind; the goal is a ratio to Gloo's median in this run, or a time. Each
row is measured again with a busy Python thread inside every member, and with a busy process beside each member: only
the interpreter's lock differs between these two. As root with `ip`, two members also call each other over TCP between
two network namespaces, which are two hosts for Etha; Gloo uses the same link. bench/members.py measures what membership
adds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import machine
from torch._C._distributed_c10d import PrefixStore, TCPStore

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "etha.groups.host.etha_group"])
MIB = 1 << 20
#: Bytes of an allreduce of float32, and how often each kind is called in a turn.
SIZES = {4: 200, 4096: 200, MIB: 60, 64 * MIB: 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a member is: its rank, how many there are, where their store is, and a pipe to the benchmark."""

    rank: int
    size: int
    port: int
    pipe: Connection
    #: The network namespace in which it lives; the own one if empty. The store is at `address` then.
    namespace: str = ""
    address: str = "127.0.0.1"

    def store(self, prefix: str) -> Any:
        return PrefixStore(prefix, TCPStore(self.address, self.port, is_master=False, wait_for_workers=False))

    def gloo(self) -> Any:
        if not self.namespace:
            return dist.ProcessGroupGloo(self.store("gloo"), self.rank, self.size)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="bench0")]
        return dist.ProcessGroupGloo(self.store("gloo"), self.rank, self.size, options)

    def group(self, name: str, kind: Any = None, **options: Any) -> Any:
        from etha.groups.host.etha_group import ProcessGroupEtha

        group = (kind or ProcessGroupEtha)(timeout=60, **options)
        group.configure(f"{self.address}:{self.port}/{name}", f"replica {self.rank}", self.rank, self.size)
        return group


def _synchronous() -> Any:
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    return opts


def _spin(stop: threading.Event) -> None:
    n = 0
    while not stop.is_set():
        for _ in range(10_000):
            n += 1


def calls(place: Place, runs: int, busy: bool, baby: bool) -> None:
    """Medians in seconds: {bytes: {kind: median}}."""
    import etha

    torch.set_num_threads(1)
    group = place.group("etha")
    gloo = place.gloo()
    kinds: dict[str, tuple[Any, bool]] = {"Gloo": (gloo, False), "etha": (group, False), "etha.empty": (group, True)}
    if baby:
        from etha.groups import ProcessGroupBabyGloo

        child = place.group("baby", ProcessGroupBabyGloo)
        kinds |= {"baby": (child, False), "baby, fresh": (child, False), "baby, etha.empty": (child, True)}
    stop = threading.Event()
    thread = threading.Thread(target=_spin, args=(stop,), daemon=True)
    if busy:
        thread.start()
    found: dict[int, dict[str, list[float]]] = {}
    for nbytes, often in SIZES.items():
        plain = torch.ones(nbytes // 4)
        mapped = etha.empty((nbytes // 4,))
        mapped.fill_(1)
        times = found[nbytes] = {name: [] for name in kinds}
        for turn in range(runs + 1):
            for name, (each, in_place) in kinds.items():
                tensors = [mapped if in_place else plain] * often
                if name.endswith("fresh"):  # tensors that nobody has seen, made before the members meet
                    tensors = [torch.ones(nbytes // 4) for _ in range(often)]
                group.barrier().wait()
                for tensor in tensors:
                    start = time.perf_counter()
                    each.allreduce([tensor], _synchronous()).wait()
                    if turn:  # the first turn touches pages
                        times[name].append(time.perf_counter() - start)
    stop.set()
    if busy:
        thread.join()
    place.pipe.send({n: {name: statistics.median(t) for name, t in times.items()} for n, times in found.items()})
    group.barrier().wait()


def orders(place: Place, runs: int) -> None:
    """Of 64 MiB between hosts, by kind: the median in seconds, and what the first host has sent for one call."""
    torch.set_num_threads(1)
    kinds = {"Gloo": place.gloo()} | {order: place.group(order, order=order) for order in ("host", "rank")}
    tensor = torch.ones(16 * MIB)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    sent: dict[str, list[int]] = {name: [] for name in kinds}
    for turn in range(7 * runs + 1):
        for name, each in kinds.items():
            kinds["host"].barrier().wait()
            before, start = _sent(), time.perf_counter()
            each.allreduce([tensor], _synchronous()).wait()
            kinds["host"].barrier().wait()  # of all: the host has sent everything
            if turn:
                times[name].append(time.perf_counter() - start)
                sent[name].append(_sent() - before)
    place.pipe.send({name: (statistics.median(times[name]), statistics.median(sent[name])) for name in kinds})
    kinds["host"].barrier().wait()


def _sent() -> int:
    """Bytes that the link of this namespace has sent so far."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if "bench0:" in line).split()[9])


def trains(place: Place, runs: int) -> None:
    """Medians in seconds of a step of DDP over 50 M parameters, by kind of group: forward, backward and SGD."""
    from etha.groups import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=place.store("ddp"), rank=place.rank, world_size=place.size)
    steps = {}
    for name, group in {"Gloo": dist.group.WORLD, "etha": place.group("etha")}.items():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(12)))
        plain = torch.nn.parallel.DistributedDataParallel
        model = plain(net) if name == "Gloo" else DistributedDataParallel(net, process_group=group)
        steps[name] = (model, torch.optim.SGD(model.parameters(), 1e-3))
    batch = torch.randn(8, 2048)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(3 * runs + 2):
        for name, (model, optimizer) in steps.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if turn > 1:  # plain DDP makes its buckets again after its first step
                times[name].append(time.perf_counter() - start)
    place.pipe.send({name: statistics.median(t) for name, t in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def configures(place: Place, runs: int, baby: bool) -> None:
    """The median in seconds of a configure; the first one, which starts what serves all later ones, is left out."""
    from etha.groups import ProcessGroupBabyGloo

    meets = place.group("meets")
    group = place.group("c", ProcessGroupBabyGloo) if baby else place.group("c")
    times = []
    for turn in range(10 * runs):
        meets.barrier().wait()
        start = time.perf_counter()
        group.configure(f"127.0.0.1:{place.port}/c{turn}", "r", place.rank, place.size)
        times.append(time.perf_counter() - start)
    place.pipe.send(statistics.median(times))
    meets.barrier().wait()


def loses(place: Place) -> None:
    """When the error of a killed member was seen, on CLOCK_MONOTONIC."""
    group = place.group("k")
    group.barrier().wait()
    place.pipe.send(os.getpid())
    if place.rank:
        place.pipe.recv()
    try:
        group.allreduce([torch.ones(3)], _synchronous()).wait()
    except RuntimeError:
        place.pipe.send(time.monotonic())


def copies(nbytes: int, runs: int) -> float:
    """Seconds to copy so many bytes on one thread: the machine's own pace."""
    source, target = torch.ones(nbytes // 4), torch.ones(nbytes // 4)
    times = []
    for _ in range(3 * runs):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def run(size: int, body: Callable[..., None], *args: Any, beside: int = 0) -> list[Any]:
    """What each of ``size`` members sent; ``beside``: busy processes meanwhile."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [CONTEXT.Process(target=_spin_process, daemon=True) for _ in range(beside)]
    members, pipes = [], []
    for rank in range(size):
        here, there = CONTEXT.Pipe()
        place = Place(rank=rank, size=size, port=store.port, pipe=there)
        members.append(CONTEXT.Process(target=body, args=(place, *args), daemon=True))
        pipes.append(here)
    for process in [*others, *members]:
        process.start()
    found = [pipe.recv() for pipe in pipes]
    for process in members:
        process.join()
    for process in others:
        process.kill()
        process.join()
    return found


def enter(namespace: str) -> None:
    """Go to a network namespace: this thread and what it starts."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    finally:
        os.close(handle)


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a link with the addresses 10.219.1.1 and 10.219.1.2."""
    names = (f"bench-{os.getpid()}-1", f"bench-{os.getpid()}-2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "bench0", "type", "veth", "peer", "name", "bench0", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.219.1.{number}/24", "dev", "bench0")
            ip("-n", name, "link", "set", "bench0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _in_namespace(place: Place, body: Callable[..., None], *args: Any) -> None:
    enter(place.namespace)
    body(place, *args)


def run_between(body: Callable[..., None], *args: Any, beside: int = 0, size: int = 2) -> list[Any]:
    """As `run`, with half of the members in each of two namespaces."""
    stores: list[Any] = []
    with namespaces() as names:

        def serve() -> None:
            enter(names[0])
            stores.append(TCPStore("10.219.1.1", 0, is_master=True, wait_for_workers=False))

        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
        others = [CONTEXT.Process(target=_spin_process, daemon=True) for _ in range(beside)]
        members, pipes = [], []
        for rank in range(size):
            here, there = CONTEXT.Pipe()
            name = names[rank * 2 // size]
            place = Place(rank=rank, size=size, port=stores[0].port, pipe=there, namespace=name, address="10.219.1.1")
            members.append(CONTEXT.Process(target=_in_namespace, args=(place, body, *args), daemon=True))
            pipes.append(here)
        for process in [*others, *members]:
            process.start()
        found = [pipe.recv() for pipe in pipes]
        for process in members:
            process.join()
        for process in others:
            process.kill()
            process.join()
        stores.clear()
    return found


def _spin_process() -> None:
    _spin(threading.Event())


def kill_to_error() -> float:
    """Seconds from SIGKILL of one of two members until the other one's call has its error."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, members = [], []
    for rank in range(2):
        here, there = CONTEXT.Pipe()
        place = Place(rank=rank, size=2, port=store.port, pipe=there)
        members.append(CONTEXT.Process(target=loses, args=(place,), daemon=True))
        members[-1].start()
        pipes.append(here)
    pids = [pipe.recv() for pipe in pipes]
    start = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    seen = float(pipes[0].recv())
    for process in members:
        process.join()
    return seen - start


def table(title: str, found: list[dict[int, dict[str, float]]]) -> list[str]:
    """One row a size, of rank 0; times in ms, and their ratio to Gloo's."""
    kinds = list(next(iter(found[0].values())))
    lines = [f"### {title}", "", "| bytes | " + " | ".join(kinds) + " |", "|---:|" + "---:|" * len(kinds)]
    for nbytes, times in found[0].items():
        cells = [f"{times[kind] * 1e3:.3f} ({times[kind] / times['Gloo']:.2f})" for kind in kinds]
        lines.append(f"| {nbytes} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def part_calls(runs: int) -> list[str]:
    return table("2 members", run(2, calls, runs, False, True))


def part_busy(runs: int) -> list[str]:
    return [
        *table("2 members, a busy Python thread inside each", run(2, calls, runs, True, True)),
        *table("2 members, a busy process beside each", run(2, calls, runs, False, True, beside=2)),
    ]


def part_four(runs: int) -> list[str]:
    return table("4 members", run(4, calls, runs, False, False))


def part_ddp(runs: int) -> list[str]:
    steps = run(2, trains, runs)[0]
    text = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in steps.items())
    ratio = steps["etha"] / steps["Gloo"]
    return [f"a step of DDP, 50 M parameters in float32, 2 members: {text} ({ratio:.2f})", ""]


def part_between(runs: int) -> list[str]:
    title = "2 members between namespaces"
    return [
        *table(f"{title}, over TCP", run_between(calls, runs, False, False)),
        *table(f"{title}, a busy Python thread inside each", run_between(calls, runs, True, False)),
        *table(f"{title}, a busy process beside each", run_between(calls, runs, False, False, beside=2)),
    ]


def part_orders(runs: int) -> list[str]:
    title = "### 2 members in each of two namespaces, 64 MiB"
    lines = [title, "", "| | ms | MiB that a host sends |", "|---|---:|---:|"]
    for name, (seconds, sent) in run_between(orders, runs, size=4)[0].items():
        lines.append(f"| {name} | {seconds * 1e3:.1f} | {sent / MIB:.1f} |")
    return [*lines, ""]


def part_configure(runs: int) -> list[str]:
    lines = [f"configure, {size} members: {max(run(size, configures, runs, False)) * 1e3:.1f} ms" for size in (2, 8)]
    return [*lines, f"configure, 2 members, baby: {max(run(2, configures, runs, True)) * 1e3:.1f} ms"]


def part_kill(runs: int) -> list[str]:
    times = [kill_to_error() for _ in range(3 * runs)]
    return [
        f"SIGKILL until the survivor's error: {statistics.median(times) * 1e3:.1f} ms, at most {max(times) * 1e3:.1f}",
        "",
    ]


PARTS: dict[str, Callable[[int], list[str]]] = {
    "calls": part_calls,
    "busy": part_busy,
    "four": part_four,
    "ddp": part_ddp,
    "between": part_between,
    "orders": part_orders,
    "configure": part_configure,
    "kill": part_kill,
}
#: These need root and ``ip``.
NAMESPACES = ("between", "orders")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    options = parser.parse_args()
    title = "# Process groups: allreduce of float32, ms, in brackets the ratio to Gloo's time of the same run"
    out = [title, "", machine(), ""]
    out += [f"memcpy of 64 MiB on one thread: {copies(64 * MIB, options.runs) * 1e3:.1f} ms", ""]
    for name in options.only:
        if name in NAMESPACES and (os.geteuid() or not shutil.which("ip")):
            out += [f"{name}: left out, because it needs root and ip", ""]
        else:
            out += PARTS[name](options.runs)
    text = "\n".join(out)
    print(text)
    if options.save:
        options.save.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
