"""The files in which an agent keeps its records."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from etha.observe import ring
from etha.observe.follow import RingFollower
from etha.observe.records import Culprit, Incident, Payload, Record, TransferRecord, from_line, to_line
from etha.observe.ring import (
    FAILURES,
    MAX_FAILURES,
    MAX_TRANSFERS,
    TRANSFERS,
    RingFile,
    RingWriter,
    ended_badly,
    older,
    read_ring,
)
from etha.phases import Phases


def committed(seq: int) -> TransferRecord:
    return TransferRecord(
        at=1000.0 + seq,
        pairs=("weights",),
        batch="model",
        outcome="committed",
        seq=seq,
        version=seq,
        source="trainer",
        target="inference",
        ranks=(("trainer", 0), ("inference", 0)),
        payload=Payload(sent=4096, received=4096, ways={"process_vm": 4096}),
        seconds=0.001,
        phases=Phases(wait=0.5, move=0.001),
    )


def aborted(seq: int, reason: str = "trainer rank 3 died") -> TransferRecord:
    return TransferRecord(
        at=1000.0 + seq,
        pairs=("weights",),
        batch="model",
        seq=seq,
        outcome="aborted",
        code="peer_lost",
        reason=reason,
    )


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    writer = RingWriter(tmp_path, "cpu")
    yield writer
    writer.close()


def seqs(directory: Path, *, failed: bool = False) -> list[int | None]:
    found = read_ring(directory, failed=failed)
    return [record.seq for _, record in found if isinstance(record, TransferRecord)]


def test_a_record_survives_its_line() -> None:
    assert from_line(to_line(committed(3))) == committed(3)
    assert b"\n" not in to_line(aborted(3, "two\nlines"))[:-1]
    with pytest.raises(ValueError, match="at"):
        from_line(b'{"kind":"transfer"}')


def test_failures_have_a_file_of_their_own(tmp_path: Path, writer: RingWriter) -> None:
    superseded = TransferRecord(at=7.0, pairs=("p",), batch="b", outcome="withdrawn", superseded=True)
    writer.take([committed(1), aborted(2), superseded, Incident(at=1.0, what="started", reason="", failed=False)])
    writer.close()
    assert (tmp_path / f"cpu{TRANSFERS}").read_bytes() == to_line(committed(1)) + to_line(superseded)
    assert (tmp_path / f"cpu{FAILURES}").read_bytes().count(b"\n") == 2
    assert seqs(tmp_path) == [None, 1, 2] and seqs(tmp_path, failed=True) == [2]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_the_next_agent_appends(tmp_path: Path) -> None:
    for seq in (1, 2, 3):
        writer = RingWriter(tmp_path, "cpu")
        writer.take([committed(seq)])
        writer.close()
    assert seqs(tmp_path) == [1, 2, 3]


def test_two_agents_at_once_lose_nothing_but_what_is_old(tmp_path: Path) -> None:
    files = [RingFile(tmp_path / f"cpu{TRANSFERS}", 20_000) for _ in range(2)]
    for seq in range(500):
        files[seq % 2].append(to_line(committed(seq)))
    found = seqs(tmp_path)
    assert found == list(range(found[0] or 0, 500)) and len(found) > 30
    assert all(path.stat().st_size <= 20_000 for path in tmp_path.iterdir())


def test_half_a_line_of_a_killed_agent_spoils_no_other(tmp_path: Path, writer: RingWriter) -> None:
    (tmp_path / f"cpu{TRANSFERS}").write_bytes(to_line(committed(1)) + to_line(committed(2))[:30])
    writer.take([committed(3)])
    writer.close()
    assert seqs(tmp_path) == [1, 3]


@pytest.mark.parametrize("what", ["symlink", "fifo", "directory"])
def test_what_is_no_file_is_not_written(
    tmp_path: Path, writer: RingWriter, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, elsewhere = tmp_path / f"cpu{TRANSFERS}", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not ours")
    match what:
        case "symlink":
            path.symlink_to(elsewhere)
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    writer.take([committed(1), aborted(2)])
    writer.close()
    assert elsewhere.read_bytes() == b"not ours"
    assert seqs(tmp_path, failed=True) == [2]  # the other file is not concerned
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text


class Disk:
    """Stands for ``os`` in the ring: its writes fail while ``full``."""

    def __init__(self) -> None:
        self.full = False
        self.room = 10

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        if not self.full:
            return os.write(fd, data)
        if self.room:
            written, self.room = os.write(fd, data[: self.room]), 0
            return written
        raise OSError(28, "No space left on device")


def test_a_full_disk_costs_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    disk = Disk()
    monkeypatch.setattr(ring, "os", disk)
    writer = RingWriter(tmp_path, "cpu")

    def write(*records: Record) -> None:
        dropped, writer._dropped = writer._dropped, 0
        writer._write(list(records), dropped)

    write(committed(1))
    disk.full = True
    for seq in (2, 3, 4):
        write(committed(seq), aborted(seq))
    disk.full = False
    write(committed(5))
    assert seqs(tmp_path) == [1, 5]
    [(_, note)] = read_ring(tmp_path, failed=True)
    assert isinstance(note, Incident) and note.reason.startswith("6 records were dropped")
    assert len(caplog.records) == 1


def test_a_disk_that_stays_full_gives_one_note_though_failures_could_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last page of the file of failures has room, and a note for each transfer would push failures out."""
    disk = Disk()

    def write(fd: int, data: memoryview) -> int:
        failures = Path(f"/proc/self/fd/{fd}").readlink().name.endswith(FAILURES)
        return os.write(fd, data) if failures else Disk.write(disk, fd, data)

    monkeypatch.setattr(disk, "write", write)
    monkeypatch.setattr(ring, "os", disk)
    writer = RingWriter(tmp_path, "cpu")
    for disk.full, seq in ((True, 1), (True, 2), (True, 3), (False, 4)):
        dropped, writer._dropped = writer._dropped, 0
        writer._write([committed(seq)], dropped)
        assert bool(writer.failing) is disk.full, "etha events says so while it is so"
    [(_, note)] = read_ring(tmp_path, failed=True)
    assert isinstance(note, Incident) and note.reason.startswith("3 records were dropped")
    assert seqs(tmp_path) == [4]


def test_what_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, "cpu")
    writer._write([committed(1), aborted(2)], 0)
    nonsense = [
        b'{"kind":"incident","at":1e308,"what":"x","reason":"y"}',
        b'{"kind":"incident","at":-1e18,"what":"x","reason":"y"}',
    ]
    with (tmp_path / f"cpu{FAILURES}").open("ab") as file:
        file.write(b"\n".join([b"[" * 100_000, *nonsense, b"\xff\x00", b""]))
    (tmp_path / f"one{FAILURES}").symlink_to("/etc/hostname")
    (tmp_path / f"two{FAILURES}").mkdir()
    os.mkfifo(tmp_path / f"three{FAILURES}")
    unread: list[OSError] = []
    assert [record.seq for _, record in read_ring(tmp_path, unread=unread)] == [1, 2]  # type: ignore[union-attr]
    assert sorted(Path(error.filename).name for error in unread) == [
        f"{name}{FAILURES}" for name in ("one", "three", "two")
    ]
    for device in ("cpu", "one", "two", "three"):
        assert ended_badly(tmp_path, device) is None
    follower = RingFollower(tmp_path)
    try:
        writer._write([aborted(3)], 0)
        assert [record.seq for _, record in follower.news()] == [3]  # type: ignore[union-attr]
    finally:
        follower.close()


ME = Culprit(agent="a", host="h", pid=7)


def incident(what: str, reason: str = "it did") -> Incident:
    return Incident(at=1.0, what=what, reason=reason, culprits=(ME,), failed=False)


@pytest.mark.parametrize("last", ["started", "left", "killed"])
def test_how_the_last_agent_ended_is_found_in_full_files_by_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    path = tmp_path / f"cpu{FAILURES}"
    own = b"".join(to_line(incident(what)) for what in ("left", "killed", "started", last))
    failure = to_line(aborted(1)) + to_line(incident("link_lost", 'it said {"what":"left"}'))
    older(path).write_bytes(own + failure * 10_000)
    path.write_bytes(failure * 10_000 + b'{"kind":"incident","what":"left","half a line')
    decoded: list[bytes] = []

    def counted(line: bytes) -> Record:
        decoded.append(line)
        return from_line(line)

    monkeypatch.setattr(ring, "from_line", counted)
    assert ended_badly(tmp_path, "cpu") == (ME if last == "started" else None)
    assert len(decoded) <= 2


def test_a_directory_that_comes_back_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "ns"
    directory.mkdir()
    writer = RingWriter(directory, "cpu")
    writer._write([committed(1)], 0)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    writer._write([committed(2)], 0)
    writer._write([committed(3)], 0)
    writer._write([committed(4)], 0)
    assert seqs(directory) == [2, 3, 4] and len(caplog.records) == 1
    assert directory.stat().st_mode & 0o777 == 0o700
    [said] = [record for _, record in read_ring(directory, failed=True)]
    assert isinstance(said, Incident) and said.reason == caplog.records[0].getMessage()
    assert f"{directory} was removed while the agent of cpu" in said.reason and "its socket is gone" in said.reason


def test_no_more_is_made_again_than_the_runtime_directory(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "cleared" / "runtime" / "ns", "cpu")
    writer._write([committed(1)], 0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cleared").mkdir()
    writer._write([committed(2)], 0)
    assert seqs(tmp_path / "cleared" / "runtime" / "ns") == [2]


def test_no_directory_of_others_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runtime").mkdir(mode=0o777)
    (tmp_path / "runtime").chmod(0o777)
    RingWriter(tmp_path / "runtime" / "ns", "cpu")._write([committed(1)], 0)
    assert list((tmp_path / "runtime").iterdir()) == [] and "cannot be written" in caplog.text


def test_a_disk_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "MAX_WAITING", 10)
    monkeypatch.setattr(ring, "LAST_WORDS", 0.05)
    os.mkfifo(tmp_path / "gate")
    writer = RingWriter(tmp_path, "cpu")

    def hang(self: RingFile, lines: bytes) -> None:
        (tmp_path / "gate").read_bytes()  # until somebody opens the other end

    monkeypatch.setattr(RingFile, "append", hang)
    for seq in range(100):
        writer.take([committed(seq)])
    assert len(writer._waiting) <= 10 and writer._dropped >= 80
    writer.close()  # returns although the thread does not
    (tmp_path / "gate").write_bytes(b"")
    assert writer._thread is not None


@pytest.mark.slow
def test_a_failure_is_found_after_a_million_transfers(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, "cpu")
    writer._write([aborted(812)], 0)
    some = [committed(seq) for seq in range(1000)]
    for _ in range(1000):
        writer._write(some, 0)
    writer._write([committed(1_000_001)], 0)
    [(device, failure)] = read_ring(tmp_path, failed=True)
    assert device == "cpu" and failure == aborted(812)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes[f"cpu{TRANSFERS}"] <= MAX_TRANSFERS and sizes[f"cpu{TRANSFERS}.1"] <= MAX_TRANSFERS
    assert sizes[f"cpu{FAILURES}"] <= MAX_FAILURES and len(sizes) == 3
    assert seqs(tmp_path)[-1] == 1_000_001
