"""The command line as a person runs it, each command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from etha import TensorBusClient
from etha.agent_session import addresses, open_session
from etha.bus.messages import LetGo, WaitOffer
from etha.cli import main
from etha.config import ENVIRONMENT, Settings
from etha.doctor.machine import check_runtime_dir
from etha.errors import ConfigError, ProtocolError, RendezvousTimeoutError
from tests.flow.commands.running import agent, etha
from tests.flow.sites import Site, started_in
from tests.processes import send_signal

COMMANDS = ("agent", "status", "stop", "publications", "events", "logs", "plan", "plot", "demo", "doctor")
SECONDS = 60
#: A shell's background job ignores SIGINT, and so would what it starts.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from etha.cli import main; main()"
)
#: What a status call must not wait for: each takes a good part of its half second, or more.
SLOW = {"torch", "numpy", "matplotlib", "redis", "uvloop", "etha.plan", "etha.client", "etha.agent", "rich.progress"}


def here(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """``etha WORDS`` in this process, for commands that start nothing: loading torch anew takes seconds."""
    monkeypatch.setattr(sys, "argv", ["etha", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@contextmanager
def fresh_agent(*words: str) -> Iterator[subprocess.Popen[str]]:
    """``etha agent`` as a person starts it, in the foreground, once it serves."""
    command = [sys.executable, "-c", "from etha.cli import main; main()", "agent", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            reported = []
            for line in process.stderr:
                reported.append(line)
                if "serves" in line:
                    break
            else:
                pytest.fail("the agent ended: " + "".join(reported))
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)])
def test_help_names_every_variable(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, *words, "--help") == 0
    shown = capsys.readouterr().out
    assert [name for name in ENVIRONMENT if name not in shown] == []
    meanings = " ".join(shown.split())
    assert ("nothing crosses namespaces" in meanings) is not words, "what they mean is said once"
    if not words:
        assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", shown)] == []


def test_status_without_an_agent_says_so_and_starts_nothing(runtime: Path) -> None:
    shown = etha("status")
    assert shown.returncode == 1
    assert f"agent_unavailable: no agent is running at {runtime}" in " ".join(shown.stderr.split())
    assert "Traceback" not in shown.stderr
    assert not list(runtime.rglob("*.sock"))


def test_an_agent_in_the_foreground_shows_itself_and_leaves_on_sigterm(runtime: Path) -> None:
    with fresh_agent() as process:
        found = json.loads(etha("status", "--json").stdout)
        assert set(found) == {"agent", "agents", "pairs", "batches", "groups", "publications"}
        assert found["agent"]["pid"] == process.pid
        assert found["agent"]["device"] == "cpu"
        assert found["pairs"] == found["batches"] == found["groups"] == found["publications"] == []
        tables = etha("status").stdout
        assert str(process.pid) in tables and "batches" in tables
        assert "encrypted" in tables and re.search(r"\bno\b", tables)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert not list(runtime.glob("default/*.sock"))
    assert etha("status").returncode == 1


def test_an_agent_serves_the_namespace_it_was_told(runtime: Path) -> None:
    with agent("--namespace", "blue"):
        assert etha("status").returncode == 1
        found = json.loads(etha("status", "--json", ETHA_NAMESPACE="blue").stdout)
        assert found["agent"]["namespace"] == "blue"


def test_what_an_agent_cannot_do_is_one_line(runtime: Path) -> None:
    shown = etha("agent", "--namespace", "a b")
    assert shown.returncode == 1
    assert "namespace name 'a b'" in " ".join(shown.stderr.split()) and "Traceback" not in shown.stderr


SOURCE = {
    "mesh": [2, 2],
    "placements": ["_S(0, 2)", "S(0)"],
    "tensors": {
        "weight": {"shape": [9, 8], "dtype": "bfloat16"},
        "norm": {"shape": [8], "dtype": "float32", "mesh": [[0, 2], [1, 3]], "placements": ["R", "S(0)"]},
    },
}


Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """``etha plan`` on two sides given as data: status, output, and errors on one line."""

    def run(source: object, target: object, *words: str) -> tuple[int, str, str]:
        paths = [tmp_path / "source.json", tmp_path / "target.json"]
        for path, side in zip(paths, (source, target), strict=True):
            path.write_text(side if isinstance(side, str) else json.dumps(side))
        status = here(monkeypatch, "plan", *(str(path) for path in paths), *words)
        reported = capsys.readouterr()
        return status, reported.out, " ".join(reported.err.split())

    return run


def test_a_plan_is_explained_without_processes(plan: Plan) -> None:
    status, shown, _ = plan(SOURCE, {"mesh": [2], "placements": ["R"]})
    assert status == 0
    # 2 holders x (9 x 8 x 2 bytes + 8 x 4 bytes)
    assert "2 tensors" in shown and "352 B" in shown
    assert "'norm'" in shown and "'weight'" in shown


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"mesh": [2], "placements": ["X(0)"]}, "placement 'X(0)'"),
        ({"mesh": [2]}, "tensor 'weight' needs shape, dtype, mesh and placements"),
        ({"mesh": [2], "placements": ["S(5)"]}, "dim 5"),
        ("no json", "is not JSON"),
        ([1], "must hold an object"),
    ],
)
def test_a_malformed_side_is_named(plan: Plan, target: object, reason: str) -> None:
    status, _, reported = plan(SOURCE, target)
    assert status == 1 and "target.json" in reported and reason in reported


@pytest.mark.parametrize(
    ("side", "reason"),
    [
        (
            {"mesh": [2], "placement": ["R"]},
            "a side has the key 'placement', .*: did you mean 'placements'",
        ),
        ({"mesh": [2], "placements": ["R"], "regions": []}, "a side has the key 'regions', .*: it belongs to a tensor"),
        (
            {"mesh": {"shape": [2], "frist": 1}, "placements": ["R"]},  # codespell:ignore frist
            ".*a mesh has the key 'frist', .*mean 'first'",  # codespell:ignore frist
        ),
        ({"layouts": {"a": {"msh": [2]}}, "mesh": [2]}, "layout 'a' has the key 'msh', .*mean 'mesh'"),
        ({"mesh": [2], "placements": ["R"], "hosts": {"name": "h{}", "rank": 1}}, "\"hosts\" has the key 'rank'"),
        (
            {"tensors": {"w": {"shape": [2], "dtyp": "float32"}}},
            "tensor 'w' has the key 'dtyp', .*mean 'dtype'",
        ),
        ({"mesh": [2], "placements": ["R"], "author": "me"}, "a side has the key 'author', .*: it may have mesh, "),
    ],
)
def test_a_misspelt_key_is_named(plan: Plan, side: object, reason: str) -> None:
    status, _, reported = plan(SOURCE, side)
    assert status == 1 and re.search(f"target.json: {reason}", reported), reported


def test_a_picture_is_written_beside_the_text_and_its_name_is_checked_first(plan: Plan, tmp_path: Path) -> None:
    target = {"mesh": [2], "placements": ["R"]}
    status, shown, _ = plan(SOURCE, target, "--plot", str(tmp_path / "plan.svg"))
    assert status == 0 and "2 tensors" in shown and "busiest NIC" in (tmp_path / "plan.svg").read_text()
    status, shown, reported = plan(SOURCE, target, "--plot", str(tmp_path / "plan.jpg"))
    assert status == 1 and not shown and "its name must end in .svg, .png, .pdf" in reported


def test_regions_send_and_a_gap_is_named(plan: Plan) -> None:
    shape = {"shape": [8, 4], "dtype": "float32"}
    regions = [{"region": [[[0, 5]], [[0, 4]]], "ranks": [0, 1]}, {"region": [[[3, 7]], [[0, 4]]], "ranks": [2]}]
    source = {"tensors": {"w": {**shape, "regions": regions}}}
    inside = {"tensors": {"w": {**shape, "regions": [{"region": [[[1, 7]], [[0, 4]]], "ranks": [0]}]}}}
    status, shown, _ = plan(source, inside, "--check")
    assert status == 0 and "96 B" in shown and "2 [0:5 x 0:4] and 1 [3:7 x 0:4] -> 1 [1:7 x 0:4]" in shown
    status, _, reported = plan(source, {"mesh": [2], "placements": ["S(0)"]})
    assert status == 1 and "'w' on target rank 1: 4 of 16 elements" in reported and "among them [7:8 x 0:4]" in reported


def test_a_check_says_that_it_has_passed(plan: Plan) -> None:
    status, shown, _ = plan(SOURCE, {"mesh": [2], "placements": ["R"]}, "--check")
    assert status == 0 and "checked: every element of every target arrives exactly once" in shown


def test_a_plan_that_cannot_work_lists_every_reason(plan: Plan) -> None:
    other = {"mesh": [2], "placements": ["R"], "tensors": {"other": {"shape": [8], "dtype": "float32"}}}
    status, _, reported = plan(SOURCE, other)
    assert status == 1
    assert all(f"'{name}'" in reported for name in ("weight", "norm", "other"))


def test_the_doctor_finds_this_machine_healthy(runtime: Path) -> None:
    shown = etha("doctor")
    assert shown.returncode == 0, shown.stdout
    assert "fails" not in shown.stdout


def test_the_doctor_says_how_to_mend_what_fails(runtime: Path) -> None:
    # Port 1 refuses at once; the password must not be shown.
    shown = etha("doctor", ETHA_REDIS_URL="redis://:secret@127.0.0.1:1/0", ETHA_RUNTIME_DIR=f"{runtime}/{'d' * 80}")
    assert shown.returncode == 1
    assert "unset ETHA_REDIS_URL" in shown.stdout and "secret" not in shown.stdout + shown.stderr
    assert "shorten ETHA_RUNTIME_DIR" in shown.stdout


def test_the_doctor_as_json_says_the_same(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert all(set(line) == {"check", "verdict", "found", "mend"} for line in found)
    assert {line["check"] for line in found} >= {"python and torch", "Redis", "runtime directory"}
    assert {line["verdict"] for line in found} <= {"ok", "note"}
    monkeypatch.setenv("ETHA_REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    assert here(monkeypatch, "doctor", "--json") == 1
    shown = capsys.readouterr().out
    (redis,) = [line for line in json.loads(shown) if line["check"] == "Redis"]
    assert redis["verdict"] == "fails" and "ETHA_REDIS_URL" in redis["mend"] and "secret" not in shown


def test_the_doctor_wants_the_runtime_directory_closed_to_others(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 755; it must be yours with mode 700"):
        check_runtime_dir(Settings.from_env())


def test_the_doctor_reads_memory_for_real(runtime: Path) -> None:
    """A kernel that refuses process_vm_readv is noticed: here seen as a pid that is nobody's."""
    code = (
        "import etha.doctor.machine as d\n"
        "from etha.doctor import examine\n"
        "from etha.config import Settings\n"
        "settings = Settings.from_env()\n"
        "d.os.getpid = lambda: 2**22 - 1\n"
        "d.start_time = lambda pid: 1\n"
        "print([f for f in examine(settings) if 'memory' in f.name][-1])\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert "ok=False" in shown.stdout and "SYS_PTRACE" in shown.stdout, shown.stderr


@contextmanager
def watching(*words: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of ``etha status --watch --json``."""
    command = [sys.executable, "-c", INTERRUPTIBLE, "status", "--watch", "--json", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield map(json.loads, process.stdout)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
    assert process.returncode == 0


def test_status_imports_no_torch(runtime: Path) -> None:
    code = (
        "import sys; from etha.cli import app\n"
        "try: app(['status', '--json'])\nexcept SystemExit as end: assert not end.code\n"
        f"assert not {SLOW} & set(sys.modules), {SLOW} & set(sys.modules)"
    )
    with agent():
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert shown.returncode == 0, shown.stderr
    assert set(json.loads(shown.stdout)) == {"agent", "agents", "pairs", "batches", "groups", "publications"}


def form(pair: str) -> None:
    """Both sides of a pair by two clients of this process, which close afterwards."""
    with TensorBusClient(autostart=False) as one, TensorBusClient(autostart=False) as two:
        other = threading.Thread(target=two.init_pair, args=(pair, "b", "a"), kwargs={"rank": 0, "timeout": SECONDS})
        other.start()
        one.init_pair(pair, "a", "b", rank=0, timeout=SECONDS)
        other.join()


def test_watch_tells_what_happens_once_and_who_looks_is_no_worker(runtime: Path) -> None:
    events: list[dict[str, Any]] = []
    with watching() as lines:
        nothing = {"agent": None, "agents": [], "pairs": [], "batches": [], "groups": [], "publications": []}
        assert next(lines) == {**nothing, "events": []}
        with agent() as pid:
            form("weights")
            for line in lines:
                if line["agent"] is not None:
                    assert line["agent"]["pid"] == pid
                    assert all(worker["pid"] == os.getpid() for worker in line["agent"]["workers"])
                events += line["events"]
                if [event["kind"] for event in events].count("left") == 2:
                    break
            assert next(lines)["agent"]["workers"] == []
            form("again")
            while events[-1]["kind"] != "left" or events[-1]["pair"] != "again":
                events += next(lines)["events"]
    kinds = [event["kind"] for event in events if event.get("pair") in (None, "weights")]
    assert kinds[0] == "agent_came" and kinds.count("joined") == 2 and kinds.count("formed") == 1
    assert next(event for event in events if event["kind"] == "formed")["pair"] == "weights"
    assert len({event["id"] for event in events}) == len(events)


def test_watch_writes_into_a_pipe_at_once(runtime: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, "status", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "no agent is running" in process.stdout.readline()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
    assert process.returncode == 0


def test_an_idle_agent_leaves_while_somebody_watches(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETHA_IDLE", "2.5")
    with watching() as lines:
        with TensorBusClient(timeout=SECONDS) as client:
            client.status()
            assert next(line for line in lines if line["agent"] is not None)
        assert next(line for line in lines if line["agent"] is None)


def test_an_observer_may_only_look(runtime: Path) -> None:
    async def ask() -> None:
        settings = Settings.from_env()
        async with open_session(addresses(settings)[0], settings, timeout=SECONDS) as session:
            assert (await session.status())["agent"]["workers"] == []
            assert [event["kind"] for event in await session.events()] == ["agent_came"]
            for request in (LetGo(all=True, segments=()), WaitOffer(batch="b", epoch=1)):
                with pytest.raises(ProtocolError, match="not an observer's"):
                    await session._link.request(request, timeout=SECONDS)

    with agent():
        asyncio.run(ask())


def test_an_idle_agent_with_other_settings_is_replaced_and_stop_ends_it(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TensorBusClient(timeout=SECONDS) as client:
        first = client.status()["agent"]
    monkeypatch.setenv("ETHA_LISTEN", "127.0.0.2:0")
    with TensorBusClient(timeout=SECONDS) as client:
        second = client.status()["agent"]
    assert second["pid"] != first["pid"] and second["address"].startswith("127.0.0.2:")
    monkeypatch.delenv("ETHA_LISTEN")
    with TensorBusClient(timeout=SECONDS) as client:
        assert client.status()["agent"]["pid"] == second["pid"], "what is not asked for differs from nothing"
    assert here(monkeypatch, "stop", "--device", "cpu") == 0
    assert capsys.readouterr().out == f"stopped the agent that was process {second['pid']}\n"
    assert not agents_in(runtime)
    assert here(monkeypatch, "stop") == 1
    reported = " ".join(capsys.readouterr().err.split())
    assert "nothing to stop: no agent is running at" in reported and "client" not in reported


@pytest.mark.parametrize("device", ["foo", "cuda:x", "cpu:0", ""])
def test_what_is_no_device_is_told_so(
    device: str, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "stop", f"--device={device}") == 1
    assert f"config: device {device!r} is neither cpu nor cuda:N" in capsys.readouterr().err


def test_an_agent_of_no_device_is_told_so(runtime: Path) -> None:
    ended = etha("agent", "--device", "foo")
    assert ended.returncode == 1 and "device 'foo' is neither cpu nor cuda:N" in ended.stderr, ended.stderr
    assert "{" not in ended.stderr and "Traceback" not in ended.stderr


def agents_in(runtime: Path) -> list[int]:
    return [pid for pid, command in started_in(str(runtime)).items() if "etha.agent" in command]


def test_an_agent_with_clients_is_not_replaced_and_errors_say_so(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with TensorBusClient(timeout=SECONDS) as client:
        first = client.status()["agent"]["pid"]
        monkeypatch.setenv("ETHA_LISTEN", "127.0.0.2:0")
        with TensorBusClient(timeout=SECONDS) as other:
            assert other.status()["agent"]["pid"] == first
            reported = "runs with no ETHA_LISTEN instead of ETHA_LISTEN=127.0.0.2:0, and others use it"
            assert reported in caplog.text
            with pytest.raises(RendezvousTimeoutError, match=f"{reported}: end them, or `etha stop --device cpu`"):
                other.init_pair("p", "a", "b", 1, rank=0, timeout=0.3)
        with pytest.raises(ConfigError, match="agent runs with Redis the embedded server"):
            TensorBusClient(redis_url="redis://127.0.0.1:1", timeout=SECONDS).status()
        monkeypatch.setattr("etha.agent_session.HURRY", 0.3)
        send_signal(first, signal.SIGSTOP)
        assert here(monkeypatch, "stop", "--now") == 0
        assert not agents_in(runtime)


def test_status_of_a_pair_whose_sides_have_closed_in_order(served: Site, pair: str) -> None:
    with TensorBusClient(timeout=SECONDS) as watcher:
        first, second = TensorBusClient(timeout=SECONDS), TensorBusClient(timeout=SECONDS)
        with ThreadPoolExecutor() as threads:
            met = [
                threads.submit(first.init_pair, pair, "a", "b", 1, rank=0),
                threads.submit(second.init_pair, pair, "b", "a", 1, rank=0),
            ]
        assert {done.result().epoch for done in met} == {1}
        agent = watcher.status()["agent"]
        assert agent["host"] == served.at("a").get("ETHA_HOST_ID", os.uname().nodename)
        first.close()
        second.close()
        states = {"lost"}
        while "lost" in states:
            found = [one for one in watcher.status()["pairs"] if one["pair"] == pair]
            states = {one["state"] for one in found}
        assert all((one["state"], one["error"]) == ("closed", "") for one in found)


@pytest.mark.parametrize("command", ["agent", "status", "stop"])
def test_a_runtime_directory_that_cannot_be_is_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", Path("/sys/etha")):
        done = etha(command, ETHA_RUNTIME_DIR=str(path), ETHA_NAMESPACE="default")
        assert done.returncode == 1 and "Traceback" not in done.stderr and "bug" not in done.stderr
        assert str(path) in done.stderr, done.stderr
