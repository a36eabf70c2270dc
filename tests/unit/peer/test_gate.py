"""Who gets in: agents of the namespace by their keys, and nobody else whatever they know or send."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import AsyncIterator

import msgpack
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from etha.errors import AgentUnavailableError, ProtocolError, RedisUnavailableError
from etha.peer.keys import Keys, check_public_key
from etha.peer.messages import Commit, Done
from etha.peer.wire import Bye, Hello, Welcome, decode, encode
from tests.unit.peer.agents import SCOPE, Agent, Namespace, Stranger, agent, complaints, until


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@pytest.fixture
async def a(namespace: Namespace) -> AsyncIterator[Agent]:
    async with agent("a", namespace) as a:
        yield a


def refused(stranger: Stranger) -> bool:
    """Whether the handshake of ``stranger`` has failed by its key; its socket would try again for ever."""
    while stranger.monitor.poll(0):
        reported = parse_monitor_message(stranger.monitor.recv_multipart())
        assert reported["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
        if reported["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return True
    return False


async def test_a_stranger_who_knows_the_public_key_cannot_link(
    a: Agent, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Stranger(a.hub.address, a.keys.public)
    try:
        stranger.socket.send(encode(None, Hello(version="0", losses=0)))
        stranger.socket.send(encode(SCOPE, Commit(seq=1)))
        await until(lambda: refused(stranger))
    finally:
        stranger.close()
    assert a.events == [] and a.hub._sessions._sessions == {}
    lines = [r for r in caplog.records if "is no agent's of this namespace" in r.message]
    assert lines and all(r.levelno == logging.WARNING for r in lines)
    assert namespace.refreshes >= 1


async def test_an_agent_of_another_namespace_learns_why_it_cannot_link(a: Agent) -> None:
    async with agent("b", Namespace()) as b:
        with pytest.raises(AgentUnavailableError, match="refused this agent's key"):
            await b.open(a)
    assert a.events == []


async def test_keys_of_others_admit_nobody_without_the_secret(a: Agent, namespace: Namespace) -> None:
    async with agent("b", namespace) as b:
        stranger = Stranger(a.hub.address, a.keys.public, Keys(public=b.keys.public, secret=Keys.fresh().secret))
        try:
            stranger.socket.send(encode(None, Hello(version="0", losses=0)))
            await until(lambda: bool(stranger.monitor.poll(0)))
            await asyncio.sleep(0.2)
        finally:
            stranger.close()
        assert a.hub._sessions._sessions == {}


async def test_who_listens_without_the_published_key_is_not_talked_to(a: Agent, namespace: Namespace) -> None:
    async with agent("b", namespace) as b:
        with pytest.raises(AgentUnavailableError, match="proven their keys"):
            await a.hub.open("b", b.hub.address, Keys.fresh().public, 5.0)
    with pytest.raises(ProtocolError, match="not a public key"):
        await a.hub.open("b", "127.0.0.1:1", "no key", 5.0)


async def test_an_agent_published_just_now_is_found_by_one_refresh(a: Agent, namespace: Namespace) -> None:
    async with agent("b", namespace, publish=False) as b:
        namespace.late[b.keys.public] = "b"
        await b.open(a)
        assert namespace.refreshes == 1
        await a.open(b)
        b.send(a, Done(seq=1))
        assert await a.heard(1) == [("b", SCOPE, Done(seq=1))]


async def test_many_strangers_cost_few_refreshes(a: Agent, namespace: Namespace) -> None:
    strangers = [Stranger(a.hub.address, a.keys.public) for _ in range(8)]
    try:
        for stranger in strangers:
            await until(lambda stranger=stranger: refused(stranger))  # type: ignore[misc]
    finally:
        for stranger in strangers:
            stranger.close()
    assert namespace.refreshes <= 20


async def test_no_redis_no_new_agents_but_the_known_ones(
    a: Agent, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refresh() -> None:
        raise RedisUnavailableError("gone")

    monkeypatch.setattr(a.hub._gate, "_refresh", refresh)
    async with agent("b", namespace) as b, agent("c", Namespace()) as c:
        with pytest.raises(AgentUnavailableError, match="refused"):
            await c.open(a)
        await b.open(a)
    assert "could not be looked up for 1 new links: gone" in caplog.text


async def test_what_a_peer_claims_to_be_does_not_matter(a: Agent, namespace: Namespace) -> None:
    async with agent("b", namespace) as b, agent("c", namespace) as c:
        await asyncio.gather(a.open(b), a.open(c), b.open(a), c.open(a))
        # "b" speaks on the routing id that "c" would like to have: the gate's word stands beside every message.
        forger = Stranger(a.hub.address, a.keys.public, c.keys)
        try:
            forger.socket.send(encode(None, Hello(version="b", losses=0)))
            forger.socket.send(encode(SCOPE, Done(seq=66)))
            await a.heard(1)
        finally:
            forger.close()
        assert a.events == [("c", SCOPE, Done(seq=66))]


@pytest.mark.parametrize(
    "parts",
    [
        [b"garbage"],
        [b""],
        [b"one", b"two"],
        [msgpack.packb({"v": 2, "op": "hello", "scope": None, "args": {}})],
        [encode(SCOPE, Done(seq=1)) + b"\x00"],
    ],
)
async def test_an_admitted_agent_that_speaks_nonsense_loses_its_link(
    a: Agent, namespace: Namespace, caplog: pytest.LogCaptureFixture, parts: list[bytes]
) -> None:
    async with agent("b", namespace) as b:
        await asyncio.gather(a.open(b), b.open(a))
        b.send(a, Done(seq=1))
        b.hub._links["a"]._dealer.send_multipart(parts)
        b.send(a, Done(seq=2))
        events = await a.heard(2)
        assert events[0] == ("b", SCOPE, Done(seq=1))
        assert events[1][:2] == ("gone", "b") and "broke the protocol" in events[1][2]
        ((kind, who, text),) = await b.heard(1)
        assert (kind, who) == ("gone", "a") and "you broke the protocol" in text
        await asyncio.gather(a.open(b), b.open(a))
        b.send(a, Done(seq=3))
        assert (await a.heard(3))[2] == ("b", SCOPE, Done(seq=3))
    assert sum("dropped from agent b" in record.message for record in caplog.records) == 1


async def test_messages_before_hello_are_answered_with_bye_and_not_heard(namespace: Namespace) -> None:
    # No beat of b's comes between: the Hello is in b's name, and ends b's own link when b is next heard of.
    async with agent("a", namespace, beat=60) as a, agent("b", namespace, beat=60) as b:
        await asyncio.gather(a.open(b), b.open(a))
        rude = Stranger(a.hub.address, a.keys.public, b.keys)
        try:
            rude.socket.send(encode(SCOPE, Commit(seq=1)))
            await until(lambda: bool(rude.socket.poll(0)))
            assert isinstance(decode(rude.socket.recv()).message, Bye)
            rude.socket.send(encode(None, Hello(version="0", losses=0)))
            await until(lambda: bool(rude.socket.poll(0)))
            assert isinstance(decode(rude.socket.recv()).message, Welcome)
        finally:
            rude.close()
        assert a.events == [] and a.is_open("b")


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1"


def garbage() -> list[bytes]:
    draw = random.Random(7)
    return [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 9,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x26\x05READY" + bytes(31),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8 + bytes(999),
        b"\xff",
        b"",
        *(draw.randbytes(draw.randrange(1, 2000)) for _ in range(20)),
        *(GREETING + draw.randbytes(draw.randrange(1, 500)) for _ in range(20)),
    ]


async def test_garbage_on_the_port_does_nothing(
    a: Agent, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    host, port = a.hub.address.split(":")
    async with agent("b", namespace) as b:
        await asyncio.gather(a.open(b), b.open(a))
        sent = garbage()
        for data in sent:
            with socket.socket() as connection:
                connection.setblocking(False)
                await loop.sock_connect(connection, (host, int(port)))
                async with asyncio.timeout(60):
                    with contextlib.suppress(OSError):  # it may hang up on us at any moment
                        await loop.sock_sendall(connection, data)
                        connection.shutdown(socket.SHUT_WR)
                        while await loop.sock_recv(connection, 4096):
                            continue
            b.send(a, Done(seq=len(a.events)))
        await a.heard(len(sent))
        assert [event[2].seq for event in a.events] == sorted(event[2].seq for event in a.events)
        assert b.events == [] and {p.state for p in a.hub.peers()} == {"open"}
        reported = [r.message for r in caplog.records if r.name.startswith("etha")]
        words = sum(1 for data in sent if data)  # who says nothing, as `etha doctor`, is no complaint
        await until(lambda: complaints((r.message for r in caplog.records), "dropped a connection") == words)
        assert len(reported) < 10
        assert not a.hub._listener._front.unproven


def test_a_public_key_is_checked_before_it_is_used() -> None:
    keys = Keys.fresh()
    assert check_public_key(keys.public) == keys.public and keys.secret not in repr(keys)
    assert Keys.fresh() != keys
    for wrong in ("", keys.public[:-1], keys.public + "0", "é" * 40, "#" * 40, os.urandom(20).hex() + "\n"):
        with pytest.raises(ProtocolError, match="not a public key"):
            check_public_key(wrong)
