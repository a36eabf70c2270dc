"""Mutated messages at a real agent's sockets: answered or dropped, never a traceback, and the others notice nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from etha.bus.channel import dial
from etha.bus.codec import Failure, Malformed, Reply, Request, decode, encode
from etha.bus.handshake import Attach, WorkerWelcome
from etha.bus.messages import InitPair, PairFormed, Probe
from tests.flow.sites import Commons
from tests.flow.ways import Way
from tests.unit.bus.echo import hello

from .ground import Ground
from .mutation import damage, mutated
from .samples import bus_messages
from .trial import bounded, count, rng_of, seeds

#: Messages between two looks whether the agent still answers.
BURST = 100
_ids = itertools.count(1 << 40)


@pytest_asyncio.fixture
async def ground(commons: Commons) -> AsyncIterator[Ground]:
    async with Ground(commons.site(Way.LOCAL, "fuzz")) as ground:
        yield ground
        await ground.transfer()
    assert not ground.bugs(), ground.bugs()[0]


@pytest.fixture
def corpus() -> list[bytes]:
    first = random.Random(0)
    return [message for _ in range(10) for message in bus_messages(first)]


def bursts(name: str, corpus: list[bytes], harm: float) -> Iterator[list[bytes]]:
    """Mutated messages in bursts; of ``harm`` the bytes are damaged as well."""
    todo = seeds(name)
    while some := list(itertools.islice(todo, BURST)):
        found = []
        for seed in some:
            rng = rng_of(seed)
            data = mutated(rng.choice(corpus), rng, rng.choice(corpus))
            with contextlib.suppress(Malformed):
                decode(data)
                count(name, "valid")
                found.append(data)
                continue
            count(name, "malformed")
            found.append(
                data if rng.random() < harm else encode(Request(next(_ids), 0.2, Probe(address=1, token=data[:64])))
            )
        yield found


class Dealer:
    """A bare socket on the bus."""

    def __init__(self, context: zmq.asyncio.Context, path: Path) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.connect(f"ipc://{path}")

    async def ask(self, message: object, left: float | None = 30.0) -> Reply | Failure:
        """The answer to a request of ours, whatever comes before it."""
        number = next(_ids)
        await self.socket.send(encode(Request(number, left, message)))
        while True:
            answer = decode(await self.socket.recv())
            if isinstance(answer, Reply | Failure) and answer.id == number:
                return answer


@pytest.mark.timeout(1800)
async def test_strangers_on_the_bus(ground: Ground, corpus: list[bytes]) -> None:
    (pid,) = await ground.pids()
    with zmq.asyncio.Context() as context, bounded(pid):
        for burst in bursts("bus socket", corpus, 1.0):
            dealer = Dealer(context, ground.socket())
            for data in burst:
                await dealer.socket.send(data)
            assert isinstance(await dealer.ask(Probe(address=1, token=b"x")), Failure)
            dealer.socket.close(0)


class Worker:
    """A worker of one side of pair "weights" that has said hello, attached, and come to its pair."""

    def __init__(self, dealer: Dealer, descriptors: socket.socket) -> None:
        self.dealer, self.descriptors = dealer, descriptors

    @classmethod
    async def come(cls, context: zmq.asyncio.Context, path: Path) -> Worker:
        dealer = Dealer(context, path)
        answer = await dealer.ask(hello())
        assert isinstance(answer, Reply) and isinstance(answer.message, WorkerWelcome), answer
        descriptors = dial(path)
        descriptors.setblocking(True)
        descriptors.send(encode(Request(1, None, Attach(session=answer.message.session))))
        assert isinstance(decode(descriptors.recv(1 << 16)), Reply)
        return cls(dealer, descriptors)

    def leave(self) -> None:
        self.descriptors.close()
        self.dealer.socket.close(0)


async def met(context: zmq.asyncio.Context, path: Path) -> list[Worker]:
    """Both sides of pair "weights", formed."""
    workers = [await Worker.come(context, path) for _ in range(2)]
    names = ("trainer", "inference")
    number = next(_ids)
    first = InitPair(pair="weights", side=names[0], remote=names[1], world_size=1, rank=0, launch=None)
    await workers[0].dealer.socket.send(encode(Request(number, 30.0, first)))
    second = InitPair(pair="weights", side=names[1], remote=names[0], world_size=1, rank=0, launch=None)
    answer = await workers[1].dealer.ask(second)
    assert isinstance(answer, Reply) and isinstance(answer.message, PairFormed), answer
    return workers


@pytest.mark.timeout(1800)
async def test_workers_that_talk_nonsense_in_a_session(ground: Ground, corpus: list[bytes]) -> None:
    (pid,) = await ground.pids()
    formed = 0
    with zmq.asyncio.Context() as context, bounded(pid):
        for burst in bursts("bus session", corpus, 0.0):
            workers = await met(context, ground.socket())
            formed += 1
            for i, data in enumerate(burst):
                await workers[i % 2].dealer.socket.send(data)
            for worker in workers:
                await worker.dealer.ask(Probe(address=1, token=b"x"))
                worker.leave()
    assert formed


@pytest.mark.timeout(1800)
async def test_packets_on_the_descriptor_socket(ground: Ground, corpus: list[bytes]) -> None:
    (pid,) = await ground.pids()
    memory = os.memfd_create("fuzz")
    try:
        with zmq.asyncio.Context() as context, bounded(pid):
            for i, burst in enumerate(bursts("descriptor socket", corpus, 1.0)):
                worker = await Worker.come(context, ground.socket())
                with contextlib.suppress(OSError):  # the agent has closed it
                    for data in burst:
                        connection = dial(ground.socket()) if i % 2 else worker.descriptors
                        connection.setblocking(True)
                        fds = [memory] * (len(data) % 4)
                        socket.send_fds(connection, [data[: 1 << 16] or b"x"], fds)
                        if i % 2:
                            connection.close()
                worker.leave()
    finally:
        os.close(memory)


@pytest.mark.timeout(600)
async def test_bytes_that_are_no_zeromq(ground: Ground) -> None:
    greeting = bytes.fromhex("ff00000000000000017f0301") + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    (pid,) = await ground.pids()
    with bounded(pid):
        for seed in range(200):
            rng = rng_of(seed)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(ground.socket()))
                with contextlib.suppress(OSError):
                    stranger.sendall(damage(greeting + ready, rng, greeting))
