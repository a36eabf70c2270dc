"""The end of a registration that stands but that one rank cannot use: it ends on all agents before that rank hears so.

    agent of the rank                      every other agent of the batch
    its workers: BatchLost                 |
    Forsaken ----------------------------> its workers: BatchLost
    <------------------------------- Noted |
    the rank: Ok

So whatever any rank asks its agent after the failed one has its error, the old registration is not given to it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from etha.agent.runtime.peers import Links
from etha.agent.services.batch_state import Live
from etha.peer.introductions import Forsaken, Noted

#: Seconds beyond the request's deadline, less than its worker waits. A frozen agent ends the registration as it thaws.
GRACE = 0.5


class Forsaking:
    """Tells other agents, and knows which of them have heard."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._waiting: dict[int, tuple[set[str], asyncio.Event]] = {}
        self._requests = 0

    async def tell(self, live: Live, agents: Collection[str], text: str, deadline: float) -> None:
        """Return once these agents have ended the registration, or do not answer by ``deadline`` (of the loop)."""
        self._requests += 1
        request, silent, heard = self._requests, set(agents), asyncio.Event()
        for agent in sorted(silent):
            self._links.tell(agent, live.scope, Forsaken(request=request, text=text))
        if not silent:
            return
        self._waiting[request] = silent, heard
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline + GRACE):
                    await heard.wait()
        finally:
            del self._waiting[request]

    def hear(self, agent: str, message: Noted) -> None:
        """An agent has ended the registration."""
        if (found := self._waiting.get(message.request)) is not None:
            silent, heard = found
            silent.discard(agent)
            if not silent:
                heard.set()

    def lose(self, agent: str) -> None:
        """An agent's link is lost: it will not answer."""
        for request in list(self._waiting):
            self.hear(agent, Noted(request=request))
