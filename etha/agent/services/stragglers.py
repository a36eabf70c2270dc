"""Finds out which ranks are missing. Only a direction's coordinator knows, so a status report asks it."""

from __future__ import annotations

import asyncio

from etha.agent.protocol.effects import CallKey, Member
from etha.agent.protocol.participant import Call
from etha.agent.runtime.peers import PeerLinks
from etha.agent.services.batch_state import LocalRegistration, RegisteredBatch
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

    async def refresh(self, batches: list[RegisteredBatch]) -> None:
        """Update ``missing`` of these batches, as far as their coordinators answer in time."""
        asked = [(batch, self._ask(batch, _oldest(batch))) for batch in batches if batch.asks]
        futures = {future for _, future in asked if future is not None}
        if futures:
            await asyncio.wait(futures, timeout=PATIENCE)
        for batch, future in asked:
            known = future.result() if future is not None and future.done() and not future.cancelled() else ()
            batch.missing = tuple(sorted({*batch.participant.missing(), *known}))
        self._forget(futures)

    async def learn(self, batch: RegisteredBatch, key: CallKey) -> None:
        """Before a waiting call ends at its deadline: ask who was not ready, if no READY was sent."""
        participant = batch.participant
        call = participant.find(key)
        if call is None or call not in participant.queues.of(call.member[0]):
            return
        if participant.sides[call.member[0]].standing is not None:
            return  # the answer to its withdrawal will tell
        future = self._ask(batch, call)
        if future is not None:
            await asyncio.wait({future}, timeout=LAST_PATIENCE)
            if future.done():
                participant.note_missing(_source(batch, call), future.result())
            self._forget({future})

    def hear(self, agent: str, registration: LocalRegistration, message: AskMissing | TellMissing) -> None:
        """Another agent asks or answers."""
        match message:
            case AskMissing(request=request, source=source):
                batch = registration.registered  # None: nobody here can be ready
                found = batch.participant.coordinators.get(source) if batch is not None else None
                missing = found.missing() if found is not None else ()
                self._links.tell(agent, registration.scope, TellMissing(request=request, missing=missing))
            case TellMissing(request=request, missing=missing):
                future = self._asked.get(request)
                if future is not None and not future.done() and agent in registration.agents:
                    future.set_result(missing)

    def _ask(self, batch: RegisteredBatch, call: Call | None) -> asyncio.Future[tuple[Member, ...]] | None:
        if call is None:
            return None
        source = _source(batch, call)
        coordinator = batch.registration.machine.agents[source][0]
        if coordinator == batch.me:
            return None
        self._requests += 1
        self._asked[self._requests] = future = asyncio.get_running_loop().create_future()
        self._links.tell(coordinator, batch.scope, AskMissing(request=self._requests, source=source))
        return future

    def _forget(self, futures: set[asyncio.Future[tuple[Member, ...]]]) -> None:
        for request in [request for request, future in self._asked.items() if future in futures]:
            del self._asked[request]


def _oldest(batch: RegisteredBatch) -> Call | None:
    return next(iter(batch.participant.queues), None)


def _source(batch: RegisteredBatch, call: Call) -> str:
    """The side from which a call's direction sends."""
    return call.member[0] if call.verb == "send" else batch.other(call.member[0])
