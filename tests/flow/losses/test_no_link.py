"""An agent that is out of others' reach: its pairs do not form again and again, and do form once it is in reach."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from torch.distributed.tensor import Replicate

import etha
from tests.flow.sides import Sides
from tests.flow.sites import Site, environment

OPTIONS: dict[str, Any] = {"placements": [Replicate()], "device_mesh": (1,)}
#: Seconds for which both jobs try, and the most epochs that this makes: pauses of 0, 0.05, 0.1, 0.2, ... in between.
TRIES, MOST_EPOCHS = 4.0, 9


class _Unreachable(Sides):
    """The inference side's agent tells others an address at which nothing listens."""

    def __init__(self, site: Site, pair: str, port: int) -> None:
        super().__init__(site, pair)
        settings = site.at("out-of-reach") | {
            "ETHA_HOST_ID": "out-of-reach",
            "ETHA_LISTEN": "127.0.0.1:0",
            "ETHA_ADVERTISE": f"127.0.0.1:{port}",
        }
        with environment(settings):
            self.clients["inference", 0] = etha.AsyncTensorBusClient(timeout=20)

    async def tries(self, member: tuple[str, int], seconds: float) -> list[etha.EthaError]:
        """Call ``init_pair`` as the loop of a job does; how each call ended."""
        ends: list[etha.EthaError] = []
        until = asyncio.get_running_loop().time() + seconds
        while (left := until - asyncio.get_running_loop().time()) > 0:
            try:
                await self.init(member, timeout=left, **OPTIONS)
            except etha.EthaError as error:
                ends.append(error)
        return ends


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def relay(held: socket.socket, port: int) -> AsyncIterator[None]:
    """Whoever connects to ``held`` speaks to ``port`` of this host."""
    joined: list[asyncio.StreamWriter] = []

    async def joins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection("127.0.0.1", port)
        joined.extend((writer, away))
        await asyncio.gather(_carry(reader, away), _carry(there, writer))

    server = await asyncio.start_server(joins, sock=held)
    try:
        yield
    finally:
        server.close()
        for writer in joined:
            writer.close()
        await server.wait_closed()


@pytest.mark.ways("tcp", reason="both agents of one test, on hosts of their own")
async def test_agents_out_of_reach_try_less_and_less_often_and_meet_once_in_reach(rough: Site, pair: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody else gets this port, and nobody listens there
        async with _Unreachable(rough, pair, held.getsockname()[1]) as sides:
            ends = await asyncio.gather(*(sides.tries(member, TRIES) for member in sides.members))
            assert [len(each) for each in ends] == [1, 1], ends
            for [error] in ends:  # the deadline may come while Redis is asked
                assert isinstance(error, (etha.AgentUnavailableError, etha.RedisUnavailableError)), ends
                if isinstance(error, etha.AgentUnavailableError):
                    assert "no link to agent" in error.message and "nothing listens there" in error.message
            assert rough.redis is not None
            async with redis.asyncio.Redis.from_url(rough.redis, decode_responses=True) as server:
                assert int(await server.hget(f"etha:{{default}}:pair:{pair}", "epoch")) <= MOST_EPOCHS
            waiting = [asyncio.create_task(sides.init(member, timeout=60, **OPTIONS)) for member in sides.members]
            agent = (await sides.clients["inference", 0].status())["agent"]
            async with relay(held, int(agent["bound"].rpartition(":")[2])):
                epochs = {formed.epoch for formed in await asyncio.gather(*waiting)}
                assert len(epochs) == 1 and epochs.pop() <= MOST_EPOCHS + 3
