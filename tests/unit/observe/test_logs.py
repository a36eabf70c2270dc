"""The log of an agent: its lines, and a file that stays small and usable for months."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from etha.config import MAX_LOG, LogSettings, Settings
from etha.errors import AgentLostError, ConfigError, TransferError, note_of_log, noted, with_note
from etha.observe.logs import AgentLog, JsonFormatter, LogSource, TextFormatter, levels, log_of

LOGS = """
import logging, os, sys
from pathlib import Path
from etha.observe.logs import AgentLog
path = Path(sys.argv[1])
handler = AgentLog()
handler.own(path)
log = logging.getLogger("agent")
log.addHandler(handler)
for number in range(int(sys.argv[2])):
    log.warning("%06d " + 1000 * "x", number)
os.write(2, b"from C")
"""


def run(code: str, path: Path, *words: object, stderr: Any = None, **options: Any) -> None:
    """``code`` in a process of its own, whose standard error is the file at ``path``."""
    with path.open("ab") as log:
        command = [sys.executable, "-c", code, str(path), *map(str, words)]
        subprocess.run(command, stderr=log if stderr is None else stderr, check=True, **options)


def numbers(path: Path) -> list[int]:
    return [int(line.split(": ")[1][:6]) for line in path.read_text().split("\n") if ": 0" in line]


def test_a_full_log_is_set_aside_while_the_agent_runs(tmp_path: Path) -> None:
    path, lines = tmp_path / "cpu.log", 3 * MAX_LOG // 1000
    run(LOGS, path, lines)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cpu.log", "cpu.log.1"]
    assert path.stat().st_size <= MAX_LOG + 2000 and (tmp_path / "cpu.log.1").stat().st_size <= MAX_LOG + 2000
    assert path.read_text().endswith("x\nfrom C")
    found = numbers(tmp_path / "cpu.log.1") + numbers(path)
    assert found == list(range(found[0], lines))


def test_what_is_not_its_own_file_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "cpu.log", tmp_path / "other"
    path.write_text("of another agent")
    with other.open("ab") as log:
        run(LOGS, path, 2 * MAX_LOG // 1000, stderr=log)
    assert path.read_text() == "of another agent" and other.stat().st_size > MAX_LOG


REMOVED = """
import logging, sys
from pathlib import Path
from etha.observe.logs import AgentLog
path, what = Path(sys.argv[1]), sys.argv[2]
handler = AgentLog()
handler.own(path)
log = logging.getLogger("agent")
log.addHandler(handler)
log.warning("first")
if what == "removed":
    path.unlink()
elif what == "moved":
    path.rename(path.with_name("moved"))
elif what == "emptied":
    path.write_text("")
elif what == "linked":
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("victim"))
elif what == "folder":
    path.unlink()
    path.parent.rmdir()
log.warning("second")
"""


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("removed", {"cpu.log": ["second"]}),
        ("moved", {"cpu.log": ["second"], "moved": ["first"]}),
        ("emptied", {"cpu.log": ["second"]}),
        ("linked", {"cpu.log": [], "moved": ["first", "second"]}),
        ("folder", {"cpu.log": ["second"]}),
    ],
)
def test_a_log_that_somebody_took_away_is_written_again(tmp_path: Path, what: str, left: dict[str, list[str]]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    run(REMOVED, folder / "cpu.log", what)
    found = list(folder.iterdir()) if folder.exists() else []
    assert {path.name: [line.rpartition(" ")[2] for line in lines(path)] for path in found} == left


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


FULL = """
import logging, resource, signal, sys
from pathlib import Path
from etha.observe.logs import AgentLog
path = Path(sys.argv[1])
handler = AgentLog()
handler.own(path)
log = logging.getLogger("agent")
log.addHandler(handler)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log.warning("before")
room = path.stat().st_size + 10
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
for number in range(5):
    log.warning("lost %d", number)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.warning("after")
"""


def test_what_a_full_disk_takes_is_counted_and_the_agent_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "cpu.log"
    run(FULL, path)
    found = [line.partition(": ")[2] for line in lines(path)]
    assert found[0] == "before" and found[-1] == "after"
    assert found[-2].startswith("5 lines before this one are lost")
    assert "Traceback" not in path.read_text()


def record(message: str = "pair %s formed", *args: object, **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "etha.agent", "levelname": "INFO", "levelno": 20, "msg": message, "args": args, **fields}
    )


def test_a_line_of_text_has_time_level_device_agent_logger_and_message() -> None:
    form = TextFormatter(LogSource("cuda-GPU-1", "3f2a97c01b5d4e66"))
    time, rest = form.format(record("pair %s formed", "weights", created=1_800_000_000.1234)).split(" ", 1)
    assert rest == "INFO cuda-GPU-1 3f2a97c01b5d4e66 etha.agent: pair weights formed"
    assert datetime.fromisoformat(time).timestamp() == pytest.approx(1_800_000_000.123)
    assert time[19:23] == ".123" and time[-6] in "+-"


def broken() -> Any:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        return sys.exc_info()


def test_only_the_first_line_of_a_record_begins_with_a_time() -> None:
    shown = TextFormatter(LogSource()).format(
        record("one\n2026-11-23T06:27:24.123+00:00 ERROR cpu x forged: line\x1b[2J\r", exc_info=broken())
    )
    first, *rest = shown.split("\n")
    assert first.endswith(": one") and all(line.startswith("    ") for line in rest)
    assert "\\x1b[2J\\r" in shown and "Traceback" in shown and "ValueError: two" in shown


def test_a_line_of_json_has_the_same_fields_and_the_traceback_as_a_text() -> None:
    shown = JsonFormatter(LogSource("cpu", "a")).format(record("it\nfailed: %s", "\ud800", exc_info=broken()))
    assert "\n" not in shown and shown.startswith('{"time": "')
    found = json.loads(shown)
    assert set(found) == {"time", "level", "device", "agent", "logger", "message", "traceback"}
    assert found["message"].startswith("it\nfailed") and "ValueError: two\nlines" in found["traceback"]
    assert "traceback" not in json.loads(JsonFormatter(LogSource()).format(record("fine")))


def test_a_line_that_cannot_be_formatted_ends_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as file:
        handler = AgentLog(descriptor=file.fileno())
        handler.handle(record("%d", "no number"))
        handler.handle(record("fine"))
        assert (tmp_path / "log").read_text().count("\n") == 1
    assert "no number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "own", "root"),
    [("debug", logging.DEBUG, logging.INFO), ("info", logging.INFO, logging.INFO), ("warning", 30, 30)],
)
def test_other_libraries_say_nothing_of_their_debugging(level: str, own: int, root: int) -> None:
    assert levels(level) == (root, own)


def test_what_is_no_level_and_no_format_is_refused_by_everybody_who_reads_settings() -> None:
    for read in (LogSettings.from_env, Settings.from_env):
        with pytest.raises(ConfigError, match="ETHA_LOG='loud' is not debug, info or warning"):
            read({"ETHA_LOG": "loud"})
        with pytest.raises(ConfigError, match="ETHA_LOG_FORMAT='xml' is not text or json"):
            read({"ETHA_LOG_FORMAT": "xml"})
    assert LogSettings.from_env({"ETHA_LOG": "", "ETHA_LOG_FORMAT": ""}) == LogSettings(level="info", format="text")


def test_an_agent_of_another_level_does_not_meet_what_was_explicitly_wished() -> None:
    running, wanting = Settings.from_env({}), Settings.from_env({"ETHA_LOG": "debug", "ETHA_LOG_FORMAT": "json"})
    assert running.differ(wanting.wishes) == "ETHA_LOG=info instead of ETHA_LOG=debug, " + (
        "ETHA_LOG_FORMAT=text instead of ETHA_LOG_FORMAT=json"
    )
    assert wanting.differ(running.wishes) == "", "a default is no wish"


def test_where_a_process_logs_is_seen_from_outside(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "input()"]
    with (tmp_path / "log").open("w") as file:
        for stderr, expected in ((file, str(tmp_path / "log")), (subprocess.PIPE, "-"), (subprocess.DEVNULL, "-")):
            with subprocess.Popen(sleeper, stdin=subprocess.PIPE, stderr=stderr) as process:
                assert log_of(process.pid) == expected
                process.communicate(b"\n")
    assert log_of(process.pid) == "", "it has ended"


def test_a_path_that_is_no_text_is_shown_as_one(tmp_path: Path) -> None:
    """It travels in messages and in Redis, where an agent would fail on anything else."""
    code = "import os; from etha.observe.logs import shown_log; os.write(1, shown_log().encode())"
    with (tmp_path / "\udcff\n.log").open("wb") as log:
        shown = subprocess.run([sys.executable, "-c", code], stderr=log, stdout=subprocess.PIPE, check=True)
    assert shown.stdout.decode() == str(tmp_path / r"\udcff\n.log")


def test_an_error_names_one_log_only() -> None:
    assert note_of_log("") == "" and note_of_log("-", "node1") == (
        "log of the agent: its terminal or its service on node1"
    )
    note = note_of_log("/run/cpu.log", "node1")
    assert with_note("it died", note) == "it died; log of the agent: /run/cpu.log on node1"
    assert with_note(with_note("it died", note), note_of_log("/other.log")) == with_note("it died", note)
    error = noted(AgentLostError("it died", outcome="aborted", torn=True), note)
    assert isinstance(error, AgentLostError) and (error.outcome, error.torn) == ("aborted", True)
    assert error.message == str(error) == with_note("it died", note)
    same = TransferError("fine")
    assert noted(same, "") is same
