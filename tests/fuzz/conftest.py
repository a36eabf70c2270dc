"""Fuzzing shares the sites of the flow tests, and says at the end how many messages went where."""

from __future__ import annotations

import pytest

from tests.flow.conftest import agents, commons, forget_environment, pytest_generate_tests, served

from . import trial

__all__ = ["agents", "commons", "forget_environment", "pytest_generate_tests", "served"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a trial, and the sum."""
    if not trial.counts:
        return
    terminalreporter.section("mutated messages")
    total = 0
    for name, found in trial.counts.items():
        total += sum(found.values())
        outcomes = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(found.items()))
        terminalreporter.write_line(f"{name:20} {sum(found.values()):>9,}: {outcomes}")
    terminalreporter.write_line(f"{'in all':20} {total:>9,}, seed {trial.SEED}")
