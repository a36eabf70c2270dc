"""A short transfer between two agents, which the receiving one decides, while that one stands still or dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from etha.errors import AgentLostError, EthaError, PeerLostError
from tests.faults.agents import ask, run_agent
from tests.flow.jobs import Job, Worker
from tests.flow.sides import Sides
from tests.flow.sites import Site, private_directory, stop_all
from tests.flow.ways import Way
from tests.processes import send_signal
from tests.seconds import within
from tests.unit.store.server import served

OLD, NEW, LATER = 1.0, 2.0, 3.0
pytestmark = pytest.mark.ways("host", "tcp", each=True)


class Scene:
    """A trainer and an inference worker, each with its agent; a batch that has moved once, and moves again now."""

    def __init__(self, receiver: Worker, handles: dict[Any, Any]) -> None:
        self.receiver, self.handles = receiver, handles
        self.given, self.taken = torch.full((1024,), OLD), torch.zeros(1024)

    async def hand_over(self) -> None:
        """Both call; the receiving agent has heard GO, and stands still before it has copied anything."""
        ask(self.receiver, "freeze")
        self.given.fill_(NEW)
        self.send = asyncio.create_task(self.handles["trainer", 0].transfer("send"))
        self.recv = asyncio.create_task(self.handles["inference", 0].transfer("recv"))
        await asyncio.to_thread(self.receiver.expect, "handed")


@contextlib.asynccontextmanager
async def scene(way: Way, pair: str) -> AsyncIterator[Scene]:
    with private_directory() as directory, served(directory) as server, contextlib.ExitStack() as stack:
        stack.callback(stop_all, str(directory))
        site = Site(way, directory, server.url)
        with Job(site.env) as job:
            receiver = job.start(run_agent, at=("inference", 0))
            receiver.expect("ready")
            async with Sides(site, pair, trainer=1, inference=1) as sides:
                await sides.meet(device_mesh=(1,), placements=[Replicate()])
                found = Scene(receiver, {})
                held = {"trainer": found.given, "inference": found.taken}
                found.handles = await sides.register("b", lambda side, rank: ({"w": held[side]}, {}))
                ends = await sides.move(found.handles)
                assert not [end for end in ends.values() if isinstance(end, Exception)], ends
                assert torch.equal(found.taken, found.given)
                yield found


async def test_who_thaws_commits_nothing_from_memory_that_was_taken_back(way: Way, pair: str) -> None:
    async with scene(way, pair) as found:
        await found.hand_over()
        async with asyncio.timeout(within(8.0)):
            [end] = await asyncio.gather(found.send, return_exceptions=True)
        assert isinstance(end, PeerLostError) and end.outcome == "unknown", end
        found.given.fill_(LATER)
        send_signal(found.receiver.pid, signal.SIGCONT)
        async with asyncio.timeout(within(8.0)):
            [end] = await asyncio.gather(found.recv, return_exceptions=True)
        if isinstance(end, EthaError):
            assert isinstance(end, PeerLostError) or end.outcome == "aborted", end  # type: ignore[attr-defined]
        else:  # what was sent before lay in its socket
            assert way is Way.TCP and bool((found.taken == NEW).all())


async def test_who_decides_dies_and_the_outcome_is_unknown_at_once(way: Way, pair: str) -> None:
    async with scene(way, pair) as found:
        await found.hand_over()
        send_signal(found.receiver.pid, signal.SIGKILL)
        async with asyncio.timeout(within(2.5)):
            ends = await asyncio.gather(found.send, found.recv, return_exceptions=True)
        assert isinstance(ends[0], PeerLostError) and ends[0].outcome == "unknown", ends
        assert isinstance(ends[1], AgentLostError), ends
        assert bool((found.taken == OLD).all())


async def test_a_sender_that_gives_up_asks_who_decides(way: Way, pair: str) -> None:
    async with scene(way, pair) as found:
        await found.hand_over()
        found.send.cancel()
        send_signal(found.receiver.pid, signal.SIGCONT)
        async with asyncio.timeout(within(8.0)):
            ends = await asyncio.gather(found.send, found.recv, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError), ends
        if isinstance(ends[1], Exception):
            assert isinstance(ends[1], EthaError) and ends[1].outcome == "aborted", ends  # type: ignore[attr-defined]
        else:
            assert bool((found.taken == NEW).all())
