"""Links between agents that are processes: killed, stopped, restarted; and on the loop that agents use."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvloop

from etha.errors import AgentUnavailableError
from etha.peer.keys import Keys
from etha.peer.messages import Commit, Done
from tests.flow.jobs import CONTEXT
from tests.processes import send_signal
from tests.unit.peer.agents import BEAT, SCOPE, Agent, Namespace, Remote, agent


@pytest.fixture
def namespace() -> Namespace:
    return Namespace()


@asynccontextmanager
async def remote(name: str, a: Agent) -> AsyncIterator[Remote]:
    """Agent ``name`` in a process of its own, which knows ``a`` and is known to it."""
    keys = Keys.fresh()
    a.namespace.published[keys.public] = name
    made = await asyncio.to_thread(Remote, CONTEXT, name, keys, {a.keys.public: a.name})
    try:
        yield made
    finally:
        made.kill()


async def link(a: Agent, b: Remote, seq: int = 1) -> None:
    """Open the links between ``a`` and ``b`` both ways, and see one question answered."""
    count = len(a.events)
    await a.hub.open(b.name, b.address, b.keys.public, 5.0)
    await asyncio.to_thread(b.open, a)
    a.hub.send(b.name, SCOPE, Done(seq=seq))
    assert (await a.heard(count + 1))[count] == (b.name, SCOPE, Commit(seq=seq))


async def test_a_killed_agent_is_gone_at_once(namespace: Namespace) -> None:
    # With beats of an hour only the closed link can tell.
    async with agent("a", namespace, beat=3600.0) as a, remote("b", a) as b:
        await link(a, b)
        started = time.monotonic()
        os.kill(b.pid, signal.SIGKILL)
        ((kind, who, text),) = (await a.heard(2))[1:]
        assert (kind, who) == ("gone", "b") and "closed" in text
        assert time.monotonic() - started < 0.5
        b.process.join()
        with pytest.raises(AgentUnavailableError, match="nothing listens there"):
            await a.hub.open("b", b.address, b.keys.public, 5.0)


async def test_a_stopped_agent_is_gone_after_three_missed_beats_and_learns_of_it(namespace: Namespace) -> None:
    async with agent("a", namespace) as a, remote("b", a) as b:
        await link(a, b)
        send_signal(b.pid, signal.SIGSTOP)
        started = time.monotonic()
        ((kind, who, text),) = (await a.heard(2))[1:]
        assert (kind, who) == ("gone", "b") and "missed 3 beats" in text
        assert 2 * BEAT < time.monotonic() - started < 10 * BEAT
        os.kill(b.pid, signal.SIGCONT)
        assert await asyncio.to_thread(b.said) == ("gone", "a")
        # Both have lost the link; both open it again.
        await link(a, b, seq=2)
        assert len(a.events) == 3


async def test_a_stopped_agent_cannot_be_opened(namespace: Namespace) -> None:
    async with agent("a", namespace) as a, remote("b", a) as b:
        send_signal(b.pid, signal.SIGSTOP)
        with pytest.raises(AgentUnavailableError, match=r"did not answer within 0\.3 s"):
            await a.hub.open("b", b.address, b.keys.public, 0.3)
        os.kill(b.pid, signal.SIGCONT)
        await link(a, b)


def test_on_the_loop_that_agents_use() -> None:
    async def main() -> None:
        namespace = Namespace()
        async with agent("a", namespace) as a, agent("b", namespace) as b:
            await asyncio.gather(a.open(b), b.open(a))
            for seq in range(2000):
                a.send(b, Done(seq=seq))
                b.send(a, Commit(seq=seq))
            assert [event[2].seq for event in await b.heard(2000)] == list(range(2000))
            assert [event[2].seq for event in await a.heard(2000)] == list(range(2000))
            a.hub.drop("b")
            await b.heard(2001)
        assert [event for event in a.events if event[0] == "gone"] == []

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_eight_agents_open_each_other_at_once(namespace: Namespace) -> None:
    async with AsyncExitStack() as stack:
        agents = [await stack.enter_async_context(agent(f"a{n}", namespace)) for n in range(8)]
        await asyncio.gather(*(one.open(other) for one in agents for other in agents if one is not other))
        for one in agents:
            for other in agents:
                if one is not other:
                    one.send(other, Done(seq=int(one.name[1:])))
        for one in agents:
            heard = await one.heard(7)
            assert {(event[0], event[2].seq) for event in heard} == {
                (other.name, int(other.name[1:])) for other in agents if other is not one
            }
