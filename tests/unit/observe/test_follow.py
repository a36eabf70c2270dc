"""New records of files that grow and are set aside."""

from __future__ import annotations

import select
from pathlib import Path

from etha.observe.follow import RingFollower
from etha.observe.records import Incident, to_line
from etha.observe.ring import TRANSFERS, RingFile


def record(number: int) -> Incident:
    return Incident(at=float(number), what="left", reason="x" * 200)


def test_each_record_comes_once_through_rotations(tmp_path: Path) -> None:
    file = RingFile(tmp_path / f"cpu{TRANSFERS}", 2000)
    file.append(to_line(record(0)))
    follower = RingFollower(tmp_path)
    found: list[float] = []
    for number in range(1, 40):
        file.append(to_line(record(number)))
        if number % 3 == 0:
            assert select.select([follower], [], [], 10)[0]
            found += [one.at for _, one in follower.news()]
    found += [one.at for _, one in follower.news()]
    assert found == list(range(1, 40))
    RingFile(tmp_path / f"cuda-0{TRANSFERS}", 2000).append(to_line(record(99)))
    assert [(device, one.at) for device, one in follower.news()] == [("cuda-0", 99.0)]
    follower.close()
    follower.close()


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / f"cpu{TRANSFERS}"
    path.touch()
    follower = RingFollower(tmp_path)
    line = to_line(record(1))
    with path.open("ab", buffering=0) as file:
        file.write(line[:20])
        assert follower.news() == []
        file.write(line[20:])
        assert [one.at for _, one in follower.news()] == [1.0]
    follower.close()


def test_a_directory_that_was_removed_and_made_again_is_followed(tmp_path: Path) -> None:
    directory = tmp_path / "ns"
    directory.mkdir()
    path = directory / f"cpu{TRANSFERS}"
    path.write_bytes(to_line(record(1)))
    follower = RingFollower(directory)
    path.unlink()
    assert select.select([follower], [], [], 10)[0]
    assert follower.news() == []
    directory.rmdir()
    assert select.select([follower], [], [], 10)[0], "the directory has gone"
    directory.mkdir()
    assert follower.news() == []
    path.write_bytes(to_line(record(2)))
    assert select.select([follower], [], [], 10)[0]
    assert [one.at for _, one in follower.news()] == [2.0]
    follower.close()
