"""An agent that dies while its workers wait for the other side: who comes then waits for those who come again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
import torch
from torch.distributed.tensor import Replicate

from etha import TransferResult
from etha.bus.process import Credentials
from etha.errors import AgentLostError
from tests.flow.jobs import wait_gone
from tests.flow.sides import Sides
from tests.flow.sites import Site

OPTIONS = {"placements": [Replicate()], "timeout": 60.0}


@pytest.mark.ways("tcp", "three")
async def test_whoever_completes_an_epoch_with_a_dead_agent_waits_for_the_next(rough: Site, pair: str) -> None:
    async with Sides(rough, pair, trainer=2, inference=2) as sides:
        early = [m for m in sides.members if m[0] == "inference"]
        late = [m for m in sides.members if m[0] == "trainer"]
        watcher = sides.clients[early[0]]
        waiting = [asyncio.create_task(sides.init(member, device_mesh=(2,), **OPTIONS)) for member in early]
        pid = (await watcher.status())["agent"]["pid"]
        while not any(
            p["pair"] == pair and p["waiting_for"] == {"trainer": [0]} for p in (await watcher.status())["pairs"]
        ):
            pass
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_gone, pid)
        for end in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(end, AgentLostError)
        # For ten seconds Redis lists that agent, so whoever comes now completes an epoch with it.
        assert rough.redis is not None
        async with redis.asyncio.Redis.from_url(rough.redis) as server, server.pubsub() as news:
            await news.subscribe(f"etha:{{default}}:pair:{pair}")
            coming = [asyncio.create_task(sides.init(member, device_mesh=(2,), **OPTIONS)) for member in late]
            async for message in news.listen():
                if message["data"] == b"lost":
                    break
                assert not any(task.done() for task in coming), await asyncio.gather(*coming, return_exceptions=True)
        again = [asyncio.create_task(sides.init(member, device_mesh=(2,), **OPTIONS)) for member in early]
        epochs = {formed.epoch for formed in await asyncio.gather(*coming, *again)}
        assert epochs == {2}
        handles = await sides.register("b", lambda side, rank: ({"w": torch.full((4,), float(side == "trainer"))}, {}))
        assert all(isinstance(r, TransferResult) for r in (await sides.move(handles)).values())


_PIDFD_GETFD = 438


@contextlib.contextmanager
def sessions_held(pid: int, pidfd: int) -> Iterator[None]:
    """This process's connections to an agent do not close when that dies, because this process has the other ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if not str(entry.readlink()).startswith("socket:"):
                continue
            fd = libc.syscall(_PIDFD_GETFD, pidfd, int(entry.name), 0)
            if fd < 0:
                pytest.skip(f"pidfd_getfd is not allowed here: {os.strerror(ctypes.get_errno())}")
            end = stack.enter_context(socket.socket(fileno=fd))
            listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if end.family != socket.AF_UNIX or listens or Credentials.of_socket(end).pid != os.getpid():
                end.close()
        yield


@pytest.mark.ways("local", reason="it is about workers of one agent")
async def test_whoever_has_not_read_yet_that_the_agent_died_meets_by_the_next_one(rough: Site, pair: str) -> None:
    """The other workers have heard it already. The message would be taken and never answered."""
    async with Sides(rough, pair) as sides:
        await sides.meet(device_mesh=(1,), **OPTIONS)
        pid = (await sides.clients["trainer", 0].status())["agent"]["pid"]
        pidfd = os.pidfd_open(pid)
        try:
            with sessions_held(pid, pidfd):
                os.kill(pid, signal.SIGKILL)
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                assert ended.poll(60_000)  # blocks the loop, too, which hears nothing meanwhile
                await sides.meet(device_mesh=(1,), **OPTIONS)
        finally:
            os.close(pidfd)
        assert (await sides.clients["trainer", 0].status())["agent"]["pid"] != pid
        assert {formed.epoch for formed in sides.pairs.values()} == {2}


@pytest.mark.ways("tcp")
async def test_a_pair_forms_again_after_redis_went_back_to_an_older_formed_epoch(site: Site, pair: str) -> None:
    """Redis is restored from a backup in which an epoch is formed that its agents know to be long over."""
    key = f"etha:{{default}}:pair:{pair}"
    async with Sides(site, pair) as sides, redis.asyncio.Redis.from_url(site.redis, decode_responses=True) as store:
        await sides.meet(device_mesh=(1,), **OPTIONS)
        backup = {name: await store.hgetall(name) for name in (key, f"{key}:trainer", f"{key}:inference")}
        for state in ("formed", "lost"):
            await store.hset(key, mapping={"epoch": "11", "state": state})
            await store.publish(key, state)
            for client in sides.clients.values():
                while not any(
                    p["pair"] == pair and (p["epoch"], p["state"]) == (11, state)
                    for p in (await client.status())["pairs"]
                ):
                    pass
        for name, values in backup.items():
            await store.delete(name)
            await store.hset(name, mapping=values)
            await store.publish(name, "restored")
        await sides.meet(device_mesh=(1,), **OPTIONS)
        assert {p.epoch for p in sides.pairs.values()} == {12}
