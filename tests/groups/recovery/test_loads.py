"""A newcomer loads its state: in any sharding, while the others compute, and whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.flow.sites import private_directory
from tests.groups.recovery.loads import OF_NEWCOMER, OF_SOURCE, ROWS, train
from tests.groups.replicas import Rank, Replicas, StepLog, replicas
from tests.seconds import within

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_directory() as path:
        yield path


@pytest.fixture
def job(directory: Path) -> Iterator[Replicas]:
    with replicas(directory, timeout=20.0) as found:
        yield found


def moments(names: tuple[str, ...], *always: str) -> list[Any]:
    """All moments; ``make test`` has those of ``always``."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.more) for name in names]


def sized(size: int) -> Callable[[StepLog], bool]:
    return lambda log: log.committed and log.size == size


def replica(job: Replicas, directory: Path, name: str, placement: str, world: int = 2) -> list[Rank]:
    """The ranks of a replica that shards its state so."""
    options = {"placement": placement, "directory": str(directory)}
    return [job.start(name, rank=rank, world=world, body=train, **options) for rank in range(world)]


def check_equal(job: Replicas) -> None:
    """After every committed step all replicas have the same state, rank by rank."""
    after: dict[tuple[int, int, int], set[float]] = defaultdict(set)
    for rank in job.every:
        for log in rank.logs:
            if log.committed:
                after[log.epoch, log.step, rank.number].add(round(log.weights, 9))
    assert all(len(values) == 1 for values in after.values()), {k: v for k, v in after.items() if len(v) > 1}


@pytest.mark.parametrize(
    ("source", "newcomer"),
    [
        ("rows", "columns"),
        pytest.param("columns", "whole", marks=pytest.mark.more),
        ("plain", "rows"),
        pytest.param("rows", "plain", marks=pytest.mark.more),
    ],
)
def test_a_newcomer_may_shard_otherwise(job: Replicas, directory: Path, source: str, newcomer: str) -> None:
    first = replica(job, directory, "a", source)
    for one in first:
        one.until(sized(1))
    new = replica(job, directory, "new", newcomer)
    for one in (*first, *new):
        one.until(sized(2))
    assert [one.logs[0].total for one in new] == [1.0, 1.0], "it has recovered"
    assert all(one.logs[0].committed and one.logs[0].size == 1 for one in new), "its first step counts"
    assert all(log.committed for one in first for log in one.logs), "no step was lost"
    last = new[0].logs[-1].step
    new[0].until(lambda log: log.step > last + 5)
    job.end(*first, *new)
    check_equal(job)


def test_a_newcomer_of_another_host_loads_by_both_hosts_agents(job: Replicas, directory: Path) -> None:
    """The hosts have only names, and a Redis in common: agents of one of them read no memory of the other."""
    job.env["ETHA_HOST_ID"] = "one"
    first = replica(job, directory, "a", "rows")
    for one in first:
        one.until(sized(1))
    with private_directory() as other:
        job.env |= {
            "ETHA_RUNTIME_DIR": str(other),
            "ETHA_HOST_ID": "two",
            "ETHA_REDIS_URL": f"unix://{directory}/redis.sock",
        }
        new = replica(job, directory, "new", "columns")
        for one in (*first, *new):
            one.until(sized(2))
        assert [one.logs[0].total for one in new] == [1.0, 1.0], "it has recovered"
        assert all(log.committed for one in first for log in one.logs), "no step was lost"
        job.end(*first, *new)
    check_equal(job)


def pair_with_one_ahead(job: Replicas, directory: Path, count: int = 2) -> list[Rank]:
    """Replicas of one rank each that train."""
    ranks = [one for name in "abc"[:count] for one in replica(job, directory, name, "plain", 1)]
    for one in ranks:
        one.until(sized(count))
    return ranks


def arm(rank: Rank, moment: str, what: str) -> None:
    """Let ``what`` happen when this rank reaches ``moment`` of the next load for "new"."""
    rank.pipe.send(("act", moment, what))
    rank.says("armed")


def source_of(ranks: list[Rank]) -> Rank:
    """The member from which the next newcomer loads: the first of the epoch."""
    return next(one for one in ranks if one.logs[-1].rank == 0)


def test_members_compute_while_the_newcomer_has_nothing_yet(job: Replicas, directory: Path) -> None:
    ranks = pair_with_one_ahead(job, directory)
    new = job.start("new", body=train, placement="plain", directory=str(directory), act=("receive", "wait"))
    new.says("waits")
    epoch = ranks[0].logs[-1].epoch + 1
    for one in ranks:
        one.says(f"computed {epoch}")
    assert f"begun {epoch}" not in new.words
    assert all(log.epoch < epoch for one in ranks for log in one.logs), "the step waits for the newcomer"
    new.pipe.send("go on")
    for one in (*ranks, new):
        one.until(sized(3))
    assert new.logs[0].committed and new.logs[0].size == 2
    job.end(*ranks, new)
    check_equal(job)


@pytest.mark.parametrize("moment", moments(OF_SOURCE, "hear", "register", "copied"))
def test_another_source_takes_the_place_of_one_that_dies(job: Replicas, directory: Path, moment: str) -> None:
    ranks = pair_with_one_ahead(job, directory)
    source = source_of(ranks)
    (other,) = [one for one in ranks if one is not source]
    arm(source, moment, "die")
    (new,) = replica(job, directory, "new", "plain", 1)
    assert source.ends()[0] == "killed"
    new.until(sized(2))
    other.until(sized(2))
    assert new.logs[0].total == 1.0 and other.logs[-1].rank == 0
    assert sum(not log.committed for log in other.logs) <= 2, "one for the death, one for what it left behind"
    job.end(other, new)
    check_equal(job)


@pytest.mark.parametrize("moment", moments(OF_NEWCOMER, "answer", "receive", "loaded"))
def test_a_newcomer_that_dies_costs_the_others_a_step(job: Replicas, directory: Path, moment: str) -> None:
    ranks = pair_with_one_ahead(job, directory)
    new = job.start("new", body=train, placement="plain", directory=str(directory), act=(moment, "die"))
    assert new.ends()[0] == "killed"
    epoch = ranks[0].logs[-1].epoch
    for one in ranks:
        one.until(lambda log: log.committed and log.epoch > epoch)
        assert sum(not log.committed for log in one.logs) <= 1
    (again,) = replica(job, directory, "new", "plain", 1)
    for one in (*ranks, again):
        one.until(sized(3))
    job.end(*ranks, again)
    check_equal(job)


@pytest.mark.parametrize("moment", moments(OF_SOURCE, "meet", "copied"))
def test_agents_that_die_in_a_load(job: Replicas, directory: Path, moment: str) -> None:
    ranks = pair_with_one_ahead(job, directory)
    arm(source_of(ranks), moment, "kill agents")
    (new,) = replica(job, directory, "new", "plain", 1)
    for one in (*ranks, new):
        one.until(sized(3))
    assert all(sum(not log.committed for log in one.logs) <= 2 for one in ranks)
    job.end(*ranks, new)
    check_equal(job)


@pytest.mark.parametrize("moment", moments(OF_SOURCE[2:], "meet"))  # before them, what fails is the program's own
def test_a_source_that_fails_serves_in_the_next_epoch(job: Replicas, directory: Path, moment: str) -> None:
    (source,) = replica(job, directory, "a", "plain", 1)
    source.until(sized(1))
    arm(source, moment, "fail")
    (new,) = replica(job, directory, "new", "plain", 1)
    joined = [one.until(sized(2)) for one in (source, new)]
    assert joined[0].at - source.logs[0].at < within(10.0), "nobody has waited for a deadline"
    assert sum(not log.committed for log in source.logs) <= 1
    job.end(source, new)
    check_equal(job)


@pytest.mark.parametrize("moment", moments(OF_NEWCOMER, "receive"))
def test_a_newcomer_that_is_stopped_is_left_out_and_loads_later(directory: Path, moment: str) -> None:
    with replicas(directory, timeout=3.0) as job:
        ranks = pair_with_one_ahead(job, directory)
        new = job.start("new", body=train, placement="plain", directory=str(directory), act=(moment, "stop"))
        new.says("stops")
        joined = ranks[0].logs[-1].epoch
        for one in ranks:
            one.until(lambda log: log.committed and log.epoch > joined and log.size == 2)
        os.kill(new.pid, signal.SIGCONT)
        for one in (*ranks, new):
            one.until(sized(3))
        job.end(*ranks, new)
        check_equal(job)


@pytest.mark.parametrize("moment", moments(OF_SOURCE[:-1], "hear"))  # then the newcomer has everything
def test_a_newcomer_does_not_begin_anew_while_the_only_source_is_stopped(directory: Path, moment: str) -> None:
    with replicas(directory, timeout=3.0) as job:
        # It is stopped in begin(), which it ends with an error after longer than this.
        source = job.start("a", body=train, placement="plain", directory=str(directory), timeout=60.0)
        source.until(sized(1))
        arm(source, moment, "stop")
        (new,) = replica(job, directory, "new", "plain", 1)
        source.says("stops")
        name, text = new.ends()
        assert name == "GroupTimeoutError" and "replica a" in text, text
        assert new.logs == [], "it has trained without the weights"
        last = source.logs[-1].step
        os.kill(source.pid, signal.SIGCONT)
        source.until(lambda log: log.committed and log.step > last)
        (again,) = replica(job, directory, "new", "plain", 1)
        for one in (source, again):
            one.until(sized(2))
        assert again.logs[0].total == 1.0 and again.logs[0].step > last
        job.end(source, again)
        check_equal(job)


def test_finished_loads_leave_redis_in_the_next_epoch(job: Replicas, directory: Path) -> None:
    (first,) = replica(job, directory, "a", "plain", 1)
    first.until(sized(1))
    (new,) = replica(job, directory, "new", "plain", 1)
    joined = first.until(sized(2))
    with redis.Redis(unix_socket_path=str(directory / "redis.sock"), decode_responses=True) as store:
        loaded = f"dp.epoch-{joined.epoch}.member-1"
        assert store.sismember("etha:{default}:pairs", loaded)
        assert store.exists(f"etha:{{default}}:batch:{loaded}:state")
        job.end(new)
        first.until(sized(1))
        (again,) = replica(job, directory, "new", "plain", 1)
        newest = first.until(sized(2))
        left = [key for key in store.scan_iter("*") if "epoch-" in key and f"epoch-{newest.epoch}." not in key]
        assert [key for key in left if ":epoch:" not in key] == []
        assert store.smembers("etha:{default}:pairs") == {f"dp.epoch-{newest.epoch}.member-1"}
        assert store.smembers("etha:{default}:batches") == {f"dp.epoch-{newest.epoch}.member-1/state"}
    job.end(first, again)


def test_a_rank_that_fails_says_so_at_once(job: Replicas, directory: Path) -> None:
    """The other ranks of the load wait in a rendezvous, to which it never comes."""
    first = replica(job, directory, "a", "rows")
    for one in first:
        one.until(sized(1))
    options = {"placement": "rows", "directory": str(directory)}
    new = [job.start("new", rank=0, world=2, body=train, **options)]
    new.append(job.start("new", rank=1, world=2, body=train, **options, act=("meet", "fail")))
    assert new[1].ends()[0] == "MemoryError"
    assert new[0].ends()[0] == "GroupLostError"
    epoch = first[0].logs[-1].epoch
    for one in first:
        one.until(lambda log: log.committed and log.epoch > epoch)
        pauses = [later.at - earlier.at for earlier, later in pairwise(one.logs)]
        assert max(pauses) < within(10.0), "nobody has waited for a deadline"
    job.end(*first)


def test_a_state_that_does_not_fit_is_the_newcomers_error(job: Replicas, directory: Path) -> None:
    (first,) = replica(job, directory, "a", "plain", 1)
    first.until(sized(1))
    new = job.start("new", body=train, placement="plain", directory=str(directory), rows=ROWS + 1)
    name, text = new.ends()
    assert name == "ConfigError", text
    why = f"weight is torch.float64 of [{ROWS + 1}, 11] here and torch.float64 of [{ROWS}, 11] at the replica"
    assert why in text
    first.says(f"new could not load: new rank 0: members.state: {why}", within=True)
    last = first.logs[-1].step
    first.until(lambda log: log.committed and log.step > last)
    assert sum(not log.committed for log in first.logs) <= 1
    job.end(first)


def test_another_optimizer_is_found_before_the_first_step(job: Replicas, directory: Path) -> None:
    (first,) = replica(job, directory, "a", "plain", 1)
    first.until(sized(1))
    new = job.start("new", body=train, placement="plain", directory=str(directory), optimizer="SGD")
    name, text = new.ends()
    assert name == "ConfigError", text
    assert "the optimizer is SGD here and Adam at the replica that it is loaded from" in text
    job.end(first)


def test_a_state_that_cannot_be_handed_over_keeps_only_the_newcomer_out(job: Replicas, directory: Path) -> None:
    first = replica(job, directory, "a", "plain", 2)
    for one in first:
        one.until(sized(1))
    arm(first[1], "take", "odd")
    new = replica(job, directory, "new", "plain", 2)
    name, text = new[1].ends()
    assert name == "ConfigError", text
    assert "replica a cannot hand over its state: ConfigError: members.state cannot hand over extra/odd, a set" in text
    assert new[0].ends()[0] == "GroupLostError"
    epoch = first[0].logs[-1].epoch
    for one in first:
        one.until(lambda log: log.committed and log.epoch > epoch)
    job.end(*first)
