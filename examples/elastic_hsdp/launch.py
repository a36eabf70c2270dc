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
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from etha.demo.launch import private_directory, stop
from etha.demo.process import adopting, describe

HERE = Path(__file__).parent
#: Steps that all replicas make together between two kills, and before the end.
CALM = 10
BEGUN = time.monotonic()


class Failed(Exception):
    """What was promised did not happen."""


@dataclass
class Rank:
    """One process, and the last line that it has said."""

    process: asyncio.subprocess.Process
    said: dict = field(default_factory=dict)
    digest: str = ""


@dataclass
class Replica:
    """One replica. It is started again, with all its ranks, as long as ``run`` runs and it has not ended well."""

    name: str
    size: int
    directory: Path
    ranks: list[Rank] = field(default_factory=list)
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
        self.table = Table(self)

    async def run(self) -> None:
        """Train, kill, wait until all are back, again; then end and compare."""
        started = f"{len(self.replicas)} replicas of {self.options.ranks} ranks start"
        self.note(f"{started}; ETHA_RUNTIME_DIR={self.directory / 'etha'} etha status shows them")
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
            env = environment(self.directory) | {
                "ETHA_REPLICA": replica.name,
                "WORLD_SIZE": str(replica.size),
                "ELASTIC_STORE": f"file://{store}",
                "ELASTIC_END": str(self.directory / "end"),
            }
            log = self.directory / f"{replica.name}.log"
            replica.ranks = []
            try:
                for number in range(replica.size):
                    replica.ranks.append(await started(env | {"RANK": str(number)}, log))
                async with asyncio.TaskGroup() as reads:
                    for rank in replica.ranks:
                        reads.create_task(self.read(replica, rank))
            finally:
                for rank in replica.ranks:
                    if rank.process.returncode is None:
                        rank.process.kill()
                        await rank.process.wait()
            codes = [rank.process.returncode for rank in replica.ranks]
            if not any(codes):
                replica.state = "ended"
                self.note(f"{replica.name} has ended")
                return
            killed = any(code == -signal.SIGKILL for code in codes)
            if not killed:
                raise Failed(f"{replica.name}: ranks ended with {', '.join(map(describe, codes))}")
            self.note(f"{replica.name} is over: {', '.join(map(describe, codes))}; starting it again")

    async def read(self, replica: Replica, rank: Rank) -> None:
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
        """Failed, unless all replicas have the same weights after the same step."""
        steps = {rank.said["step"] for replica in self.replicas for rank in replica.ranks}
        digests = {tuple(rank.digest for rank in replica.ranks) for replica in self.replicas}
        if len(steps) != 1 or len(digests) != 1 or not all(all(each) for each in digests):
            raise Failed(f"replicas have ended at steps {sorted(steps)} with weights {sorted(digests)}")
        lives = sum(replica.lives for replica in self.replicas) - len(self.replicas)
        self.note(
            f"{len(self.replicas)} replicas have equal weights after step {steps.pop()}; {lives} were started again"
        )

    def note(self, text: str) -> None:
        """Something happened: a line above the table."""
        self.changed.set()
        self.table.note(f"{time.monotonic() - BEGUN:6.1f} s  {text}")


class Table:
    """The table of a terminal, drawn again in place; elsewhere only the lines of events."""

    COLUMNS = ("replica", "pids", "state", "epoch", "step", "rank", "loss", "lives")

    def __init__(self, job: Job) -> None:
        self._job, self._live = job, sys.stdout.isatty()
        self._lines, self._drawn = 0, 0.0

    def note(self, text: str) -> None:
        self._erase()
        print(text, flush=True)
        self._drawn = 0.0
        self.draw()

    def draw(self) -> None:
        """At most ten times a second."""
        if not self._live or time.monotonic() - self._drawn < 0.1:
            return
        self._erase()
        rows = [self.COLUMNS, *map(self._row, self._job.replicas)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.COLUMNS))]
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            print(line[: shutil.get_terminal_size().columns - 1])  # a line that wraps would be two
        sys.stdout.flush()
        self._lines, self._drawn = len(rows), time.monotonic()

    def _row(self, one: Replica) -> tuple[str, ...]:
        last = one.last
        pids = " ".join(str(rank.process.pid) for rank in one.ranks)
        if not last:
            return (one.name, pids, one.state, "-", "-", "-", "-", str(one.lives))
        place, loss = f"{last['place']} of {last['size']}", f"{last['loss']:.4f}"
        return (one.name, pids, one.state, str(last["epoch"]), str(last["step"]), place, loss, str(one.lives))

    def _erase(self) -> None:
        if self._lines:
            sys.stdout.write(f"\x1b[{self._lines}A\x1b[J")  # up, and clear to the end of the screen
            self._lines = 0


async def started(env: dict[str, str], log: Path) -> Rank:
    """A rank, whose errors go to a file."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / "trainer.py"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=env,
            start_new_session=True,
        )
    return Rank(process)


def environment(directory: Path) -> dict[str, str]:
    """Of all ranks: sockets and temporary files in ``directory``, one thread each."""
    foreign = ("ETHA_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"ETHA_RUNTIME_DIR": str(directory / "etha"), "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}


async def main(options: argparse.Namespace) -> int:
    """Run it; the exit status."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with private_directory() as directory, adopting() as before:
        try:
            async with asyncio.timeout(options.seconds):
                await Job(options, directory).run()
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            for log in sorted(directory.glob("*.log")):
                print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n", file=sys.stderr)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 1
        finally:
            stop(before)
    return 0


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--replicas", type=int, default=3)
    words.add_argument("--ranks", type=int, default=2, help="ranks of each replica, over which FSDP2 shards the model")
    words.add_argument("--kills", type=int, default=5, help="one rank at random each time")
    words.add_argument("--seed", type=int, default=0, help="who is killed")
    words.add_argument("--seconds", type=float, default=600, help="most that all of it may take")
    try:
        sys.exit(asyncio.run(main(words.parse_args())))
    except asyncio.CancelledError:
        sys.exit(130)
