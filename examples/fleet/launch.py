"""Everything on this machine: a trainer that publishes, and replicas of two ranks each that are killed and start again.

    python launch.py [--replicas 4] [--ranks 2] [--kills 5] [--seed 0]

Each replica cuts the weight in another way. Two of them join late. A kill takes a random rank, and its replica starts
again; the trainer is killed, too, once, and starts again. A terminal shows one table that changes; a pipe or a file
gets a line for each event. Status 0 if in the end every replica has the last version, and none ever had a wrong
element. Whatever happens, nothing that was started is left.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etha.demo.examples import (
    ExampleFailed,
    ExampleRank,
    LiveTable,
    end_ranks,
    run_example,
    start_rank,
)
from etha.demo.launch import environment
from etha.demo.process import describe

HERE = Path(__file__).parent
#: Versions that every replica takes between two kills.
CALM = 3


@dataclass
class Side:
    """The trainer, or a replica. It is started again, with all its ranks, until the end."""

    name: str
    program: str
    size: int
    env: dict[str, str]
    ranks: list[ExampleRank] = field(default_factory=list)
    lives: int = 0
    updates: int = 0
    ending: bool = False

    @property
    def last(self) -> dict:
        """What its rank 0 has said last."""
        return self.ranks[0].said if self.ranks else {}


class Fleet:
    """The trainer and all replicas, and what is to be seen of them."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.random = random.Random(options.seed)
        self.trainer = Side("trainer", "trainer.py", 1, {})
        self.replicas = [
            Side(
                f"replica-{n}", "replica.py", options.ranks, {"FLEET_REPLICA": f"replica-{n}", "FLEET_DIM": str(n % 2)}
            )
            for n in range(options.replicas)
        ]
        self.changed = asyncio.Event()
        self.table = LiveTable(("side", "pids", "version", "lag", "from", "ms", "lives"), self.rows, sys.stdout)

    async def run(self) -> None:
        """Publish, let replicas join late, kill, wait until all are back, again; then end and compare."""
        early, late = self.replicas[: max(1, len(self.replicas) - 2)], self.replicas[max(1, len(self.replicas) - 2) :]
        self.note(f"a trainer and {len(early)} replicas start; ETHA_RUNTIME_DIR={self.directory / 'run'} etha status")
        async with asyncio.TaskGroup() as tasks:
            for side in (self.trainer, *early):
                tasks.create_task(self.live(side))
            await self.calm(early)
            if late:
                self.note(f"{len(late)} replicas join late")
            for side in late:
                tasks.create_task(self.live(side))
            for number in range(self.options.kills):
                await self.calm(self.replicas)
                victim = self.trainer if number == 1 else self.random.choice(self.replicas)
                rank = self.random.randrange(victim.size)
                process = victim.ranks[rank].process
                self.note(f"kill {number + 1} of {self.options.kills}: rank {rank} of {victim.name}, pid {process.pid}")
                process.kill()
                await process.wait()
            await self.calm(self.replicas)
            (self.directory / "end").touch()
            await self.until(lambda: self.trainer.last.get("last", False))
            last = self.trainer.last["version"]
            ranks = [rank for one in self.replicas for rank in one.ranks]
            await self.until(lambda: all(rank.said.get("version") == last for rank in ranks))
            self.end()
        lives = sum(one.lives - 1 for one in (self.trainer, *self.replicas))
        self.note(f"{len(self.replicas)} replicas have version {last}; {lives} times a side was started again")

    def end(self) -> None:
        """Let all end."""
        for side in (self.trainer, *self.replicas):
            side.ending = True
            for rank in side.ranks:
                rank.process.kill()

    async def live(self, side: Side) -> None:
        """Start a side, wait until all its ranks have ended, and start it again, until the end."""
        while not side.ending:
            side.lives += 1
            side.updates, side.ranks = 0, []
            env = environment(self.directory, os.environ) | side.env
            env |= {"WORLD_SIZE": str(side.size), "FLEET_INTERVAL": str(self.options.interval)}
            env |= {"FLEET_END": str(self.directory / "end")}
            try:
                for number in range(side.size):
                    log = self.directory / f"{side.name}.log"
                    side.ranks.append(await start_rank(HERE / side.program, env | {"RANK": str(number)}, log))
                async with asyncio.TaskGroup() as reads:
                    for rank in side.ranks:
                        reads.create_task(self.read(side, rank))
            finally:
                await end_ranks(side.ranks)
            codes = [rank.process.returncode for rank in side.ranks]
            if side.ending:
                return
            if not any(code == -signal.SIGKILL for code in codes):
                raise ExampleFailed(f"{side.name}: ranks ended with {', '.join(map(describe, codes))}")
            self.note(f"{side.name} is over: {', '.join(map(describe, codes))}; starting it again")

    async def read(self, side: Side, rank: ExampleRank) -> None:
        """Take what one rank says until it has ended. Its side is over then, so the other ranks end, too."""
        output = rank.process.stdout
        assert output is not None
        while line := await output.readline():
            rank.said = json.loads(line)
            if not rank.said.get("right", True):
                raise ExampleFailed(f"{side.name} has wrong elements in version {rank.said['version']}")
            if rank is side.ranks[0]:
                side.updates += 1
                if side.updates == 1 and side is not self.trainer:
                    self.note(f"{side.name} has version {rank.said['version']}, from {rank.said['source']}")
            self.changed.set()
            self.table.draw()
        await rank.process.wait()
        for other in side.ranks:
            if other.process.returncode is None:
                other.process.kill()

    async def calm(self, replicas: list[Side]) -> None:
        """Wait until all of these have taken some versions, and the trainer puts some."""
        before = {side.name: (side.lives, side.updates) for side in (self.trainer, *replicas)}

        def moved(side: Side) -> bool:
            lives, updates = before[side.name]
            return side.updates >= CALM + (updates if side.lives == lives else 0)

        await self.until(lambda: all(moved(side) for side in (self.trainer, *replicas)))

    async def until(self, condition) -> None:
        """Wait until ``condition()``, which depends on what ranks say."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def note(self, text: str) -> None:
        """Something happened: a line above the table."""
        self.changed.set()
        self.table.note(text)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """What each side holds, for the table."""
        newest = self.trainer.last.get("version", 0)
        for one in (self.trainer, *self.replicas):
            last, pids = one.last, " ".join(str(rank.process.pid) for rank in one.ranks)
            if not last:
                yield (one.name, pids, "-", "-", "-", "-", str(one.lives))
                continue
            lag, ms = str(max(0, newest - last["version"])), f"{last['seconds'] * 1e3:.1f}"
            yield (one.name, pids, str(last["version"]), lag, last.get("source", "-"), ms, str(one.lives))


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--replicas", type=int, default=4)
    words.add_argument("--ranks", type=int, default=2, help="ranks of each replica, over which it cuts the weight")
    words.add_argument("--kills", type=int, default=5, help="one rank at random each time; the second is the trainer")
    words.add_argument("--interval", type=float, default=0.3, help="seconds between two versions")
    words.add_argument("--seed", type=int, default=0, help="who is killed")
    words.add_argument("--seconds", type=float, default=600, help="most that all of it may take")
    options = words.parse_args()
    status = run_example(
        lambda directory: Fleet(options, directory).run(), options.seconds, lambda text: print(text, file=sys.stderr)
    )
    sys.exit(status)
