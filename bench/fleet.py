"""How fast a version reaches a fleet, and how far subscribers lag.

    python bench/fleet.py [--subscribers 1,2,4,8,16] [--mib 16] [--rate 100] [--fan-out 2] [--publisher-first]
    python bench/fleet.py --simulate [--subscribers 1,2,4,8,16,100,1000] [--server redis-server]

The first measures a fleet of real agents on hosts whose NICs the kernel paces (``fleet_hops``, ``paced_hosts``).

``--simulate``: real scripts in a real server, modelled hops. Every claim, put and release is a call of the scripts of
etha/store. A hop takes T of virtual time (or T times a random factor), whoever else sends, because each subscriber
serves one other at a time. Leases do not lapse, because virtual time is not the server's. The bound is that of
doubling, T * ceil(log2(R / fan_out + 1)): in each round the publisher gives fan_out copies, and each subscriber that
has the version one. The server's time is that of its own statistics of commands.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet_hops
import harness
import paced_hosts

sys.path.insert(0, str(Path(__file__).parents[1]))
from etha.store import connect
from etha.store.publication_records import (
    ClaimRequest,
    PublicationRank,
    PublishedTensor,
    SourceClaim,
    TensorTable,
)
from etha.store.records import RankHolder
from etha.store.registry import Store
from tests.unit.store.server import agent, fresh_namespace, served

TABLE = TensorTable({"w": PublishedTensor(dtype="bfloat16", shape=(1024, 1024))})
#: Seconds of virtual time that a hop takes.
HOP = 1.0


@dataclass(slots=True)
class Replica:
    """One subscriber: what it holds, when it got that, and its last question."""

    name: str
    serial: int
    held: int = 0
    call: int = 0


@dataclass
class Simulation:
    """One publication with R subscribers that ask for the next version as soon as they have one."""

    store: Store
    count: int
    fan_out: int
    copies: int | None
    spread: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    sent: dict[int, int] = field(default_factory=dict)
    announced: dict[int, float] = field(default_factory=dict)
    complete: dict[int, float] = field(default_factory=dict)
    worst_lag: float = 0.0
    calls: list[float] = field(default_factory=list)

    async def enter(self) -> None:
        """All sides enter, and all subscribers ask."""
        self.store.publications.held.clear()
        self.replicas: dict[str, Replica] = {}
        self.running: dict[int, SourceClaim] = {}
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = 0
        publisher = {"slots": 2, "places": self.fan_out, "copies": self.copies}
        self.publisher = await self._enter("trainer", "publisher", 0, **publisher)
        self.puts = 0
        for number in range(self.count):
            name = f"r{number}"
            self.replicas[name] = Replica(name, await self._enter(name, "subscriber", number + 1))
        for replica in self.replicas.values():
            await self.ask(replica)

    async def _enter(self, side: str, role: Any, number: int, **more: Any) -> int:
        entrance = PublicationRank(publication="p", side=side, role=role, rank=0, world=1, tensors=TABLE, **more)
        member = RankHolder(agent="a", host=f"host-{number}", pid=number + 1, start=1)
        return (await self.store.publications.enter(entrance, member)).serial

    def at(self, when: float, kind: str, what: Any) -> None:
        """Something happens at ``when``."""
        self.order += 1
        heapq.heappush(self.events, (when, self.order, kind, what))

    async def timed(self, work: Any) -> Any:
        """Await one call of the store and note how long it took."""
        began = time.perf_counter()
        found = await work
        self.calls.append(time.perf_counter() - began)
        return found

    async def ask(self, replica: Replica) -> None:
        """The next question of a subscriber."""
        replica.call += 1
        request = ClaimRequest(
            publication="p", subscriber=replica.name, serial=replica.serial, call=replica.call, newer_than=replica.held
        )
        await self.timed(self.store.publications.claim(request))

    async def put(self) -> None:
        """The publisher announces the next version. With two slots it never waits."""
        publications = self.store.publications
        self.puts += 1
        slot = await self.timed(publications.prepare("p", "trainer", self.publisher, 0, self.puts))
        assert slot.ready
        seq = await self.timed(publications.announce("p", "trainer", self.publisher, 0, self.puts, slot, None))
        self.announced[seq] = self.now

    async def end(self, claim: SourceClaim) -> None:
        """A hop has committed."""
        await self.timed(self.store.publications.release(claim, committed=True))
        del self.running[claim.number]
        replica = self.replicas[claim.subscriber]
        assert claim.seq > replica.held, "an older version than it holds"
        if replica.held:
            self.worst_lag = max(self.worst_lag, self.now - self.announced[replica.held + 1])
        replica.held = claim.seq
        if all(one.held >= claim.seq for one in self.replicas.values()):
            self.complete.setdefault(claim.seq, self.now)
        await self.ask(replica)

    async def start_granted(self) -> None:
        """Begin the hops whose claims have been granted since."""
        key = self.store.keys.publication_part("p", "claims")
        numbers = await self.store._session.connection.call("read", lambda client: client.hkeys(key), 10)
        new = sorted(int(number) for number in numbers if int(number) not in self.running)
        if not new:
            return
        texts = await self.store._session.connection.call("read", lambda client: client.hmget(key, new), 10)
        for number, text in zip(new, texts, strict=True):
            claim = SourceClaim.read(key, "p", json.loads(text))
            self.running[number] = claim
            if claim.source == "trainer":
                self.sent[claim.seq] = self.sent.get(claim.seq, 0) + 1
            self.at(self.now + HOP * (1 + self.spread * (2 * self.chance.random() - 1)), "end", claim)

    async def play(self, until: float = math.inf) -> None:
        """Let what is due happen, in order."""
        while self.events and self.events[0][0] <= until:
            self.now, _, kind, what = heapq.heappop(self.events)
            await (self.put() if kind == "put" else self.end(what))
            if not self.events or self.events[0][0] > self.now:
                await self.start_granted()
        if until < math.inf:
            self.now = until
            for one in self.replicas.values():
                if one.held + 1 in self.announced:
                    self.worst_lag = max(self.worst_lag, until - self.announced[one.held + 1])


def rounds(count: int, fan_out: int) -> int:
    """Rounds of doubling until ``count`` subscribers have a version."""
    return math.ceil(math.log2(count / fan_out + 1))


async def server_seconds(store: Store) -> tuple[int, float]:
    """(scripts run, seconds that the server has spent on them)."""
    stats = await store._session.connection.call("read", lambda client: client.info("commandstats"), 10)
    one = stats.get("cmdstat_evalsha", {"calls": 0, "usec": 0})
    return int(one["calls"]), one["usec"] / 1e6


async def spreads(url: str, counts: list[int]) -> list[str]:
    """The table of one version that reaches all."""
    lines = [
        f"{'R':>5} {'fan_out':>7} {'copies':>7} {'hops':>9} {'rounds':>7} {'bound':>6} {'sent':>5} "
        f"{'scripts':>8} {'server us':>10} {'call p99 us':>12}"
    ]
    for count in counts:
        for fan_out, limited, spread in (
            (1, False, 0.0),
            (1, True, 0.0),
            (4, False, 0.0),
            (4, True, 0.0),
            (1, True, 0.2),
        ):
            copies = fan_out + 1 if limited else None
            async with agent(url, fresh_namespace(), "a", timeout=60) as store:
                simulation = Simulation(store, count, fan_out, copies, spread)
                await simulation.enter()
                before, simulation.calls = await server_seconds(store), []
                simulation.at(0.0, "put", None)
                await simulation.play()
                after = await server_seconds(store)
            scripts, seconds = after[0] - before[0], after[1] - before[1]
            calls = sorted(simulation.calls)
            lines.append(
                f"{count:>5} {fan_out:>7} {copies or 'any':>7} {f'T +-{spread:.0%}' if spread else 'T':>9} "
                f"{simulation.complete[1] / HOP:>7.2f} {rounds(count, fan_out):>6} {simulation.sent[1]:>5} "
                f"{scripts:>8} {seconds / scripts * 1e6:>10.0f} {calls[int(len(calls) * 0.99)] * 1e6:>12.0f}"
            )
    return lines


async def lags(url: str, cases: list[tuple[int, int]], intervals: list[float], length: float) -> list[str]:
    """The table of subscribers' lag while versions go on."""
    lines = [
        f"{'R':>5} {'fan_out':>7} {'interval':>9} {'puts':>5} {'worst lag':>10} {'bound':>7} {'copies sent a put':>18}"
    ]
    for count, fan_out in cases:
        for interval in intervals:
            async with agent(url, fresh_namespace(), "a", timeout=60) as store:
                simulation = Simulation(store, count, fan_out, fan_out + 1)
                await simulation.enter()
                puts = max(2, int(length / interval))
                for number in range(puts):
                    simulation.at(number * interval, "put", None)
                await simulation.play(puts * interval)
            bound = max(interval, 2 * HOP * rounds(count, fan_out))
            sent = sum(simulation.sent.values()) / puts
            lag = simulation.worst_lag
            lines.append(
                f"{count:>5} {fan_out:>7} {interval:>8.1f}T {puts:>5} {lag:>9.2f}T {bound:>6.1f}T {sent:>18.2f}"
            )
    return lines


async def simulate(options: argparse.Namespace, url: str) -> None:
    """Print both tables."""
    counts = [int(one) for one in options.subscribers.split(",")]
    for line in await spreads(url, counts):
        print(line, flush=True)
    print()
    for line in await lags(url, [(1, 1), (4, 1), (16, 1), (16, 2)], [0.1, 0.3, 1.0, 3.0, 10.0], options.length):
        print(line, flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="model the hops")
    parser.add_argument("--subscribers", help="how many, with commas; default: 1,2,4,8,16, simulated up to 1000")
    parser.add_argument("--length", type=float, default=40.0, help="simulated: of the runs with puts, in T")
    parser.add_argument("--server", help="simulated: another server's binary; default: the shipped one")
    parser.add_argument("--mib", type=int, default=16, help="measured: payload of a version")
    parser.add_argument("--rate", type=float, default=100.0, help="measured: MB/s of a host's NIC, each way")
    parser.add_argument(
        "--fan-out", type=int, default=2, help="measured: subscribers that the publisher serves at once"
    )
    parser.add_argument("--versions", type=int, default=5, help="measured: of each number of subscribers")
    parser.add_argument("--puts", type=int, default=100, help="measured: at an interval of 0.3 T")
    parser.add_argument(
        "--publisher-first",
        action="store_true",
        help="measured: the publisher, its agent and Redis have a core whenever they want one, as on machines of their "
        "own; root",
    )
    parser.add_argument("--differences", default="never", help="measured: ETHA_DIFFERENCES of all agents")
    parser.add_argument("--pass-on", default="1", help="measured: ETHA_PASS_ON of all agents")
    options = parser.parse_args()
    options.subscribers = options.subscribers or ("1,2,4,8,16,100,1000" if options.simulate else "1,2,4,8,16")
    if not options.simulate:
        paced_hosts.isolate()
        options.counts, options.rate = [int(one) for one in options.subscribers.split(",")], options.rate * 1e6
    print(harness.machine())
    if not options.simulate:
        fleet_hops.measure(options)
        return
    connect.CLAIM_LEASE = 86400.0
    with tempfile.TemporaryDirectory() as directory, served(Path(directory), binary=options.server) as server:
        asyncio.run(simulate(options, server.url))


if __name__ == "__main__":
    main()
