"""An elastic job as a test sees it: replicas that it starts and kills, agents, Redis, and the logs of all ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from tests.flow.jobs import wait_gone
from tests.flow.sites import private_directory, started_in, stop_all
from tests.groups.elastic.history import CommittedStep, RankStep, check_history
from tests.groups.replicas import Rank, Replicas, Trainer, replicas
from tests.unit.store.server import Server, served


class ElasticJob:
    """The replicas of a job by name; each has a directory, and so an agent, of its own."""

    def __init__(
        self, directory: Path, job: Replicas, server: Server, body: Callable[[Trainer], None], world: int
    ) -> None:
        self.directory, self._job, self.server, self._body, self._world = directory, job, server, body, world
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._launches = itertools.count(1)
        self.ranks: dict[str, list[Rank]] = {}
        self._names: set[str] = set()

    def start(self, name: str, *, resume: bool = False) -> list[Rank]:
        """Start a replica."""
        runtime = self.directory / name
        self._names.add(name)
        self._job.env = {
            "ETHA_RUNTIME_DIR": str(runtime),
            "ETHA_IDLE": "300",
            "ETHA_REDIS_URL": self.server.url,
        }
        options = {
            "store": self._store.port,
            "launch": next(self._launches),
            "directory": str(self.directory),
            "resume": resume,
        }
        self.ranks[name] = [
            self._job.start(name, rank=rank, world=self._world, body=self._body, **options)
            for rank in range(self._world)
        ]
        return self.ranks[name]

    def lose(self, name: str, ranks: list[int], then: Callable[[], None] = lambda: None) -> None:
        """SIGKILL ranks of a replica, and do ``then``; the others of it end by themselves."""
        for number in ranks:
            os.kill(self.ranks[name][number].pid, signal.SIGKILL)
        then()
        for number, rank in enumerate(self.ranks.pop(name)):
            how = rank.ends()
            assert how[0] == "killed" if number in ranks else how[0] == "GroupLostError", how[1]
            rank.process.join()

    def until(self, size: int, steps: int = 1) -> None:
        """All ranks have committed ``steps`` steps of so many replicas."""
        everyone = [each for ranks in self.ranks.values() for each in ranks]
        try:
            for rank in everyone:
                first = rank.until(lambda log: log.committed and len(log.members) == size and not log.watches)
                rank.until(lambda log, first=first: log.committed and log.step >= first.step + steps - 1)
        except AssertionError:
            for rank in everyone:  # where each of them is
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR1)
            for rank in everyone:
                rank.read(1.0)
                print(rank.name, rank.pid, rank.end, rank.logs[-1:])
            raise

    def kill_agents(self) -> None:
        """SIGKILL all agents; the trainers start others."""
        for name in self._names:
            for pid, command in started_in(str(self.directory / name)).items():
                if "etha.agent" in command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    wait_gone(pid)

    def finish(self) -> list[CommittedStep]:
        """All end after the same step, with the logs that they must have; the steps that counted."""
        everyone = [rank for ranks in self.ranks.values() for rank in ranks]
        for rank in everyone:
            rank.pipe.send("end")
        for rank in everyone:
            end = rank.ends()
            # Whoever leaves first ends its replica for the other ranks.
            assert end[0] == "ended" or (self._world > 1 and end[0] == "GroupLostError"), end[1]
        self.ranks.clear()
        return check_history(self.logs())

    def logs(self) -> list[RankStep]:
        """Of all ranks that ever lived."""
        found = []
        for path in sorted(self.directory.glob("*.log")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a rank may be killed while it writes
                    fields = json.loads(line)
                    found.append(RankStep(**{**fields, "members": tuple(fields["members"])}))
        return found

    def close(self) -> None:
        """End the agents."""
        for name in self._names:
            stop_all(str(self.directory / name))


@contextlib.contextmanager
def elastic_job(body: Callable[[Trainer], None], world: int) -> Iterator[ElasticJob]:
    """A job without replicas so far, whose ranks run ``body``."""
    with private_directory() as directory, served(directory) as server, replicas(directory) as found:
        job = ElasticJob(directory, found, server, body, world)
        try:
            yield job
        finally:
            job.close()
