"""Mutated tokens, openings, headers and spans at the data port: closed in one line, and streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import ProtocolError
from etha.plan import Layout, TensorSpec
from etha.transport.base import WireRun
from etha.transport.tcp.listener import OPENING_BYTES
from etha.transport.tcp.run import TcpRun
from etha.transport.tcp.streams import Header, ReceiveStream
from tests.unit.peer.agents import complaints, until
from tests.unit.transport.agents import Agent, Job, agents, make_plan, same, transfer

from .mutation import damage
from .trial import Lines, bounded, count, rng_of, seeds

#: Connections at once: fewer than the door lets wait.
BURST = 64


def job() -> Job:
    """Two ranks on "a" to two on "b", over the wire."""
    spec = [{"w": TensorSpec((64, 48), torch.float32, Layout((2,), [Shard(dim)]))} for dim in (0, 1)]
    whole = torch.arange(64 * 48.0).reshape(64, 48)
    return Job(
        make_plan(spec[0], spec[1], ["a", "a"], ["b", "b"]),
        ("a", "a"),
        ("b", "b"),
        {r: {"w": whole[32 * r : 32 * (r + 1)].clone()} for r in range(2)},
        {r: {"w": torch.zeros(64, 24)} for r in range(2)},
    )


async def good(at: dict[str, Agent], seq: int) -> None:
    """A transfer of every element."""
    work = job()
    expected = work.expected()
    await transfer(work, at, seq)
    same(work.target, expected)


async def said(at: Agent, data: bytes, *, end: bool = True) -> bytes:
    """What the port answers to ``data`` until it closes the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as stranger:
        stranger.setblocking(False)
        await loop.sock_connect(stranger, ("127.0.0.1", at.port))
        heard = b""
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(stranger, data)
            if end:
                stranger.shutdown(socket.SHUT_WR)
            while more := await loop.sock_recv(stranger, 64):
                heard += more
        return heard


@pytest.mark.timeout(1800)
async def test_tokens_that_are_not_good() -> None:
    async with agents(["a", "b"]) as at:
        await good(at, 1)
        todo = seeds("data port")
        with bounded(), Lines("etha.transport.tcp.listener", "etha.transport.tcp.streams") as lines:
            while some := list(itertools.islice(todo, BURST)):
                given = await at["b"].address_for("a").tokens(len(some))
                knocks = []
                for seed, token in zip(some, given, strict=True):
                    data = damage(token, rng_of(seed), token) + bytes(OPENING_BYTES)
                    if data[: len(token)] == token and len(data) >= len(token) + OPENING_BYTES:
                        count("data port", "let in")  # it was damaged behind what is read first
                        assert await said(at["b"], data) == b"\1"
                        continue
                    count("data port", "refused")
                    knocks.append(said(at["b"], data))
                assert set(await asyncio.gather(*knocks)) <= {b""}
                await until(lambda: complaints(lines.said, "closed a data connection") == len(knocks))  # noqa: B023
                assert not lines.broken
                lines.said.clear()
        await good(at, 2)


@pytest.mark.timeout(1800)
async def test_headers_and_spans_after_a_good_token() -> None:
    async with agents(["a", "b"]) as at:
        await good(at, 1)
        flow = job().wire("a").sends["b"]
        match, waiting = at["b"].plane.match, []

        def matched(inlet: ReceiveStream, header: Header) -> TcpRun | None:
            waiting.append(header)
            return match(inlet, header)

        at["b"].plane.match = matched  # type: ignore[method-assign]
        todo = seeds("data stream")
        with bounded(), Lines("etha.transport.tcp.listener", "etha.transport.tcp.streams") as lines:
            while some := list(itertools.islice(todo, BURST)):
                given = await at["b"].address_for("evil").tokens(len(some))
                opening, knocks = secrets.token_bytes(OPENING_BYTES), []
                waiting.clear()
                for seed, token in zip(some, given, strict=True):
                    rng = rng_of(seed)
                    head = Header.of(
                        flow, rng.randrange(len(flow.lanes)), (bytes(32), rng.choice((2, 3, 1 << 60)))
                    ).pack()
                    body = damage(head + rng.randbytes(rng.choice((0, 10, 4096))), rng, head)
                    knocks.append(said(at["b"], token + opening + body))
                    count("data stream", "sent")
                async with asyncio.TaskGroup() as group:
                    heard = [group.create_task(knock) for knock in knocks]
                    # A header may name a run that is yet to come: its stream waits for it, as long as it stands.
                    await until(lambda: sum(d.done() for d in heard) + len(waiting) >= len(heard), 20.0)  # noqa: B023
                    at["b"].plane.drop("evil")
                assert {done.result() for done in heard} <= {b"\1", b""}
                assert not lines.broken
                lines.said.clear()
        at["b"].plane.match = match  # type: ignore[method-assign]
        await good(at, 2)
        await good(at, 3)


async def test_a_peer_that_sends_another_run_than_planned_writes_nothing() -> None:
    """The header names the run that is waited for, with the wrong digest: the run fails, its targets stay."""
    async with agents(["a", "b"]) as at:
        work = job()
        wire = work.wire("b")
        (token,) = await at["b"].address_for("a").tokens(1)
        flow = work.wire("a").sends["b"]
        head = bytearray(Header.of(flow, 0, (bytes(32), 5)).pack())
        head[45] ^= 1  # in the digest
        run = WireRun(program=wire, seq=5, key=bytes(32))
        await at["b"].plane.prepare(run)
        ended, _ = await asyncio.gather(
            at["b"].transport.run(run),
            said(at["b"], token + bytes(OPENING_BYTES) + bytes(head) + b"\xff" * 4096, end=False),
            return_exceptions=True,
        )
        assert isinstance(ended, ProtocolError) and "both agents must have the same plan" in str(ended)
        assert all(not held["w"].any() for held in work.target.values())
