"""The bar of a long command: on a terminal's standard error after a while, and nowhere else."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from etha.commands import terminal


def on(monkeypatch: pytest.MonkeyPatch, *, terminals: bool, after: float) -> io.StringIO:
    """What is written to standard error."""
    written = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=written, force_terminal=terminals, width=100))
    monkeypatch.setattr(terminal, "PROGRESS_AFTER", after)
    return written


def timers() -> list[threading.Timer]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_command_that_takes_long_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    written = on(monkeypatch, terminals=True, after=0.0)
    with terminal.progress("planning") as bar:
        bar.at(3, 7, "checking")
        for timer in timers():
            timer.join()
    assert "checking" in written.getvalue() and "3/7" in written.getvalue()


def test_a_step_of_unknown_length_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    written = on(monkeypatch, terminals=True, after=0.0)
    with terminal.progress("planning") as bar:
        bar.at(0, None, "counting")
        for timer in timers():
            timer.join()
    assert "counting" in written.getvalue() and "0/" not in written.getvalue()


@pytest.mark.parametrize(("terminals", "after"), [(False, 0.0), (True, 3600.0)])
def test_nothing_is_written_elsewhere_or_by_a_quick_command(
    terminals: bool, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = on(monkeypatch, terminals=terminals, after=after)
    with terminal.progress("planning") as bar:
        bar.at(3, 7, "checking")
    assert "checking" not in written.getvalue() and timers() == []


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, terminals=True, after=0.0)
    with pytest.raises(ValueError, match="told"), terminal.progress("planning"):
        raise ValueError("told")
    assert timers() == []
