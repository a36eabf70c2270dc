"""Registrations: publish, wait for all ranks, plan, agree, close.

If one rank cannot use a registered batch, the registration ends on all agents before that rank gets its error:

    agent of the rank                      every other agent of the batch
    its workers: BatchLost                 |
    Forsaken ----------------------------> its workers: BatchLost
    <------------------------------- Noted |
    the rank: Ok

So once the failed rank has its error, no agent gives the old registration to any rank again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import suppress
from weakref import WeakValueDictionary

from etha.agent.protocol.capabilities import Terms
from etha.agent.protocol.effects import Answer, CallKey, Fail, Member
from etha.agent.protocol.evaluation import Evaluation
from etha.agent.protocol.records import Manifest, Record
from etha.agent.protocol.registration import (
    BatchEffect,
    Declare,
    EnrolAgain,
    EvaluateRoster,
    RegistrationState,
    Stand,
    Unenroll,
)
from etha.agent.runtime import tasks
from etha.agent.runtime.gc_scheduler import GcScheduler
from etha.agent.runtime.host_sharing import exhibits
from etha.agent.runtime.peers import Epoch, PeerLinks
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.runtime.status_writer import quietly
from etha.agent.runtime.tasks import Spawn, ends_within, outage
from etha.agent.services.batch_state import Enrolment, Field, Key, LocalRegistration, RegisteredBatch, Tensors
from etha.agent.services.hints import LIMIT, Hints
from etha.agent.services.manifests import ManifestCache
from etha.agent.services.planning import plan
from etha.agent.services.rendezvous import RendezvousService
from etha.agent.services.transfers import TransferService
from etha.bus.codec import Request
from etha.bus.messages import AttachShadows, AttachSnapshot, BatchLost, CloseBatch, ExchangeSegments, Ok, Register
from etha.config import check_name
from etha.errors import (
    ConfigError,
    EthaError,
    PeerLostError,
    ProtocolError,
    RedisUnavailableError,
    RegistrationError,
    RendezvousTimeoutError,
    with_note,
    withdrawn,
)
from etha.peer.introductions import AskMissing, Copied, Exhibits, Forsaken, Noted, TellMissing
from etha.peer.wire import Said, Scope
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Most seconds that a worker which has closed a batch waits until its agent has unmapped the batch's memory. A worker
#: of a card waits without this limit, because CUDA does not define what happens to memory that is freed while another
#: process has it open. Its client has a limit of its own, and then never frees the memory.
_PATIENCE = 1.0
#: Least seconds that Redis is given to take an entry, whatever the call's deadline: an entry whose answer nobody waited
#: for would count as a rank that has come.
_ENROLL = 10.0


class RegistrationService:
    """All registrations of this agent."""

    def __init__(
        self,
        *,
        me: str,
        store: Store,
        links: PeerLinks,
        calls: OpenCalls,
        rendezvous: RendezvousService,
        transfers: TransferService,
        gc_scheduler: GcScheduler,
        spawn: Spawn,
        hints: Hints,
    ) -> None:
        self._hints = hints
        self._me, self._store, self._links, self._calls, self._rendezvous = me, store, links, calls, rendezvous
        self._transfers, self._gc, self._spawn = transfers, gc_scheduler, spawn
        self.manifests = ManifestCache(store)
        self.known: dict[Key, LocalRegistration] = {}
        #: Registrations that are over but still hold workers' memory.
        self._releasing: dict[Key, LocalRegistration] = {}
        self._memory = RegistrationMemory()
        self._forsaking = Forsaking(links)
        #: Held from a rank's enrolment until it waits or is taken back, so that taking back one call's entry does not
        #: take that of the rank's next call.
        self._enrolling: WeakValueDictionary[tuple[str, str, Member], asyncio.Lock] = WeakValueDictionary()

    def register(self, session: WorkerSession, request: Request, message: Register) -> None:
        """A worker calls ``register_tensors``."""
        check_name("batch", message.batch)
        member, epochs = membership(self._rendezvous, session, message)
        old = self._open(session, message.batch)
        if old is not None and old.machine.lost is None and old.closed is None:
            raise RegistrationError(
                f"batch {message.batch!r} is open in this client already; close its handle before you register others"
            )
        self.leave(session, message.batch)  # a registration of an earlier epoch needs no close
        session.staged = message.staged or session.staged
        box: list[LocalRegistration] = []
        call = _called(message, member)
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(call, box, key, expired))
        enrolment = Enrolment(
            session=session, key=key, member=member, epochs=epochs, message=message, deadline=request.deadline, box=box
        )
        self._spawn(self._enroll(enrolment))

    def attach(self, session: WorkerSession, request: Request, message: AttachShadows | AttachSnapshot) -> None:
        """Take the memory into which a worker receives an atomic batch, or in which it keeps snapshots."""
        registration = self.find(session, message.batch, message.epoch)
        member = session.seats[registration.pairs[0]].member
        registration.tensors[member].attach(message)
        if isinstance(message, AttachSnapshot):
            self._spawn(self._show_snapshot(registration, member))
        session.peer.reply(request.id, Ok())

    def exchange(self, session: WorkerSession, request: Request, message: ExchangeSegments) -> None:
        """A worker has put what it received in place by exchanging segments: do the same here.

        RegistrationError, before anything has changed, if somebody else maps them.
        """
        registered = self.registered(session, message.batch, message.epoch)
        registration = registered.registration
        own = {member: tensors for member, tensors in registration.tensors.items() if tensors.session is session}
        names = {name for pair in message.segments for name in pair}
        if not names <= set().union(*(tensors.segments for tensors in own.values())):
            raise RegistrationError(f"batch {message.batch!r}: only its own memory can be exchanged")
        for other in self.known.values():
            if other is not registration and names & other.segments(session):
                raise RegistrationError(f"batch {other.name!r} uses the same memory")
        for side in {side for side, _ in own} & registered.evaluation.plans.keys():
            if readers := registered.read_by(side) - {registered.me}:
                raise RegistrationError(f"agents of this host copy from the same memory: {', '.join(sorted(readers))}")
        session.memory.exchange(message.segments)
        for tensors in own.values():
            tensors.exchange(message.segments)
        session.peer.reply(request.id, Ok())

    def close(self, session: WorkerSession, request: Request, message: CloseBatch) -> None:
        """A worker closes its handle. A handle of an earlier epoch must not close its successor."""
        registration = self._open(session, message.batch)
        if registration is None or registration.epoch != message.epoch:
            session.peer.reply(request.id, Ok())
        elif not message.why:
            self.leave(session, message.batch)
            session.peer.reply(request.id, Ok())
        else:
            text = self._forsake(registration, session, message.why)
            self.leave(session, message.batch)
            self._spawn(self._tell_all(registration, session, request, text))

    def find(self, session: WorkerSession, batch: str, epoch: int) -> LocalRegistration:
        """The registration of a worker's call; raises an error that says why there is none."""
        registration = self._open(session, batch)
        if registration is None:
            raise RegistrationError(f"batch {batch!r} is not registered by this client: call register_tensors first")
        for pair in registration.pairs:
            error = self._rendezvous.error(session.seats[pair]) if pair in session.seats else registration.machine.lost
            if error is not None:
                raise error
        if (lost := registration.machine.lost) is not None:
            raise withdrawn(lost)
        registration.check_epoch(epoch)
        return registration

    def registered(self, session: WorkerSession, batch: str, epoch: int) -> RegisteredBatch:
        """As ``find``, for a call that needs all ranks. ProtocolError if they have not all registered, PeerLostError if
        one has closed the batch."""
        registration = self.find(session, batch, epoch)
        if (found := registration.registered) is None:
            raise ProtocolError(f"batch {batch!r}: its registration has not been answered yet")
        if (closed := registration.closed) is not None:
            self._push_lost(registration, closed)
            raise PeerLostError(closed.message, reason=closed.reason, outcome="withdrawn")
        return found

    def moves(self, session: WorkerSession, batch: str) -> bool:
        """Whether a transfer of a worker's batch runs."""
        registration = self._open(session, batch)
        return registration is not None and registration.moving

    def over_streams(self, session: WorkerSession, batch: str) -> bool:
        """Whether all of a worker's registered batch goes over streams, in either direction."""
        registration = self._open(session, batch)
        registered = None if registration is None else registration.registered
        return registered is not None and registered.transports == "tcp"

    def registered_batches(self) -> list[RegisteredBatch]:
        """The batches of the known registrations on which all agents agree."""
        return [one.registered for one in self.known.values() if one.registered is not None]

    # ---- events of workers and pairs ----------------------------------------------------------

    def leave(self, session: WorkerSession, batch: str) -> None:
        """A worker's part in a batch ends, and its waiting calls with it."""
        registration = self._open(session, batch)
        session.batches.pop(batch, None)
        if registration is None:
            return
        for member in [m for m, t in registration.tensors.items() if t.session is session]:
            text = f"{member[0]} rank {member[1]} has closed batch {batch!r}: call register_tensors again"
            error = _forsaken(text, member)
            if (registered := registration.registered) is not None:
                self._transfers.withdraw(registered, member, error)
                if registration.machine.lost is None and registration.closed is None:
                    self._spawn(self._tell_that_closed(registration, error))
            self._perform(registration, registration.machine.close(member))
        # Other workers here still have it open.
        if not registration.over and registration.machine.state is RegistrationState.REGISTERED:
            self._let_go(registration)

    def on_worker_lost(self, session: WorkerSession, reason: str) -> None:
        """A worker is gone. Its pairs break, too, unless its process holds them through another client."""
        for batch in list(session.batches):
            if (registration := self._open(session, batch)) is not None:
                for side, rank in [m for m, t in registration.tensors.items() if t.session is session]:
                    how = "closed its client" if reason == "closed" else f"died (pid {session.holder.pid})"
                    error = PeerLostError(f"{side} rank {rank} {how}", reason=reason, culprits=[(side, rank)])
                    self._break(registration, error)
            self.leave(session, batch)

    def broken(self, pair: str, epoch: int, error: PeerLostError) -> None:
        """A pair's epoch is over, and so are its batches."""
        for registration in list(self.known.values()):
            if registration.epochs.get(pair) == epoch:
                self._break(registration, error)

    # ---- messages of other agents -------------------------------------------------------------

    def hear(self, agent: str, scope: Scope, message: Said) -> None:
        """A message about a registration, from one of the agents of its pair."""
        key = (scope.pair, scope.batch, scope.generation)
        if isinstance(message, Noted):
            self._forsaking.hear(agent, message)
            return
        registration = self.known.get(key) or self._memory.ended(key)
        batch = registration.registered if registration is not None else None
        if registration is None and isinstance(message, Forsaken) and not message.closed:
            self._memory.note_lost(key, _forsaken(message.text))
            self._links.tell(agent, scope, Noted(request=message.request))
        elif registration is None:  # the other agent has seen all entries before this one
            self._memory.hold(key, agent, message)
        elif registration.epoch != scope.epoch or agent not in registration.agents:
            log.warning("agent %s is no part of %s", agent, scope)
        elif isinstance(message, Exhibits):
            registration.show(agent, message)
        elif isinstance(message, Forsaken):
            (self._end_calls if message.closed else self._end_for_all)(registration, _forsaken(message.text))
            self._links.tell(agent, scope, Noted(request=message.request))
        elif isinstance(message, AskMissing | TellMissing):
            self._transfers.stragglers.hear(agent, registration, message)
        elif isinstance(message, Copied):
            if batch is not None:
                self._transfers.progress_reporter.heard(batch, agent, message)
        elif batch is None:
            if key in self.known:  # nobody here takes part in a closed one any more
                registration.early.append((agent, message))  # type: ignore[arg-type]
        else:
            self._transfers.hear(batch, agent, message)  # type: ignore[arg-type]

    def on_agent_lost(self, agent: str, epoch: Epoch | None = None) -> None:
        """An agent is lost, in ``epoch`` alone if one is given: transfers with it end, each with the outcome that can
        be known."""
        self._forsaking.on_agent_lost(agent, epoch)
        for registration in [*self.known.values(), *self._memory.ended_with(agent)]:
            part = epoch is None or registration.epochs.get(epoch[0]) == epoch[1]
            if part and agent in registration.agents and registration.registered is not None:
                self._transfers.on_agent_lost(registration.registered, agent, by_word=epoch is not None)

    # ---- inside -------------------------------------------------------------------------------

    def _open(self, session: WorkerSession, batch: str) -> LocalRegistration | None:
        """The registration that a worker has open under this id."""
        where = session.batches.get(batch)
        return self.known.get((where[0], batch, where[1])) if where is not None else None

    def _forsake(self, registration: LocalRegistration, session: WorkerSession, why: str) -> str:
        """A worker cannot use a registered batch: end it, because transfers with that worker would wait in vain."""
        ranks = [f"{side} rank {rank}" for (side, rank), t in registration.tensors.items() if t.session is session]
        text = f"{' and '.join(ranks)} cannot take part in batch {registration.name!r}, register it again: {why}"[:4000]
        self._end_for_all(registration, _forsaken(text), but=session)
        return text

    async def _show_snapshot(self, registration: LocalRegistration, member: Member) -> None:
        """Tell the agents that copy from ``member`` where its snapshots lie."""
        tensors = registration.tensors.get(member)  # None if the batch was closed at once
        readers = registration.registered.read_by(member[0]) if registration.registered is not None else ()
        if not readers or tensors is None or tensors.snapshot is None:
            return
        shown = {member: (tensors.session, tensors.snapshot)}
        for message in await asyncio.to_thread(exhibits, shown, snapshot=True):
            for agent in readers:
                self._links.tell(agent, registration.scope, message)

    async def _tell_all(
        self, registration: LocalRegistration, session: WorkerSession, request: Request, text: str
    ) -> None:
        await self._forsaking.tell(registration.scope, registration.agents - {self._me}, text, request.deadline)
        session.peer.reply(request.id, Ok())

    async def _tell_that_closed(self, registration: LocalRegistration, error: PeerLostError) -> None:
        """A rank here has closed the batch. The others would wait for it in vain, so the calls of all end."""
        self._end_calls(registration, error)
        deadline, others = asyncio.get_running_loop().time(), registration.agents - {self._me}
        await self._forsaking.tell(registration.scope, others, error.message, deadline, closed=True)

    def _end_calls(self, registration: LocalRegistration, error: PeerLostError) -> None:
        """A rank has closed the batch: no transfer can begin any more. One that runs ends as it must."""
        if registration.closed is None and registration.machine.lost is None:
            registration.closed = error
            if registration.registered is not None:  # else once it is
                self._spawn(self._end_waiting(registration, registration.registered, error))

    async def _end_waiting(
        self, registration: LocalRegistration, registered: RegisteredBatch, error: PeerLostError
    ) -> None:
        await self._transfers.idle_tracker.wait_for([registered])
        if registration.machine.lost is None:
            self._push_lost(registration, error)
            self._transfers.break_up(registered, error)

    def _end_for_all(
        self, registration: LocalRegistration, error: PeerLostError, *, but: WorkerSession | None = None
    ) -> None:
        """End a registration while its pair stays: inform the workers here that hold it, then end their calls."""
        if registration.machine.lost is None:
            self._push_lost(registration, error, but=but)
        self._break(registration, error)

    def _push_lost(
        self, registration: LocalRegistration, error: PeerLostError, *, but: WorkerSession | None = None
    ) -> None:
        """Inform the workers here that hold a registration."""
        lost = BatchLost(
            pair=registration.pairs[0],
            epoch=registration.epoch,
            batch=registration.name,
            generation=registration.generation,
            reason=error.reason,
            text=error.message,
        )
        for member in sorted(registration.machine.holders):
            if (session := registration.tensors[member].session) is not but:
                session.peer.push(lost)

    def _break(self, registration: LocalRegistration, error: PeerLostError) -> None:
        self._memory.note_lost(registration.key, error)
        self._perform(registration, registration.machine.break_up(error))
        if registration.registered is not None:
            self._transfers.break_up(registration.registered, error)

    def _ended(self, call: str, box: list[LocalRegistration], key: CallKey, expired: bool) -> None:
        if box:
            self._spawn(self._expire(box[0], key, cancelled=not expired))
            return
        if expired:
            text = f"{call} ended at its deadline before Redis at {self._store.url} had answered"
            self._calls.fail(key, RedisUnavailableError(text))
        else:  # which says nothing about Redis
            self._calls.fail(key, RendezvousTimeoutError(f"{call} was cancelled before Redis had its registration"))

    async def _expire(self, registration: LocalRegistration, key: CallKey, *, cancelled: bool) -> None:
        """End a call that was cancelled, or whose deadline has passed, unless it has been answered meanwhile.

        The worker gets its error last, so that no other rank counts on this registration when the worker registers
        again. The call leaves the registration before the first await, because other ranks may begin it anew meanwhile.
        """
        hint, already = "", frozenset(registration.machine.absent)
        if not cancelled and already:
            hint, _ = await asyncio.gather(
                self._hints.of_batch(registration.pairs[0], registration.name),
                ends_within(LIMIT, self._look(registration)),  # not every rank of many is announced
            )
        effects = registration.machine.expire(key, cancelled=cancelled, hint=hint, already=already)
        fails = [effect for effect in effects if isinstance(effect, Fail)]
        for fail in fails:
            registration.drop(fail.call)
        self._perform(registration, [])
        taken_back = asyncio.Event()
        self._spawn(self._take_back_all(registration, effects, taken_back))
        # Without Redis this takes longer than the worker waits for its answer.
        await ends_within(tasks.TAKEN_BACK, taken_back.wait())
        for fail in fails:
            self._calls.fail(fail.call, fail.error)

    async def _take_back_all(
        self, registration: LocalRegistration, effects: list[BatchEffect], taken_back: asyncio.Event
    ) -> None:
        try:
            for effect in effects:
                if isinstance(effect, Unenroll):
                    await self._take_back(registration.scope, registration.agents, effect.member)
        finally:
            taken_back.set()

    async def _take_back(self, scope: Scope, agents: Collection[str], member: Member) -> None:
        """Take back the entry of a rank whose call has ended early.

        If the entry had completed the roster, other ranks may hold the batch by now, or will soon, and their transfers
        would wait for this rank in vain. Then the registration ends for all of them.
        """
        key = (scope.pair, scope.batch, scope.generation)
        registration = self.known.get(key)
        try:
            if await self._store.batches.unenroll(*key, *member):
                return
        except EthaError as error:
            outage(log, "batch %s: %s rank %d could not be taken back: %s", scope.batch, *member, error)
            if registration is None or registration.machine.absent:
                return
        text = (
            f"{member[0]} rank {member[1]} cannot take part in batch {scope.batch!r}, register it again: its "
            f"register_tensors ended early, and others may have counted on it"
        )
        if (registration := self.known.get(key)) is not None:
            self._end_for_all(registration, _forsaken(text))
        else:
            self._memory.note_lost(key, _forsaken(text))
        await self._forsaking.tell(scope, set(agents) - {self._me}, text, asyncio.get_running_loop().time())

    async def _enroll(self, enrolment: Enrolment) -> None:
        session, key, member, message = enrolment.session, enrolment.key, enrolment.member, enrolment.message
        epochs, deadline = enrolment.epochs, enrolment.deadline
        turn = self._enrolling.setdefault((message.pairs[0], message.batch, member), asyncio.Lock())
        async with turn:
            try:
                manifest = await asyncio.to_thread(Manifest.of, message, member[1])
                timeout = math.inf if deadline == math.inf else deadline - asyncio.get_running_loop().time()
                digest = await self.manifests.publish(manifest, timeout=timeout)
                primary = message.pairs[0]
                if (lost := lost_since(self._rendezvous, session, epochs)) is not None:
                    raise lost
                if key not in self._calls:
                    return
                view = self._rendezvous.view(primary)
                expected = sum(len(side.members) for side in view.sides.values())
                generation = await self._store.batches.enroll(
                    primary,
                    message.batch,
                    message.epoch,
                    member[0],
                    member[1],
                    Record.of(message, digest).to_json(),
                    expected=expected,
                    over=self._memory.over(primary, message.batch),
                    timeout=max(timeout, _ENROLL),
                )
                lost = lost_since(self._rendezvous, session, epochs) or self._memory.lost(
                    (primary, message.batch, generation)
                )
                if lost is not None:
                    await self._store.batches.unenroll(primary, message.batch, generation, *member)
                    raise lost  # the batch is not registered yet, so nothing else informs this call
                if key not in self._calls:  # the call was given up, or its worker is gone
                    scope = Scope(pair=primary, epoch=message.epoch, batch=message.batch, generation=generation)
                    agents = {holder.agent for side in view.sides.values() for holder in side.members.values()}
                    await self._take_back(scope, agents, member)
                    return
            except RedisUnavailableError as error:
                self._calls.fail(key, RedisUnavailableError(f"{_called(message, member)}: {error.message}"))
                return
            except EthaError as error:
                self._calls.fail(key, error)
                return
            except Exception as error:
                log.exception("batch %s: registering failed", message.batch)
                text = with_note(f"the agent failed to register, a bug of Etha: {error!r}", self._links.log_note)
                self._calls.fail(key, ProtocolError(text))
                return
            registration = self.known.get((primary, message.batch, generation))
            if registration is None:
                registration = LocalRegistration.begin(
                    self._me, message.batch, message.pairs, epochs, generation, view, self._links.mappings
                )
                self.known[registration.key] = registration
                for agent, said in self._memory.held(registration.key):
                    self.hear(agent, registration.scope, said)
                self._spawn(self._follow(registration))
            enrolment.box.append(registration)
            registration.enrolments[key] = enrolment
            registration.tensors[member] = Tensors(
                session,
                {entry.name: entry.handle for entry in message.entries},
                tuple(entry.name for entry in message.entries),
            )
            session.batches[message.batch] = (primary, generation)
            self._perform(registration, registration.machine.enrolled(key, member))

    async def _follow(self, registration: LocalRegistration) -> None:
        """Read the roster after every wake-up until this agent's part is decided."""
        primary, batch, _ = registration.key
        states = (RegistrationState.ENROLLING, RegistrationState.EVALUATING, RegistrationState.AGREEING)
        async with self._store.changes(self._store.keys.batch(primary, batch)) as changed:
            while registration.machine.state in states:
                await self._look(registration)
                if registration.machine.state in states:
                    await changed()

    async def _look(self, registration: LocalRegistration) -> None:
        """Read the roster, or what of it can still change."""
        machine, store = registration.machine, self._store.batches
        asking = dict(machine.waiting)
        try:
            if machine.state is RegistrationState.ENROLLING:
                roster = await store.roster(*registration.key)
            else:
                roster = await store.verdicts(*registration.key, sorted(machine.everybody), set(asking.values()))
            self._perform(registration, machine.rostered(roster.entries, roster.verdicts, roster.newest, asking))
        except EthaError as error:
            outage(log, "batch %s: the roster could not be read: %s", registration.name, error)

    def _perform(self, registration: LocalRegistration, effects: list[BatchEffect]) -> None:
        primary, batch, generation = registration.key
        for effect in effects:
            match effect:
                case Answer(call=key, message=message):
                    registration.enrolments.pop(key, None)
                    self._calls.answer(key, message)
                case Fail(call=key, error=error):
                    registration.drop(key)
                    self._calls.fail(key, error)
                case EnrolAgain(call=key):
                    enrolment = registration.enrolments[key]
                    log.info("%s: Redis has lost its entry", _called(enrolment.message, enrolment.member))
                    registration.drop(key)
                    enrolment.box.clear()
                    self._spawn(self._enroll(enrolment))
                case EvaluateRoster(entries=entries):
                    self._spawn(self._evaluate(registration, dict(entries)))
                case Declare(verdict=verdict):
                    writing = self._store.batches.verdict(
                        primary, batch, generation, self._me, verdict, expected=len(registration.agents)
                    )
                    self._spawn(quietly(writing))
                case Unenroll(member=(side, rank)):
                    self._spawn(quietly(self._store.batches.unenroll(primary, batch, generation, side, rank)))
                case Stand(evaluation=evaluation, terms=terms):
                    self._stand(registration, evaluation, terms)
        if registration.machine.state in (RegistrationState.REFUSED, RegistrationState.LOST, RegistrationState.CLOSED):
            registration.shared_tensors.close()
            registration.shared_snapshots.close()
        closed = (
            registration.machine.state is RegistrationState.CLOSED and self.known.get(registration.key) is registration
        )
        if closed:
            del self.known[registration.key]
        if closed and not registration.machine.alone:
            self._memory.keep(registration)
        if closed or (registration.machine.state is RegistrationState.LOST and not registration.over):
            self._let_go(registration)

    def _let_go(self, registration: LocalRegistration) -> None:
        """Begin to release a registration that starts no transfer any more."""
        registration.over = True
        self._releasing[registration.key] = registration
        self._spawn(self._release(registration))

    async def _release(self, registration: LocalRegistration) -> None:
        """Release workers' memory and a GPU's tables, once no lane can be inside them."""
        if registration.registered is not None:
            await self._transfers.idle_tracker.wait_for([registration.registered])
        try:
            await registration.release()
        finally:
            self._releasing.pop(registration.key, None)
            registration.released.set()
        if registration.machine.state is RegistrationState.CLOSED:
            registration.forget()
        self._gc.soon()

    async def released(self, session: WorkerSession) -> None:
        """Return when the batches that a worker has left hold none of its memory, except those whose transfer still
        runs.

        They release it shortly after ``leave``. If their streams are slow to close, this waits at most ``_PATIENCE``.
        """
        left = [one for one in self._releasing.values() if one.serves(session) and not one.moving]
        with suppress(TimeoutError):
            async with asyncio.timeout(None if session.memory.on_device else _PATIENCE):
                for one in left:
                    await one.released.wait()

    async def _evaluate(self, registration: LocalRegistration, entries: dict[Member, str]) -> None:
        try:
            evaluation, verdict = await plan(registration, entries, self._store, self.manifests, self._links)
        except EthaError as error:
            self._perform(registration, registration.machine.failed(error))
            return
        except Exception as error:
            log.exception("batch %s: planning failed", registration.name)
            what = f"{type(error).__name__}: {error}"
            text = f"batch {registration.name!r}: planning failed in the agent, a bug of Etha: {what}"
            failed = RegistrationError(with_note(text, self._links.log_note))
            self._perform(registration, registration.machine.failed(failed))
            return
        self._perform(registration, registration.machine.evaluated(evaluation, verdict))

    def _stand(self, registration: LocalRegistration, evaluation: Evaluation, terms: Terms) -> None:
        transport = None if registration.machine.alone else self._transfers.compiler.transport(registration, terms)
        can_hold = self._transfers.lane_scheduler.can_hold
        batch = registration.registered = RegisteredBatch(registration, evaluation, terms, transport, can_hold)
        fields: dict[str, Field] = {"tensors": evaluation.tensors, "bytes": batch.nbytes, "digest": evaluation.digest}
        fields["transport"] = batch.transports
        for pair, written in registration.records(fields).items():
            self._spawn(quietly(self._store.batches.set_fields(pair, registration.name, written)))
        early, registration.early = registration.early, []
        for agent, message in early:
            self._transfers.hear(batch, agent, message)
        if registration.closed is not None:
            self._spawn(self._end_waiting(registration, batch, registration.closed))


def _forsaken(text: str, *culprits: Member) -> PeerLostError:
    return PeerLostError(text, reason="closed", outcome="withdrawn", culprits=culprits)


#: How many registrations are kept before this agent knows them, and after they were closed.
MAX_KEPT = 256
#: Messages kept for each.
MAX_MESSAGES = 1000


class RegistrationMemory:
    """Bounded memory of registrations before they begin and after they have ended."""

    def __init__(self) -> None:
        self._early: OrderedDict[Key, list[tuple[str, Said]]] = OrderedDict()
        self._ended: OrderedDict[Key, LocalRegistration] = OrderedDict()
        self._lost: OrderedDict[Key, PeerLostError] = OrderedDict()

    def note_lost(self, key: Key, error: PeerLostError) -> None:
        """A registration is over for all, whether this agent knows it or not. Ranks of it may still come."""
        self._lost.setdefault(key, error)
        while len(self._lost) > MAX_KEPT:
            self._lost.popitem(last=False)

    def lost(self, key: Key) -> PeerLostError | None:
        """Why a rank that comes now is too late."""
        return self._lost.get(key)

    def over(self, pair: str, batch: str) -> int:
        """The latest generation of a batch that ended for all; 0 if none is known."""
        return max((generation for of, name, generation in self._lost if (of, name) == (pair, batch)), default=0)

    def hold(self, key: Key, agent: str, message: Said) -> None:
        """Keep a message about a registration that this agent does not know yet; the oldest are dropped."""
        held = self._early.setdefault(key, [])
        if len(held) < MAX_MESSAGES:
            held.append((agent, message))
        while len(self._early) > MAX_KEPT:
            lost, _ = self._early.popitem(last=False)
            log.debug("what was said of batch %s generation %d is dropped", lost[1], lost[2])

    def held(self, key: Key) -> list[tuple[str, Said]]:
        """The messages kept for a registration that is known now, in order."""
        return self._early.pop(key, [])

    def keep(self, registration: LocalRegistration) -> None:
        """A registration over several agents was closed here. Others may still ask for the outcome of its last
        transfer."""
        self._ended[registration.key] = registration
        while len(self._ended) > MAX_KEPT:
            self._ended.popitem(last=False)

    def ended(self, key: Key) -> LocalRegistration | None:
        """A closed registration, if it is remembered."""
        return self._ended.get(key)

    def ended_with(self, agent: str) -> list[LocalRegistration]:
        """The closed registrations in which ``agent`` took part."""
        return [registration for registration in self._ended.values() if agent in registration.agents]


#: Seconds beyond the request's deadline; less than its worker waits. A frozen agent ends the registration as it thaws.
GRACE = 0.5


class Forsaking:
    """Informs other agents, and records which of them have answered."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._waiting: dict[int, tuple[Epoch, set[str], asyncio.Event]] = {}
        self._requests = 0

    async def tell(
        self, scope: Scope, agents: Collection[str], text: str, deadline: float, *, closed: bool = False
    ) -> None:
        """Return once these agents have ended the registration, or at ``deadline`` (loop time) plus ``GRACE``."""
        self._requests += 1
        request, silent, heard = self._requests, set(agents), asyncio.Event()
        for agent in sorted(silent):
            self._links.tell(agent, scope, Forsaken(request=request, text=text, closed=closed))
        if not silent:
            return
        self._waiting[request] = (scope.pair, scope.epoch), silent, heard
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline + GRACE):
                    await heard.wait()
        finally:
            del self._waiting[request]

    def hear(self, agent: str, message: Noted) -> None:
        """An agent has ended the registration."""
        if (found := self._waiting.get(message.request)) is not None:
            _, silent, heard = found
            silent.discard(agent)
            if not silent:
                heard.set()

    def on_agent_lost(self, agent: str, lost_in: Epoch | None) -> None:
        """An agent is lost, in one epoch or in all: it will not answer."""
        for request, (epoch, _, _) in list(self._waiting.items()):
            if lost_in in (None, epoch):
                self.hear(agent, Noted(request=request))


def _called(message: Register, member: Member) -> str:
    """A worker's call, as messages name it."""
    return f"register_tensors of batch {message.batch!r} of pair {message.pairs[0]!r} by {member[0]} rank {member[1]}"


def membership(
    rendezvous: RendezvousService, session: WorkerSession, message: Register
) -> tuple[Member, dict[str, int]]:
    """The worker's (side, rank), on which all pairs of the batch must agree, and the epoch of each pair.

    Raises ConfigError, PeerLostError, RegistrationError.
    """
    if not message.pairs or list(message.pairs) != sorted(set(message.pairs)):
        raise ProtocolError("the pairs of a registration are a sorted list of at least one")
    seats = []
    for pair in message.pairs:
        seat = session.seats.get(pair)
        if seat is None:
            raise ConfigError(f"this client is not in pair {pair!r}: call init_pair first")
        if (error := rendezvous.error(seat)) is not None:
            raise error
        seats.append(seat)
    first = seats[0]
    for seat in seats[1:]:
        if (seat.side, seat.rank, seat.remote) != (first.side, first.rank, first.remote):
            raise RegistrationError(
                f"pairs {first.pair!r} and {seat.pair!r} do not join the same two sides with the same ranks "
                f"({first.side} rank {first.rank} to {first.remote}, {seat.side} rank {seat.rank} to "
                f"{seat.remote}): register one batch for each"
            )
    if message.epoch != first.epoch:
        raise PeerLostError(f"pair {first.pair!r} is at epoch {first.epoch} now", reason="relaunched")
    return first.member, {seat.pair: seat.epoch for seat in seats}


def lost_since(
    rendezvous: RendezvousService, session: WorkerSession, epochs: Mapping[str, int]
) -> PeerLostError | None:
    """Why a registration that began at these epochs cannot continue; None if it can."""
    for pair, epoch in epochs.items():
        seat = session.seats.get(pair)
        if seat is None:
            return PeerLostError(f"this client has left pair {pair!r}", reason="closed")
        if (error := rendezvous.error(seat)) is not None:
            return error
        if seat.epoch != epoch:
            return PeerLostError(f"pair {pair!r} is at epoch {seat.epoch} now, not {epoch}", reason="relaunched")
    return None
