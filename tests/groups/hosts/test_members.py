"""Replicas on two hosts, with agents of their own and one Redis: they lose one and get it back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow import nursery
from tests.flow.networks import namespaces
from tests.flow.networks.namespaces import Hosts
from tests.flow.networks.tun import enter
from tests.flow.sites import private_directory
from tests.groups.replicas import Rank, Replicas, Trainer, replicas, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), *namespaces.MARKS]


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_directory() as path:
        yield path


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Hosts]:
    with namespaces.hosts(tmp_path) as found:
        yield found


def inside(trainer: Trainer) -> None:
    """Train in a namespace; the agent of the host starts there, too."""
    enter(trainer.options.pop("namespace"))
    os.environ.update(trainer.options.pop("env"))
    nursery.use(None)
    train(trainer)


def start(job: Replicas, directory: Path, net: Hosts, host: int) -> Rank:
    """A replica on host 1 or 2."""
    runtime = directory / str(host)
    runtime.mkdir(mode=0o700, exist_ok=True)
    env = {
        "ETHA_RUNTIME_DIR": str(runtime),
        "ETHA_REDIS_URL": net.url,
        "ETHA_LISTEN": f"10.211.1.{host}:0",
        "ETHA_HOST_ID": f"host-{host}",
        "ETHA_IDLE": "30",
    }
    return job.start(f"on {host}".replace(" ", "-"), body=inside, namespace=(net.one, net.two)[host - 1], env=env)


def sized(size: int) -> Any:
    return lambda log: log.committed and log.size == size


def test_replicas_of_two_hosts_lose_one_and_get_it_back(directory: Path, net: Hosts) -> None:
    with replicas(directory) as job:
        one, two = start(job, directory, net, 1), start(job, directory, net, 2)
        for each in (one, two):
            each.until(sized(2))
        killed = job.kill(two)
        alone = one.until(sized(1))
        assert alone.at - killed < 5.0
        again = start(job, directory, net, 2)
        for each in (one, again):
            each.until(sized(2))
        job.end(one, again)
        job.check()
