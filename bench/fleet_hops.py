"""A real fleet: one publisher, up to R subscribers of one rank, an agent each on a host of its own with a paced NIC.

T is the time of one hop alone: R = 1. All versions are whole (ETHA_DIFFERENCES=never unless it is set), and every
element of every version is compared with what was put. Besides publications, the same processes move the same bytes as
R pairs, all at once, and by Gloo's broadcast, over the same NICs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import paced_hosts
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate

import etha

TENSORS = 8
#: Intervals between puts are in T; the measured one.
INTERVAL = 0.3
#: Seconds that a host may wait for the others.
PATIENCE = 600.0
_PORT = 29400


@dataclass
class Host:
    """One host of the fleet: number 0 is the publisher's. ``tensors`` are int16, and a version adds its number."""

    number: int
    options: argparse.Namespace
    directory: Path
    barrier: Any
    client: etha.AsyncTensorBusClient
    base: torch.Tensor = field(init=False)
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        count = self.options.mib * harness.MIB // 2 // TENSORS
        self.base = torch.randint(
            -30000, 30000, (count,), dtype=torch.int16, generator=torch.Generator().manual_seed(1)
        )
        self.tensors = {f"w{i}": etha.empty(count, dtype=torch.int16) for i in range(TENSORS)}
        self.fill(0)

    def fill(self, version: int) -> None:
        """The tensors hold a version."""
        for i, tensor in enumerate(self.tensors.values()):
            torch.add(self.base, version * TENSORS + i, out=tensor)

    def check(self, version: int) -> None:
        """AssertionError unless they do."""
        for i, tensor in enumerate(self.tensors.values()):
            assert torch.equal(tensor, self.base + (version * TENSORS + i)), f"version {version} is not what was put"

    async def meet(self) -> None:
        """All hosts are here."""
        await asyncio.to_thread(self.barrier.wait, PATIENCE)

    def layout(self) -> dict[str, Any]:
        """Arguments by which both sides hold all elements on one rank."""
        placements = {name: [Replicate()] for name in self.tensors}
        return {"rank": 0, "expected_world_size": 1, "device_mesh": (1,), "placements": placements}

    async def publish(self, name: str) -> etha.AsyncPublication:
        return await self.client.publish(name, self.tensors, fan_out=self.options.fan_out, **self.layout())

    async def subscribe(self, name: str) -> etha.AsyncSubscription:
        side = f"replica-{self.number}"
        return await self.client.subscribe(name, self.tensors, subscriber=side, atomic=True, **self.layout())


#: What a host has measured in a phase. All clocks are this machine's monotonic one.
Found = dict[str, Any]
Phase = Callable[[Host, int], Awaitable[Found]]


async def spread(host: Host, count: int) -> Found:
    """Versions one after the other, each once all hold the one before."""
    found: Found = {"put": [], "held": [], "sent": [], "source": []}
    name, me = f"spread-{count}", 0 < host.number <= count
    opened = await host.publish(name) if host.number == 0 else None
    await host.meet()
    subscription = await host.subscribe(name) if me else None
    for version in range(1, host.options.versions + 2):
        await host.meet()
        if opened is not None:
            host.fill(version)
            before = paced_hosts.sent()
            await opened.put(version)
            found["put"].append(time.monotonic())
        elif subscription is not None:
            update = await subscription.next()
            found["held"].append(time.monotonic())
            found["source"].append(update.source)
            host.check(version)
        await host.meet()
        if opened is not None:
            found["sent"].append(paced_hosts.sent() - before)
    for one in (subscription, opened):
        if one is not None:
            await one.close()
    return found


async def follow(host: Host, count: int) -> Found:
    """Puts at an interval with nobody and then with all; a join in the middle; how long each lags."""
    seconds: Found = {"alone": [], "beside": [], "announced": {}, "held": [], "join": None}
    name, interval = "follow", INTERVAL * host.options.mib * harness.MIB / host.options.rate
    opened = await host.publish(name) if host.number == 0 else None
    subscription = None
    for phase in ("alone", "beside"):
        await host.meet()
        if phase == "beside" and 0 < host.number < count:
            subscription = await host.subscribe(name)
        await host.meet()
        first, last = (1, host.options.puts) if phase == "alone" else (host.options.puts + 1, 2 * host.options.puts)
        if opened is not None:
            begun = time.monotonic()
            for version in range(first, last + 1):
                host.fill(version)
                await asyncio.sleep(max(0.0, begun + (version - first) * interval - time.monotonic()))
                before = time.monotonic()
                await opened.put(version)
                seconds["announced"][version] = after = time.monotonic()
                seconds[phase].append(after - before)
        elif phase == "beside" and host.number == count:
            await asyncio.sleep(interval * host.options.puts / 2)
            before = time.monotonic()
            subscription = await host.subscribe(name)
            update = await subscription.next()
            seconds["join"] = time.monotonic() - before
            host.check(int(update.version))
            await _until(host, subscription, last, seconds["held"])
        elif subscription is not None:
            await _until(host, subscription, last, seconds["held"])
    await host.meet()
    for one in (subscription, opened):
        if one is not None:
            await one.close()
    return seconds


async def _until(host: Host, subscription: etha.AsyncSubscription, last: int, held: list[tuple[int, float]]) -> None:
    """Receive versions until the last one, and note when."""
    while subscription.version != last:
        update = await subscription.next()
        held.append((int(update.version), time.monotonic()))
        host.check(int(update.version))


async def pairs(host: Host, count: int) -> Found:
    """As many pairs as there are receivers; the sender sends to all at once."""
    found: Found = {"put": [], "held": []}
    names = [f"pair-{count}-{number}" for number in range(1, count + 1)]
    mine = names if host.number == 0 else names[host.number - 1 : host.number]
    batches = []
    for name in mine:
        sides = ("trainer", "replica") if host.number == 0 else ("replica", "trainer")
        mesh = {"rank": 0, "device_mesh": (1,), "placements": [Replicate()]}
        await host.client.init_pair(name, *sides, 1, **mesh)  # type: ignore[arg-type]
        batches.append(await host.client.register_tensors(name, host.tensors, pair_name=name, atomic=True))
    for version in range(1, host.options.versions + 2):
        await host.meet()
        if host.number == 0:
            host.fill(version)
            found["put"].append(time.monotonic())
            await asyncio.gather(*(batch.transfer("send", version=version) for batch in batches))
        elif batches:
            await batches[0].transfer("recv")
            found["held"].append(time.monotonic())
            host.check(version)
        await host.meet()
    for batch in batches:
        await batch.close()
    return found


async def broadcast(host: Host, count: int) -> Found:
    """Gloo's broadcast of one flat tensor."""
    found: Found = {"put": [], "held": []}
    await host.meet()
    if host.number <= count:
        await asyncio.to_thread(_broadcast, host, count, found)
    await host.meet()
    return found


def _broadcast(host: Host, count: int, found: Found) -> None:
    address, port = paced_hosts.address(0), _PORT + count
    store = dist.TCPStore(address, port, count + 1, host.number == 0, timedelta(seconds=PATIENCE))
    group = dist.ProcessGroupGloo(store, host.number, count + 1, timedelta(seconds=PATIENCE))
    flat = torch.empty(sum(tensor.numel() for tensor in host.tensors.values()), dtype=torch.int16)
    for version in range(1, host.options.versions + 2):
        flat.fill_(version if host.number == 0 else 0)
        group.barrier().wait()
        begun = time.monotonic()
        # Gloo has no int16.
        group.broadcast(flat.view(torch.int32), 0).wait()
        found["put" if host.number == 0 else "held"].append(begun if host.number == 0 else time.monotonic())
        assert bool((flat == version).all())
        group.barrier().wait()
    del group, store


async def _host(number: int, options: argparse.Namespace, directory: Path, redis: str, barrier: Any) -> list[Found]:
    counts, most = options.counts, max(options.counts)
    phases: list[tuple[Phase, int]] = [(spread, count) for count in counts]
    phases += [(follow, most)]
    phases += [(way, count) for way in (pairs, broadcast) for count in counts]
    place = harness.place(directory, redis, "tcp", str(number))
    place["ETHA_LISTEN"] = f"{paced_hosts.address(number)}:0"
    place["ETHA_DIFFERENCES"] = options.differences
    place["ETHA_PASS_ON"] = options.pass_on
    place["GLOO_SOCKET_IFNAME"] = paced_hosts.NIC
    harness.settle(place)
    found = []
    async with etha.AsyncTensorBusClient(timeout=PATIENCE) as client:
        host = Host(number, options, directory, barrier, client)
        for phase, count in phases:
            found.append(await phase(host, count))
            await host.meet()
    return found


def go_first(first: bool) -> None:
    """What this process starts from now on, itself included, has a core whenever it wants one, before all others.

    As if it had a machine of its own: the other hosts of this benchmark share its cores, those of a real fleet do not.
    """
    policy = os.SCHED_RR if first else os.SCHED_OTHER
    try:
        os.sched_setscheduler(0, policy, os.sched_param(1 if first else 0))
    except PermissionError as error:
        raise SystemExit("--publisher-first needs root, or CAP_SYS_NICE") from error


def run(number: int, options: argparse.Namespace, directory: Path, redis: str, barrier: Any) -> list[Found]:
    """The process of one host."""
    paced_hosts.enter(number, options.rate)
    go_first(options.publisher_first and number == 0)
    return asyncio.run(_host(number, options, directory, redis, barrier))


def reading(directory: Path, mib: int) -> float:
    """Median seconds of reading a safetensors file of the same size from the page cache into memory of one's own."""
    count = mib * harness.MIB // 2 // TENSORS
    path = directory / "model.safetensors"
    save_file({f"w{i}": torch.zeros(count, dtype=torch.int16) for i in range(TENSORS)}, path)
    mine = {f"w{i}": torch.zeros(count, dtype=torch.int16) for i in range(TENSORS)}
    seconds = []
    for _ in range(6):
        begun = time.perf_counter()
        for name, tensor in load_file(path).items():
            mine[name].copy_(tensor)
        seconds.append(time.perf_counter() - begun)
    path.unlink()
    return statistics.median(seconds[1:])


def measure(options: argparse.Namespace) -> None:
    """Run the fleet and print its tables."""
    counts, most = options.counts, max(options.counts)
    paced_hosts.make_switch()
    barrier = get_context("fork").Barrier(most + 1)
    with harness.private_host() as directory:
        go_first(options.publisher_first)
        redis = harness.shared_redis()
        go_first(False)
        file = reading(directory, options.mib)
        ranks = harness.run_ranks([(run, (n, options, directory, redis, barrier)) for n in range(most + 1)])
    results: list[list[Found]] = [list(phase) for phase in zip(*ranks, strict=True)]
    payload = options.mib * harness.MIB
    alone = payload / options.rate
    spreads, (followed,), others = (
        results[: len(counts)],
        results[len(counts) : len(counts) + 1],
        results[len(counts) + 1 :],
    )
    hop = until_all(spreads[0])[0] if counts[0] == 1 else alone
    print(
        f"\n{options.mib} MiB a version, {options.rate / 1e6:g} MB/s a host each way (headers included): "
        f"{alone:.3f} s without headers; T = {hop:.3f} s; fan_out {options.fan_out}; medians of {options.versions}\n"
    )
    print(f"{'R':>3} {'all hold it':>12} {'slowest':>8} {'copies given':>13} {'sent':>6} {'N pairs':>9} {'Gloo':>7}")
    for i, count in enumerate(counts):
        middle, slowest = until_all(spreads[i])
        copies = max(
            sum(r["source"][v] == "trainer" for r in spreads[i] if r["source"]) for v in range(options.versions + 1)
        )
        sent = statistics.median(spreads[i][0]["sent"][1:]) / payload
        beside = [until_all(others[way * len(counts) + i])[0] / hop for way in (0, 1)]
        print(
            f"{count:>3} {middle / hop:>11.2f}T {slowest / hop:>7.2f}T {copies:>13} {sent:>6.2f} {beside[0]:>8.2f}T "
            f"{beside[1]:>6.2f}T",
            flush=True,
        )
    follow_lines(followed, options, hop, file)


def until_all(found: list[Found]) -> tuple[float, float]:
    """Median and most seconds from a put until all held it, without the first version, which forms pairs."""
    held = [one["held"] for one in found if one["held"]]
    seconds = [max(times) - put for put, *times in zip(found[0]["put"], *held, strict=True)][1:]
    return statistics.median(seconds), max(seconds)


def follow_lines(found: list[Found], options: argparse.Namespace, hop: float, file: float) -> None:
    """Print what puts at an interval cost, how far subscribers lag, and what a join costs."""
    alone, beside = ([1000 * harness.quantile(found[0][part], q) for q in (0.5, 0.99)] for part in ("alone", "beside"))
    print(
        f"\nputs every {INTERVAL} T, {options.puts} of them: p50 {alone[0]:.1f} ms and p99 {alone[1]:.1f} ms with no "
        f"subscriber, {beside[0]:.1f} and {beside[1]:.1f} ms with {max(options.counts)}: p99 {beside[1] / alone[1]:.2f}"
    )
    announced: dict[int, float] = found[0]["announced"]
    lags = [
        after - announced[before[0] + 1]
        for one in found[1:]
        for before, (_, after) in zip(one["held"], one["held"][1:], strict=False)
    ]
    print(
        f"lag behind the first version that a subscriber lacks: median {statistics.median(lags) / hop:.2f} T, "
        f"worst {max(lags) / hop:.2f} T"
    )
    join = found[-1]["join"]
    print(
        f"a join in the middle: {join:.3f} s ({join / hop:.2f} T); the same bytes from a file in the page cache: "
        f"{file:.3f} s"
    )
