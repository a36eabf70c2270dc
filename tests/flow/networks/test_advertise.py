"""Agents that are reached at other addresses than they listen on: NAT, port maps of containers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.addresses import Advertised
from etha.config import Settings
from etha.errors import ConfigError
from etha.peer.ports import Ports
from tests.flow.sides import Sides
from tests.flow.sites import Site, open_site
from tests.flow.ways import Way


class Gateway:
    """A mapped port: passes connections on to ``port`` and counts the bytes that come in."""

    def __init__(self, port: int) -> None:
        self.port, self.taken = port, 0
        self.bytes = bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, counts: bool) -> None:
            try:
                while data := await source.read(1 << 16):
                    self.taken += len(data) if counts else 0
                    self.bytes += data
                    target.write(data)
                    await target.drain()
            except ConnectionError:
                pass
            finally:
                target.close()

        await asyncio.gather(pass_on(reader, inner_writer, True), pass_on(inner_reader, writer, False))


@asynccontextmanager
async def gateway(port: int) -> AsyncIterator[tuple[Gateway, int]]:
    """A gateway to ``port`` and the port that it is mapped to."""
    made = Gateway(port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    async with server:
        yield made, server.sockets[0].getsockname()[1]


def two_ports() -> int:
    """The first of two free ports in a row."""
    ports = Ports.bind()
    ports.close()
    return ports.port


class Mapped(Site):
    """A site whose agents listen at and advertise what ``told`` says of their place."""

    overrides: dict[str, dict[str, str]]

    def at(self, place: str) -> dict[str, str]:
        return super().at(place) | self.overrides[place]


@pytest.mark.parametrize("any_address", [False, True])
async def test_other_hosts_come_by_the_advertised_addresses(any_address: bool) -> None:
    with open_site(Way.TCP) as plain:
        site = Mapped(plain.way, plain.directory, plain.redis)
        async with AsyncExitStack() as stack:
            gateways: list[Gateway] = []
            site.overrides = {}
            for place in ("a", "b"):
                own = two_ports()
                links, first = await stack.enter_async_context(gateway(own))
                data, second = await stack.enter_async_context(gateway(own + 1))
                gateways += [links, data]
                host = "0.0.0.0" if any_address else "127.0.0.1"
                site.overrides[place] = {
                    "ETHA_LISTEN": f"{host}:{own}",
                    "ETHA_ADVERTISE": f"localhost:{first},{second}",
                }
            async with Sides(site, "weights") as sides:
                await sides.meet(
                    trainer={"device_mesh": (1,), "placements": [Shard(0)]},
                    inference={"device_mesh": (1,), "placements": [Replicate()]},
                )
                source, target = torch.arange(512.0).reshape(64, 8), torch.zeros(64, 8)
                shapes: dict[str, Any] = {"shapes": {"w": (64, 8)}}
                handles = await sides.register(
                    "b", lambda side, rank: ({"w": source if side == "trainer" else target}, shapes)
                )
                for result in (await sides.move(handles, timeout=20.0)).values():
                    assert not isinstance(result, BaseException), result
                assert torch.equal(source, target)
                shown = (await sides.clients["inference", 0].status())["agent"]["address"]
                assert shown == site.overrides["b"]["ETHA_ADVERTISE"].partition(",")[0]
            assert gateways[0].taken and gateways[2].taken, "links go by the gateways, both ways"
            assert gateways[3].taken > source.nbytes, "and so does what is sent to the receiving agent"


def test_what_can_be_advertised() -> None:
    assert Advertised.parse("gate:7000").data_address == "gate:7001"
    assert Advertised.parse("[::1]:7000,9") == Advertised(address="[::1]:7000", data_address="[::1]:9")
    assert Advertised.parse("gate:7000,9000").after(4) == "gate:7004,9004"
    for wrong in ("gate", "gate:0", "gate:7000,", "gate:7000,x", "gate:7000,70000", "gate:7000,1,2", ":7000"):
        with pytest.raises(ConfigError):
            Advertised.parse(wrong)
    assert Settings.from_env({"ETHA_ADVERTISE": "gate:1"}).advertise == "gate:1"
    with pytest.raises(ConfigError, match="ETHA_ADVERTISE"):
        Ports.bind("0.0.0.0:0")
    ports = Ports.bind("0.0.0.0:0", advertised=True)
    assert ports.links.getsockname()[0] == "0.0.0.0" and ports.address == f"127.0.0.1:{ports.port}"
    ports.close()
