"""Clients that nobody closes: dropped, left behind by their event loop, or by a program's end; and forked children."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.errors import PeerLostError
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sites import Site

pytestmark = pytest.mark.ways("local")
ONE: dict[str, Any] = {"expected_world_size": 1, "device_mesh": (1,), "placements": [Replicate()], "rank": 0}


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def loops_end_without_close(pair: str, how: str) -> str:
    """The program goes on, and works with Etha."""

    async def fails() -> None:
        client = etha.AsyncTensorBusClient()
        await client.init_pair(pair, "trainer", "inference", **ONE)
        if how == "pending":
            pending = asyncio.ensure_future(client.init_pair(pair + "x", "trainer", "inference", **ONE))
            await asyncio.sleep(0)
            assert not pending.done()
        kept.append(client)
        raise ZeroDivisionError("the user's bug")

    kept: list[etha.AsyncTensorBusClient] = []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fails())
    if how == "collected":
        kept.clear()
    gc.collect()
    for client in kept:
        asyncio.run(client.close())
    with etha.TensorBusClient() as blocking:
        blocking.status()
    tell("went on")
    wait_for("stop")
    return "alive"


@pytest.mark.parametrize("how", ["collected", "kept", "pending"])
async def test_a_loop_that_ends_ends_its_clients_and_the_program_goes_on(
    guests: Job, site: Site, pair: str, how: str
) -> None:
    worker = guests.start(loops_end_without_close, pair, how, at=("trainer", 0))
    async with site.client("inference", 0, timeout=60) as client:
        formed = await client.init_pair(pair, "inference", "trainer", **ONE)
        async with asyncio.timeout(60):
            assert await formed.lost == "died"
        await asyncio.to_thread(worker.expect, "went on")
        worker.go("stop")
        assert await asyncio.to_thread(worker.result) == "alive"


def dropped(pair: str) -> int:
    """Thirty blocking clients that nobody closes; how many descriptors are left of them."""
    with etha.TensorBusClient() as client:
        client.status()
        tell("ready")
        wait_for("go")
        before = descriptors(os.getpid())
        for _ in range(30):
            etha.TensorBusClient().status()
        left = etha.TensorBusClient()
        left.init_pair(pair, "trainer", "inference", **ONE)
        handle = left.register_tensors("b", {"w": torch.zeros(2)}, pair_name=pair)
        assert handle.batch_id == "b"
        del left, handle
        gc.collect()
        wait_for("lost")
        client.status()
        return descriptors(os.getpid()) - before


async def test_clients_that_nobody_holds_are_closed_and_their_peers_hear_died(
    guests: Job, site: Site, pair: str
) -> None:
    worker = guests.start(dropped, pair, at=("trainer", 0))
    await asyncio.to_thread(worker.expect, "ready")
    async with site.client("inference", 0, timeout=60) as client:
        await client.status()
        agent = (await client.status())["agent"]["pid"]
        before = descriptors(agent)
        worker.go("go")
        formed = await client.init_pair(pair, "inference", "trainer", **ONE)
        await client.register_tensors("b", {"w": torch.zeros(2)}, pair_name=pair)
        async with asyncio.timeout(60):
            assert await formed.lost == "died"
        worker.go("lost")
        assert await asyncio.to_thread(worker.result) < 10
        await client.status()
        assert descriptors(agent) < before + 10, "the agent has kept descriptors of dropped clients"


async def test_an_async_client_that_nobody_holds_is_closed_while_its_loop_runs(site: Site, pair: str) -> None:
    client = site.client("trainer", 0, timeout=60)
    async with site.client("inference", 0, timeout=60) as other:
        formed, _ = await asyncio.gather(
            other.init_pair(pair, "inference", "trainer", **ONE), client.init_pair(pair, "trainer", "inference", **ONE)
        )
        del client
        gc.collect()
        async with asyncio.timeout(60):
            assert await formed.lost == "died"
        with pytest.raises(PeerLostError):
            await other.register_tensors("b", {"w": torch.zeros(2)}, pair_name=pair)


_FORK = """
import os, sys, etha
client = etha.TensorBusClient()
client.status()
for how in ("exit", "close", "another"):
    if (child := os.fork()) == 0:
        if how == "close":
            client.close()
        elif how == "another":
            with etha.TensorBusClient() as own:
                own.status()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0, how
client.status()
client.close()
"""


def test_forked_children_end_in_silence(site: Site) -> None:
    """Whether they let their parent's client be, close it or make their own."""
    environment = {**os.environ, **site.env("trainer", 0)}
    command = [sys.executable, "-c", _FORK]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_of_the_blocking_clients_has_died_calls_raise_and_the_next_client_gets_another(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = site.blocking("trainer", 0)
    first.status()
    assert first._membership is not None
    loop_thread = first._membership.loop_thread
    begun, error = threading.Event(), []

    async def endless() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            loop_thread.call(endless())
        except etha.EthaError as raised:
            error.append(type(raised))

    waiting = threading.Thread(target=call)
    waiting.start()
    assert begun.wait(60)

    class Broken:
        def exception(self, *said: object) -> None:
            raise SystemExit

    monkeypatch.setattr("etha.client.loop_thread.log", Broken())
    loop_thread._loop.call_soon_threadsafe(sys.exit)  # nothing but a fault in the thread's own code can end it
    loop_thread._thread.join(60)
    waiting.join(60)
    assert not waiting.is_alive() and error == [etha.AgentLostError]
    with pytest.raises(etha.AgentLostError):
        first.status()
    with site.blocking("trainer", 0) as second:
        second.status()
    first.close()
