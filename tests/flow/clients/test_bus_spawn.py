"""Autostart: exactly one agent however many ask, as a daemon, and a telling error when it does not come up."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import etha
from etha.bus.link import AgentLink
from etha.bus.process import start_time
from etha.client import agent_process
from etha.client.agent_process import ensure_agent, environment
from etha.config import Settings
from etha.errors import AgentUnavailableError, ConfigError, EthaError
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sites import started_in
from tests.unit.bus.echo import Echo, hello

pytestmark = pytest.mark.usefixtures("cold")

#: Stands in for etha.agent; notes each that came up, and does as the file ``mode`` says.
AGENT = """
    import argparse, asyncio, fcntl, os, sys
    from pathlib import Path
    p = argparse.ArgumentParser()
    for name in ("--device", "--namespace", "--ready-fd"):
        p.add_argument(name, required=True)
    p.add_argument("--autostarted", action="store_true", required=True)
    p.add_argument("--start-lock", type=int, required=True)
    p.add_argument("--patient", action="store_true")
    args = p.parse_args()
    folder = Path(os.environ["ETHA_RUNTIME_DIR"]) / args.namespace
    fd = int(args.ready_fd)

    def ready():
        fcntl.flock(args.start_lock, fcntl.LOCK_UN)
        os.write(fd, b"ready\\n")
        os.close(fd)

    with open(folder / "started", "a") as notes:
        notes.write(f"{os.getpid()}\\n")
    mode = (folder / "mode").read_text() if (folder / "mode").exists() else "serve"
    print("a line on stdout that goes nowhere")
    print(f"agent in mode {mode}", file=sys.stderr, flush=True)
    if mode == "break":
        os.write(fd, b"error etha something broke\\n")
        sys.exit(1)
    if mode == "refuse":
        os.write(fd, b"error config ETHA_LISTEN is wrong\\n")
        sys.exit(1)
    if mode == "crash":
        raise SystemExit("no memory left")
    if mode.startswith("slow"):  # until the test opens the other end
        (folder / "gate").read_bytes()
    if mode == "slow and broken":
        os.write(fd, b"error etha something broke\\n")
        sys.exit(1)
    if mode == "busy":
        os.pwrite(args.start_lock, f"starting {os.getpid()}\\nbusy redis_unavailable no answer\\n".encode(), 0)
    if mode in ("hang", "busy"):
        import signal
        signal.pause()
    if mode in ("serve", "slow"):  # what a probe sees of an agent, without the seconds that torch takes to import
        import signal, socket
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / f"{args.device}.fds"))
        listener.listen()
        ready()
        signal.pause()
    from tests.unit.bus.echo import EchoService
    from etha.bus.server import BusServer

    async def main():
        async with BusServer(folder / f"{args.device}.sock", EchoService()):
            ready()
            await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.fixture
def settings(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    (tmp_path / "fake_etha_agent.py").write_text(textwrap.dedent(AGENT))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = Settings.from_env()
    settings.ensure_runtime_dir()
    yield settings
    for notes in settings.runtime_dir.glob("*/started"):
        for pid in map(int, notes.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def started(settings: Settings) -> list[int]:
    notes = settings.runtime_dir / settings.namespace / "started"
    return [int(line) for line in notes.read_text().split()] if notes.exists() else []


def to_do(settings: Settings, mode: str) -> None:
    (settings.runtime_dir / settings.namespace / "mode").write_text(mode)


async def ensure(settings: Settings, timeout: float = 30.0) -> Path:
    return await ensure_agent(
        settings,
        "cpu",
        redis_url=settings.redis_url,
        namespace=settings.namespace,
        timeout=timeout,
        module="fake_etha_agent",
    )


async def test_an_agent_is_started_and_found_by_the_next(settings: Settings) -> None:
    to_do(settings, "serve the bus")
    path = await ensure(settings)
    assert path == settings.socket_path("cpu")
    async with await AgentLink.connect(path, hello(), timeout=5.0) as link:
        assert await link.request(Echo(text="hi")) == Echo(text="hi")
        (pid,) = started(settings)
        assert link.agent_pid == pid
    assert await ensure(settings) == path
    assert started(settings) == [pid]


async def test_it_is_a_daemon(settings: Settings) -> None:
    await ensure(settings)
    (pid,) = started(settings)
    process = Path(f"/proc/{pid}")
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    parent, session = int(fields[1]), int(fields[3])
    assert parent != os.getpid()
    assert session != os.getsid(0)
    assert (process / "cwd").readlink() == Path("/")
    assert [(process / f"fd/{fd}").readlink() for fd in (0, 1)] == [Path("/dev/null")] * 2
    log = (process / "fd/2").readlink()
    assert log == settings.socket_path("cpu").with_suffix(".log")
    assert (log.read_text(), log.stat().st_mode & 0o777) == ("agent in mode serve\n", 0o600)
    assert "Umask:\t0077" in (process / "status").read_text()
    command = (process / "cmdline").read_bytes().split(b"\0")
    assert command[1:5] == [b"-m", b"fake_etha_agent", b"--device", b"cpu"]


async def test_many_clients_of_one_process_get_one_agent(settings: Settings) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ensure(settings)) for _ in range(10)]
    assert {task.result() for task in asked} == {settings.socket_path("cpu")}
    assert len(started(settings)) == 1


def ask(settings: Settings) -> str:
    tell("here")
    wait_for("now")
    return str(asyncio.run(ensure(settings)))


def test_many_processes_get_one_agent(settings: Settings) -> None:
    with Job({"PYTHONPATH": os.environ["PYTHONPATH"]}) as job:
        workers = [job.start(ask, settings) for _ in range(6)]
        for worker in workers:
            worker.expect("here")
        for worker in workers:
            worker.go("now")
        assert {worker.result() for worker in workers} == {str(settings.socket_path("cpu"))}
    assert len(started(settings)) == 1


async def test_namespaces_have_agents_of_their_own(settings: Settings) -> None:
    other = replace(settings, namespace="other")
    assert await ensure(settings) != await ensure(other)
    assert len(started(settings)) == len(started(other)) == 1


@pytest.mark.parametrize(
    ("mode", "reported"),
    [
        ("break", r"did not start: etha something broke\n.*cpu\.log, which ends:\nagent in mode break"),
        (
            "crash",
            r"did not start: it ended without a word\n.*cpu\.log, which ends:\nagent in mode crash\nno memory left",
        ),
    ],
)
async def test_one_that_does_not_start_tells_why(settings: Settings, mode: str, reported: str) -> None:
    settings.socket_path("cpu").with_suffix(".log").write_text("what an older agent said\n")
    to_do(settings, mode)
    with pytest.raises(AgentUnavailableError, match=reported) as caught:
        await ensure(settings)
    assert "older" not in str(caught.value)
    to_do(settings, "serve")
    await ensure(settings)


async def test_one_that_refuses_its_settings_tells_the_user(settings: Settings) -> None:
    to_do(settings, "refuse")
    with pytest.raises(EthaError, match=r"the agent of cpu did not start: .*ETHA_LISTEN is wrong"):
        await ensure(settings)


async def test_one_that_does_not_come_up_in_time_is_told_by_its_log(settings: Settings) -> None:
    to_do(settings, "hang")
    begin = time.monotonic()
    with pytest.raises(AgentUnavailableError, match="in time; waited for the one that was started"):
        await ensure(settings, timeout=1.0)
    assert time.monotonic() - begin < 2.0


async def test_one_that_is_slower_than_its_callers_comes_up_for_the_next(settings: Settings) -> None:
    to_do(settings, "slow")
    os.mkfifo(gate := settings.runtime_dir / settings.namespace / "gate")
    for _ in range(4):
        with pytest.raises(AgentUnavailableError, match=r"in time; waited for"):
            await ensure(settings, timeout=0.3)
    waiting = asyncio.create_task(ensure(settings, timeout=60))
    await asyncio.to_thread(gate.write_bytes, b"")
    assert await waiting == settings.socket_path("cpu")
    assert len(started(settings)) == 1


def ask_shortly(settings: Settings) -> str:
    try:
        return str(asyncio.run(ensure(settings, timeout=0.3)))
    except AgentUnavailableError as error:
        return error.message


def test_one_whose_starter_has_gone_comes_up_for_the_next(settings: Settings) -> None:
    to_do(settings, "slow")
    os.mkfifo(gate := settings.runtime_dir / settings.namespace / "gate")
    with Job({"PYTHONPATH": os.environ["PYTHONPATH"]}) as job:
        for _ in range(3):  # each leaves with its process
            assert "in time; waited for" in job.start(ask_shortly, settings).result()
        worker = job.start(ask, settings)
        worker.expect("here")
        worker.go("now")
        gate.write_bytes(b"")
        assert worker.result() == str(settings.socket_path("cpu"))
    assert len(started(settings)) == 1


async def test_an_agent_that_died_while_it_started_is_followed_by_another(settings: Settings) -> None:
    to_do(settings, "hang")
    while not started(settings):
        with pytest.raises(AgentUnavailableError, match="once it listens, the next call finds it"):
            await ensure(settings, timeout=0.5)
    to_do(settings, "serve")
    os.kill(started(settings)[0], signal.SIGKILL)
    await ensure(settings)
    assert len(started(settings)) == 2


async def test_who_waited_for_a_start_that_failed_does_not_repeat_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_do(settings, "slow and broken")
    os.mkfifo(gate := settings.runtime_dir / settings.namespace / "gate")
    waiting = threading.Semaphore(0)

    def flock(lock: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            waiting.release()
        fcntl.flock(lock, operation)

    monkeypatch.setattr(agent_process, "fcntl", types.SimpleNamespace(**{**vars(fcntl), "flock": flock}))
    first = asyncio.create_task(ensure(settings, 60))
    door = await asyncio.to_thread(os.open, gate, os.O_WRONLY)  # the agent is there, and reads
    others = [asyncio.create_task(ensure(settings, 60)) for _ in range(5)]
    wish = asyncio.create_task(ensure(replace(settings, redis_url="redis://127.0.0.1:1"), 60))
    for _ in range(6):
        await asyncio.to_thread(waiting.acquire)
    os.close(door)
    for result in await asyncio.gather(first, *others, return_exceptions=True):
        assert "something broke" in str(result)
    os.close(await asyncio.to_thread(os.open, gate, os.O_WRONLY))
    assert "something broke" in str((await asyncio.gather(wish, return_exceptions=True))[0])
    assert len(started(settings)) == 2, "one for the five, and one for the other wish"


async def test_who_gives_too_little_time_hears_how_the_last_start_failed(settings: Settings) -> None:
    to_do(settings, "refuse")
    with pytest.raises(ConfigError, match="ETHA_LISTEN is wrong"):
        await ensure(settings)
    to_do(settings, "hang")
    with pytest.raises(AgentUnavailableError, match="if it fails, that log says why") as caught:
        await ensure(settings, timeout=0.5)
    assert "The one before it did not start: the agent of cpu did not start: ETHA_LISTEN" in caught.value.message


async def test_what_keeps_a_starting_agent_is_told(settings: Settings) -> None:
    to_do(settings, "busy")
    for _ in range(100):
        with pytest.raises(EthaError) as caught:
            await ensure(settings, timeout=0.5)
        if caught.value.code == "redis_unavailable":
            break
    assert "no answer" in caught.value.message and f"process {started(settings)[0]}" in caught.value.message


async def test_who_waits_for_another_starter_says_so(settings: Settings) -> None:
    lock = settings.socket_path("cpu").with_suffix(".start").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AgentUnavailableError, match="waited for another client, of this or another process"):
            await ensure(settings, timeout=0.2)
    assert started(settings) == []


async def test_an_interpreter_that_is_not_known_is_told(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(AgentUnavailableError, match="start one by `etha agent`"):
        await ensure(settings)


async def test_a_large_log_is_set_aside(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "MAX_LOG", 100)
    log = settings.socket_path("cpu").with_suffix(".log")
    log.write_text("x" * 200)
    await ensure(settings)
    assert log.read_text() == "agent in mode serve\n"
    assert log.with_suffix(".log.1").stat().st_size == 200


async def test_a_path_that_is_too_long_is_told_before_anything_starts(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="shorten ETHA_RUNTIME_DIR"):
        await ensure(replace(settings, runtime_dir=settings.runtime_dir / ("x" * 100)))


def test_the_agents_environment_says_nothing_of_the_workers_job(settings: Settings) -> None:
    own = {
        "PATH": "/bin",
        "LD_PRELOAD": "libtcmalloc.so",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "1",
        "ETHA_LAUNCH_ID": "l",
        "ETHA_AGENT": "ipc:///x",
        "ETHA_REDIS_URL": "redis://other",
        "ETHA_IDLE": "5",
        "ETHA_NAMESPACE": "other",
    }
    env = environment(own, settings, None)
    root = str(Path(agent_process.__file__).parents[2])
    assert env == {
        "PATH": "/bin",
        "LD_PRELOAD": "libtcmalloc.so",
        "ETHA_IDLE": "5",
        "ETHA_NAMESPACE": "default",
        "ETHA_RUNTIME_DIR": str(settings.runtime_dir),
        "ETHA_HOST_ID": settings.host_id,
        "PYTHONPATH": root,
    }
    assert environment(own, settings, "redis://u:p@h")["ETHA_REDIS_URL"] == "redis://u:p@h"
    relative = environment({"PYTHONPATH": "src"}, settings, None)["PYTHONPATH"].split(":")
    assert relative == [str(Path("src").absolute()), root]


async def test_an_agent_goes_on_starting_when_its_caller_has_given_up(runtime: Path) -> None:
    async with etha.AsyncTensorBusClient(timeout=0.5) as hasty:
        agents: list[int] = []
        while not agents:
            with pytest.raises(AgentUnavailableError, match="in time; waited for"):
                await hasty.status()
            agents = [pid for pid, command in started_in(str(runtime)).items() if "etha.agent" in command]
    async with etha.AsyncTensorBusClient(timeout=100) as client:
        assert [(await client.status())["agent"]["pid"]] == agents


def test_start_time_tells_processes_apart() -> None:
    assert start_time() == start_time(os.getpid()) > 0
    assert start_time(2**22 + 1) == 0
