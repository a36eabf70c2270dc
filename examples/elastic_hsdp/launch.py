"""Everything on this machine: replicas of two ranks each that train together, are killed at random, and start again.

    python launch.py [--replicas 3] [--ranks 2] [--kills 5] [--seed 0]

A terminal shows one table that changes; a pipe or a file gets a line for each event. After the last kill all replicas
train together for some more steps, and end. Status 0 if all ranks then have the same weights and optimizer state as
those with their shards in the other replicas, bit by bit. Whatever happens, nothing that was started is left.
"""

import argparse
import asyncio
import json
import math
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
#: Steps that all replicas make together between two kills, and before the end.
CALM = 10


@dataclass
class Replica:
    """One replica. It is started again, with all its ranks, as long as ``run`` runs and it has not ended well."""

    name: str
    size: int
    directory: Path
    ranks: list[ExampleRank] = field(default_factory=list)
    lives: int = 0
    state: str = "starts"

    @property
    def last(self) -> dict:
        """What its rank 0 has said last."""
        return self.ranks[0].said if self.ranks else {}


class Job:
    """All replicas, and what is to be seen of them."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.random = random.Random(options.seed)
        self.replicas = [Replica(f"replica-{n}", options.ranks, directory) for n in range(options.replicas)]
        self.changed = asyncio.Event()
        columns = ("replica", "pids", "state", "epoch", "step", "rank", "loss", "lives")
        self.table = LiveTable(columns, self.rows, sys.stdout)

    async def run(self) -> None:
        """Train, kill, wait until all are back, again; then end and compare."""
        started = f"{len(self.replicas)} replicas of {self.options.ranks} ranks start"
        self.note(f"{started}; ETHA_RUNTIME_DIR={self.directory / 'run'} etha status shows them")
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(self.live(replica))
            for number in range(self.options.kills):
                await self.together()
                victim = self.random.choice(self.replicas)
                rank = self.random.randrange(victim.size)
                process = victim.ranks[rank].process
                self.note(f"kill {number + 1} of {self.options.kills}: rank {rank} of {victim.name}, pid {process.pid}")
                process.kill()
                await process.wait()
            await self.together()
            (self.directory / "end").touch()
        self.judge()

    async def live(self, replica: Replica) -> None:
        """Start a replica, wait until all its ranks have ended, and start it again unless they have ended well."""
        while True:
            replica.lives += 1
            replica.state = "starts"
            store = self.directory / f"{replica.name}.{replica.lives}"
            env = environment(self.directory, os.environ) | {
                "ETHA_REPLICA": replica.name,
                "WORLD_SIZE": str(replica.size),
                "ELASTIC_STORE": f"file://{store}",
                "ELASTIC_END": str(self.directory / "end"),
            }
            log = self.directory / f"{replica.name}.log"
            replica.ranks = []
            try:
                for number in range(replica.size):
                    replica.ranks.append(await start_rank(HERE / "trainer.py", env | {"RANK": str(number)}, log))
                async with asyncio.TaskGroup() as reads:
                    for rank in replica.ranks:
                        reads.create_task(self.read(replica, rank))
            finally:
                await end_ranks(replica.ranks)
            codes = [rank.process.returncode for rank in replica.ranks]
            if not any(codes):
                replica.state = "ended"
                self.note(f"{replica.name} has ended")
                return
            killed = any(code == -signal.SIGKILL for code in codes)
            if not killed:
                raise ExampleFailed(f"{replica.name}: ranks ended with {', '.join(map(describe, codes))}")
            self.note(f"{replica.name} is over: {', '.join(map(describe, codes))}; starting it again")

    async def read(self, replica: Replica, rank: ExampleRank) -> None:
        """Take what one rank says until it has ended."""
        output = rank.process.stdout
        assert output is not None
        while line := await output.readline():
            said = json.loads(line)
            rank.digest = said.get("digest", rank.digest)
            if "step" not in said:
                continue
            before, rank.said = rank.said, said
            if rank is replica.ranks[0] and said["epoch"] != before.get("epoch"):
                replica.state = "trains"
                how = ", has loaded its state" if said["recovered"] else ""
                self.note(
                    f"{replica.name} is in epoch {said['epoch']}: {said['size']} replicas, step {said['step']}{how}"
                )
            self.changed.set()
            self.table.draw()
        await rank.process.wait()

    async def together(self) -> None:
        """Wait until all replicas have made some steps together."""
        since: dict[str, float] = {}
        while True:
            for one in self.replicas:
                last = one.last
                if one.state != "trains" or last["size"] < len(self.replicas) or not last["committed"]:
                    since.pop(one.name, None)
                else:
                    since.setdefault(one.name, last["step"])
            calm = [one for one in self.replicas if one.last.get("step", 0) - since.get(one.name, math.inf) >= CALM]
            if len(calm) == len(self.replicas):
                return
            self.changed.clear()
            await self.changed.wait()

    def judge(self) -> None:
        """ExampleFailed, unless all replicas have the same weights after the same step."""
        steps = {rank.said["step"] for replica in self.replicas for rank in replica.ranks}
        digests = {tuple(rank.digest for rank in replica.ranks) for replica in self.replicas}
        if len(steps) != 1 or len(digests) != 1 or not all(all(each) for each in digests):
            raise ExampleFailed(f"replicas have ended at steps {sorted(steps)} with weights {sorted(digests)}")
        lives = sum(replica.lives for replica in self.replicas) - len(self.replicas)
        self.note(
            f"{len(self.replicas)} replicas have equal weights after step {steps.pop()}; {lives} were started again"
        )

    def note(self, text: str) -> None:
        """Something happened: a line above the table."""
        self.changed.set()
        self.table.note(text)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """How far each replica is, for the table."""
        for one in self.replicas:
            last, pids = one.last, " ".join(str(rank.process.pid) for rank in one.ranks)
            if not last:
                yield (one.name, pids, one.state, "-", "-", "-", "-", str(one.lives))
                continue
            place, loss = f"{last['place']} of {last['size']}", f"{last['loss']:.4f}"
            yield (one.name, pids, one.state, str(last["epoch"]), str(last["step"]), place, loss, str(one.lives))


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--replicas", type=int, default=3)
    words.add_argument("--ranks", type=int, default=2, help="ranks of each replica, over which FSDP2 shards the model")
    words.add_argument("--kills", type=int, default=5, help="one rank at random each time")
    words.add_argument("--seed", type=int, default=0, help="who is killed")
    words.add_argument("--seconds", type=float, default=600, help="most that all of it may take")
    options = words.parse_args()
    status = run_example(
        lambda directory: Job(options, directory).run(), options.seconds, lambda text: print(text, file=sys.stderr)
    )
    sys.exit(status)
