"""Mutated messages and handshakes at a hub's port: from an agent that may link, and from strangers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from etha.peer.keys import Keys
from etha.peer.messages import Commit, Done
from etha.peer.wire import Beat, Bye, Hello, Malformed, decode, encode
from tests.unit.peer.agents import SCOPE, Agent, Namespace, agent, until

from .mutation import damage, mutated
from .samples import peer_messages
from .trial import Lines, bounded, count, rng_of, seeds

BURST = 50


@pytest_asyncio.fixture
async def linked() -> AsyncIterator[tuple[Agent, Agent]]:
    """A hub at which others talk nonsense, and a good citizen that is linked to it."""
    namespace = Namespace()
    async with agent("a", namespace, beat=3600.0) as a, agent("b", namespace, beat=3600.0) as b:
        await asyncio.gather(a.open(b), b.open(a))
        yield a, b
        before = len(a.events), len(b.events)
        b.send(a, Done(seq=7))
        a.send(b, Commit(seq=7))
        assert (await a.heard(before[0] + 1))[-1] == ("b", SCOPE, Done(seq=7))
        assert (await b.heard(before[1] + 1))[-1] == ("a", SCOPE, Commit(seq=7))
        assert [event for event in a.events if event[:2] == ("gone", "b")] == []


def dealer(context: zmq.asyncio.Context, a: Agent, keys: Keys) -> zmq.asyncio.Socket:
    """A bare socket that speaks CURVE, connected to the hub."""
    made = context.socket(zmq.DEALER)
    made.linger, made.sndhwm, made.rcvhwm = 0, 0, 0
    made.curve_serverkey, made.curve_publickey, made.curve_secretkey = (
        text.encode() for text in (a.keys.public, keys.public, keys.secret)
    )
    made.connect(f"tcp://{a.hub.address}")
    return made


@pytest.mark.timeout(1800)
async def test_an_agent_that_talks_nonsense(linked: tuple[Agent, Agent]) -> None:
    a, _ = linked
    first = random.Random(0)
    corpus = [message for _ in range(10) for message in peer_messages(first)]
    keys = Keys.fresh()
    a.namespace.published[keys.public] = "evil"
    greeting, numbers = encode(None, Hello(version="0", losses=0)), itertools.count(1)
    todo = seeds("link")
    names = ("etha.peer.sessions", "etha.peer.listener", "etha.bus.socket")
    with zmq.asyncio.Context() as context, bounded(), Lines(*names) as lines:
        evil = dealer(context, a, keys)
        while some := list(itertools.islice(todo, BURST)):
            malformed = 0
            for seed in some:
                rng = rng_of(seed)
                data = mutated(rng.choice(corpus), rng, rng.choice(corpus))
                try:
                    decode(data)
                    count("link", "valid")
                except Malformed:
                    count("link", "malformed")
                    malformed += 1
                await evil.send(greeting)
                await evil.send(data)
            number = next(numbers)
            await evil.send(encode(None, Hello(version="0", losses=0)))
            await evil.send(encode(None, Beat(number=(1 << 50) + number)))
            while decode(await evil.recv()).message != Beat(number=(1 << 50) + number):
                pass
            assert not lines.broken, "a message that the hub could not handle"
            assert len([line for line in lines.said if "dropped from agent evil" in line]) >= malformed
            assert max(map(len, lines.said), default=0) < 4000
            lines.said.clear()
        evil.close(0)


@pytest.mark.timeout(1800)
async def test_handshakes_of_no_agent(linked: tuple[Agent, Agent], caplog: pytest.LogCaptureFixture) -> None:
    a, _ = linked
    host, port = a.hub.address.rsplit(":", 1)
    greeting = bytes.fromhex("ff00000000000000017f0301") + b"CURVE".ljust(20, b"\0") + bytes(32)
    hail = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72)
    loop = asyncio.get_running_loop()
    with bounded():
        for seed in seeds("link handshake"):
            rng = rng_of(seed)
            whole = greeting + hail + rng.randbytes(32) + bytes(8) + rng.randbytes(80)
            with socket.socket() as stranger:
                stranger.setblocking(False)
                await loop.sock_connect(stranger, (host, int(port)))
                with contextlib.suppress(OSError):  # the hub has hung up
                    await loop.sock_sendall(stranger, damage(whole, rng, greeting))
            count("link handshake", "sent")
    assert not [r for r in caplog.records if r.exc_info]
    assert {event[0] for event in a.events} <= {"gone", "b"}


async def test_who_knows_the_public_key_alone_is_refused_before_any_message(
    linked: tuple[Agent, Agent], caplog: pytest.LogCaptureFixture
) -> None:
    a, _ = linked
    with zmq.asyncio.Context() as context:
        stranger = dealer(context, a, Keys.fresh())
        await stranger.send(encode(None, Hello(version="0", losses=0)))
        await until(lambda: "is no agent's of this namespace" in caplog.text)
        assert not await stranger.poll(0)
        stranger.close(0)
    assert isinstance(decode(encode(None, Bye(text="x"))).message, Bye)
