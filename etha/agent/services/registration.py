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

from etha.agent.protocol.capabilities import Terms
from etha.agent.protocol.effects import Answer, CallKey, Fail, Member
from etha.agent.protocol.evaluation import Evaluation
from etha.agent.protocol.records import Manifest, Record
from etha.agent.protocol.registration import BatchEffect, Declare, EvaluateRoster, RegistrationState, Stand, Unenroll
from etha.agent.runtime.gc_scheduler import GcScheduler
from etha.agent.runtime.host_sharing import exhibits
from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.runtime.status_writer import quietly
from etha.agent.runtime.tasks import Spawn, outage
from etha.agent.services.batch_state import BatchState, Field, Key, Tensors
from etha.agent.services.hints import Hints
from etha.agent.services.manifests import ManifestCache
from etha.agent.services.planning import plan
from etha.agent.services.rendezvous import RendezvousService
from etha.agent.services.transfers import TransferService
from etha.bus.codec import Request
from etha.bus.messages import AttachShadows, AttachSnapshot, BatchLost, CloseBatch, Ok, Register
from etha.config import check_name
from etha.errors import ConfigError, EthaError, PeerLostError, ProtocolError, RedisUnavailableError, RegistrationError
from etha.peer.introductions import AskMissing, Copied, Exhibits, Forsaken, Noted, TellMissing
from etha.peer.wire import Said, Scope
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Most seconds that a worker which has closed a batch waits until its agent has unmapped the batch's memory. A worker
#: of a card waits without this limit, because CUDA does not define what happens to memory that is freed while another
#: process has it open. Its client has a limit of its own, and then never frees the memory.
_PATIENCE = 1.0


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
        self._manifests = ManifestCache(store)
        self.live: dict[Key, BatchState] = {}
        #: Registrations that are over but still hold workers' memory.
        self._releasing: dict[Key, BatchState] = {}
        self._memory = RegistrationMemory()
        self._forsaking = Forsaking(links)

    def register(self, session: WorkerSession, request: Request, message: Register) -> None:
        """A worker calls ``register_tensors``."""
        check_name("batch", message.batch)
        member, epochs = membership(self._rendezvous, session, message)
        old = self._live(session, message.batch)
        if old is not None and old.machine.lost is None:
            raise RegistrationError(
                f"batch {message.batch!r} is open in this client already; close its handle before you register others"
            )
        self.leave(session, message.batch)  # a registration of an earlier epoch needs no close
        session.staged = message.staged or session.staged
        box: list[BatchState] = []
        name = f"{message.batch!r} of pair {message.pairs[0]!r} by {member[0]} rank {member[1]}"
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(name, box, key, expired))
        self._spawn(self._enroll(session, key, member, epochs, message, request.deadline, box))

    def attach(self, session: WorkerSession, request: Request, message: AttachShadows | AttachSnapshot) -> None:
        """Take the memory into which a worker receives an atomic batch, or in which it keeps snapshots."""
        live = self.find(session, message.batch, message.epoch)
        member = session.seats[live.pairs[0]].member
        live.tensors[member].attach(message)
        if isinstance(message, AttachSnapshot):
            self._spawn(self._show_snapshot(live, member))
        session.peer.reply(request.id, Ok())

    def close(self, session: WorkerSession, request: Request, message: CloseBatch) -> None:
        """A worker closes its handle. A handle of an earlier epoch must not close its successor."""
        live = self._live(session, message.batch)
        if live is None or live.epoch != message.epoch:
            session.peer.reply(request.id, Ok())
        elif not message.why:
            self.leave(session, message.batch)
            session.peer.reply(request.id, Ok())
        else:
            text = self._forsake(live, session, message.why)
            self.leave(session, message.batch)
            self._spawn(self._tell_all(live, session, request, text))

    def find(self, session: WorkerSession, batch: str, epoch: int) -> BatchState:
        """The registration of a worker's call; raises an error that says why there is none."""
        live = self._live(session, batch)
        if live is None:
            raise RegistrationError(f"batch {batch!r} is not registered by this client: call register_tensors first")
        for pair in live.pairs:
            error = self._rendezvous.error(session.seats[pair]) if pair in session.seats else live.machine.lost
            if error is not None:
                raise error
        if (lost := live.machine.lost) is not None:
            raise PeerLostError(lost.message, reason=lost.reason, outcome="withdrawn")
        live.check_epoch(epoch)
        return live

    # ---- events of workers and pairs ----------------------------------------------------------

    def leave(self, session: WorkerSession, batch: str) -> None:
        """A worker's part in a batch ends, and its waiting calls with it."""
        live = self._live(session, batch)
        session.batches.pop(batch, None)
        if live is None:
            return
        for member in [m for m, t in live.tensors.items() if t.session is session]:
            error = PeerLostError(f"{member[0]} rank {member[1]} has closed batch {batch!r}", reason="closed")
            self._transfers.withdraw(live, member, error)
            self._perform(live, live.machine.close(member))
        # Other workers here still have it open.
        if not live.over and live.machine.state is RegistrationState.REGISTERED:
            self._let_go(live)

    def on_worker_lost(self, session: WorkerSession, reason: str) -> None:
        """A worker is gone. Its pairs break, too, unless its process holds them through another client."""
        for batch in list(session.batches):
            if (live := self._live(session, batch)) is not None:
                for side, rank in [m for m, t in live.tensors.items() if t.session is session]:
                    how = "closed its client" if reason == "closed" else f"died (pid {session.holder.pid})"
                    error = PeerLostError(f"{side} rank {rank} {how}", reason=reason)
                    self._break(live, error)
            self.leave(session, batch)

    def broken(self, pair: str, epoch: int, error: PeerLostError) -> None:
        """A pair's epoch is over, and so are its batches."""
        for live in list(self.live.values()):
            if live.epochs.get(pair) == epoch:
                self._break(live, error)

    # ---- messages of other agents -------------------------------------------------------------

    def hear(self, agent: str, scope: Scope, message: Said) -> None:
        """A message about a registration, from one of the agents of its pair."""
        key = (scope.pair, scope.batch, scope.generation)
        if isinstance(message, Noted):
            self._forsaking.hear(agent, message)
            return
        live = self.live.get(key) or self._memory.ended(key)
        if live is None and isinstance(message, Forsaken):
            self._memory.note_lost(key, _forsaken(message.text))
            self._links.tell(agent, scope, Noted(request=message.request))
        elif live is None:  # the other agent has seen all entries before this one
            self._memory.hold(key, agent, message)
        elif live.epoch != scope.epoch or agent not in live.agents:
            log.warning("agent %s is no part of %s", agent, scope)
        elif isinstance(message, Exhibits):
            live.show(agent, message)
        elif isinstance(message, Forsaken):
            self._end_for_all(live, _forsaken(message.text))
            self._links.tell(agent, scope, Noted(request=message.request))
        elif isinstance(message, AskMissing | TellMissing):
            self._transfers.stragglers.hear(agent, live, message)
        elif isinstance(message, Copied):
            self._transfers.progress_reporter.heard(live, agent, message)
        elif live.participant is None:
            live.early.append((agent, message))  # type: ignore[arg-type]
        else:
            self._transfers.hear(live, agent, message)  # type: ignore[arg-type]

    def on_agent_lost(self, agent: str) -> None:
        """The link to an agent is lost: transfers with it end, each with the outcome that can be known."""
        self._forsaking.on_agent_lost(agent)
        for live in [*self.live.values(), *self._memory.ended_with(agent)]:
            if agent in live.agents:
                self._transfers.on_agent_lost(live, agent)

    # ---- inside -------------------------------------------------------------------------------

    def _live(self, session: WorkerSession, batch: str) -> BatchState | None:
        """The registration that a worker has open under this id."""
        where = session.batches.get(batch)
        return self.live.get((where[0], batch, where[1])) if where is not None else None

    def _forsake(self, live: BatchState, session: WorkerSession, why: str) -> str:
        """A worker cannot use a registered batch: end it, because transfers with that worker would wait in vain."""
        ranks = [f"{side} rank {rank}" for (side, rank), t in live.tensors.items() if t.session is session]
        text = f"{' and '.join(ranks)} cannot take part in batch {live.name!r}, register it again: {why}"[:4000]
        self._end_for_all(live, _forsaken(text), but=session)
        return text

    async def _show_snapshot(self, live: BatchState, member: Member) -> None:
        """Tell the agents that copy from ``member`` where its snapshots lie."""
        tensors = live.tensors.get(member)  # None if the batch was closed at once
        readers = live.read_by(member[0])
        if not readers or tensors is None or tensors.snapshot is None:
            return
        shown = {member: (tensors.session, tensors.snapshot)}
        for message in await asyncio.to_thread(exhibits, shown, snapshot=True):
            for agent in readers:
                self._links.tell(agent, live.scope, message)

    async def _tell_all(self, live: BatchState, session: WorkerSession, request: Request, text: str) -> None:
        await self._forsaking.tell(live, live.agents - {self._me}, text, request.deadline)
        session.peer.reply(request.id, Ok())

    def _end_for_all(self, live: BatchState, error: PeerLostError, *, but: WorkerSession | None = None) -> None:
        """End a registration while its pair stays: inform the workers here that hold it, then end their calls."""
        if live.machine.lost is None:
            lost = BatchLost(
                pair=live.pairs[0],
                epoch=live.epoch,
                batch=live.name,
                generation=live.generation,
                reason=error.reason,
                text=error.message,
            )
            held = [live.tensors[member].session for member in sorted(live.machine.holders)]
            for session in held:
                if session is not but:
                    session.peer.push(lost)
        self._break(live, error)

    def _break(self, live: BatchState, error: PeerLostError) -> None:
        self._memory.note_lost(live.key, error)
        self._perform(live, live.machine.break_up(error))
        self._transfers.break_up(live, error)

    def _ended(self, name: str, box: list[BatchState], key: CallKey, expired: bool) -> None:
        if box and expired:
            self._spawn(self._expire(box[0], key))
            return
        if box:
            self._perform(box[0], box[0].machine.expire(key, cancelled=True))
            return
        what = "ended at its deadline" if expired else "was cancelled"
        text = f"register_tensors of batch {name} {what} before Redis at {self._store.url} had answered"
        self._calls.fail(key, RedisUnavailableError(text))

    async def _expire(self, live: BatchState, key: CallKey) -> None:
        """A deadline has passed: look for hints, then end the call, unless the batch is registered by now."""
        hint = await self._hints.of_batch(live.pairs[0], live.name) if live.machine.absent else ""
        self._perform(live, live.machine.expire(key, cancelled=False, hint=hint))

    async def _enroll(
        self,
        session: WorkerSession,
        key: CallKey,
        member: Member,
        epochs: Mapping[str, int],
        message: Register,
        deadline: float,
        box: list[BatchState],
    ) -> None:
        try:
            manifest = await asyncio.to_thread(Manifest.of, message, member[1])
            timeout = math.inf if deadline == math.inf else deadline - asyncio.get_running_loop().time()
            digest = await self._manifests.publish(manifest, timeout=timeout)
            primary = message.pairs[0]
            if (lost := lost_since(self._rendezvous, session, epochs)) is not None:
                raise lost
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
                timeout=timeout,
            )
            lost = lost_since(self._rendezvous, session, epochs) or self._memory.lost(
                (primary, message.batch, generation)
            )
            if lost is not None or key not in self._calls:  # the call was given up, or its worker is gone
                await self._store.batches.unenroll(primary, message.batch, generation, *member)
            if lost is not None:
                raise lost  # the batch is not registered yet, so nothing else informs this call
            if key not in self._calls:
                return
        except EthaError as error:
            self._calls.fail(key, error)
            return
        except Exception as error:
            log.exception("batch %s: registering failed", message.batch)
            self._calls.fail(key, ProtocolError(f"the agent failed to register, a bug of Etha: {error!r}"))
            return
        live = self.live.get((primary, message.batch, generation))
        if live is None:
            live = BatchState.begin(
                self._me, message.batch, message.pairs, epochs, generation, view, self._links.mappings
            )
            self.live[live.key] = live
            for agent, said in self._memory.held(live.key):
                self.hear(agent, live.scope, said)
            self._spawn(self._follow(live))
        box.append(live)
        live.tensors[member] = Tensors(
            session,
            {entry.name: entry.handle for entry in message.entries},
            tuple(entry.name for entry in message.entries),
        )
        session.batches[message.batch] = (primary, generation)
        self._perform(live, live.machine.enrolled(key, member))

    async def _follow(self, live: BatchState) -> None:
        """Read the roster after every wake-up until this agent's part is decided."""
        primary, batch, generation = live.key
        states = (RegistrationState.ENROLLING, RegistrationState.EVALUATING, RegistrationState.AGREEING)
        async with self._store.changes(self._store.keys.batch(primary, batch)) as changed:
            while live.machine.state in states:
                try:
                    roster = await self._store.batches.roster(primary, batch, generation)
                    self._perform(live, live.machine.rostered(roster.entries, roster.verdicts))
                except EthaError as error:
                    outage(log, "batch %s: the roster could not be read: %s", batch, error)
                if live.machine.state in states:
                    await changed()

    def _perform(self, live: BatchState, effects: list[BatchEffect]) -> None:
        primary, batch, generation = live.key
        for effect in effects:
            match effect:
                case Answer(call=key, message=message):
                    self._calls.answer(key, message)
                case Fail(call=key, error=error):
                    live.drop(key)
                    self._calls.fail(key, error)
                case EvaluateRoster(entries=entries):
                    self._spawn(self._evaluate(live, dict(entries)))
                case Declare(verdict=verdict):
                    self._spawn(quietly(self._store.batches.verdict(primary, batch, generation, self._me, verdict)))
                case Unenroll(member=(side, rank)):
                    self._spawn(quietly(self._store.batches.unenroll(primary, batch, generation, side, rank)))
                case Stand(evaluation=evaluation, terms=terms):
                    self._stand(live, evaluation, terms)
        if live.machine.state in (RegistrationState.REFUSED, RegistrationState.LOST, RegistrationState.CLOSED):
            live.shared_tensors.close()
            live.shared_snapshots.close()
        closed = live.machine.state is RegistrationState.CLOSED and self.live.get(live.key) is live
        if closed:
            del self.live[live.key]
        if closed and not live.machine.alone:
            self._memory.keep(live)
        if closed or (live.machine.state is RegistrationState.LOST and not live.over):
            self._let_go(live)

    def _let_go(self, live: BatchState) -> None:
        """Begin to release a registration that starts no transfer any more."""
        live.over = True
        self._releasing[live.key] = live
        self._spawn(self._release(live))

    async def _release(self, live: BatchState) -> None:
        """Release workers' memory and a GPU's tables, once no lane can be inside them."""
        await self._transfers.idle_tracker.wait_for([live])
        try:
            await live.release()
        finally:
            self._releasing.pop(live.key, None)
            live.released.set()
        if live.machine.state is RegistrationState.CLOSED:
            live.forget()
        self._gc.soon()

    async def released(self, session: WorkerSession) -> None:
        """Return when the batches that a worker has left hold none of its memory, except those whose transfer still
        runs.

        They release it shortly after ``leave``. If their streams are slow to close, this waits at most ``_PATIENCE``.
        """
        left = [live for live in self._releasing.values() if live.serves(session) and live.current is None]
        with suppress(TimeoutError):
            async with asyncio.timeout(None if session.memory.on_device else _PATIENCE):
                for live in left:
                    await live.released.wait()

    async def _evaluate(self, live: BatchState, entries: dict[Member, str]) -> None:
        try:
            evaluation, verdict = await plan(live, entries, self._store, self._manifests, self._links)
        except EthaError as error:
            self._perform(live, live.machine.failed(error))
            return
        except Exception as error:
            log.exception("batch %s: planning failed", live.name)
            text = f"batch {live.name!r}: planning failed in the agent, a bug of Etha: {type(error).__name__}: {error}"
            self._perform(live, live.machine.failed(RegistrationError(text)))
            return
        self._perform(live, live.machine.evaluated(evaluation, verdict))

    def _stand(self, live: BatchState, evaluation: Evaluation, terms: Terms) -> None:
        wire = None if live.machine.alone else self._transfers.compiler.transport(live, terms)
        live.stand(evaluation, terms, wire, lambda source: self._transfers.lane_scheduler.can_hold(live, source))
        nbytes = max((evaluation.nbytes(side) for side in evaluation.sides), default=0)
        fields: dict[str, Field] = {"tensors": evaluation.tensors, "bytes": nbytes, "digest": evaluation.digest}
        fields["transport"] = live.transports
        for pair, written in live.records(fields).items():
            self._spawn(quietly(self._store.batches.set_fields(pair, live.name, written)))
        early, live.early = live.early, []
        for agent, message in early:
            self._transfers.hear(live, agent, message)


def _forsaken(text: str) -> PeerLostError:
    return PeerLostError(text, reason="closed", outcome="withdrawn")


#: How many registrations are kept before this agent knows them, and after they were closed.
MAX_KEPT = 256
#: Messages kept for each.
MAX_MESSAGES = 1000


class RegistrationMemory:
    """Bounded memory of registrations before they begin and after they have ended."""

    def __init__(self) -> None:
        self._early: OrderedDict[Key, list[tuple[str, Said]]] = OrderedDict()
        self._ended: OrderedDict[Key, BatchState] = OrderedDict()
        self._lost: OrderedDict[Key, PeerLostError] = OrderedDict()

    def note_lost(self, key: Key, error: PeerLostError) -> None:
        """A registration is over for all, whether this agent knows it or not. Ranks of it may still come."""
        self._lost.setdefault(key, error)
        while len(self._lost) > MAX_KEPT:
            self._lost.popitem(last=False)

    def lost(self, key: Key) -> PeerLostError | None:
        """Why a rank that comes now is too late."""
        return self._lost.get(key)

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

    def keep(self, live: BatchState) -> None:
        """A registration over several agents was closed here. Others may still ask for the outcome of its last
        transfer."""
        self._ended[live.key] = live
        while len(self._ended) > MAX_KEPT:
            self._ended.popitem(last=False)

    def ended(self, key: Key) -> BatchState | None:
        """A closed registration, if it is remembered."""
        return self._ended.get(key)

    def ended_with(self, agent: str) -> list[BatchState]:
        """The closed registrations in which ``agent`` took part."""
        return [live for live in self._ended.values() if agent in live.agents]


#: Seconds beyond the request's deadline; less than its worker waits. A frozen agent ends the registration as it thaws.
GRACE = 0.5


class Forsaking:
    """Informs other agents, and records which of them have answered."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self._waiting: dict[int, tuple[set[str], asyncio.Event]] = {}
        self._requests = 0

    async def tell(self, live: BatchState, agents: Collection[str], text: str, deadline: float) -> None:
        """Return once these agents have ended the registration, or at ``deadline`` (loop time) plus ``GRACE``."""
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

    def on_agent_lost(self, agent: str) -> None:
        """An agent's link is lost: it will not answer."""
        for request in list(self._waiting):
            self.hear(agent, Noted(request=request))


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
