"""Replicas on two hosts, with agents of their own and one Redis: one is killed, or the network fails between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.flow import nursery
from tests.flow.networks import filters, namespaces, tun
from tests.flow.networks.filters import DEAF, LOSSY, arriving
from tests.flow.networks.namespaces import Hosts
from tests.flow.networks.tun import End, delayed, enter
from tests.flow.sites import private_directory
from tests.groups.replicas import Rank, Replicas, StepLog, Trainer, replicas, train
from tests.seconds import within

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


@contextmanager
def cut(net: Hosts) -> Iterator[None]:
    net.cut()
    try:
        yield
    finally:
        net.mend()


def deaf(net: Hosts, host: str) -> AbstractContextManager[Any]:
    """Nothing of the other host arrives at this one."""
    return arriving(net, DEAF, at=(host,))


#: How the way between the hosts is cut; the replica on host 1 is the older one, which goes on alone.
CUTS: dict[str, Callable[[Hosts], AbstractContextManager[Any]]] = {
    "to the older one": lambda net: deaf(net, net.one),
    "to the younger one": lambda net: deaf(net, net.two),
    "both ways": cut,
}


def epochs(rank: Rank) -> list[int]:
    """The epochs in which it has made steps."""
    return sorted({log.epoch for log in rank.logs})


@pytest.mark.needs("nft")
@pytest.mark.parametrize(
    ("seconds", "way"),
    [
        pytest.param(0, "to the older one", marks=pytest.mark.more, id="until one goes on"),
        *(pytest.param(60, way, marks=[pytest.mark.soak, pytest.mark.timeout(0)], id=f"60 s {way}") for way in CUTS),
    ],
)
def test_hosts_that_cannot_reach_each_other_go_apart_once_and_meet_again(
    directory: Path, net: Hosts, seconds: float, way: str
) -> None:
    """The older replica trains on without a pause, and the other one comes back once there is a way again."""
    with replicas(directory) as job:
        one = start(job, directory, net, 1)
        one.until(sized(1))
        two = start(job, directory, net, 2)
        before = max(each.until(sized(2)).epoch for each in (one, two))
        began = one.logs[-1].at
        with CUTS[way](net):
            alone = one.until(sized(1))
            while one.logs[-1].at < began + seconds:
                one.until(lambda log: True)
        mended = one.logs[-1].at
        back = one.until(sized(2), 120)
        two.until(lambda log: log.committed and log.epoch == back.epoch and log.size == 2)
        assert back.at - mended < within(20.0)
        assert back.epoch - before == 3, "an epoch that could not form, one of the older one, and one of both"
        assert epochs(one) == [*range(epochs(one)[0], before + 1), alone.epoch, back.epoch]
        assert epochs(two)[-2:] == [before, back.epoch]
        steps: list[StepLog] = [log for log in one.logs if log.epoch == alone.epoch]
        longest = max((later.at - earlier.at for earlier, later in pairwise(steps)), default=0.0)
        assert longest < within(2.0), "nobody has stood still for the one that could not be reached"
        job.end(one, two)
        job.check()


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(lambda net: arriving(net, LOSSY.format(percent=5)), id="5 % loss", marks=filters.MARKS),
        pytest.param(
            lambda net: delayed(End(net.one, "10.211.1.1"), End(net.two, "10.211.1.2"), 0.2),
            id="200 ms",
            marks=[*tun.MARKS, pytest.mark.more],
        ),
    ],
)
def test_a_bad_network_slows_replicas_and_parts_none(
    directory: Path, net: Hosts, network: Callable[[Hosts], AbstractContextManager[Any]]
) -> None:
    with replicas(directory) as job:
        one, two = start(job, directory, net, 1), start(job, directory, net, 2)
        epoch = max(each.until(sized(2)).epoch for each in (one, two))
        with network(net):
            step = max(each.logs[-1].step for each in (one, two)) + 20
            for each in (one, two):
                assert each.until(lambda log: log.step >= step, 120).epoch == epoch
            job.kill(two)
            one.until(sized(1))
            again = start(job, directory, net, 2)
            joined = [each.until(sized(2), 120) for each in (one, again)]
        assert len({log.epoch for log in joined}) == 1
        job.end(one, again)
        job.check()
