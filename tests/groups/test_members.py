"""Replicas that come and go: real trainers, agents and Redis, and real kills."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from etha.bus.messages import EnterGroup
from etha.errors import GroupTimeoutError
from etha.groups.members import Members
from tests.flow.sites import private_directory, started_in
from tests.groups.replicas import Replicas, StepLog, come_twice, learn, never_commit, replicas, train_torchs_ddp
from tests.processes import send_signal
from tests.seconds import within

pytestmark = pytest.mark.usefixtures("agents")


@pytest.fixture
def directory() -> Iterator[Path]:
    with private_directory() as path:
        yield path


@pytest.fixture
def job(directory: Path) -> Iterator[Replicas]:
    with replicas(directory) as found:
        yield found


def sized(size: int) -> object:
    return lambda log: log.committed and log.size == size


def first(rank: object, epoch: int) -> StepLog:
    return next(log for log in rank.logs if log.committed and log.epoch == epoch)  # type: ignore[attr-defined]


def test_three_replicas_lose_one_and_get_it_back(job: Replicas) -> None:
    a, b, c = (job.start(name) for name in "abc")
    for one in (a, b, c):
        one.until(sized(3))
    job.kill(b)
    for one in (a, c):
        assert one.until(sized(2)).epoch == one.logs[-1].epoch
    again = job.start("b")
    joined = [one.until(sized(3)) for one in (a, c, again)]
    assert len({log.epoch for log in joined}) == 1
    lasts = [one.until(lambda log, at=joined[0]: log.step >= at.step + 5) for one in (a, c, again)]
    epoch = joined[0].epoch
    assert len({first(one, epoch).step for one in (a, c, again)}) == 1, "all enter the new epoch at the same step"
    uncommitted = [log for log in a.logs if not log.committed and log.epoch >= a.logs[-1].epoch - 1]
    assert len(uncommitted) <= 1, "a join costs at most one step"
    assert lasts
    job.end(a, c, again)
    job.check()


@pytest.mark.parametrize("via", ["etha", "gloo"])
def test_who_leaves_out_the_calls_of_a_step_keeps_nobody_waiting(directory: Path, via: str) -> None:
    with replicas(directory, via=via, timeout=40.0) as job:
        a, b = job.start("a"), job.start("b", fails_at=20)
        for one in (a, b):
            one.until(lambda log: log.committed and log.step >= 22)
            lost = [log for log in one.logs if not log.committed and log.step == 20]
            assert len(lost) == 1, "only the step that failed does not count"
            before = max((log.at for log in one.logs if log.at < lost[0].at), default=lost[0].at)
            assert lost[0].at - before < within(5.0), "nobody has waited for the timeout"
        job.end(a, b)
        job.check()


def test_a_replica_that_has_left_comes_again_in_the_same_launch(job: Replicas) -> None:
    ranks = [job.start("a", rank=rank, world=2, body=come_twice) for rank in range(2)]
    for rank in ranks:
        end = rank.ends()
        assert end[0] == "ended", end


def test_a_loop_that_never_commits_is_warned(job: Replicas) -> None:
    job.start("a", body=never_commit).says("step 0 was begun 10 times and never committed", within=True)


def test_ranks_of_a_replica_change_the_epoch_together(directory: Path) -> None:
    """Between two steps one rank hears of a death before the other, which would go on into the step alone."""
    with replicas(directory, timeout=40.0) as job:
        a = [job.start("a", rank=rank, world=2, breaks_at=20) for rank in range(2)]
        b = [job.start("b", rank=rank, world=2) for rank in range(2)]
        for one in (*a, *b):
            one.until(lambda log: log.committed and log.step >= 25 and log.size == 2)
            pauses = [later.at - earlier.at for earlier, later in pairwise(one.logs) if earlier.step >= 19]
            assert max(pauses) < within(5.0), "nobody has waited for the timeout"
        assert a[0].logs[-1].epoch > next(log.epoch for log in a[0].logs if log.step == 20)
        job.end(*a, *b)
        job.check()


def test_replicas_over_gloo(directory: Path) -> None:
    with replicas(directory, via="gloo") as job:
        a, b, c = (job.start(name) for name in "abc")
        for one in (a, b, c):
            one.until(sized(3))
        job.kill(b)
        for one in (a, c):
            one.until(sized(2))
        job.end(a, c)
        job.check()


def test_replicas_over_gloo_in_children(directory: Path) -> None:
    """The children meet over the agents' store, which their trainers serve to them."""
    with replicas(directory, via="baby-gloo") as job:
        a, b = (job.start(name) for name in "ab")
        for one in (a, b):
            one.until(sized(2))
        job.kill(b)
        a.until(sized(1))
        again = job.start("b")
        joined = [one.until(sized(2)) for one in (a, again)]
        assert len({log.epoch for log in joined}) == 1
        job.end(a, again)
        job.check()


def test_one_of_two_goes_on_at_once(job: Replicas) -> None:
    a, b = job.start("a"), job.start("b")
    for one in (a, b):
        one.until(sized(2))
    killed = job.kill(b)
    alone = a.until(sized(1))
    assert alone.at - killed < within(1.0)
    job.end(a)
    job.check()


def test_a_newcomer_loads_weights_optimizer_and_data_position(job: Replicas) -> None:
    a, b, c = (job.start(name, body=learn) for name in "abc")
    for one in (a, b, c):
        one.until(sized(3))
    job.kill(a)  # the first one, from which the others have loaded
    for one in (b, c):
        one.until(sized(2))
    again = job.start("a", body=learn)
    joined = again.until(sized(3))
    first_step = again.logs[0]
    assert first_step.total == 1.0, "it has recovered"
    assert first_step.committed and (first_step.rank, first_step.size) == (2, 2), (
        "no step is lost; it watches the first"
    )
    assert joined.step == first_step.step + 1
    for one in (b, c):
        one.until(lambda log: log.committed and log.step > joined.step + 5)
    job.end(b, c, again)
    after: dict[tuple[int, int], set[float]] = {}
    for rank in job.every:
        for log in rank.logs:
            if log.committed:
                after.setdefault((log.epoch, log.step), set()).add(log.weights)
    assert all(len(values) == 1 for values in after.values()), {k: v for k, v in after.items() if len(v) > 1}


def test_who_leaves_in_order_costs_one_step(job: Replicas) -> None:
    a, b = job.start("a"), job.start("b")
    for one in (a, b):
        one.until(sized(2))
    job.end(b)
    a.until(sized(1))
    assert sum(not log.committed for log in a.logs) <= 2
    job.end(a)
    job.check()


def test_a_stopped_member_is_left_out_and_comes_back(directory: Path) -> None:
    with replicas(directory, timeout=2.0) as job:
        a, b = job.start("a"), job.start("b")
        for one in (a, b):
            one.until(sized(2))
        send_signal(b.pid, signal.SIGSTOP)
        a.until(sized(1))
        os.kill(b.pid, signal.SIGCONT)
        both = a.until(sized(2))
        b.until(lambda log: log.committed and log.epoch == both.epoch and log.size == 2)
        assert first(b, both.epoch).rank == 1, "who was left out is behind"
        job.end(a, b)
        job.check()


def test_training_goes_on_without_the_agent(job: Replicas, directory: Path) -> None:
    a, b = job.start("a"), job.start("b")
    for one in (a, b):
        one.until(sized(2))
    epoch, step = a.logs[-1].epoch, a.logs[-1].step
    agents = [pid for pid, command in started_in(str(directory)).items() if "etha.agent" in command]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    for one in (a, b):
        assert one.until(lambda log: log.step > step + 100).epoch == epoch
    job.kill(b)
    assert a.until(sized(1)).epoch > epoch
    job.end(a)
    job.check()


def test_a_replica_that_loses_a_rank_is_over(job: Replicas) -> None:
    ranks = {(name, rank): job.start(name, rank=rank, world=2) for name in "ab" for rank in (0, 1)}
    for one in ranks.values():
        one.until(sized(2))
    job.kill(ranks["b", 1])
    error, text = ranks["b", 0].ends()
    assert error == "GroupLostError", text
    for rank in (0, 1):
        ranks["a", rank].until(sized(1))
    again = [job.start("b", rank=rank, world=2) for rank in (0, 1)]
    for one in again:
        one.until(sized(2))
    for rank in (0, 1):
        ranks["a", rank].until(sized(2))
    job.end(*again, ranks["a", 0], ranks["a", 1])
    job.check()


def test_votes_of_all_ranks_of_a_replica_are_equal(job: Replicas) -> None:
    ranks = [job.start(name, rank=rank, world=2) for name in "ab" for rank in (0, 1)]
    for one in ranks:
        one.until(sized(2))
    job.kill(ranks[3])
    for one in ranks[:2]:
        one.until(sized(1))
    job.end(*ranks[:2])
    votes = [{(log.epoch, log.step, log.committed) for log in one.logs} for one in ranks[:2]]
    assert votes[0] == votes[1]


def status(directory: Path, *words: str) -> str:
    """What ``etha status`` prints about this job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
    env |= {"ETHA_RUNTIME_DIR": str(directory), "COLUMNS": "200"}
    command = [sys.executable, "-m", "etha", "status", *words]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def test_status_shows_the_group_with_epoch_members_and_step_and_who_is_missing(job: Replicas, directory: Path) -> None:
    ranks = {(name, rank): job.start(name, rank=rank, world=2, pause=0.01) for name in "ab" for rank in (0, 1)}
    step = [one.until(sized(2)) for one in ranks.values()][-1].step
    [line] = json.loads(status(directory, "--json"))["groups"]
    assert (line["group"], line["state"], line["world_size"], line["waiting_for"]) == ("dp", "formed", 2, [])
    assert line["step"] >= step, "the step is the one of now, not the one at which the epoch has formed"
    for one in ranks.values():
        one.until(lambda log: log.step > line["step"])
    [later] = json.loads(status(directory, "--json"))["groups"]
    assert later["epoch"] == line["epoch"] and later["step"] > line["step"]
    assert {one["rank"] for one in later["members"]} == {0, 1} and all(one["counts"] for one in later["members"])
    found = {(one["replica"], rank["rank"]): rank["pid"] for one in later["members"] for rank in one["ranks"]}
    assert found == {place: one.pid for place, one in ranks.items()}
    new = job.start("c", rank=0, world=2)
    waits: list[dict[str, Any]] = []
    while not waits:
        waits = json.loads(status(directory, "--json"))["groups"][0]["waiting_for"]
    assert waits == [{"replica": "c", "rank": 1, "host": "", "pid": None}]
    table = status(directory)
    assert "elastic groups" in table and "rank 1 of c, which has not come" in table and f"pid {new.pid} on" in table
    job.end(*ranks.values())
    job.check()


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["made before the step", "made in it"])
def test_torchs_ddp_cannot_join_members_that_train(job: Replicas, late: bool) -> None:
    """Its gradients fit into one bucket: the calls would match, and the sums be of unlike gradients."""
    one = job.start("one", body=train_torchs_ddp)
    one.until(lambda log: log.committed and log.step >= 3)
    two = job.start("two", body=train_torchs_ddp, late=late)
    name, text = two.ends()
    assert name == "GroupError" and "etha.groups.DistributedDataParallel" in text
    assert not any(log.committed for log in two.logs)
    one.until(lambda log: log.committed and log.size == 1 and log.epoch > 1)
    assert all(log.size == 1 for log in one.logs if log.committed)
    job.end(one)


@pytest.mark.slow
def test_torchs_ddp_trains_where_all_begin_together(job: Replicas) -> None:
    one, two = (job.start(name, body=train_torchs_ddp, min_replicas=2) for name in ("one", "two"))
    for each in (one, two):
        each.until(lambda log: log.committed and log.step >= 3)
    job.end(one, two)


def test_a_call_that_was_cancelled_at_any_moment_does_not_keep_the_next_one_out(
    job: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two quick Ctrl-C do. The second one does not wait until the agent has taken the wish back."""
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    with Members("dp", replica="a", min_replicas=2, timeout=20) as members:
        link = members._link

        def question(patience: float) -> Any:
            asked = EnterGroup(
                group="dp", replica="a", rank=0, world=1, wants=True, launch=None, epoch=0, last=0, step=0, committed=0,
                least=2, patience=20.0, grace=3.0, asked=str(next(numbers)),
            )  # fmt: skip
            return asyncio.ensure_future(link.ask(asked, patience))

        async def ask_and_cancel() -> None:
            for turn in range(30):
                asked = question(30.0)
                await asyncio.sleep(0.01 * (turn % 3))
                asked.cancel()
                await asyncio.sleep(0)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            with pytest.raises(GroupTimeoutError):
                await question(0.5)

        numbers = itertools.count()
        with pytest.raises(GroupTimeoutError):
            members.begin(timeout=5.0)  # its agent is there now
        link.loop_thread.call(ask_and_cancel())
