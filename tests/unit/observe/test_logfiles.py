"""``etha logs``: the logs of a host's agents, merged, across rotation, and followed."""

from __future__ import annotations

import os
import random
import threading
from contextlib import closing
from pathlib import Path

import pytest

from etha.observe import logfiles
from etha.observe.inotify import FolderWatch
from etha.observe.logfiles import LogEntry, LogFile, LogView, logs_in


def line(second: int, text: str, device: str = "cpu") -> str:
    return f"2026-11-23T06:27:{second:02}.000+00:00 INFO {device} a etha.agent: {text}\n"


def read_all(folder: Path) -> list[LogEntry]:
    with closing(LogView(lambda: logs_in(folder))) as view:
        return view.read()


def texts(entries: list[LogEntry]) -> list[str]:
    return [text.rpartition(": ")[2] for entry in entries for text in entry.lines]


def test_logs_are_found_even_if_only_the_older_file_is_left(tmp_path: Path) -> None:
    for name in ("cpu.log", "cpu.log.1", "cuda-GPU-1.log.1", "cpu.sock", "cpu.start", "x.log.bz2"):
        (tmp_path / name).touch()
    assert logs_in(tmp_path) == {tmp_path / "cpu.log": "cpu", tmp_path / "cuda-GPU-1.log": "cuda-GPU-1"}
    assert logs_in(tmp_path / "nothing") == {}


def test_several_logs_are_merged_by_time_and_what_has_no_time_stays_behind_its_line(tmp_path: Path) -> None:
    (tmp_path / "cpu.log.1").write_text(line(1, "one"))
    (tmp_path / "cpu.log").write_text(line(3, "three") + "    Traceback\n    ValueError\nfrom C\n")
    json = '{"time": "2026-11-23T07:27:02.000+01:00", "level": "INFO", "message": ": two"}\n'
    (tmp_path / "cuda.log").write_text("before all times\n" + json + line(4, "four"))
    found = read_all(tmp_path)
    assert [entry.device for entry in found] == ["cuda", "cpu", "cuda", "cpu", "cuda"]
    assert texts(found) == [
        *("before all times", "one", 'two"}', "three", "    Traceback", "    ValueError", "from C", "four")
    ]


def test_a_clock_that_was_set_back_changes_no_order(tmp_path: Path) -> None:
    (tmp_path / "cpu.log").write_text(line(30, "first") + line(10, "second"))
    (tmp_path / "other.log").write_text(line(20, "other"))
    assert texts(read_all(tmp_path)) == ["other", "first", "second"]


def test_what_only_looks_like_a_time_is_a_line_like_others(tmp_path: Path) -> None:
    odd = ["2026-99-99T10:00:00.000+00:00 a", "2026-01-01T10:00:00.000+99:99 b", "0001-01-01T00:00:00.000+14:00 c"]
    (tmp_path / "cpu.log").write_text("\n".join([line(1, "before").rstrip("\n"), *odd, line(2, "after")]))
    shown = "\n".join(texts(read_all(tmp_path)))
    assert all(text in shown for text in ("before", *odd, "after"))


def test_a_line_is_shown_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "cpu.log"
    with closing(LogFile(path, "cpu")) as file:
        assert file.read() == []
        path.write_text(line(1, "one") + "2026")
        assert texts(file.read()) == ["one"]
        with path.open("a") as log:
            log.write(line(2, "two")[4:] + "end")
        assert texts(file.read()) == ["two"] and texts(file.finish()) == ["end"] and file.finish() == []


def test_every_line_is_read_once_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    path, older = tmp_path / "cpu.log", tmp_path / "cpu.log.1"
    for seed in range(200):
        choose = random.Random(seed)
        for file in (path, older):
            file.unlink(missing_ok=True)
        reader, written, read, rotations = LogFile(path, "cpu"), 0, [], 0
        log = path.open("a")
        assert reader.read() == []
        for _ in range(30):
            match choose.choice(("write", "write", "rotate", "read", "new")):
                case "write":
                    log.write(line(written % 60, str(written)))
                    log.flush()
                    written += 1
                case "rotate" if rotations < 2 and path.exists():  # a third time the first file is lost
                    path.replace(older)
                    log.close()
                    log, rotations = path.open("a"), rotations + 1
                case "new":  # the agent leaves, and another one appends
                    log.close()
                    log = path.open("a")
                case "read":
                    read, rotations = read + texts(reader.read()), 0
        log.close()
        read += texts(reader.read())
        reader.close()
        assert read == [str(number) for number in range(written)], seed


def test_a_file_that_was_emptied_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "cpu.log"
    path.write_text(line(1, "one") + line(2, "two"))
    with closing(LogFile(path, "cpu")) as file:
        file.read()
        path.write_text(line(3, "three"))
        assert texts(file.read()) == ["three"]


def test_only_the_end_of_a_huge_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfiles, "MOST", 1000)
    path = tmp_path / "cpu.log"
    path.write_text("".join(line(n % 60, str(n)) for n in range(500)))
    found = texts(read_all(tmp_path))
    assert found[-1] == "499" and 5 < len(found) < 20 and all(text.isdecimal() for text in found)


def test_what_a_terminal_would_obey_is_written_out(tmp_path: Path) -> None:
    (tmp_path / "cpu.log").write_bytes(b"\x1b]0;title\x07\xff\tx\n")
    ((only,),) = (entry.lines for entry in read_all(tmp_path))
    assert only == "\\x1b]0;title\\x07\ufffd\tx"


def test_waiting_ends_with_a_change_and_with_the_reader(tmp_path: Path) -> None:
    (tmp_path / "cpu.log").write_text(line(1, "one"))
    reader, writer = os.pipe()
    view = LogView(lambda: logs_in(tmp_path))
    view.follow(tmp_path)
    assert texts(view.read()) == ["one"]
    seen: list[str] = []

    def follow() -> None:
        while view.wait(writer):
            view.follow(tmp_path)
            seen.extend(texts(view.read()))
            if "three" in seen:
                os.close(reader)

    thread = threading.Thread(target=follow)
    thread.start()
    with (tmp_path / "cpu.log").open("a") as log:
        log.write(line(2, "two"))
    (tmp_path / "cpu.log").rename(tmp_path / "cpu.log.1")
    (tmp_path / "other.log").write_text(line(3, "three"))
    thread.join(60)
    assert not thread.is_alive() and sorted(seen) == ["three", "two"]
    os.close(writer)
    view.close()


def test_a_folder_that_came_again_is_watched_again(tmp_path: Path) -> None:
    folder = tmp_path / "default"
    folder.mkdir()
    watch = FolderWatch()
    watch.add(folder)
    watch.add(folder)
    _, writer = pipe = os.pipe()
    folder.rmdir()
    while watch._folders:
        assert watch.wait(writer)
    folder.mkdir()
    watch.add(folder)
    (folder / "cpu.log").touch()
    assert watch.wait(writer)
    watch.close()
    for end in pipe:
        os.close(end)
