"""ETHA_ENCRYPT=1: what stands between two agents cannot read or pretend, and neither end falls back to plain bytes."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from etha.errors import ConfigError, EthaError
from etha.transport.base import StreamLost
from etha.transport.tcp.listener import DataAddress, DataListener, connect
from etha.transport.tcp.tls import Identity
from tests.flow.networks.test_advertise import Gateway, Mapped, gateway, two_ports
from tests.flow.sides import Sides
from tests.flow.sites import open_site
from tests.flow.ways import Way

#: What lies all over the tensor that is sent.
MARK = b"etha's own bytes"
ROWS = 1 << 12


async def test_what_is_between_two_agents_sees_no_tensor() -> None:
    with open_site(Way.TCP) as plain:
        site = Mapped(plain.way, plain.directory, plain.redis)
        async with AsyncExitStack() as stack:
            watched: list[Gateway] = []
            site.overrides = {}
            for place in ("a", "b"):
                own = two_ports()
                _, first = await stack.enter_async_context(gateway(own))
                data, second = await stack.enter_async_context(gateway(own + 1))
                watched.append(data)
                site.overrides[place] = {
                    "ETHA_LISTEN": f"127.0.0.1:{own}",
                    "ETHA_ADVERTISE": f"127.0.0.1:{first},{second}",
                    "ETHA_ENCRYPT": "1",
                }
            source = torch.frombuffer(bytearray(MARK * ROWS * 16), dtype=torch.uint8).reshape(ROWS, -1)
            target = torch.zeros_like(source)
            shapes: dict[str, Any] = {"shapes": {"w": tuple(source.shape)}}
            async with Sides(site, "weights") as sides:
                await sides.meet(
                    trainer={"device_mesh": (1,), "placements": [Shard(0)]},
                    inference={"device_mesh": (1,), "placements": [Replicate()]},
                )
                handles = await sides.register(
                    "b", lambda side, rank: ({"w": source if side == "trainer" else target}, shapes)
                )
                for _ in range(3):
                    target.zero_()
                    for result in (await sides.move(handles, timeout=30.0)).values():
                        assert not isinstance(result, BaseException), result
                    assert torch.equal(source, target)
                status = (await sides.clients["inference", 0].status())["agent"]
                assert status["encrypted"] is True
            seen = bytes(watched[0].bytes + watched[1].bytes)
            assert len(seen) > 3 * source.nbytes
            assert MARK not in seen


async def test_an_agent_that_encrypts_refuses_one_that_does_not() -> None:
    with open_site(Way.TCP) as plain:
        site = Mapped(plain.way, plain.directory, plain.redis)
        site.overrides = {"a": {"ETHA_ENCRYPT": "1"}, "b": {}}
        async with Sides(site, "weights", timeout=30.0) as sides:
            calls = [sides.init(member) for member in sides.members]
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, EthaError) for error in errors), errors
        assert any("set ETHA_ENCRYPT=1 on both sides, or on none" in str(error) for error in errors), errors


async def test_a_client_that_wants_encryption_is_not_served_without() -> None:
    with open_site(Way.LOCAL) as plain:
        site = Mapped(plain.way, plain.directory, plain.redis)
        site.overrides = {"a": {}}
        async with site.client("trainer", 0) as first:
            await first.status()
            site.overrides = {"a": {"ETHA_ENCRYPT": "1"}}
            async with site.client("inference", 0) as second:
                with pytest.raises(ConfigError, match="ETHA_ENCRYPT=1 is set here"):
                    await second.status()


TOKEN = b"t" * 40


async def answer(identity: Identity | None, fingerprint: bytes | None, shown: list[bytes]) -> list[socket.socket]:
    """What an opener that expects ``fingerprint`` gets from a door with ``identity``."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    inside: list[socket.socket] = []

    def admit(token: bytes) -> str:
        shown.append(token)
        return "opener"

    door = DataListener(
        listener,
        token_bytes=len(TOKEN),
        admit=admit,
        entered=lambda conn, agent, opening: inside.append(conn),
        patience=2.0,
        identity=identity,
    )

    async def tokens(count: int) -> list[bytes]:
        return [TOKEN] * count

    running = asyncio.create_task(door.run())
    host, port = listener.getsockname()
    try:
        address = DataAddress(host=host, port=port, tokens=tokens, fingerprint=fingerprint)
        return await connect("door", address, b"opening.", 1)
    finally:
        running.cancel()
        await asyncio.wait({running})
        for conn in inside:
            conn.close()


async def test_somebody_in_between_is_shown_no_token() -> None:
    shown: list[bytes] = []
    with pytest.raises(StreamLost, match="somebody is in between"):
        await answer(Identity.fresh(), Identity.fresh().fingerprint, shown)
    assert shown == []


async def test_neither_end_falls_back_to_plain_bytes() -> None:
    shown: list[bytes] = []
    identity = Identity.fresh()
    with pytest.raises(StreamLost):
        await answer(identity, None, shown)
    with pytest.raises(StreamLost):
        await answer(None, identity.fingerprint, shown)
    assert TOKEN not in shown
    for conn in await answer(identity, identity.fingerprint, shown):
        conn.close()
    assert shown[-1] == TOKEN


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"sub-etha\[encrypt\]"):
        Identity.fresh()
