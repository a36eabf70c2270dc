"""Which part of the agent a worker's message is for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from etha.agent.runtime.sessions import Session
from etha.agent.status import report
from etha.bus.codec import Request
from etha.bus.messages import (
    MAX_EVENTS,
    AttachShadows,
    AttachSnapshot,
    CloseBatch,
    Confirm,
    Events,
    GetEvents,
    GetStatus,
    InitPair,
    LetGo,
    Ok,
    Probe,
    Probed,
    Register,
    Status,
    Supersede,
    Transfer,
    WaitOffer,
)
from etha.bus.peer import Peer
from etha.errors import EthaError, ProtocolError

if TYPE_CHECKING:
    from etha.agent.server import Agent

#: Seconds that Redis is given for what an observer wants to see.
EVENTS_SECONDS = 2.0


def dispatch(agent: Agent, session: Session, request: Request) -> None:
    """Hand a worker's request on; EthaErrors are its answer."""
    peer = session.peer
    match request.message:
        case InitPair() as message:
            agent.pairs.init(session, request, message)
        case Register() as message:
            agent.batches.register(session, request, message)
        case AttachShadows() | AttachSnapshot() as message:
            agent.batches.attach(session, request, message)
        case Transfer() as message:
            live = agent.batches.find(session, message.batch, message.epoch)
            agent.movers.transfer(session, request, message, live)
        case Supersede(batch=batch, epoch=epoch):
            agent.movers.supersede(session, agent.batches.find(session, batch, epoch))
            peer.reply(request.id, Ok())
        case WaitOffer(batch=batch, epoch=epoch):
            agent.movers.offers.wait(session, request, agent.batches.find(session, batch, epoch))
        case Confirm():
            peer.reply(request.id, Ok())  # what there is to say has been said
        case CloseBatch() as message:
            agent.batches.close(session, request, message)
        case Probe(address=address, token=token):
            text = session.probe(address, token)
            peer.reply(request.id, Probed(reaches=not text, text=text))
        case LetGo(all=True):
            agent.spawn(agent.let_go(session, request))
        case LetGo(segments=segments):
            agent.spawn(agent.unmap(session, request, segments))
        case _:
            show(agent, peer, request)


def show(agent: Agent, peer: Peer, request: Request) -> None:
    """What workers and observers may ask: status and events. ProtocolError for everything else."""
    match request.message:
        case GetStatus():
            agent.spawn(_status(agent, peer, request.id))
        case GetEvents() as message:
            agent.spawn(_events(agent, peer, request.id, message))
        case _:
            raise ProtocolError(f"{type(request.message).__name__} is not a request, or not an observer's")


async def _status(agent: Agent, peer: Peer, request_id: int) -> None:
    stale, _ = await asyncio.gather(
        agent.pairs.refresh(), agent.movers.inquiries.refresh(list(agent.batches.live.values()))
    )
    peer.reply(request_id, Status(report=report(agent, stale)))


async def _events(agent: Agent, peer: Peer, request_id: int, message: GetEvents) -> None:
    try:
        found = await agent.store.events(
            max(1, min(message.count, MAX_EVENTS)), after=message.after or "-", timeout=EVENTS_SECONDS
        )
    except EthaError as error:
        peer.fail(request_id, error, None)
    else:
        peer.reply(request_id, Events(events=tuple({"id": at, **fields} for at, fields in found)))
