"""Which records have a line in the log."""

from __future__ import annotations

import logging

import pytest

from etha.observe.record_log import MOST, log_records
from etha.observe.records import Incident, Outcome, TransferRecord


def record(outcome: Outcome = "committed", **fields: object) -> TransferRecord:
    return TransferRecord(**{"at": 1.0, "pairs": ("p",), "batch": "b", "seq": 7, "outcome": outcome, **fields})


def test_a_transfer_that_went_well_has_one_line_at_debug_and_none_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "etha"):
        log_records([record(), record("withdrawn", superseded=True)])
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "etha"):
        log_records([record()])
    (line,) = caplog.records
    assert line.levelname == "DEBUG" and line.getMessage().startswith("p/b: transfer 7")
    assert "committed" in line.getMessage()


def test_what_failed_has_one_line_and_a_call_that_gave_up_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    failed = [
        record("aborted", code="peer_lost", reason="rank 3 died"),
        record("withdrawn", seq=None, code="transfer_timeout", reason="its deadline passed"),
        Incident(at=1.0, what="link_refused", reason="a wrong key"),
    ]
    with caplog.at_level(logging.INFO, "etha"):
        log_records(failed)
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO", "WARNING"]
    for line, reason in zip(caplog.records, ("rank 3 died", "its deadline passed", "a wrong key"), strict=True):
        assert reason in line.getMessage()


def test_what_the_agent_has_logged_itself_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "etha"):
        log_records([Incident(at=1.0, what=what, reason="Redis is away") for what in ("warning", "error")])
    assert caplog.records == []


def test_many_failures_at_once_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    log_records([record("aborted", code="peer_lost", reason="x")] * 100)
    assert len(caplog.records) == MOST + 1 and f"{100 - MOST} more failures" in caplog.text
