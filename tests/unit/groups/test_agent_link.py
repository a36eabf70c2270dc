"""A process's link to its agent: whatever ends, another agent is found, and hears who is here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from etha.config import Settings
from etha.errors import AgentLostError
from etha.groups.agent_link import GroupAgentLink

HERE = "I am here"


class PlayedAgent:
    """Answers everything, until it is asked what it dies of. Made on the link's loop."""

    def __init__(self, dies_of: object = None) -> None:
        self.lost: asyncio.Future[AgentLostError] = asyncio.get_running_loop().create_future()
        self.asked: list[Any] = []
        self._dies_of = dies_of

    async def request(self, message: Any, timeout: float, on_timeout: Callable[[], Exception] | None = None) -> Any:
        self.asked.append(message)
        if message == self._dies_of:
            self.die()
            raise AgentLostError("it has ended")
        return f"answer to {message}"

    def die(self) -> None:
        self.lost.set_result(AgentLostError("it has ended"))

    async def close(self) -> None:
        """Nothing is open."""


class World:
    """A link whose agents die when they are asked these questions, one after the other."""

    def __init__(self, *deaths: object) -> None:
        self._deaths = list(deaths)
        self.agents: list[PlayedAgent] = []
        self.heard = threading.Semaphore(0)
        self.link = GroupAgentLink(
            Settings.from_env(),
            redis_url=None,
            agent="played",
            on_push=lambda push: None,
            attend=lambda: [HERE],
            heard=lambda answer: self.heard.release(),
        )
        self.link._connect = self._connect  # type: ignore[method-assign, assignment]

    async def _connect(self, timeout: float, *, again: bool) -> PlayedAgent:
        self.agents.append(PlayedAgent(self._deaths.pop(0)))
        return self.agents[-1]

    def kill_last(self) -> None:
        async def kill() -> None:
            self.agents[-1].die()

        self.link.loop_thread.call(kill())


@pytest.mark.timeout(60)
def test_an_agent_that_dies_before_it_has_heard_who_is_here_is_replaced() -> None:
    """Nobody asks anything meanwhile: without the link the others would hear nothing of this process."""
    world = World(None, HERE, HERE, None)
    assert world.link.call("q", 30) == "answer to q"
    world.kill_last()
    assert world.heard.acquire(timeout=30)
    assert [agent.asked for agent in world.agents] == [["q"], [HERE], [HERE], [HERE]]
    assert world.link.connected
    world.link.close()


@pytest.mark.timeout(60)
def test_a_question_survives_agents_that_die_before_they_have_heard_who_is_here() -> None:
    world = World("q", HERE, HERE, "q", None)
    assert world.link.call("q", 30) == "answer to q"
    assert [agent.asked for agent in world.agents] == [["q"], [HERE], [HERE], [HERE, "q"], [HERE, "q"]]
    world.link.close()
