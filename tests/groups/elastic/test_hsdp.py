"""HSDP with replicas of two ranks that are lost and come again: what one process computes from the same batches.

    trainers (3 x 2) -- an agent for each replica -- one Redis;   the test kills any of these, and starts them again

The suite loses a replica three times, `make soak-groups` fifty times (ETHA_GROUP_LOSSES). Every rank keeps a log, which
`history.py` checks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.flow import nursery
from tests.flow.jobs import wait_gone
from tests.flow.sites import private_directory, started_in, stop_all
from tests.groups.elastic.history import CommittedStep, RankStep, check_history
from tests.groups.elastic.trainer import SHARDS, one_process, train_sharded
from tests.groups.replicas import Rank, Replicas, replicas
from tests.unit.store.server import Server, served

NAMES = "abc"
#: How often `make soak-groups` loses a replica.
LOSSES = int(os.environ.get("ETHA_GROUP_LOSSES", "50"))


class ElasticJob:
    """The replicas of a job, of two ranks each, by name; each has a directory, and so an agent, of its own."""

    def __init__(self, directory: Path, job: Replicas, server: Server) -> None:
        self.directory, self._job, self.server = directory, job, server
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._launches = itertools.count(1)
        self.ranks: dict[str, list[Rank]] = {}

    def start(self, name: str, *, resume: bool = False) -> list[Rank]:
        """Start a replica."""
        runtime = self.directory / name
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
            self._job.start(name, rank=rank, world=SHARDS, body=train_sharded, **options) for rank in range(SHARDS)
        ]
        return self.ranks[name]

    def lose(self, name: str, ranks: list[int]) -> None:
        """SIGKILL ranks of a replica; the others of it end by themselves."""
        for number in ranks:
            os.kill(self.ranks[name][number].pid, signal.SIGKILL)
        for number, rank in enumerate(self.ranks.pop(name)):
            how = rank.ends()
            assert how[0] == "killed" if number in ranks else how[0] == "GroupLostError", how[1]
            rank.process.join()

    def until(self, size: int, steps: int = 1) -> None:
        """All ranks have committed ``steps`` steps of so many replicas."""
        for rank in [each for ranks in self.ranks.values() for each in ranks]:
            first = rank.until(lambda log: log.committed and len(log.members) == size and not log.watches)
            rank.until(lambda log, first=first: log.committed and log.step >= first.step + steps - 1)

    def kill_agents(self) -> None:
        """SIGKILL all agents; the trainers start others."""
        for name in NAMES:
            for pid, command in started_in(str(self.directory / name)).items():
                if "etha.agent" in command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    wait_gone(pid)

    def finish(self, start: int = 0) -> list[CommittedStep]:
        """All end after the same step, with the logs and weights that they must have; the steps that counted."""
        everyone = [rank for ranks in self.ranks.values() for rank in ranks]
        for rank in everyone:
            rank.pipe.send("end")
        for rank in everyone:
            end = rank.ends()
            assert end[0] in ("ended", "GroupLostError"), end[1]  # whoever leaves first ends its replica for the other
        steps = check_history(self.logs(), 0)
        expected = one_process(steps)
        for name, number in itertools.product(self.ranks, range(SHARDS)):
            found = torch.load(self.directory / f"{name}-{number}.whole")
            for key, tensor in expected.items():
                # The order of sums differs from one process's, by some units in the last place of float64 in each step.
                torch.testing.assert_close(found[key], tensor, rtol=1e-8, atol=1e-10, msg=f"{name} {number}: {key}")
        self.ranks.clear()
        return steps

    def logs(self) -> list[RankStep]:
        """Of all ranks that ever lived."""
        found = []
        for path in sorted(self.directory.glob("*.log")):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a rank may be killed while it writes
                    fields = json.loads(line)
                    found.append(RankStep(**{**fields, "members": tuple(fields["members"])}))
        return found


@pytest.fixture(scope="module", autouse=True)
def agents() -> Iterator[None]:
    """Agents are forked from a process that has torch."""
    if nursery.address() is not None:
        yield
        return
    nursery.open_nursery()
    yield
    nursery.close_nursery()


@pytest.fixture
def job() -> Iterator[ElasticJob]:
    with private_directory() as directory, served(directory) as server, replicas(directory) as found:
        elastic = ElasticJob(directory, found, server)
        try:
            yield elastic
        finally:
            for name in NAMES:
                stop_all(str(directory / name))


def lose_and_regain(job: ElasticJob, losses: int, chance: random.Random) -> None:
    """Lose a replica at a random moment, one or both of its ranks; now and then all agents, or Redis, with it."""
    for number in range(losses):
        job.until(len(NAMES), chance.randrange(1, 6))
        name = chance.choice(NAMES)
        also = (
            chance.choice(["nothing", "nothing", "agents", "Redis"])
            if losses > 3
            else ["nothing", "agents", "Redis"][number % 3]
        )
        time.sleep(chance.random() / 50)  # anywhere in a step
        if also == "agents":
            job.kill_agents()
        if also == "Redis":
            job.server.stop()
        try:
            job.lose(name, chance.choice([[0], [1], [0, 1]]))
        finally:
            if also == "Redis":
                job.server.start()
        if chance.random() < 0.5:
            job.until(len(NAMES) - 1)
        job.start(name)
    job.until(len(NAMES), 3)


def play(job: ElasticJob, losses: int, seed: int) -> None:
    chance = random.Random(seed)
    for name in NAMES:
        job.start(name)
    lose_and_regain(job, losses, chance)
    before = job.finish()
    for name in NAMES:
        job.start(name, resume=True)
    job.until(len(NAMES), 5)
    steps = job.finish()
    assert steps[: len(before)] == before, "a job that starts again from disk goes on where it ended"
    assert len(steps) >= len(before) + 5
    print(f"{losses} losses (seed {seed}): {len(steps)} steps in {len({s.epoch for s in steps})} epochs are right")


def test_replicas_that_are_lost_and_come_again_train_as_one_process(job: ElasticJob) -> None:
    play(job, 3, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_fifty_losses(job: ElasticJob) -> None:
    play(job, LOSSES, seed=int(os.environ.get("ETHA_GROUP_SEED", "7")))
