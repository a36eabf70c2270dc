"""Every error that names an agent names its log, and the host of that if it may be another one."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.agent_session import open_session
from etha.config import Settings
from etha.errors import AgentLostError, AgentUnavailableError, EthaError, PeerLostError, TransferError
from tests.flow.commands.test_cli import fresh_agent
from tests.flow.sides import Sides
from tests.flow.sites import Site
from tests.flow.ways import Way
from tests.processes import send_signal

NOTE = re.compile(r"log of the agent: (\S+)(?: on (\S+))?")


def named(error: BaseException) -> str:
    """The log that an error names, which is there."""
    assert isinstance(error, EthaError)
    found = NOTE.findall(error.message)
    assert len(found) == 1, error.message
    return str(found[0][0]).rstrip(";,)")


def log_at(site: Site, place: str) -> str:
    return str(site.directory / place / "default" / "cpu.log")


async def moving(sides: Sides, size: int = 4, **options: Any) -> dict[Any, Any]:
    await sides.meet(device_mesh=(1,), placements=[Replicate()])
    return await sides.register("b", lambda side, rank: ({"w": torch.ones(size)}, options))


async def test_a_lost_agent_is_named_with_its_log(rough: Site, pair: str, way: Way) -> None:
    trainer, inference = way.place("trainer", 0), way.place("inference", 0)
    async with Sides(rough, pair) as sides:
        handles = await moving(sides)
        client = sides.clients["trainer", 0]
        report = (await client.status())["agent"]
        assert report["log"] == log_at(rough, trainer)
        waiting = asyncio.ensure_future(handles["inference", 0].transfer("recv"))
        await asyncio.sleep(0)
        os.kill(report["pid"], signal.SIGKILL)
        with pytest.raises(AgentLostError) as lost:
            await handles["trainer", 0].transfer("send")
        assert named(lost.value) == log_at(rough, trainer)
        with pytest.raises(AgentLostError) as again:
            await handles["trainer", 0].transfer("send")
        assert named(again.value) == log_at(rough, trainer)
        with pytest.raises((AgentLostError, PeerLostError)) as other:
            await waiting
        assert named(other.value) == log_at(rough, trainer), "not the log of the one that is there"
        if trainer != inference:
            assert NOTE.findall(other.value.message)[0][1], "the host"


@pytest.mark.ways("local")
async def test_an_agent_that_hangs_is_named_with_its_log(rough: Site, pair: str) -> None:
    async with Sides(rough, pair) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        client = sides.clients["trainer", 0]
        pid = (await client.status())["agent"]["pid"]
        send_signal(pid, signal.SIGSTOP)
        try:
            with pytest.raises(AgentLostError, match="is it stopped") as hangs:
                await client.status(timeout=0.1)
            assert "init_pair" not in hangs.value.message, "the session stands and goes on with the agent"
            late = rough.client("trainer", 0, autostart=False)
            with pytest.raises(AgentUnavailableError, match="is it stopped or overloaded") as met:
                await late.status(timeout=0.5)
            await late.close()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert named(hangs.value) == named(met.value) == log_at(rough, "a")


async def test_an_agent_that_has_left_is_named_with_its_log(runtime: Path) -> None:
    async with etha.AsyncTensorBusClient(timeout=60.0) as client:
        pid = (await client.status())["agent"]["pid"]
        os.kill(pid, signal.SIGTERM)
        await asyncio.wait({client._connection.link.lost}, timeout=60)
        with pytest.raises(AgentUnavailableError) as caught:
            async with open_session(f"ipc://{runtime}/default/cpu.sock", Settings.from_env(), timeout=5.0):
                pass
    assert named(caught.value) == str(runtime / "default" / "cpu.log")


async def test_of_an_agent_in_the_foreground_the_error_says_who_has_its_log(runtime: Path) -> None:
    with fresh_agent() as process:
        async with etha.AsyncTensorBusClient(timeout=60.0) as client:
            pair = uuid.uuid4().hex
            waiting = asyncio.create_task(client.init_pair(pair, "a", "b", 1, rank=0))
            while not any(p["pair"] == pair and p["waiting_for"] for p in (await client.status())["pairs"]):
                pass
            process.kill()
            with pytest.raises(AgentLostError, match="log of the agent: its terminal or its service"):
                await waiting


@pytest.mark.ways("local", "tcp")
async def test_memory_that_an_agent_cannot_read_is_told_to_both_sides_with_the_log_of_that_agent(
    rough: Site, pair: str, way: Way
) -> None:
    libc, pages = ctypes.CDLL(None, use_errno=True), mmap.mmap(-1, 1 << 20)
    tensor = torch.frombuffer(pages, dtype=torch.float32)
    trainer = way.place("trainer", 0)
    async with Sides(rough, pair) as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {"trainer": tensor, "inference": torch.zeros_like(tensor)}
        handles = await sides.register("b", lambda side, rank: ({"w": tensors[side]}, {}))
        address = ctypes.c_void_p(tensor.data_ptr())
        assert libc.mprotect(address, ctypes.c_size_t(1 << 20), 0) == 0
        try:
            calls = [handles["trainer", 0].transfer("send"), handles["inference", 0].transfer("recv")]
            errors = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            libc.mprotect(address, ctypes.c_size_t(1 << 20), mmap.PROT_READ | mmap.PROT_WRITE)
        for error in errors:
            assert isinstance(error, TransferError) and "trainer rank 0" in error.message, error
            assert named(error) == log_at(rough, trainer)
