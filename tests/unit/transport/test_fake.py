"""The fake transport keeps the Protocol's promises, and breaks exactly what it is told to."""

from __future__ import annotations

import asyncio

import pytest
import torch

from etha.errors import PeerLostError, ProtocolError
from etha.transport.base import Peer, Transport, WireBucket
from etha.transport.fake import FakeNetwork, FakeTransport, Fault


async def pair(network: FakeNetwork) -> tuple[FakeTransport, FakeTransport]:
    a, b = network.join("a"), network.join("b")
    ends: list[Transport[WireBucket]] = [a, b]  # the Protocol, as mypy sees it
    for end, other in zip(ends, "ba", strict=True):
        await end.open([Peer(agent=other)])
    return a, b


def numbers(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n, dtype=torch.uint8)


def send(peer: str, *tensors: torch.Tensor) -> WireBucket:
    return WireBucket(peer=peer, round=0, send=tensors)


def receive(peer: str, *tensors: torch.Tensor) -> WireBucket:
    return WireBucket(peer=peer, round=0, receive=tensors)


async def test_both_directions_arrive_in_order() -> None:
    a, b = await pair(FakeNetwork())
    at_a, at_b = torch.zeros(4, dtype=torch.uint8), [torch.zeros(n, dtype=torch.uint8) for n in (3, 5)]
    bucket = WireBucket(peer="b", round=0, send=(numbers(3), numbers(5, 50)), receive=(at_a,))
    other = WireBucket(peer="a", round=0, send=(numbers(4, 9),), receive=tuple(at_b))
    seen: list[int] = []
    assert await asyncio.gather(a.run(bucket, seen.append), b.run(other)) == [12, 12] == [bucket.nbytes] * 2
    assert (
        torch.equal(at_a, numbers(4, 9)) and torch.equal(at_b[0], numbers(3)) and torch.equal(at_b[1], numbers(5, 50))
    )
    assert seen == [12]


async def test_a_delayed_message_holds_those_behind_it() -> None:
    network = FakeNetwork()
    a, b = await pair(network)
    release = asyncio.Event()
    network.inject("a", "b", Fault(kind="delay", message=0, release=release))
    out = torch.zeros(2, dtype=torch.uint8)
    await a.run(send("b", numbers(1, 1), numbers(1, 2)))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(b.run(receive("a", out[:1], out[1:])))
        await asyncio.sleep(0)
        assert out.tolist() == [0, 0] and not task.done()
        release.set()
    assert out.tolist() == [1, 2]


async def test_a_corrupted_message_differs() -> None:
    network = FakeNetwork()
    a, b = await pair(network)
    network.inject("a", "b", Fault(kind="corrupt", message=1))
    out = torch.zeros(8, dtype=torch.uint8)
    await a.run(send("b", numbers(4), numbers(4)))
    await b.run(receive("a", out[:4], out[4:]))
    assert torch.equal(out[:4], numbers(4)) and out[4:].tolist() == [255, 1, 2, 3]


async def test_a_lost_message_is_waited_for_until_abort() -> None:
    network = FakeNetwork()
    a, b = await pair(network)
    network.inject("a", "b", Fault(kind="drop", message=0))
    await a.run(send("b", numbers(4)))
    with pytest.raises(ValueError, match="enough"):
        async with asyncio.timeout(60):
            asyncio.get_running_loop().call_later(0.01, b.abort, ValueError("enough"))
            await b.run(receive("a", torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="enough"):
        await b.run(receive("a"))


async def test_a_closed_link_ends_both_ends() -> None:
    network = FakeNetwork()
    a, b = await pair(network)
    network.inject("a", "b", Fault(kind="close", message=0))
    results = await asyncio.gather(
        b.run(receive("a", torch.zeros(4, dtype=torch.uint8))), a.run(send("b", numbers(4))), return_exceptions=True
    )
    assert all(isinstance(r, PeerLostError) and r.reason == "closed" for r in results)
    with pytest.raises(PeerLostError):
        await b.run(send("a", numbers(1)))


async def test_ends_that_cut_differently_notice() -> None:
    a, b = await pair(FakeNetwork())
    await a.run(send("b", numbers(4)))
    with pytest.raises(ProtocolError, match="4 bytes, 5"):
        await b.run(receive("a", torch.zeros(5, dtype=torch.uint8)))
    with pytest.raises(ProtocolError, match="'c'"):
        await a.run(send("c", numbers(1)))


async def test_close_ends_what_waits() -> None:
    _, b = await pair(FakeNetwork())
    asyncio.get_running_loop().call_soon(asyncio.ensure_future, b.close())
    with pytest.raises(PeerLostError):
        await b.run(receive("a", torch.zeros(5, dtype=torch.uint8)))
