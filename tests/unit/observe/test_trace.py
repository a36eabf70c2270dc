"""A process's trace: its file, what becomes of it if the disk is full or the process is killed, and what is merged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etha.config import Settings
from etha.errors import ConfigError
from etha.observe import trace
from etha.observe.trace import Tracer, head
from etha.observe.trace_merge import merge


def settings(directory: Path, host: str = "h") -> Settings:
    return replace(Settings.from_env({"ETHA_HOST_ID": host}), trace=directory)


def tracer(directory: Path, role: str = "worker", **about: Any) -> Tracer:
    return Tracer(directory, {**head(settings(directory), role, "cpu"), **about})


def events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def test_what_was_told_is_in_the_merged_file(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t")
    one.span("calls", "transfer", 10**9, 10**9 + 5000, {"seq": 1}, [("move", 10**9 + 1000, 2000)])
    one.close()
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    assert (merged.workers, merged.agents, merged.spans, merged.strangers) == (1, 0, 1, [])
    call, move = events(tmp_path / "out.json")
    assert (call["name"], move["name"]) == ("transfer", "move")
    assert call["args"]["seq"] == 1
    assert (call["dur"], move["dur"]) == (5, 2)


def test_spans_that_overlap_get_rows(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t")
    for begun, ended in ((100, 200), (150, 250), (120, 300), (300, 400)):
        one.span("calls", "transfer", begun, ended)
    one.close()
    merge([tmp_path / "t"], tmp_path / "out.json")
    rows = [event["tid"] for event in events(tmp_path / "out.json")]
    assert len(set(rows)) == 3
    assert rows[3] == rows[0]


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tracer(tmp_path / "t")
    one.flush()
    real, full = one._file, os.open("/dev/full", os.O_WRONLY)
    one._file = full
    for _ in range(3):
        one.span("calls", "transfer", 0, 1)
        one.flush()
    one._file = real
    one.span("calls", "register_tensors", 2, 3)
    one.close()
    os.close(full)
    assert len(caplog.records) == 1
    assert "not complete: No space left on device; transfers go on" in caplog.text
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    assert [event["name"] for event in events(tmp_path / "out.json")] == ["register_tensors"]
    assert merged.files[0].dropped == 3
    assert any("3 lines dropped" in line for line in merged.warnings)


def test_a_removed_directory_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tracer(tmp_path / "t")
    one.flush()
    one.path.unlink()
    for _ in range(3):
        one.span("calls", "transfer", 0, 1)
        one.flush()
    one.close()
    assert len(caplog.records) == 1
    assert "it was removed" in caplog.text


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST", 10)
    one = tracer(tmp_path / "t")
    with one._writing:  # the disk is slow
        for _ in range(100):
            one.span("calls", "transfer", 0, 1)
    one.close()
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    assert merged.spans + merged.files[0].dropped == 100
    assert merged.files[0].dropped >= 89


def test_what_cannot_be_written_as_json_is_counted(tmp_path: Path) -> None:
    one = tracer(tmp_path / "t")
    one.span("calls", "transfer", 0, 1, {"version": "\ud800"})
    one.span("calls", "transfer", 1, 2, {"version": 1 << 80})
    one.span("calls", "transfer", 2, 3, {"version": threading})
    one.close()
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    assert merged.spans + merged.files[0].dropped == 3


KILLED = """
import os, signal, sys
from pathlib import Path
from etha.observe.trace import Tracer
one = Tracer(Path(sys.argv[1]), {head})
one.span("calls", "init_pair", 10, 20)
one.begin("calls", "transfer", 30, {{"batch": "b"}})
one.flush()
os.write(one._file, b'["x","calls","tra')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_what_it_did(tmp_path: Path) -> None:
    program = KILLED.format(head=head(settings(tmp_path), "worker", "cpu"))
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "t")], check=False)
    assert killed.returncode == -signal.SIGKILL
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    call, open_call = events(tmp_path / "out.json")
    assert call["name"] == "init_pair"
    assert (open_call["name"], open_call["args"]) == ("transfer", {"batch": "b", "unfinished": True})
    assert merged.unfinished == 1


def test_files_that_are_no_traces_are_named(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for name, text in {"a.txt": "hello", "b.json": '{"etha_trace": 99}\n', "c": '{"etha_trace": 1}\n', "d": ""}.items():
        (tmp_path / "t" / name).write_text(text)
    with pytest.raises(ConfigError, match=r"no trace in .*t: set ETHA_TRACE(.|\n)*a\.txt: no trace of Etha"):
        merge([tmp_path / "t"], tmp_path / "out.json")
    tracer(tmp_path / "t").close()
    merged = merge([tmp_path / "t"], tmp_path / "t" / "out.json")
    assert {path.name: why for path, why in merged.strangers} == {
        "a.txt": "no trace of Etha",
        "b.json": "a trace in format 99, this version of etha reads 1",
        "c": "its head has no host",
        "d": "no trace of Etha",
    }
    again = merge([tmp_path / "t"], tmp_path / "t" / "out.json")  # what it has written itself is none of them
    assert len(again.strangers) == 4


def test_a_directory_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ETHA_TRACE=.*file: no trace can be written there: File exists"):
        tracer(tmp_path / "file")


def test_equal_names_get_numbers(tmp_path: Path) -> None:
    one, other = tracer(tmp_path), tracer(tmp_path)
    one.close()
    other.close()
    assert other.path.name == f"{one.path.stem}.2.jsonl"


def test_a_forked_child_writes_nothing_of_its_parent(tmp_path: Path) -> None:
    trace.start(settings(tmp_path), "worker", "cpu")
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if trace.active is None else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        trace.stop()
    assert trace.active is None


def hosts(directory: Path, *, linked: bool) -> list[Path]:
    """Two hosts whose clocks differ by 1,000 s; each has a span at the same moment."""
    found = []
    ahead = 1000 * 10**9
    for host, shift in (("a", 0), ("b", ahead)):
        about = {"host": host, "host_name": host, "clock": host}
        one = tracer(directory / host, "agent", **about, monotonic_ns=10**9 + shift, realtime_ns=10**18)
        one.note(agent=host)
        one.span("transfers", "transfer", 2 * 10**9 + shift, 3 * 10**9 + shift)
        if linked and host == "a":
            one.beat_returned("b", 8, 10**9, 10**9 + 40_000)
        elif linked:
            one.beat_answered("a", 8, 10**9 + shift + 20_000, 10**9 + shift + 20_000)
        one.close()
        found.append(directory / host)
    return found


@pytest.mark.parametrize("linked", [True, False])
def test_two_hosts_are_put_on_one_clock(tmp_path: Path, linked: bool) -> None:
    merged = merge(hosts(tmp_path, linked=linked), tmp_path / "out.json")
    one, other = events(tmp_path / "out.json")
    assert one["ts"] == other["ts"]
    assert merged.hosts == ("a", "b")
    assert merged.unlinked == (() if linked else ("b",))
    assert merged.clock_error == pytest.approx(20e-6 if linked else 0, abs=1e-7)
    assert ("largest error of the clocks: 20 us" in merged.text) is linked


def test_a_zipped_file_is_written_for_gz(tmp_path: Path) -> None:
    import gzip

    tracer(tmp_path / "t").close()
    merge([tmp_path / "t"], tmp_path / "out.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))["displayTimeUnit"] == "ns"


def test_merging_imports_no_torch() -> None:
    program = "import sys, etha.observe.trace_merge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_client_refuses_a_directory_that_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from etha import TensorBusClient

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ETHA_TRACE", str(tmp_path / "file" / "t"))
    with pytest.raises(ConfigError, match=r"ETHA_TRACE=.*: no trace can be written there: Not a directory; name a dir"):
        TensorBusClient()
    assert trace.active is None


def test_an_agent_without_the_wanted_trace_is_another(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    assert wanted.wishes["ETHA_TRACE"] == str(tmp_path)
    assert wanted.differ(wanted.wishes) == ""
    untraced = Settings.from_env({})
    assert untraced.differ(wanted.wishes) == f"no ETHA_TRACE instead of ETHA_TRACE={tmp_path}"
