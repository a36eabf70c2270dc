"""Options and events cross between processes as JSON, and refuse what makes no sense."""

from __future__ import annotations

import pytest

from etha.demo.events import Event, Reporter
from etha.demo.options import Options, layout_of, ranks_of


def test_options_survive_the_command_line() -> None:
    options = Options(steps=7, every=3, synthetic=0.5)
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("options", "versions"),
    [
        (Options(steps=7, every=3), (0, 3, 6, 7)),
        (Options(steps=6, every=3), (0, 3, 6)),
        (Options(steps=1, every=9), (0, 1)),
        (Options(synthetic=1.0, rounds=2), (1, 2)),
    ],
)
def test_versions_begin_untrained_and_end_with_the_last_step(options: Options, versions: tuple[int, ...]) -> None:
    assert options.versions == versions


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"every": 0}, {"synthetic": 0.0}, {"synthetic": -1.0}, {"rounds": 0}])
def test_senseless_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Options(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"replicas": -1}, {"replicas": 17}, {"replicas": 1, "synthetic": 1.0}, {"replicas": 1, "device": "cuda"}]
)
def test_replicas_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"replicas|cards"):
        Options(**wrong)  # type: ignore[arg-type]


def test_replicas_have_different_layouts() -> None:
    layouts = [layout_of(f"replica-{number}") for number in range(5)]
    assert len(set(layouts[:4])) == 4 and layouts[4] == layouts[0]
    assert [ranks_of(job) for job in ("trainer", "inference", "replica-0", "replica-1")] == [4, 2, 2, 1]


def test_events_survive_the_pipe() -> None:
    event = Event(job="trainer", kind="version", fields={"number": 3, "sample": "a\nb", "loss": 2.5})
    line = event.to_line()
    assert line.count("\n") == 1 and Event.from_line(line) == event


@pytest.mark.parametrize("line", ["", "[]", '{"job": "x"', '{"job": "x", "kind": "gossip"}'])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError):
        Event.from_line(line)


def test_a_rank_without_a_pipe_is_silent() -> None:
    silent = Reporter("trainer", None)
    silent.tell("done")
    assert not silent.speaks
