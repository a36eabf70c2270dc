"""Blocks of transfers; between them one side comes again, and at times an agent: does anybody grow?

     block    relaunch     block     relaunch     block ...
    |------|--trainer---|---------|--inference--|------|--trainer, and an agent is told to end, or killed--|

Of a side that comes again rank 0 is the same process with a new client and new tensors, rank 1 a new process.
Every life of a process is measured after its first block and at its end.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from etha.store.connect import MAX_CONNECTIONS
from tests.flow.endurance import cargo
from tests.flow.endurance.footprint import Footprint
from tests.flow.jobs import Job, wait_gone
from tests.flow.puppets import Puppet, Stage, together
from tests.flow.sites import Site, started_in

SIDES = ("trainer", "inference")
#: Threads of asyncio's own pool.
THREADS = min(32, (os.cpu_count() or 1) + 4)
#: One agent after the other is restarted in these ways, so that each is in both.
_WAYS_TO_GO = (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)


@dataclass
class Life:
    """A process's footprint after its first block and after the latest one."""

    name: str
    first: Footprint
    last: Footprint
    blocks: int = 1

    def grown(self, tolerance: float, memory: bool) -> Iterator[str]:
        """What differs by more than that share of what it was; ``memory``: of resident memory, too.

        An agent opens a connection to Redis and starts a thread for planning when several of its calls meet, and
        keeps both: what its pools may hold in all is no growth.
        """
        pools = {"sockets": MAX_CONNECTIONS, "threads": THREADS} if self.name in ("agent", "Redis") else {}
        for name, before in self.first.all().items():
            if name == "private" or (name == "rss" and not memory):
                continue
            after = self.last.all()[name]
            if abs(after - before) > tolerance * before + pools.get(name, 0):
                yield f"{self.name} {name}: {before} -> {after}"


@dataclass
class Soak:
    """``block`` transfers between relaunches, an agent restart after every ``restart`` blocks."""

    site: Site
    job: Job
    pair: str
    block: int
    restart: int
    lives: dict[int, Life] = field(default_factory=dict)
    keys: list[Counter[str]] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    moved: int = 0
    relaunches: Counter[str] = field(default_factory=Counter)

    def run(self, blocks: int) -> None:
        """All of it; afterwards ``lives``, ``keys`` and ``files`` tell."""
        stage = Stage(self.job, self.pair)
        self.puppets = {(side, rank): stage.puppet(side, rank, 2) for side in SIDES for rank in (0, 1)}
        together(self.all(), cargo.enter)
        for number in range(1, blocks + 1):
            together_long(self.all(), cargo.move, self.moved, self.block)
            self.moved += self.block
            self.measure()
            if number == blocks:
                break
            side = SIDES[(number - 1) % 2]
            if number % self.restart == 0:
                self.end_agent(number // self.restart - 1)
            self.relaunch(side, stage)

    def all(self) -> list[Puppet]:
        return list(self.puppets.values())

    def end_agent(self, count: int) -> None:
        """Tell an agent to end, or kill it; everybody hears of that."""
        places = sorted({self.site.way.place(side, rank) for side, rank in self.puppets})
        place, how = places[count % len(places)], _WAYS_TO_GO[count % len(_WAYS_TO_GO)]
        puppet = next(p for (side, rank), p in self.puppets.items() if self.site.way.place(side, rank) == place)
        pid = puppet.do(cargo.settle)
        os.kill(pid, how)
        wait_gone(pid)
        together(self.all(), cargo.lose)
        self.relaunches[f"agent {place} {how.name}"] += 1

    def relaunch(self, side: str, stage: Stage) -> None:
        """A new launch of ``side``; the other side's processes, clients and tensors stay."""
        together([p for (s, _), p in self.puppets.items() if s == side], cargo.leave)
        self.puppets[side, 1].leave()
        self.job.workers.remove(self.puppets[side, 1].worker)
        self.puppets[side, 1].worker.end()
        together([p for (s, _), p in self.puppets.items() if s != side], cargo.lose)
        self.puppets[side, 1] = stage.puppet(side, 1, 2)
        together(self.all(), cargo.enter)
        self.relaunches[side] += 1

    def measure(self) -> None:
        """Everybody's footprint, the keys in Redis by kind, the files in the site's directory."""
        agents = set(together(self.all(), cargo.settle))
        named = {self.puppets[member].pid: f"{member[0]} {member[1]}" for member in self.puppets}
        named |= {pid: "agent" if pid in agents else _daemon(c) for pid, c in self.daemons().items()}
        for pid, name in named.items():
            now = Footprint.of(pid)
            if pid not in self.lives:
                self.lives[pid] = Life(name, now, now)
            else:
                self.lives[pid].last = now
                self.lives[pid].blocks += 1
        self.keys.append(self.count_keys())
        self.files.append(sum(len(files) for _, _, files in os.walk(self.site.directory)))

    def daemons(self) -> dict[int, str]:
        """Agents, Redis and its supervisor."""
        return started_in(str(self.site.directory))

    def count_keys(self) -> Counter[str]:
        """Keys by kind."""
        client: Any = redis.Redis.from_url(self.site.redis or f"unix://{self.site.directory}/a/redis.sock")
        with client:
            return Counter(key.decode().split("}:")[1].split(":")[0] for key in client.scan_iter("*"))

    def grown(self, tolerance: float, *, memory: bool) -> list[str]:
        """Everything that differs by more than that share from what it was after the first block."""
        found = [text for life in self.lives.values() for text in life.grown(tolerance, memory)]
        before, after = sum(self.keys[0].values()), sum(self.keys[-1].values())
        if abs(after - before) > tolerance * before:
            found.append(f"keys: {self.keys[0]} -> {self.keys[-1]}")
        if self.files[0] != self.files[-1]:
            found.append(f"files: {self.files[0]} -> {self.files[-1]}")
        return found

    def report(self) -> str:
        """A line a life and measure: after the first block, at the end, and what that is of it."""
        lines = [f"{self.moved} transfers of {cargo.NBYTES} B, {dict(self.relaunches)}"]
        for life in self.lives.values():
            cells = []
            for name, first in life.first.all().items():
                last = life.last.all()[name]
                cells.append(f"{name} {first} -> {last} ({(last - first) / first if first else 0.0:+.1%})")
            lines.append(f"{life.name:<14} {life.blocks:>2} blocks: " + ", ".join(cells))
        lines.append(f"keys  {dict(sorted(self.keys[0].items()))} -> {dict(sorted(self.keys[-1].items()))}")
        lines.append(f"files {self.files[0]} -> {self.files[-1]}")
        return "\n".join(lines)


def together_long(puppets: list[Puppet], function: Any, *args: Any) -> None:
    """As ``together``, for steps of many transfers."""
    for puppet in puppets:
        puppet.begin(function, *args)
    for puppet in puppets:
        puppet.ends(600)


def _daemon(command: str) -> str:
    return "supervisor" if "supervisor" in command else "Redis" if "-server" in command else "agent"
