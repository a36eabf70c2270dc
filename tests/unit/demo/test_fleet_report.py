"""A fleet is right only if each replica ends with the newest version, and no version ever had a wrong element."""

from __future__ import annotations

import io

from rich.console import Console

from etha.demo.events import Event
from etha.demo.fleet_report import FleetReport, fleet_table
from etha.demo.options import Options

OPTIONS = Options(steps=4, every=2, replicas=2)


def version(job: str, number: int, digest: str = "", source: str = "trainer") -> Event:
    hashes = {"w": digest or f"w{number}", "b": f"b{number}"}
    return Event(job=job, kind="version", fields={"number": number, "hashes": hashes, "source": source})


def finished() -> FleetReport:
    """Replica 0 is killed after version 2; replica 1 joins late."""
    report = FleetReport(OPTIONS)
    for event in (
        version("replica-0", 0),  # a replica may report before the trainer does
        version("trainer", 0),
        version("trainer", 2),
        version("replica-0", 2),
    ):
        report.take(event)
    assert report.held("replica-0") == 2 and report.held("replica-1") is None
    report.lost("replica-0")
    assert report.held("replica-0") is None
    for event in (version("replica-1", 4), version("trainer", 4), version("replica-0", 4, source="replica-1")):
        assert not report.finished(["replica-0", "replica-1"])
        report.take(event)
    return report


def text_of(report: FleetReport) -> str:
    written = io.StringIO()
    Console(width=160, file=written).print(fleet_table(report))
    return written.getvalue()


def test_all_end_with_the_newest_version() -> None:
    report = finished()
    assert report.finished(["replica-0", "replica-1"]) and report.verdict() == []
    killed, late = (line for line in text_of(report).splitlines() if "replica-" in line[:14])
    assert [cell.strip() for cell in killed.split("│")[1:-1]] == [
        "replica-0", "tensor-parallel over 2", "2 times", "3", "4", "replica-1", "2 tensors equal",
    ]  # fmt: skip
    assert [cell.strip() for cell in late.split("│")[1:-1]] == [
        "replica-1", "whole over 1", "once", "1", "4", "trainer", "2 tensors equal",
    ]  # fmt: skip


def test_a_wrong_element_counts_also_in_a_life_before() -> None:
    report = FleetReport(OPTIONS)
    report.take(version("replica-0", 0, digest="other"))
    report.lost("replica-0")
    for event in (version("trainer", 0), version("trainer", 4), version("replica-0", 4), version("replica-1", 4)):
        report.take(event)
    assert report.verdict() == ["replica-0: version 0: w differs"]
    assert "version 0: w differs" in text_of(report)


def test_a_replica_that_stays_behind_fails_the_run() -> None:
    report = FleetReport(OPTIONS)
    for event in (version("trainer", 2), version("trainer", 4), version("replica-0", 2)):
        report.take(event)
    assert report.verdict() == ["replica-0: holds version 2, not 4", "replica-1: holds version None, not 4"]


def test_a_version_that_the_trainer_has_not_reported_is_wrong() -> None:
    report = FleetReport(Options(steps=4, every=2, replicas=1))
    report.take(version("replica-0", 4))
    assert report.verdict() == ["replica-0: version 4: the trainer told no hashes"]
