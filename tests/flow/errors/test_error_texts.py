"""What a caller is told: its agent was killed inside its memory, a rank cannot use a batch, its tensors are staged."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.errors import AgentLostError, EthaError, PeerLostError
from etha.memory.process import Beacon
from etha.memory.revocation import SLOTS, RevocationPage
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sides import Sides
from tests.flow.sites import Site
from tests.processes import send_signal

ROWS = 1 << 13


def is_inside(page: RevocationPage) -> bool:
    """Whether a lane thread of the agent has marked itself inside of this worker's memory."""
    return any(page._inside(slot) for slot in range(1, SLOTS))


@pytest.mark.ways("local", "tcp")
async def test_nothing_writes_any_more_once_a_killed_agent_has_ended(rough: Site, pair: str) -> None:
    async with Sides(rough, pair) as sides:
        await sides.meet(
            trainer={"device_mesh": (1,), "placements": [Shard(0)]},
            inference={"device_mesh": (1,), "placements": [Replicate()]},
        )
        tensors = {side: {"w": torch.zeros(ROWS, 4096)} for side in ("trainer", "inference")}  # 128 MiB each
        handles = await sides.register("b", lambda side, rank: (tensors[side], {"shapes": {"w": (ROWS, 4096)}}))
        client = sides.clients["inference", 0]
        pid = int((await client.status())["agent"]["pid"])
        page = handles["inference", 0]._registration.connection.page

        def kill_inside(done: int, total: int) -> None:
            send_signal(pid, signal.SIGSTOP)
            if is_inside(page):
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGCONT)

        killed = False
        for _ in range(50):
            with suppress(ProcessLookupError):
                calls = [
                    handles["trainer", 0].transfer("send", timeout=60.0),
                    handles["inference", 0].transfer("recv", timeout=60.0, progress=kill_inside),
                ]
                results = await asyncio.gather(*calls, return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            if errors:
                killed = True
                break
        assert killed, "the agent was never caught inside of the memory"
        error = results[1]
        assert isinstance(error, AgentLostError) and error.torn
        assert error.quiesced, "its process has ended: nobody is inside"


def receiver(pair: str) -> str:
    """Registers an atomic batch without room for what it is to receive in."""
    with etha.TensorBusClient(timeout=60.0) as client:
        client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
        tensor = torch.zeros(ROWS, 1024)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            client.register_tensors(
                "b", {"w": tensor}, pair_name=pair, shapes={"w": (ROWS, 1024)}, atomic=True, direction="recv"
            )
        except (EthaError, OSError) as error:
            tell("failed")
            wait_for("the sender has heard")
            return str(error)
        return ""


@pytest.mark.ways("local", "tcp")
async def test_a_sender_is_told_of_a_receiver_without_memory_for_its_shadow(site: Site, pair: str) -> None:
    with Job(site.env) as job:
        other = job.start(receiver, pair, at=("inference", 0))
        async with site.client("trainer", 0, timeout=60.0) as client:
            await client.init_pair(pair, "trainer", "inference", 1, (1,), [Shard(0)], rank=0)
            tensor = torch.zeros(ROWS, 1024)
            shapes: dict[str, Any] = {"shapes": {"w": (ROWS, 1024)}}
            began = time.monotonic()
            with pytest.raises(PeerLostError, match="inference rank 0 cannot take part in batch 'b'"):
                handle = await client.register_tensors("b", {"w": tensor}, pair_name=pair, **shapes)
                await handle.transfer("send", timeout=60.0)
            assert time.monotonic() - began < 30.0
            other.go("the sender has heard")
            assert await asyncio.to_thread(other.result), "the receiver has failed, too"


class OutOfReach(Beacon):
    """What the agent is to read for a proof lies where nothing is mapped."""

    @property
    def address(self) -> int:
        return 8


@pytest.mark.ways("local", reason="it is about a worker and its agent")
async def test_a_worker_is_warned_once_that_its_tensors_are_copied_through_shared_memory(
    site: Site, pair: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Sides(site, pair) as sides:
        await sides.clients["inference", 0].close()
        with monkeypatch.context() as patched:
            patched.setattr("etha.client.connection.Beacon", OutOfReach)
            sides.clients["inference", 0] = site.client("inference", 0, timeout=60.0)
            await sides.meet(device_mesh=(1,), placements=[Replicate()])
        with caplog.at_level(logging.WARNING, logger="etha.client"):
            for batch in ("own", "again"):
                handles = await sides.register(batch, lambda side, rank: ({"w": torch.ones(4)}, {}))
            shared = {member: {"w": etha.empty(4)} for member in sides.members}
            await sides.register("mapped", lambda side, rank: (shared[side, rank], {}))
            assert all(not isinstance(r, Exception) for r in (await sides.move(handles)).values())
    lines = [record for record in caplog.records if "copied through shared memory" in record.getMessage()]
    assert [(record.name, record.levelname) for record in lines] == [("etha.client.connection", "WARNING")]
    assert re.search(r"^batch own: .*, because .*(address|memory|read)", lines[0].getMessage())
