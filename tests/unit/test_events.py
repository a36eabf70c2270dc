"""What ``etha events`` makes of lines that agents of other hosts tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from etha.agent.services.record_queries import newest_lines
from etha.commands.events import nothing
from etha.events import of_lines
from etha.observe.history import Happening
from etha.observe.records import Record, TransferRecord, to_line
from etha.observe.ring import FAILURES, TRANSFERS


def record(seq: int, **fields: object) -> TransferRecord:
    values = {"at": float(seq), "pairs": ("p",), "batch": "b", "outcome": "committed", "seq": seq, **fields}
    return TransferRecord(**values)


def written(path: Path, *records: Record) -> None:
    path.write_bytes(b"".join(map(to_line, records)))


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown() -> None:
    good = to_line(record(1)).decode().strip()
    lines = [f"cpu {good}", "cpu {", "cpu", "cpu " + "[" * 100_000, 'cpu {"kind":"later","at":1}', f"cpu {good}"]
    found, unreadable = of_lines(lines, "h")
    assert [one.device for one in found] == ["cpu", "cpu"] and unreadable == 4


@pytest.mark.parametrize("version", ["a\u2028b", "a\u2029b", "a\x85b", "a\nb"])
def test_a_version_that_looks_like_two_lines_is_one(version: str, tmp_path: Path) -> None:
    written(tmp_path / f"cpu{TRANSFERS}", record(1, version=version))
    data, left_out = newest_lines(tmp_path, 0.0, failed=False)
    found, unreadable = of_lines([line for line in data.decode().split("\n") if line], "h")
    assert [one.details["version"] for one in found] == [version] and not unreadable and not left_out


def test_failures_are_told_before_what_went_well(tmp_path: Path) -> None:
    written(tmp_path / f"cpu{TRANSFERS}", *(record(seq) for seq in range(10, 110)))
    written(
        tmp_path / f"cpu{FAILURES}",
        record(1, outcome="aborted", code="peer_lost", reason="x"),
        record(2, outcome="aborted"),
    )
    data, left_out = newest_lines(tmp_path, 0.0, failed=False, most=1000)
    found, _ = of_lines(data.decode().split("\n")[:-1], "h")
    shown = [one.details["seq"] for one in found]
    assert shown[:2] == [1, 2] and shown[2:] == list(range(110 - len(shown) + 2, 110)) and len(shown) > 4
    assert left_out == 102 - len(shown) and len(data) <= 1000


def test_a_name_without_records_is_answered_with_those_like_it_and_the_latest() -> None:
    names = ["weights/policy", *(f"pair{n}/b" for n in range(30))]
    happened = [
        Happening(at=at, host="h", device="cpu", where=where, text="t", failed=False, details={})
        for at, where in enumerate(names)
    ]
    said = nothing(happened, "weight/policy", "1d", failed=False)
    assert "but about weights/policy, pair29/b, pair28/b" in said and said.endswith("and 21 more")
    assert (
        nothing(happened, "x", "1d", failed=True)
        == "no failure is recorded about x since 1d; --since 7d looks further back"
    )
