"""HSDP with replicas of two ranks that are lost and come again: what one process computes from the same batches.

    trainers (3 x 2) -- an agent for each replica -- one Redis;   the test kills any of these, and starts them again

The suite loses a replica three times, `make soak-groups` fifty times (ETHA_GROUP_LOSSES). Every rank keeps a log, which
`history.py` checks.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator

import pytest
import torch

from tests.groups.elastic.history import CommittedStep
from tests.groups.elastic.job import ElasticJob, elastic_job
from tests.groups.elastic.trainer import SHARDS, one_process, train_sharded

NAMES = "abc"
#: How often `make soak-groups` loses a replica, and the seed of its choices.
LOSSES = int(os.environ.get("ETHA_GROUP_LOSSES", "50"))
SEED = int(os.environ.get("ETHA_GROUP_SEED", "7"))

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def job() -> Iterator[ElasticJob]:
    with elastic_job(train_sharded, SHARDS) as found:
        yield found


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
        lost = chance.choice([[0], [1], [0, 1]])
        if also == "Redis":
            job.server.stop()
            # A rank that hears of the death in begin() asks Redis what has become of its replica, and waits for it.
            job.lose(name, lost, then=job.server.start)
        else:
            job.lose(name, lost)
        if chance.random() < 0.5:
            job.until(len(NAMES) - 1)
        job.start(name)
    job.until(len(NAMES), 3)


def ended(job: ElasticJob) -> list[CommittedStep]:
    """The steps that counted; all replicas have the weights and buffers that one process has after them."""
    names = list(job.ranks)
    steps = job.finish()
    expected = one_process(steps)
    for name, number in itertools.product(names, range(SHARDS)):
        found = torch.load(job.directory / f"{name}-{number}.whole")
        for key, tensor in expected.items():
            # The order of sums differs from one process's, by some units in the last place of float64 in each step.
            torch.testing.assert_close(found[key], tensor, rtol=1e-8, atol=1e-10)
    return steps


def play(job: ElasticJob, losses: int, seed: int) -> None:
    chance = random.Random(seed)
    for name in NAMES:
        job.start(name)
    job.until(len(NAMES))
    for rank in itertools.chain.from_iterable(job.ranks.values()):
        joins = len({log.epoch for log in rank.logs}) - 1
        lost = sum(not log.committed for log in rank.logs)
        assert lost <= joins, f"a join costs at most one step, and {rank.name} has lost {lost} in {joins} joins"
    lose_and_regain(job, losses, chance)
    before = ended(job)
    for name in NAMES:
        job.start(name, resume=True)
    job.until(len(NAMES), 5)
    steps = ended(job)
    assert steps[: len(before)] == before, "a job that starts again from disk goes on where it ended"
    assert len(steps) >= len(before) + 5
    print(f"{losses} losses (seed {seed}): {len(steps)} steps in {len({s.epoch for s in steps})} epochs are right")


def test_replicas_that_are_lost_and_come_again_train_as_one_process(job: ElasticJob) -> None:
    play(job, 3, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_fifty_losses(job: ElasticJob) -> None:
    play(job, LOSSES, seed=SEED)
