"""Finds out which ranks are missing. Only a direction's coordinator knows, so a status report asks it."""

from __future__ import annotations

import asyncio

from etha.agent.protocol.effects import CallKey, Member
from etha.agent.protocol.participant import Call
from etha.agent.runtime.peers import PeerLinks
from etha.agent.services.batch_state import BatchState
from etha.peer.introductions import AskMissing, TellMissing

#: Seconds that a status report, and a call at its deadline, wait for other agents. Then this agent reports what it
#: knows.
PATIENCE = 0.5
LAST_PATIENCE = 0.1


class StragglerQueries:
    """Questions to coordinators on other agents, and answers to theirs."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._asked: dict[int, asyncio.Future[tuple[Member, ...]]] = {}
        self._requests = 0

    async def refresh(self, lives: list[BatchState]) -> None:
        """Update ``missing`` of these batches, as far as their coordinators answer in time."""
        asked = [(live, self._ask(live, _oldest(live))) for live in lives if live.participant is not None and live.asks]
        futures = {future for _, future in asked if future is not None}
        if futures:
            await asyncio.wait(futures, timeout=PATIENCE)
        for live, future in asked:
            assert live.participant is not None
            known = future.result() if future is not None and future.done() and not future.cancelled() else ()
            live.missing = tuple(sorted({*live.participant.missing(), *known}))
        self._forget(futures)

    async def learn(self, live: BatchState, key: CallKey) -> None:
        """Before a waiting call ends at its deadline: ask who was not ready, if no READY was sent."""
        participant = live.participant
        call = participant.find(key) if participant is not None else None
        if participant is None or call is None or call not in participant.queues.of(call.member[0]):
            return
        if participant.sides[call.member[0]].standing is not None:
            return  # the answer to its withdrawal will tell
        future = self._ask(live, call)
        if future is not None:
            await asyncio.wait({future}, timeout=LAST_PATIENCE)
            if future.done():
                participant.note_missing(_source(live, call), future.result())
            self._forget({future})

    def hear(self, agent: str, live: BatchState, message: AskMissing | TellMissing) -> None:
        """Another agent asks or answers."""
        match message:
            case AskMissing(request=request, source=source):
                found = live.participant.coordinators.get(source) if live.participant is not None else None
                missing = found.missing() if found is not None else ()
                self._links.tell(agent, live.scope, TellMissing(request=request, missing=missing))
            case TellMissing(request=request, missing=missing):
                future = self._asked.get(request)
                if future is not None and not future.done() and agent in live.agents:
                    future.set_result(missing)

    def _ask(self, live: BatchState, call: Call | None) -> asyncio.Future[tuple[Member, ...]] | None:
        if call is None:
            return None
        source = _source(live, call)
        coordinator = live.machine.agents[source][0]
        if coordinator == live.machine.me:
            return None
        self._requests += 1
        self._asked[self._requests] = future = asyncio.get_running_loop().create_future()
        self._links.tell(coordinator, live.scope, AskMissing(request=self._requests, source=source))
        return future

    def _forget(self, futures: set[asyncio.Future[tuple[Member, ...]]]) -> None:
        for request in [request for request, future in self._asked.items() if future in futures]:
            del self._asked[request]


def _oldest(live: BatchState) -> Call | None:
    return next(iter(live.participant.queues), None) if live.participant is not None else None


def _source(live: BatchState, call: Call) -> str:
    """The side from which a call's direction sends."""
    return call.member[0] if call.verb == "send" else live.other(call.member[0])
