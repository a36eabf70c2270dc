"""A fleet of agents, one a GPU: real processes that are no agents but end as agents do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from etha.agent.fleet import CONTEXT_LOST, RETRIES, Fleet, serve_all
from etha.agent.runtime.device import find
from etha.cuda.driver import Device
from etha.errors import AgentUnavailableError, ConfigError
from tests.fakes.cuda import GPU0, GPU1, FakeDriver

DEVICES = FakeDriver((GPU0, GPU1)).devices()
#: Tells that it is there, and waits for SIGTERM.
SERVES = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); open(sys.argv[1], 'a').close(); signal.pause()"


def python(code: str, *arguments: object) -> Sequence[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


async def there(*paths: Path) -> None:
    async with asyncio.timeout(30):
        while not all(path.exists() for path in paths):  # noqa: ASYNC110 - nothing tells of a file
            await asyncio.sleep(0.01)


async def test_stop_lets_all_of_them_leave(tmp_path: Path) -> None:
    fleet = Fleet(lambda device: python(SERVES, tmp_path / device.uuid), DEVICES)
    running = asyncio.create_task(fleet.run())
    await there(tmp_path / GPU0, tmp_path / GPU1)
    assert not running.done()
    fleet.stop()
    await running


async def test_one_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    def command(device: Device) -> Sequence[str]:
        return python("raise SystemExit(3)") if device.uuid == GPU1 else python(SERVES, tmp_path / "a")

    with pytest.raises(AgentUnavailableError, match=rf"cuda:1 \({GPU1}\) ended with status 3"):
        await Fleet(command, DEVICES).run()


async def test_a_lost_context_is_followed_by_another_process(tmp_path: Path) -> None:
    """Twice, and then it serves; the other one never notices."""
    once = "import os, sys; n = len(os.listdir(sys.argv[1])); open(f'{sys.argv[1]}/{n}', 'x'); "
    lives, other = tmp_path / "lives", tmp_path / "other"
    lives.mkdir()

    def command(device: Device) -> Sequence[str]:
        if device.uuid == GPU0:
            return python(SERVES, other)
        again = f"if n < 2: raise SystemExit({CONTEXT_LOST})\n{SERVES.replace('sys.argv[1]', 'sys.argv[2]')}"
        return python(f"{once}\n{again}", lives, tmp_path / "serves")

    fleet = Fleet(command, DEVICES)
    running = asyncio.create_task(fleet.run())
    await there(tmp_path / "serves", other)
    assert len(list(lives.iterdir())) == 3
    fleet.stop()
    await running


async def test_a_card_that_is_lost_again_and_again_is_given_up() -> None:
    with pytest.raises(AgentUnavailableError, match=f"lost its context {1 + RETRIES} times in a row"):
        await Fleet(lambda device: python(f"raise SystemExit({CONTEXT_LOST})"), DEVICES[:1]).run()


@pytest.mark.slow
async def test_an_agent_of_a_fleet_leaves_with_it(tmp_path: Path) -> None:
    """Its parent is killed, so nobody tells it but the kernel."""
    code = (
        "import os, sys, signal, subprocess\n"
        "child = 'from etha.agent.fleet import leave_with_parent; leave_with_parent(); import signal, sys; '\n"
        'child += \'signal.signal(15, lambda *_: (open(sys.argv[2], "x"), sys.exit(0))); open(sys.argv[1], "x"); \'\n'
        "subprocess.Popen([sys.executable, '-c', child + 'signal.pause()', *sys.argv[1:]])\n"
        "signal.pause()"
    )
    began, left = tmp_path / "began", tmp_path / "left"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(began), str(left), cwd=Path.cwd())
    await there(began)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    await there(left)


async def test_all_without_a_gpu_and_with_too_few_ports() -> None:
    with pytest.raises(ConfigError, match="no GPU is visible"):
        await serve_all(FakeDriver(()), [], None)
    with pytest.raises(ConfigError, match="2 agents need 4 ports from 65534 on"):
        await serve_all(FakeDriver((GPU0, GPU1)), [], "0.0.0.0:65534")


@pytest.mark.parametrize(("wanted", "uuid"), [("cuda", GPU0), ("cuda:1", GPU1), (f"cuda-{GPU1}", GPU1)])
def test_devices_by_name(wanted: str, uuid: str) -> None:
    assert find(FakeDriver((GPU0, GPU1)), wanted).uuid == uuid


def test_a_device_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(ConfigError, match=rf"'cuda:5'.*cuda:0 \(Fake GPU, {GPU0}\), cuda:1"):
        find(FakeDriver((GPU0, GPU1)), "cuda:5")


def test_a_host_without_a_gpu_is_told_in_words() -> None:
    with pytest.raises(
        ConfigError, match=r"no GPU is visible here \(driver 13\.0, runtime 13\.0, bindings .*etha doctor"
    ):
        find(FakeDriver(()), "cuda:0")
