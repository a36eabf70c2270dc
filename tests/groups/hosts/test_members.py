"""Replicas on two hosts, with agents of their own and one Redis: one is killed, or the network fails between them."""

from __future__ import annotations

import os
import time
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


#: How the way between the hosts is cut; the replica on host 1 is the older one.
CUTS: dict[str, Callable[[Hosts], AbstractContextManager[Any]]] = {
    "to the older one": lambda net: deaf(net, net.one),
    "to the younger one": lambda net: deaf(net, net.two),
    "both ways": cut,
}


def epochs(rank: Rank) -> list[int]:
    """The epochs in which it has made steps."""
    return sorted({log.epoch for log in rank.logs})


def alone_after(epoch: int, one: Rank, two: Rank) -> tuple[Rank, Rank, StepLog]:
    """Wait until a replica trains alone; that one, the other one, and the step."""
    deadline = time.monotonic() + 60
    while True:
        for rank, other in ((one, two), (two, one)):
            last: StepLog = rank.logs[-1]
            if last.committed and last.size == 1 and last.epoch > epoch:
                return rank, other, last
        left = deadline - time.monotonic()
        assert one.end is None and two.end is None and left > 0 and one.read(left), (one.logs[-3:], two.logs[-3:])


def committed_in(rank: Rank, epoch: int) -> int:
    return max(log.step for log in rank.logs if log.epoch == epoch and log.committed)


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
    """One trains on without a pause, and the other one comes back once there is a way again.

    If the cut has let the vote of the last step pass in one direction, the one that has committed it goes on. Otherwise
    the older one does.
    """
    with replicas(directory) as job:
        one = start(job, directory, net, 1)
        one.until(sized(1))
        two = start(job, directory, net, 2)
        before = max(each.until(sized(2)).epoch for each in (one, two))
        began = one.logs[-1].at
        with CUTS[way](net):
            first, second, alone = alone_after(before, one, two)
            while first.logs[-1].at < began + seconds:
                first.until(lambda log: True)
        mended = first.logs[-1].at
        back = first.until(sized(2), 120)
        second.until(lambda log: log.committed and log.epoch == back.epoch and log.size == 2)
        ahead = committed_in(two, before) - committed_in(one, before)
        assert first is (two if ahead > 0 else one) and abs(ahead) <= 1
        assert back.at - mended < within(20.0)
        assert back.epoch - before == 3, "an epoch that could not form, one of a single replica, and one of both"
        assert epochs(first)[-3:] == [before, alone.epoch, back.epoch]
        assert epochs(second)[-2:] == [before, back.epoch]
        steps: list[StepLog] = [log for log in first.logs if log.epoch == alone.epoch]
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
