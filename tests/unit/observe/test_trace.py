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


HEAD = {
    "etha_trace": 1,
    "host": "h",
    "host_name": "hn",
    "role": "agent",
    "device": "cpu",
    "pid": 1,
    "clock": "c",
    "monotonic_ns": 1000,
    "realtime_ns": 5,
}
GOOD = '["x","transfers","transfer",1000,2000,{"pair":"p","epoch":1,"batch":"b","seq":1},[],0]'
#: Lines that cannot be read.
BAD_LINES = {
    "begun without a track": '["b",1]',
    "begun at no time": '["b",1,"t","n","soon",{}]',
    "a number that is a list": '["x","t","n",1,2,{},[],[1]]',
    "parts that are none": '["x","t","n",1,2,{},[["a"]],0]',
    "parts that are a number": '["x","t","n",1,2,{},7,0]',
    "a time beyond 64 bits": f'["x","t","n",{10**30},2,{{}},[],0]',
    "a time with a fraction": '["x","t","n",1.5,2,{},[],0]',
    "deep nesting": '["x","t","n",1,2,' + '{"a":' * 100_000,
    "half a surrogate pair": '["x","t","\\ud800",1,2,{},[],0]',
    "a note that overwrites the head": '["n",{"agent":7,"pid":"x","clock":[1]}]',
    "a beat without times": '["q","a",1]',
    "a kind of a later version": '["z",1]',
    "no JSON": "\x00\x1b]0;",
}


@pytest.mark.parametrize("bad", list(BAD_LINES.values()), ids=list(BAD_LINES))
def test_a_line_that_cannot_be_read_costs_no_more_than_itself(tmp_path: Path, bad: str) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.jsonl").write_text(f"{json.dumps(HEAD)}\n{bad}\n{GOOD}\n")
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    assert (merged.spans, merged.transfers, merged.files[0].torn) == (1, 1, 1)
    assert [event["name"] for event in events(tmp_path / "out.json")] == ["transfer"]
    assert any("1 line cannot be read" in text for text in merged.warnings)


@pytest.mark.parametrize(
    "odd", [{"sources": 7}, {"targets": [1]}, {"key": [1]}, {"seq": -1}, {"seq": 4294967295}, {"seq": 1 << 64}]
)
def test_arguments_of_another_shape_are_shown_as_they_are(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "t").mkdir()
    line = json.dumps(["x", "transfers", "transfer", 1, 2, {"seq": 1, **odd}, [], 0])
    (tmp_path / "t" / "a.jsonl").write_text(f"{json.dumps(HEAD)}\n{line}\n{GOOD}\n")
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    if odd != {"seq": 1 << 64}:
        assert {"seq": 1, **odd} in [event["args"] for event in events(tmp_path / "out.json")]
    assert merged.transfers >= 1


def test_counting_far_numbers_takes_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "t").mkdir()
    about = {"pair": "p", "epoch": 1, "batch": "b"}
    lines = [
        json.dumps(["x", "transfers", "transfer", 1, 2, {**about, "seq": seq}, [], 0])
        for seq in (1, 2, 2, 1023, 1024, 50_000_000)
    ]
    (tmp_path / "t" / "a.jsonl").write_text("\n".join([json.dumps(HEAD), *lines, ""]))
    tracemalloc.start()
    try:
        assert merge([tmp_path / "t"], tmp_path / "out.json").transfers == 5
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_an_agent_that_notes_no_device_is_merged(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    head = {name: value for name, value in HEAD.items() if name != "device"}
    (tmp_path / "t" / "a.jsonl").write_text(f'{json.dumps(head)}\n["n",{{"agent":"x"}}]\n{GOOD}\n')
    assert merge([tmp_path / "t"], tmp_path / "out.json").spans == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"realtime_ns": 10**26}, "its head cannot be read"),
        ({"realtime_ns": -(10**19)}, "its head cannot be read"),
        ({"pid": "x"}, "its head cannot be read: Expected `int`, got `str` - at `$.pid`"),
        ({"host_name": {"a": 1}}, "its head cannot be read"),
    ],
)
def test_a_head_of_another_shape_leaves_only_its_file_out(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.jsonl").write_text(f"{json.dumps({**HEAD, **wrong})}\n{GOOD}\n")
    (tmp_path / "t" / "b.jsonl").write_text(f"{json.dumps(HEAD)}\n{GOOD}\n")
    (tmp_path / "t" / "c.jsonl").write_text('{"a":' * 10_000)
    merged = merge([tmp_path / "t"], tmp_path / "out.json")
    assert merged.spans == 1
    assert [path.name for path, _ in merged.strangers] == ["a.jsonl", "c.jsonl"]
    assert merged.strangers[0][1].startswith(why)


def test_a_merge_that_fails_leaves_no_part(tmp_path: Path) -> None:
    tracer(tmp_path / "t").close()

    def interrupted(done: int, files: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([tmp_path / "t"], tmp_path / "out.json", interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_missing_agents_file_is_a_warning(tmp_path: Path) -> None:
    tracer(tmp_path / "t").close()
    assert any(
        "no file of the agent cpu on" in text and "served 1 worker" in text
        for text in merge([tmp_path / "t"], tmp_path / "out.json").warnings
    )
    agent = tracer(tmp_path / "t", "agent")
    agent.note(agent="me")
    agent.span("send other 0", "send", 0, 1, {"key": "k"})
    agent.close()
    (warning,) = merge([tmp_path / "t"], tmp_path / "out.json").warnings
    assert "no file of agent other, with which" in warning and "exchanged bytes" in warning
    other = tracer(tmp_path / "t", "agent")
    other.note(agent="other")
    other.close()
    assert merge([tmp_path / "t"], tmp_path / "out.json").warnings == []


def test_what_etha_trace_prints_holds_no_control_character(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.jsonl").write_text(
        json.dumps({**HEAD, "role": "worker", "host_name": "\x1b]0;x\x07\n"}) + "\n"
    )
    (tmp_path / "t" / "b\x1b[2J").write_text("")
    command = [sys.executable, "-m", "etha", "trace", str(tmp_path / "t"), "-o", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no file of the agent cpu on" in done.stderr and "left out" in done.stderr
    assert not {"\x1b", "\x07"} & {*done.stdout, *done.stderr}
