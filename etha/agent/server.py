"""The agent: one asyncio service that owns one device and serves every worker on it.

    workers --bus--> Agent --+-- PeerLinks            (other agents, data port)
                             +-- RendezvousService    (pairs, Redis)
                             +-- RegistrationService  (batches, planning)
                             +-- TransferService      (the lane, streams)
                             +-- GroupService         (elastic groups, Redis)
                             +-- PublicationService   (publishers, subscribers; its hops are workers of this agent)

This file connects them and hands each request to one of them. The state machines make the decisions.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from etha.agent.greeting import LEAVING, Greeting
from etha.agent.pictures import Pictures
from etha.agent.runtime.device import GpuDevice
from etha.agent.runtime.event_writer import EventWriter
from etha.agent.runtime.gc_scheduler import GcScheduler
from etha.agent.runtime.lane import Lane
from etha.agent.runtime.peers import Epoch, PeerLinks
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.services.groups import GroupService
from etha.agent.services.hints import Hints
from etha.agent.services.publications import PublicationService
from etha.agent.services.record_queries import RecordQueries
from etha.agent.services.registration import RegistrationService
from etha.agent.services.rendezvous import PATIENCE, RendezvousService
from etha.agent.services.stream_order import StreamOrder
from etha.agent.services.transfer_records import death, failed_request
from etha.agent.services.transfers import TransferService
from etha.agent.status import report
from etha.bus.codec import Request
from etha.bus.handshake import WorkerHello, WorkerWelcome
from etha.bus.messages import (
    MAX_EVENTS,
    AddValue,
    AttachShadows,
    AttachSnapshot,
    BeginPut,
    ClaimVersion,
    CloseBatch,
    ClosePublication,
    CloseSubscription,
    Confirm,
    DepartGroup,
    DescribePublication,
    EndHop,
    EnterGroup,
    Events,
    ExchangeSegments,
    FinishPut,
    GetEvents,
    GetPicture,
    GetRecords,
    GetStatus,
    GetSubscribers,
    GetValues,
    GroupProgress,
    InitPair,
    LeavePair,
    LetGo,
    Ok,
    Picture,
    Probe,
    Probed,
    Publish,
    Pulled,
    PutValues,
    Records,
    Register,
    Released,
    Status,
    Streamed,
    Subscribe,
    Supersede,
    SwapValue,
    Transfer,
    WaitHeld,
    WaitHolders,
    WaitOffer,
)
from etha.bus.sessions import Peer
from etha.config import Settings
from etha.errors import (
    AgentLostError,
    AgentUnavailableError,
    EthaError,
    ProtocolError,
    note_of_log,
    with_note,
)
from etha.memory.mapping import WorkerMemory
from etha.memory.process import start_time
from etha.observe.logs import shown_log
from etha.observe.record_log import log_records
from etha.observe.recorder import Recorder
from etha.observe.records import Culprit, Incident
from etha.observe.ring import RingWriter, ended_badly
from etha.peer.introductions import AskRecords, TellRecords
from etha.peer.wire import Said, Scope
from etha.store.records import AgentRecord, Reason
from etha.store.records import RankHolder as Holder
from etha.store.registry import Store
from etha.version import __version__

log = logging.getLogger(__name__)

#: Seconds that a leaving agent gives running transfers.
DRAIN = 30.0
#: Seconds that Redis has to answer an observer's request.
EVENTS_SECONDS = 2.0
_LEFT = "the agent is leaving; call init_pair and register_tensors again, which start another"


class Agent:
    """The bus's Service. ``done`` is set ``idle`` seconds after the last worker has left; None: never."""

    def __init__(
        self,
        *,
        settings: Settings,
        device: str,
        greeting: Greeting,
        store: Store,
        lane: Lane,
        idle: float | None,
        card: GpuDevice | None = None,
    ) -> None:
        self.card = card
        self.settings, self.device, self.store, self.greeting = settings, device, store, greeting
        self.id = uuid.uuid4().hex[:16]
        self.log = shown_log()
        #: HOST:PORT of its metrics, or why it has none; "" if nobody asked for them.
        self.metrics = ""
        self.started_at = time.time()
        self.started = asyncio.Event()
        self.done = asyncio.Event()
        self.sessions: dict[str, WorkerSession] = {}
        #: Workers without a process: ranks of holders, for hops of publications.
        self.inner_sessions: dict[str, WorkerSession] = {}
        self._observers: set[str] = set()
        self.recorder = Recorder()
        self.ring = RingWriter(settings.runtime_dir / settings.namespace, settings.socket_path(device).stem, self.id)
        self.events = EventWriter(store, self.spawn, agent=self.id, host=settings.host_name, device=device)
        self.recorder.subscribe(self.ring.take)
        self.recorder.subscribe(self.events.take)
        self.recorder.subscribe(log_records)
        self.calls = OpenCalls(self._record)
        self.lane = lane
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None
        self._group: asyncio.TaskGroup | None = None
        self._hurried = False
        self._patience: asyncio.Timeout | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._gc = GcScheduler()
        self._pictures = Pictures(self.agent_name)
        self.links = PeerLinks(
            me=self.id,
            host=settings.host_id,
            store=store,
            listen=settings.listen,
            advertise=settings.advertise,
            encrypt=settings.encrypt,
            staging=settings.staging,
            differences=settings.differences,
            said=self._said,
            on_agent_lost=self.on_agent_lost,
            card=card,
            log_note=note_of_log(self.log, settings.host_name),
        )
        self.record_queries = RecordQueries(self.links, store, settings, self.recorder, self.ring, self.spawn)
        stream_order = StreamOrder(card, self.calls)
        self.transfers = TransferService(
            store=store,
            links=self.links,
            calls=self.calls,
            lane=lane,
            spawn=self.spawn,
            stream_order=stream_order,
            recorder=self.recorder,
        )
        self.groups = GroupService(store=store, links=self.links, calls=self.calls, spawn=self.spawn)
        hints = Hints(store, settings, greeting.redis)
        self.rendezvous = RendezvousService(
            store=store,
            links=self.links,
            calls=self.calls,
            sessions=lambda: (*self.sessions.values(), *self.inner_sessions.values()),
            spawn=self.spawn,
            broken=lambda *broken: self.registrations.broken(*broken),
            hints=hints,
        )
        self.registrations = RegistrationService(
            me=self.id,
            store=store,
            links=self.links,
            calls=self.calls,
            rendezvous=self.rendezvous,
            transfers=self.transfers,
            gc_scheduler=self._gc,
            spawn=self.spawn,
            hints=hints,
        )
        self.publications = PublicationService(
            store=store,
            calls=self.calls,
            registrations=self.registrations,
            dispatcher=self,
            spawn=self.spawn,
            zone=settings.zone or "",
            pass_on=settings.pass_on,
        )

    @property
    def holder(self) -> Holder:
        """This agent's own process, as the holder of the ranks of workers inside of it."""
        return Holder(
            agent=self.id,
            host=self.settings.host_id,
            pid=os.getpid(),
            start=start_time(os.getpid()),
            name=self.settings.host_name,
        )

    def enter(self, session: WorkerSession) -> None:
        """A worker inside of this agent has come."""
        self.inner_sessions[session.key] = session

    def leave(self, session: WorkerSession) -> None:
        """It leaves, in order."""
        if self.inner_sessions.pop(session.key, None) is not None:
            self._part(session, "closed")

    @property
    def record(self) -> AgentRecord:
        """This agent's record in Redis."""
        return AgentRecord(
            id=self.id,
            host=self.settings.host_id,
            host_name=self.settings.host_name,
            device=self.device,
            pid=os.getpid(),
            **self.links.published,
            public_key=self.links.public_key,
            started_at=self.started_at,
            version=__version__,
            log=self.log,
            metrics=self.metrics,
            certificate=self.links.certificate.hex(),
        )

    def agent_name(self, agent: str) -> str:
        """What a picture calls an agent of a batch."""
        record = self.record if agent == self.id else self.links.record(agent)
        return agent[:8] if record is None else record.device

    def on_agent_lost(self, agent: str, text: str, epoch: Epoch | None = None) -> None:
        """Another agent is lost: the link to it, or in ``epoch`` alone, of which another agent says so.

        Transfers with it end first, because they know their outcomes best.
        """
        record = self.links.record(agent)
        host, pid, device = ("?", 0, "?") if record is None else (record.shown_host, record.pid, record.device)
        reason = f"the agent {agent} of {device} on host {host} is gone: {text}"
        other = Culprit(agent=agent, host=host, pid=pid)
        self.recorder.add(Incident(at=time.time(), what="link_lost", reason=reason, culprits=(other,)))
        self.registrations.on_agent_lost(agent, epoch)
        self.rendezvous.on_agent_lost(agent, text, epoch)

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Publish this agent and serve until ``done``. ``group`` owns its tasks."""
        self._group = group
        await self.store.agents.publish(self.record)
        self._rest()
        self.spawn(self._note_start())
        self.started.set()
        await self.done.wait()

    async def drain(self) -> None:
        """Refuse new work, let running transfers finish, answer the remaining calls, withdraw from Redis."""
        self.greeting.leaving = True
        try:
            async with asyncio.timeout(0 if self._hurried else DRAIN) as self._patience:
                await self.transfers.idle_tracker.wait()
        except TimeoutError:
            how = "are not waited for" if self._hurried else f"did not end within {DRAIN:.0f} s"
            log.warning("%d transfers %s", self.transfers.idle_tracker.running, how)
        self._patience = None
        moving = {
            key
            for batch in self.registrations.registered_batches()
            if batch.current is not None
            for key in batch.current.calls.values()
        }
        for key in self.calls:
            # Nobody can commit without this agent's vote, so a call that has not begun here or not voted has consumed
            # nothing.
            outcome = "unknown" if key in moving else "withdrawn"
            self.calls.fail(key, AgentLostError(_LEFT, outcome=outcome))
        self.publications.close()
        # Emptied first, so that no session learns that another has closed.
        sessions = [*self.sessions.values(), *self.inner_sessions.values()]
        self.sessions, self.inner_sessions = {}, {}
        for session in sessions:
            self._part(session, "closed")
        try:
            await self.transfers.status_writer.close()
            await self.store.agents.withdraw(timeout=2.0)
        except EthaError as error:
            log.warning("Redis still lists this agent until its lease ends: %s", error)
        self._note("left", f"the agent of {self.device} left in order")
        self.recorder.flush()
        await asyncio.to_thread(self.ring.close)
        await self.events.close()
        for task in self._tasks:
            task.cancel()
        self._gc.cancel()
        self.lane.close()

    def hurry(self) -> None:
        """Do not wait for running transfers when leaving."""
        self._hurried = True
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task of this agent. Its exceptions are logged."""
        assert self._group is not None
        task = self._group.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("a task of the agent failed")

    async def let_go(self, session: WorkerSession, request: Request) -> None:
        """The worker leaves. Answer once nothing here has its memory open, because it may then free the memory."""
        if self.sessions.pop(session.key, None) is not None:
            self.groups.on_worker_lost(session, "closed")
            self.publications.on_worker_lost(session, "closed")
            self._part(session, "closed", released=False)
            # This covers other workers' memory that its batches have opened here, too.
            await self.registrations.released(session)
            await self._release(session)
        session.peer.reply(request.id, Released(segments=()))

    async def unmap(self, session: WorkerSession, request: Request, segments: Sequence[str]) -> None:
        """Close memory of a worker that no registration uses any more, once no lane can be inside it."""
        used = [registration.segments(session) for registration in self.registrations.known.values()]
        unused = set(segments).difference(*used)
        spared = session.memory.spare(unused)
        if session.memory.on_device:
            await self._at_rest(session)
        else:
            await self.registrations.released(session)
        await asyncio.to_thread(spared.release)  # for CPU memory: views keep a segment while a lane is inside it
        # Freeing GPU memory that another process has open is undefined, so the worker waits for this answer.
        session.peer.reply(request.id, Released(segments=tuple(sorted(unused))))

    async def _at_rest(self, session: WorkerSession) -> None:
        """Return when no transfer moves a worker's memory."""
        await self.transfers.idle_tracker.wait_for(
            batch for batch in self.transfers.idle_tracker.moving if batch.registration.serves(session)
        )

    # ---- the bus's Service --------------------------------------------------------------------

    def hello(self, peer: Peer, hello: WorkerHello) -> WorkerWelcome:
        """A worker connects; ConfigError if it wants another namespace or another Redis."""
        welcome = self.greeting.welcome(peer, hello, alone=not self.sessions, warning=self.links.hub.warning)
        self.admit(peer, hello, welcome)
        return welcome

    def admit(self, peer: Peer, hello: WorkerHello, welcome: WorkerWelcome) -> None:
        """Open the session of a worker or an observer that got ``welcome``."""
        if hello.observer:
            self._observers.add(peer.key)
            return
        if welcome.leaving:
            self.done.set()
            return
        holder = Holder(
            agent=self.id,
            host=self.settings.host_id,
            pid=peer.pid,
            start=peer.start,
            name=self.settings.host_name,
        )
        mappings = None if self.card is None else self.card.mappings
        memory = WorkerMemory(peer.pid, peer.start, mappings=mappings)
        self.sessions[peer.key] = WorkerSession(peer=peer, holder=holder, memory=memory, differs=welcome.differs)
        self._rest()

    def note_reach(self, peer: Peer, why_not: str) -> None:
        """A worker's memory was found within reach ("") or not before this agent was ready."""
        self._session(peer).memory.private = not why_not

    def received(self, peer: Peer, request: Request) -> None:
        """Handle one message of a worker. Every error becomes its answer."""
        try:
            if peer.key in self._observers:
                return self._show(peer, request)
            session = self._session(peer)
            if self.greeting.leaving and not isinstance(request.message, GetStatus):
                raise AgentUnavailableError(LEAVING)
            self._dispatch(session, request)
        except EthaError as error:
            self._refuse(peer, request, error)
        except Exception as error:
            log.exception("request %s failed", type(request.message).__name__)
            text = with_note(f"the agent failed, a bug of Etha: {error!r}", self.links.log_note)
            self._refuse(peer, request, ProtocolError(text))

    def said(self, peer: Peer, message: Any) -> None:
        """A worker says how far it has come with what it moves itself."""
        session = self._session(peer)
        match message:
            case Pulled(batch=batch, epoch=epoch):
                # Also if a rank has closed the batch, or this agent is leaving: what moves goes on.
                if (registered := self.registrations.find(session, batch, epoch).registered) is not None:
                    self.transfers.pulled(session, registered, message)
            case Streamed(batch=batch, epoch=epoch):
                if (registered := self.registrations.find(session, batch, epoch).registered) is not None:
                    self.transfers.streamed(session, registered, message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is a request")

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """A worker does not want an answer any more."""
        self.calls.cancelled(peer, request_id)

    def descriptors(self, peer: Peer, header: dict[str, Any], fds: list[int]) -> None:
        """A worker shares memory: a segment, or its revocation page."""
        try:
            session = self._session(peer)
        except EthaError:
            for fd in fds:
                os.close(fd)
            raise
        session.show(header, fds)

    def on_disconnected(self, peer: Peer, reason: Reason) -> None:
        """A worker's or an observer's connection has ended."""
        self._observers.discard(peer.key)
        if (session := self.sessions.pop(peer.key, None)) is not None:
            # Not when this agent leaves: a group goes on without it.
            self.groups.on_worker_lost(session, reason)
            self.publications.on_worker_lost(session, reason)
            self._part(session, reason)

    def _part(self, session: WorkerSession, reason: Reason, *, released: bool = True) -> None:
        if reason == "died" and session.seats:
            self.recorder.add(death(session))
        self.calls.drop(session.peer)
        self.rendezvous.on_worker_lost(session, reason)
        self.registrations.on_worker_lost(session, reason)
        if released:
            self.spawn(self._release(session))
        self._rest()

    async def _release(self, session: WorkerSession) -> None:
        """Release a worker's memory, once no lane can be inside it."""
        await self._at_rest(session)
        if self.card is not None:
            self.card.release(session)
        await asyncio.to_thread(session.memory.close)
        session.revocation = None  # ended registrations keep their sessions for a while
        self._gc.soon()

    # ---- inside -------------------------------------------------------------------------------

    def _session(self, peer: Peer) -> WorkerSession:
        """A worker's session. AgentUnavailableError after ``drain`` has removed it, ProtocolError for an observer."""
        if peer.key in self._observers:
            raise ProtocolError("an observer shows no memory")
        session = self.sessions.get(peer.key) or self.inner_sessions.get(peer.key)
        if session is None:
            raise AgentUnavailableError(LEAVING)
        return session

    def _dispatch(self, session: WorkerSession, request: Request) -> None:
        """Hand a worker's request to the service that handles it. EthaErrors become its answer."""
        peer = session.peer
        match request.message:
            case Transfer() as message:
                found = self.registrations.registered(session, message.batch, message.epoch)
                self.transfers.transfer(session, request, message, found)
            case InitPair() as message:
                self.rendezvous.init(session, request, message)
            case Register() as message:
                self.registrations.register(session, request, message)
            case AttachShadows() | AttachSnapshot() as message:
                self.registrations.attach(session, request, message)
            case ExchangeSegments() as message:
                self.registrations.exchange(session, request, message)
            case Supersede(batch=batch, epoch=epoch):
                self.transfers.supersede(session, self.registrations.registered(session, batch, epoch))
                peer.reply(request.id, Ok())
            case WaitOffer(batch=batch, epoch=epoch):
                self.transfers.offers.wait(session, request, self.registrations.registered(session, batch, epoch))
            case Confirm():
                peer.reply(request.id, Ok())  # PairLost and BatchLost have been sent before
            case CloseBatch() as message:
                self.registrations.close(session, request, message)
            case Probe(address=address, token=token):
                text = session.probe(address, token)
                peer.reply(request.id, Probed(reaches=not text, text=text))
            case EnterGroup() as message:
                self.groups.enter(session, request, message)
            case DepartGroup() as message:
                self.groups.depart(session, request, message)
            case GroupProgress() as message:
                self.groups.take_progress(session, request, message)
            case PutValues() | GetValues() | AddValue() | SwapValue() as message:
                self.groups.values(session, request, message)
            case Publish() | BeginPut() | FinishPut() | WaitHeld() | WaitHolders():
                self.publications.handle(session, request)
            case GetSubscribers() | ClosePublication():
                self.publications.handle(session, request)
            case DescribePublication() | Subscribe() | ClaimVersion() | EndHop() | CloseSubscription():
                self.publications.handle(session, request)
            case LeavePair(pair=pair):
                self.rendezvous.leave(session, pair)
                peer.reply(request.id, Ok())
            case LetGo(all=True):
                self.spawn(self.let_go(session, request))
            case LetGo(segments=segments):
                self.spawn(self.unmap(session, request, segments))
            case _:
                self._show(peer, request)

    def _show(self, peer: Peer, request: Request) -> None:
        """Answer the requests of workers and observers: status, events, pictures. ProtocolError for any other."""
        match request.message:
            case GetStatus():
                self.spawn(self._status(peer, request.id))
            case GetEvents() as message:
                self.spawn(self._events(peer, request.id, message))
            case GetRecords() as message:
                self.spawn(self._records(peer, request.id, message))
            case GetPicture() as message:
                self.spawn(self._picture(peer, request.id, message))
            case _:
                raise ProtocolError(f"{type(request.message).__name__} is not a request, or not an observer's")

    async def _status(self, peer: Peer, request_id: int) -> None:
        stale, _, seen, groups, (publications, unread) = await asyncio.gather(
            self.rendezvous.refresh(),
            self.transfers.stragglers.refresh(self.registrations.registered_batches()),
            self._seen(),
            self.groups.shown(PATIENCE),
            self._publications(),
        )
        stale, hints = stale or groups.stale or unread, await self.rendezvous.hints()
        peer.reply(request_id, Status(report=report(self, stale, seen, hints, groups.lines, publications)))

    async def _publications(self) -> tuple[list[dict[str, Any]], str]:
        """The lines of all publications of the namespace; or none, and why they could not be read."""
        try:
            return [view.line() for view in await self.store.publications.views(timeout=PATIENCE)], ""
        except EthaError as error:
            return [], error.message

    async def _seen(self) -> list[tuple[AgentRecord, float | None]]:
        """The agents that Redis knows, and the seconds since they renewed their leases.

        None for what this agent remembers: all if Redis does not answer, and linked agents that Redis has lost.
        """
        try:
            seen: list[tuple[AgentRecord, float | None]] = [*await self.store.agents.seen(timeout=PATIENCE)]
            known = [self.links.record(peer.agent) for peer in self.links.hub.peers()]
        except EthaError as error:
            log.debug("status with the agents that were known: %s", error)
            seen, known = [], [self.record, *self.links.records()]
        ids = {record.id for record, _ in seen}
        return [*seen, *((record, None) for record in known if record is not None and record.id not in ids)]

    async def _events(self, peer: Peer, request_id: int, message: GetEvents) -> None:
        count, after = max(1, min(message.count, MAX_EVENTS)), message.after or "-"
        try:
            if not message.wait:
                found = await self.store.events(count, after=after, timeout=EVENTS_SECONDS)
            else:
                async with self.store.changes(self.store.keys.events, ticks=False) as changed:
                    while not (found := await self.store.events(count, after=after, timeout=math.inf)):
                        await changed()
        except EthaError as error:
            peer.fail(request_id, error, None)
        else:
            peer.reply(request_id, Events(events=tuple({**fields, "id": at} for at, fields in found)))

    async def _records(self, peer: Peer, request_id: int, message: GetRecords) -> None:
        found = await self.record_queries.ask(message.since, failed=message.failed)
        peer.reply(request_id, Records(agents=tuple(found)))

    def _said(self, agent: str, scope: Scope, message: Said) -> None:
        """Another agent says something that concerns no pair as a whole."""
        if isinstance(message, AskRecords | TellRecords):
            self.record_queries.hear(agent, scope, message)
        else:
            self.registrations.hear(agent, scope, message)

    async def _picture(self, peer: Peer, request_id: int, message: GetPicture) -> None:
        try:
            found = await self._pictures.of(self.registrations.known.values(), message)
        except EthaError as error:
            peer.fail(request_id, error, None)
        else:
            peer.reply(request_id, Picture(picture=found.to_plain()))

    def _refuse(self, peer: Peer, request: Request, error: EthaError) -> None:
        if (key := (peer.key, request.id)) in self.calls:
            self.calls.fail(key, error)
        else:
            peer.fail(request.id, error, None)
            self._record(peer, request.message, error)

    async def _note_start(self) -> None:
        """Record that this agent has come, and that the one before it has not left, if it has not."""
        before = await asyncio.to_thread(ended_badly, self.ring.directory, self.ring.device)
        if before is not None:
            text = f"the agent of {self.device} before this one has ended without leaving: it was killed, or crashed"
            self.recorder.add(Incident(at=time.time(), what="killed", reason=text, culprits=(before,)))
        self._note("started", f"the agent of {self.device} started, version {__version__}")

    def _note(self, what: str, reason: str) -> None:
        """Record something that happened to this agent itself."""
        me = Culprit(agent=self.id, host=self.settings.host_name, pid=os.getpid())
        self.recorder.add(Incident(at=time.time(), what=what, reason=reason, culprits=(me,), failed=False))

    def _record(self, peer: Peer, message: Any, error: EthaError) -> None:
        """A worker's request ends with an error."""
        session = self.sessions.get(peer.key)
        if session is not None and (record := failed_request(session, message, error)) is not None:
            self.recorder.add(record)

    def _rest(self) -> None:
        """Start the timer that ends this agent ``idle`` seconds after the last worker, if it has one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._idle is not None and not self.sessions:
            self._timer = asyncio.get_running_loop().call_later(self._idle, self.done.set)
