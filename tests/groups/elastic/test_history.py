"""The check of an elastic job's logs fails for each way in which such a job could go wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.groups.elastic.history import RankStep, check_history


def job() -> list[RankStep]:
    """Replicas a, b, c of two ranks: b is killed in step 2, after a and c could not commit it; it comes again in 4."""
    logs: list[RankStep] = []

    def step(epoch: int, members: str, number: int, first: int, committed: bool = True, **also: object) -> None:
        for name in members:
            for rank in (0, 1):
                log = RankStep(
                    replica=name,
                    launch=1,
                    rank=rank,
                    epoch=epoch,
                    members=tuple(members),
                    step=number,
                    first=first,
                    committed=committed,
                    digest=f"rank {rank} after step {number if committed else number - 1}",
                )
                logs.append(replace(log, **also) if name == "b" else log)

    step(1, "abc", 0, 0)
    step(1, "abc", 1, 3)
    step(1, "ac", 2, 6, committed=False)
    logs[-4:] = [replace(log, members=("a", "b", "c")) for log in logs[-4:]]
    step(2, "ac", 2, 6)
    step(2, "ac", 3, 8)
    step(3, "acb", 4, 10, launch=2, loaded=True)
    step(3, "acb", 5, 13, launch=2)
    return logs


def test_the_steps_that_count_are_returned() -> None:
    found = check_history(job())
    assert [(each.epoch, each.step, list(each.batches)) for each in found] == [
        (1, 0, [0, 1, 2]),
        (1, 1, [3, 4, 5]),
        (2, 2, [6, 7]),
        (2, 3, [8, 9]),
        (3, 4, [10, 11, 12]),
        (3, 5, [13, 14, 15]),
    ]


def change(wanted: Callable[[RankStep], bool], **fields: object) -> Callable[[list[RankStep]], list[RankStep]]:
    return lambda logs: [replace(log, **fields) if wanted(log) else log for log in logs]


def drop(wanted: Callable[[RankStep], bool]) -> Callable[[list[RankStep]], list[RankStep]]:
    return lambda logs: [log for log in logs if not wanted(log)]


def at(replica: str, step: int, rank: int | None = None) -> Callable[[RankStep], bool]:
    return lambda log: log.replica == replica and log.step == step and rank in (None, log.rank)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (change(at("a", 1), members=("a", "b")), "mixes members"),
        (change(at("c", 3), members=("a", "c", "b")), "mixes members"),
        (change(at("b", 5), members=("a", "c")), "mixes members"),
        (change(at("b", 5, 1), launch=1), "two launches"),
        (change(at("a", 1, 1), committed=False), "disagree"),
        (change(at("c", 2, 0), committed=True), "disagree"),
        (change(at("b", 1, 0), digest="others"), "differ after"),
        (change(at("b", 5), digest="older buffers"), "differ after"),
        (change(lambda log: not log.committed, digest="new buffers"), "has changed something"),
        (change(lambda log: log.step == 3, step=7), "steps are missing"),
        (drop(lambda log: log.step == 3), "steps are missing"),
        (change(lambda log: log.step == 5, first=12), "missing or twice"),
        (change(lambda log: log.step == 5, first=14), "missing or twice"),
        (change(at("a", 5), first=12), "has batches from"),
        (change(lambda log: log.replica == "b" and log.step == 5, replica="d"), "no member"),
        (change(at("b", 4), watches=True), "no member"),
        (drop(at("c", 3)), "comes after"),
    ],
)
def test_a_job_that_went_wrong_is_found(wrong: Callable[[list[RankStep]], list[RankStep]], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_history(wrong(job()))


def stray(loads: bool) -> list[RankStep]:
    """b commits step 2 in epoch 1 and the others do not; then it comes late, and loads or does not."""
    logs = job()
    number = next(index for index, log in enumerate(logs) if log.step == 2)
    alone = [
        replace(log, step=2, first=6, digest=f"rank {log.rank} after b's step 2")
        for log in logs
        if log.replica == "b" and log.step == 1
    ]
    logs[number:number] = alone
    return [replace(log, launch=1, loaded=loads and log.loaded) if log.replica == "b" else log for log in logs]


def test_who_alone_has_committed_a_step_must_load_before_it_goes_on() -> None:
    assert [each.epoch for each in check_history(stray(loads=True))] == [1, 1, 2, 2, 3, 3]
    with pytest.raises(AssertionError, match="goes on from"):
        check_history(stray(loads=False))


def test_steps_begin_where_the_job_began() -> None:
    later = [replace(log, step=log.step + 40) for log in job()]
    assert check_history(later, 40)[0].step == 40
    with pytest.raises(AssertionError, match="steps are missing"):
        check_history(later)
