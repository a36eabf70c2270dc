"""Agents whose process a test has in hand: it hears what they are asked, and can hold one before it decides.

The product has no such seam: this process serves an ordinary agent with two of its methods wrapped.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from etha.agent.__main__ import serve
from etha.agent.protocol import epoch_links
from etha.agent.protocol.coordinator import Coordinator, Outbox, Phase
from etha.agent.server import Agent
from etha.agent.startup import Startup
from etha.bus.codec import Request
from etha.bus.sessions import Peer
from etha.config import Settings
from tests.flow import jobs
from tests.flow.jobs import Worker, tell
from tests.flow.nursery import MESH


class Seam:
    """Wraps ``received``, to tell of requests, and ``_decide``, to leave all votes unanswered after ``hold``."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.holding = False
        self.held: Coordinator | None = None
        self._received, self._decide = Agent.received, Coordinator._decide
        seam = self

        def received(agent: Agent, peer: Peer, request: Request) -> None:
            seam.agent = agent
            seam._received(agent, peer, request)
            message: Any = request.message
            tell(f"{type(message).__name__} {getattr(message, 'pair', getattr(message, 'batch', ''))}")

        def decide(coordinator: Coordinator) -> Outbox:
            if not seam.holding or not coordinator.votes >= set(coordinator.peers):
                return seam._decide(coordinator)
            seam.held, seam.holding = coordinator, False
            tell("voted")
            return []

        Agent.received, Coordinator._decide = received, decide  # type: ignore[method-assign]

    def hear(self) -> None:
        """One word of the test."""
        word, _ = jobs._link.recv()
        if word == "hold":
            self.holding, self.held = True, None
        elif word == "release":
            self.release()
        tell(f"heard {word}")

    def release(self) -> None:
        """Let the coordinator count the votes, if nothing has ended its transfer meanwhile."""
        coordinator, self.held, self.holding = self.held, None, False
        if coordinator is None or coordinator.state is not Phase.MOVING:
            return
        assert self.agent is not None
        for batch in self.agent.registrations.registered_batches():
            if coordinator in batch.participant.coordinators.values():
                batch.participant._post(self._decide(coordinator))
                self.agent.transfers._perform(batch, batch.participant._flush())


async def _serve() -> None:
    seam = Seam()
    loop = asyncio.get_running_loop()
    loop.add_reader(jobs._link.fileno(), seam.hear)
    ready, ours = os.pipe()
    loop.add_reader(ready, _ready, loop, ready)
    serving = asyncio.create_task(serve(Settings.from_env(), startup=Startup(ours)))
    await serving
    loop.remove_reader(jobs._link.fileno())


def _ready(loop: asyncio.AbstractEventLoop, ready: int) -> None:
    loop.remove_reader(ready)
    os.close(ready)
    tell("ready")


def run_agent() -> None:
    """The process of an agent; returns when it has been told to leave."""
    epoch_links.MESH = int(os.environ.get(MESH, epoch_links.MESH))
    asyncio.run(_serve())


def ask(agent: Worker, word: str) -> None:
    """Say ``hold``, ``release`` or ``ping`` to an agent; it has heard it, and what it told before is taken in."""
    agent.go(word)
    agent.expect(f"heard {word}")
