"""The ledger accepts a version only when every hash and the loss agree."""

from __future__ import annotations

import math
from typing import Any

import pytest

from etha.demo.events import Event
from etha.demo.options import GOAL, GOAL_STEPS, Options
from etha.demo.report import DemoReport, compare, table


def reported(**fields: Any) -> dict[str, Any]:
    return {"hashes": {"w": "aa", "b": "bb"}, "loss": 2.0, "bytes": 4000, "seconds": 0.001, "sample": "x", **fields}


def take(report: DemoReport, number: int, loss: float, **received: Any) -> None:
    report.take(Event(job="inference", kind="version", fields=reported(number=number, loss=loss, **received)))
    report.take(Event(job="trainer", kind="version", fields=reported(number=number, loss=loss)))


def test_equal_hashes_and_losses_make_a_row_without_problems() -> None:
    row = compare(7, reported(), reported(loss=2.0 + 1e-6))
    assert (row.number, row.problems, row.tensors) == (7, (), 2)
    assert row.gb_per_s == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("received", "problem"),
    [
        ({"hashes": {"w": "aa", "b": "b0"}}, "b differs"),
        ({"hashes": {"w": "aa"}}, "b differs"),
        ({"hashes": {"w": "aa", "b": "bb", "c": "cc"}}, "c differs"),
        ({"loss": 2.1}, "loss 2.0 at the trainer, 2.1 at the inference job"),
        ({"loss": math.nan}, "loss 2.0 at the trainer, nan at the inference job"),
        ({"loss": None}, "loss 2.0 at the trainer, None at the inference job"),
    ],
)
def test_any_difference_is_a_problem(received: dict[str, Any], problem: str) -> None:
    assert compare(0, reported(), reported(**received)).problems == (problem,)


def test_nothing_hashed_is_not_equal() -> None:
    assert compare(0, reported(hashes={}), reported(hashes={})).problems == ("the trainer told no hashes",)


def test_a_row_comes_when_both_jobs_have_told() -> None:
    report = DemoReport(Options(steps=2, every=2))
    assert report.take(Event(job="trainer", kind="version", fields=reported(number=0))) is None
    assert report.take(Event(job="trainer", kind="progress", fields={"step": 1, "steps": 2})) is None
    row = report.take(Event(job="inference", kind="version", fields=reported(number=0)))
    assert row is not None and report.rows == [row]


def test_the_verdict_names_versions_that_never_came() -> None:
    report = DemoReport(Options(steps=4, every=2))
    take(report, 0, 4.5)
    assert report.verdict() == ["versions [2, 4] were not told by both jobs"]


def test_the_loss_must_fall_and_a_long_run_must_reach_the_goal() -> None:
    short = DemoReport(Options(steps=2, every=2))
    take(short, 0, 4.0)
    take(short, 2, 4.0)
    assert short.verdict() == ["the loss did not fall: 4.0000 to 4.0000"]
    long = DemoReport(Options(steps=GOAL_STEPS, every=GOAL_STEPS))
    take(long, 0, 4.0)
    take(long, GOAL_STEPS, GOAL)
    assert long.verdict() == [f"the loss after {GOAL_STEPS} steps is {GOAL:.4f}, not below {GOAL}"]
    good = DemoReport(Options(steps=2, every=2))
    take(good, 0, 4.0)
    take(good, 2, 3.9)
    assert good.verdict() == []


def test_the_table_shows_a_line_for_each_version() -> None:
    report = DemoReport(Options(steps=2, every=2))
    take(report, 0, 4.0)
    take(report, 2, 3.9, hashes={"w": "aa", "b": "00"})
    shown = table(report.rows, synthetic=False)
    assert shown.row_count == 2
    assert [str(cell) for cell in shown.columns[3].cells] == ["2 tensors equal", "b differs"]
    assert len(table([], synthetic=True).columns) == 4
