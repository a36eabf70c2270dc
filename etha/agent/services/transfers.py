"""Transfers: takes workers' calls, runs programs on the lane, and returns results and errors."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

from etha.agent.protocol.effects import (
    BeginLane,
    CallKey,
    Fail,
    FreeLane,
    HoldLane,
    InDoubt,
    Member,
    OfferChanged,
    Settled,
    StartMove,
    StopMove,
    Tell,
    WantLane,
)
from etha.agent.protocol.participant import Call, TransferEffect
from etha.agent.runtime.lane import NOTHING, Lane
from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.pulls import WorkerPulls
from etha.agent.runtime.run import DirectionProgram, TransferProgress, TransferRun
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.runtime.status_writer import StatusWriter
from etha.agent.runtime.tasks import Spawn
from etha.agent.runtime.worker_streams import Mover, WorkerStreams
from etha.agent.services.batch_state import Ask, Key, RegisteredBatch, RunningProgram
from etha.agent.services.compile import TransferCompiler
from etha.agent.services.differences import bases, held_here, resumed, tell_held
from etha.agent.services.lane_scheduler import LaneScheduler, Needs
from etha.agent.services.offers import Offers
from etha.agent.services.stragglers import StragglerQueries
from etha.agent.services.stream_order import StreamOrder
from etha.agent.services.transfer_records import failed_call, settled_transfer
from etha.agent.services.transfer_spans import about_batch, about_run, trace_transfer
from etha.bus.codec import Request
from etha.bus.messages import Moved, Progress, Pulled, Streamed, Transfer
from etha.errors import EthaError, PeerLostError, ProtocolError, RegistrationError, TransferError, noted, with_note
from etha.memory.handles import span_nbytes
from etha.memory.mapping import DTYPES
from etha.memory.reach import AccessError, FaultError, ReachError, RevokedError, WorkerGoneError
from etha.memory.revocation import Guard
from etha.observe import trace
from etha.observe.recorder import Recorder
from etha.peer.introductions import Copied, HeldBase, HeldPart, Sums, UniqueId
from etha.peer.messages import Message
from etha.phases import NO_PHASES, Phases
from etha.store.registry import Store
from etha.transport.arrival import ArrivingVersion
from etha.transport.base import StreamLost
from etha.transport.rate_limit import RateLimit

log = logging.getLogger(__name__)

#: Seconds for which agents that have lost their coordinator ask each other.
DOUBT = 1.0
#: Seconds that a closed data stream waits for the cause, which comes over the link.
GRACE = 0.3


class TransferService:
    """All transfers of this agent; their copies share one lane."""

    def __init__(
        self,
        *,
        store: Store,
        links: PeerLinks,
        calls: OpenCalls,
        lane: Lane,
        spawn: Spawn,
        stream_order: StreamOrder,
        recorder: Recorder,
    ) -> None:
        self._stream_order, self._recorder = stream_order, recorder
        self._links, self._calls, self._lane, self._spawn = links, calls, lane, spawn
        self.compiler = TransferCompiler(links)
        self.offers = Offers(calls)
        self.stragglers = StragglerQueries(links)
        self.lane_scheduler = LaneScheduler(self._perform, self._needs)
        self.status_writer = StatusWriter(store, spawn)
        self._known_needs: Needs | None = None
        self.progress_reporter = ProgressReporter(links, calls)
        self.idle_tracker = IdleTracker()
        self._calling = False
        self._copy: Callable[[], None] | None = None

    # ---- requests of workers ------------------------------------------------------------------

    def transfer(self, session: WorkerSession, request: Request, message: Transfer, batch: RegisteredBatch) -> None:
        """A worker calls ``transfer`` on a registered batch."""
        member = session.seats[batch.pairs[0]].member
        source = member[0] if message.verb == "send" else batch.other(member[0])
        if violations := batch.evaluation.violations[source]:
            listed = "\n  ".join(map(str, violations[:20]))
            raise RegistrationError(
                f"batch {batch.name!r} cannot move from {source} to {batch.other(source)}:\n  {listed}",
                violations=violations,
            )
        if message.version is not None and message.verb == "recv":
            raise TransferError("version= is a label that the sender sets; recv learns it", outcome="withdrawn")
        if session.revocation is not None and not session.revocation.lends(message.slot):
            # This agent was frozen: the worker has stopped waiting, and its call must not bind anybody.
            raise TransferError(f"batch {batch.name!r}: the call had ended before it was heard", outcome="withdrawn")
        if message.edition and (message.verb == "recv" or batch.tensors[member].snapshot is None):
            raise ProtocolError(f"batch {batch.name!r}: {member[0]} rank {member[1]} has attached no snapshot to send")
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(batch, key, expired))
        batch.asks[key] = Ask(
            session=session,
            slot=message.slot,
            progress=message.progress,
            member=member,
            verb=message.verb,
            trace_id=message.trace_id,
            blocks=message.blocks,
        )
        if message.verb == "recv" and session.hops:
            tell_held(batch, member, session, lambda agent, held: self._links.tell(agent, batch.scope, held))
        call = Call(
            key=key,
            member=member,
            verb=message.verb,
            version=message.version,
            edition=message.edition,
            expects=message.expects,
        )
        self._stream_order.pass_on(batch, session, key, message.mark, lambda: self._wait(batch, call))

    def _wait(self, batch: RegisteredBatch, call: Call) -> None:
        """A call waits for the others. If it is the last one, and the copy that begins is short, it is made at once."""
        with self._at_once():
            self._perform(batch, batch.participant.wait(call))

    @contextmanager
    def _at_once(self) -> Iterator[None]:
        """The first short copy that begins inside is made at the end."""
        self._calling = True
        try:
            yield
        finally:
            self._calling = False
            copy, self._copy = self._copy, None
            if copy is not None:
                copy()

    def _soon(self, copy: Callable[[], None]) -> None:
        """Make a short copy: after the effects of the call or message that is handled, else when the loop comes to it.

        The loop takes longer to come to it than the copy takes. But a transfer that follows another one waits for that,
        because calls that wait in their hundreds must not keep the loop from all else.
        """
        if self._calling and self._copy is None:
            self._copy = copy
        else:
            asyncio.get_running_loop().call_soon(copy)

    def pulled(self, session: WorkerSession, batch: RegisteredBatch, message: Pulled) -> None:
        """A worker says how far it has come with its copies."""
        if message.kind == AccessError.kind:
            session.pulls = False
        current = batch.current
        if current is not None and current.run is not None:
            side, rank = session.seats[batch.pairs[0]].member
            current.run.hear(("source" if side == current.source else "target", rank), message)

    def streamed(self, session: WorkerSession, batch: RegisteredBatch, message: Streamed) -> None:
        """A worker says how far it has come with a stream."""
        current = batch.current
        if current is not None and current.run is not None and current.run.streams is not None:
            side, rank = session.seats[batch.pairs[0]].member
            current.run.streams.hear(("source" if side == current.source else "target", rank), message)

    def supersede(self, session: WorkerSession, batch: RegisteredBatch) -> None:
        """A worker takes a newer snapshot than the one that it offers."""
        self._perform(batch, batch.participant.supersede(session.seats[batch.pairs[0]].member))

    # ---- other events -------------------------------------------------------------------------

    def withdraw(self, batch: RegisteredBatch, member: Member, error: PeerLostError) -> None:
        """A worker leaves the batch: its waiting calls end, and a transfer of which it is part."""
        self.offers.withdraw(batch, member, error)
        self._stream_order.leave(batch, batch.tensors[member].session, error)
        for key in [k for k, a in batch.asks.items() if a.session is batch.tensors[member].session]:
            self._perform(batch, batch.participant.end(key, expired=False))

    def break_up(self, batch: RegisteredBatch, error: PeerLostError) -> None:
        """The batch is over for all."""
        self.offers.end(batch, list(batch.offers), error)
        self._stream_order.break_up(batch, error)
        self._perform(batch, batch.participant.break_up(error))

    # ---- inside -------------------------------------------------------------------------------

    def _ended(self, batch: RegisteredBatch, key: CallKey, expired: bool) -> None:
        if self._stream_order.end(key, expired=expired):
            return
        if expired and not batch.registration.machine.alone:
            self._spawn(self._expire(batch, key))
        else:
            self._perform(batch, batch.participant.end(key, expired=expired))

    async def _expire(self, batch: RegisteredBatch, key: CallKey) -> None:
        await self.stragglers.learn(batch, key)
        self._perform(batch, batch.participant.end(key, expired=True))

    def hear(
        self, batch: RegisteredBatch, agent: str, message: Message | Sums | UniqueId | HeldBase | HeldPart
    ) -> None:
        """A message from another agent of the batch."""
        if isinstance(message, Sums | UniqueId | HeldBase | HeldPart):
            batch.take(agent, message)
        else:
            with self._at_once():
                self._perform(batch, batch.participant.hear(agent, message))

    def on_agent_lost(self, batch: RegisteredBatch, agent: str, *, by_word: bool) -> None:
        """The link to an agent of the batch is lost, or, ``by_word``, a hub's."""
        self._perform(batch, batch.participant.on_agent_lost(agent, by_word=by_word))

    def _perform(self, batch: RegisteredBatch, effects: list[TransferEffect]) -> None:
        joined: list[Message] = []  # what is for one agent, in a row
        for effect, following in pairwise([*effects, None]):
            match effect:
                case Tell(agent=agent, message=message):
                    joined.append(message)
                    if not (isinstance(following, Tell) and following.agent == agent):
                        self._links.tell(agent, batch.scope, *joined)
                        joined.clear()
                case StartMove():
                    self._begin(batch, effect)
                case StopMove():
                    assert batch.current is not None
                    self._stop(batch, batch.current)
                case Fail():
                    self._fail(batch, effect)
                case Settled():
                    self._settled(batch, effect)
                case OfferChanged():
                    self.offers.tell(batch)
                case InDoubt(seq=seq):
                    asyncio.get_running_loop().call_later(DOUBT, self._undecided, batch, seq)
                case HoldLane(source=source):
                    self.lane_scheduler.hold(batch, source)
                case WantLane(ticket=ticket, source=source):
                    self.lane_scheduler.want(batch, ticket, source)
                case BeginLane():
                    self.lane_scheduler.begin(batch)
                case FreeLane():
                    self.lane_scheduler.free(batch)

    def _fail(self, batch: RegisteredBatch, effect: Fail) -> None:
        """Give a worker the error of its call. A call that is part of no transfer here has a record of its own."""
        error, ask, now = effect.error, batch.asks.pop(effect.call, None), time.monotonic()
        current = batch.current if effect.seq is not None else None
        phases = NO_PHASES
        if ask is not None:
            phases = Phases(wait=now - ask.since) if current is None else current.phases(ask.member, now)
        if isinstance(error, TransferError):
            error.phases = phases
        self._calls.fail(effect.call, error, recorded=True)
        if current is None and ask is not None:
            self._recorder.add(failed_call(batch, ask, effect, phases))

    def _needs(self) -> Needs:
        if self._known_needs is None:  # its links are opened after this object was made
            self._known_needs = Needs(self._links.plane, self._lane.threads)
        return self._known_needs

    def _undecided(self, batch: RegisteredBatch, seq: int) -> None:
        self._perform(batch, batch.participant.undecided(seq))

    def _begin(self, batch: RegisteredBatch, start: StartMove) -> None:
        self.idle_tracker.begin(batch)
        current = batch.current = RunningProgram(
            seq=start.seq,
            source=start.source,
            snapshot=start.snapshot,
            calls=start.calls,
            started=time.monotonic(),
            booking=start.booking,
            asked={member: batch.asks[key].since for member, key in start.calls.items()},
        )
        if trace.active is not None:
            current.trace_ids = tuple({batch.asks[key].trace_id: None for key in start.calls.values()})
        if batch.offers:  # workers wait for this side's offer
            self.offers.tell(batch, going=start.source)
        program = batch.programs.get((start.source, start.snapshot))
        if program is not None:
            self._submit(batch, current, program, known=True)
        else:
            self._spawn(self._compile(batch, current))

    def _stop(self, batch: RegisteredBatch, current: RunningProgram) -> None:
        current.stopped = True
        if current.late is not None:
            current.late.cancel()
            asyncio.get_running_loop().call_soon(self._over, batch, current, None, current.touched)
        elif current.run is not None:
            current.run.stop()
        else:
            batch.registration.shared_snapshots.wake()  # compiling may wait for a snapshot that will not come

    async def _compile(self, batch: RegisteredBatch, current: RunningProgram) -> None:
        """Compile the program of a direction's first transfer, off the loop."""
        if batch.registration.over:  # a rank here left while GO was on its way: this agent's vote ends the transfer
            lost = batch.registration.machine.lost
            text = f"batch {batch.name!r}: a rank of this agent has left it" if lost is None else lost.message
            reason = "closed" if lost is None else lost.reason
            self._over(batch, current, PeerLostError(text, reason=reason, outcome="aborted"), False)
            return
        try:
            program = await self.compiler.compile(batch, current)
        except EthaError as error:
            self._moved(batch, current, error, False)
            return
        except Exception as error:
            log.exception("batch %s: compiling failed", batch.name)
            text = f"batch {batch.name!r}: the agent could not lay out the transfer, a bug of Etha: {error!r}"
            self._over(batch, current, TransferError(with_note(text, self._links.log_note)), False)
            return
        if program is not None:
            batch.programs[current.source, current.snapshot] = program
            if trace.active is not None and program.key:
                trace.active.key(program.key, about_batch(batch))
        self._submit(batch, current, program)

    def _submit(
        self,
        batch: RegisteredBatch,
        current: RunningProgram,
        program: DirectionProgram | None,
        known: bool = False,
    ) -> None:
        """Run the program. ``known``: an earlier transfer has compiled it."""
        if current.stopped or program is None:
            self._over(batch, current, None, False)
            return
        current.program = program
        guards: dict[Member, Guard] = {}
        limit: RateLimit | None = None
        arriving: ArrivingVersion | None = None
        passed: ArrivingVersion | None = None
        for member, key in current.calls.items():
            ask, (side, rank) = batch.asks[key], member
            session, sends = ask.session, side == current.source
            hop = session.hops.get(batch.name)
            if hop is not None and sends:
                passed = hop.passed or passed
            elif hop is not None:
                arriving = hop.arriving or arriving
            if sends and session.rate_limit is not None:
                limit = session.rate_limit if session.rate_limit.rate < math.inf else None
            if session.revocation is not None:
                guards["source" if sends else "target", rank] = session.revocation.guard(ask.slot)
        current.progress = TransferProgress(program, batch.read_by(current.source))
        verification = None  # nothing is verified
        if program.verification_plan is not None:
            verification = self.compiler.verification(batch, current.seq, program.verification_plan, guards, self._lane)
        wire = program.wire
        current.run = TransferRun(
            program,
            current.seq,
            guards,
            lane=self._lane,
            plane=self._links.plane,
            wire=batch.transport,
            after=batch.failed,
            bases=bases(batch, current.source) if wire is not None and wire.differs else {},
            held=held_here(batch, current.source) if wire is not None and wire.differs else 0,
            spawn=self._spawn,
            progress=lambda done: self.progress_reporter.went(batch, current, done),
            over=lambda error, touched: self._moved(batch, current, error, touched),
            soon=self._soon,
            verification=verification,
            pulls=self._pulls(batch, current, program, guards),
            streams=self._streams(batch, current, program),
            about=NOTHING if trace.active is None else about_run(batch, current),
            limit=limit,
            arriving=arriving,
            passed=passed,
            resumed=resumed(batch, current.source) if wire is not None else frozenset(),
        )
        current.submitted = current.started if known else time.monotonic()
        current.run.start()

    def _pulls(
        self, batch: RegisteredBatch, current: RunningProgram, program: DirectionProgram, guards: Mapping[Member, Guard]
    ) -> WorkerPulls | None:
        """The copies that receiving workers do themselves; None unless all that could do so are blocked in their
        calls."""
        if program.pull is None:
            return None
        side = batch.other(current.source)
        calls = {member: current.calls[side, member[1]] for member in program.pull.tables}
        asks = [batch.asks[key] for key in calls.values()]
        if not all(ask.blocks and ask.session.pulls for ask in asks):
            return None
        return WorkerPulls(
            program.pull,
            current.seq,
            int(current.snapshot),
            open_calls=self._calls,
            calls=calls,
            known={member: batch.tensors[side, member[1]].pull_tables for member in program.pull.tables},
            guards=guards,
            threads=max(1, self._lane.threads // len(calls)),
        )

    def _streams(
        self, batch: RegisteredBatch, current: RunningProgram, program: DirectionProgram
    ) -> WorkerStreams | None:
        """What workers that are blocked in their calls may send or receive themselves; None if nothing."""
        if not program.stretches:
            return None
        movers: dict[Member, Mover] = {}
        for member in {s.member for lane in program.stretches.values() for s in lane.values()}:
            side = current.source if member[0] == "source" else batch.other(current.source)
            call = current.calls[side, member[1]]
            ask = batch.asks[call]
            if ask.blocks and ask.session.streams:
                known = batch.tensors[side, member[1]].stream_tables
                movers[member] = Mover(call=call, session=ask.session, known=known)
        if not movers:
            return None
        variant = 2 * int(current.snapshot) + int(current.source < batch.other(current.source))
        return WorkerStreams(program.stretches, current.seq, variant, open_calls=self._calls, movers=movers)

    def _moved(
        self, batch: RegisteredBatch, current: RunningProgram, error: BaseException | None, touched: bool
    ) -> None:
        self._stream_order.failed(error)
        if isinstance(error, StreamLost) and not current.stopped:
            # The other end has most likely ended the transfer, and the cause is on its way over the link. If none comes
            # and the link stands, its agent lives, and something between the data ports has ended the connection.
            broken = TransferError(
                f"{error.message}, but the link to that agent stands: look for a firewall or a broken way between the "
                f"data ports, or for the cause in its log; `etha doctor` tries the ports"
            )
            current.late = asyncio.get_running_loop().call_later(
                GRACE, self._over, batch, current, self._with_log(batch, broken), touched
            )
            current.touched = touched
            return
        self._over(batch, current, None if error is None else self._with_log(batch, error), touched)

    def _with_log(self, batch: RegisteredBatch, error: BaseException) -> EthaError:
        """The error for the workers of all agents. It names the log of the agent that failed, if no worker did."""
        found = translate(batch, error)
        if isinstance(error, WorkerGoneError | RevokedError | asyncio.CancelledError):
            return found
        return noted(found, self._links.log_of_named(found.message))

    def _over(self, batch: RegisteredBatch, current: RunningProgram, error: EthaError | None, touched: bool) -> None:
        current.late = None
        if error is None and not current.stopped:  # else it ended where it was, however long the others take to hear it
            current.moved = time.monotonic()
        self._perform(batch, batch.participant.moved(current.seq, error, touched=touched))

    def _settled(self, batch: RegisteredBatch, effect: Settled) -> None:
        current, batch.current = batch.current, None
        assert current is not None
        if effect.error is not None:
            batch.fail(effect.seq, effect.error)
        if current.run is not None and current.run.arriving is not None:
            current.run.arriving.settle(whole=effect.error is None)
        now = time.monotonic()
        seconds = now - current.started
        fields: dict[str, int | float | str | None] = {"seq": effect.seq}
        if effect.error is None:
            batch.version, batch.last_seconds, batch.last_error = effect.version, seconds, None
            batch.last_source = effect.source
            if batch.transport is not None:
                batch.transport.settled()
            self._answer(batch, effect, current, now)
            fields |= {
                "version": effect.version,
                "last_seconds": seconds,
                "last_error": "",
                "bytes": batch.nbytes,
            }
        else:
            batch.last_error = effect.error
            fields |= {"last_error": effect.error.message[:1000]}
        for pair in batch.pairs:
            self.status_writer.tell(pair, batch.name, fields)
        self._recorder.add(settled_transfer(batch, effect, current, now))
        if trace.active is not None:
            trace_transfer(trace.active, batch, effect, current, now)
        # The run and its callbacks form a cycle. It is broken here, so that workers' memory is freed without the
        # collector.
        current.program = current.run = current.progress = None
        self.idle_tracker.end(batch)

    def _answer(self, batch: RegisteredBatch, effect: Settled, current: RunningProgram, now: float) -> None:
        program, run, seconds = current.program, current.run, now - current.started
        assert program is not None
        for (side, rank), key in effect.calls.items():
            batch.asks.pop(key, None)
            role = "source" if side == effect.source else "target"
            moved = Moved(
                seq=effect.seq,
                version=effect.version,
                nbytes=program.nbytes[role, rank],
                seconds=seconds,
                peers=program.peers[role, rank],
                peak_staging=run.peak_staging if run is not None else 0,
                phases=current.phases((side, rank), now),
                wired=run.wired if run is not None and role == "target" else 0,
            )
            self._calls.answer(key, moved)


def translate(batch: RegisteredBatch, error: BaseException) -> EthaError:
    """The error for the workers of the transfer that moves now."""
    if isinstance(error, EthaError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return TransferError("stopped")
    who, members = "a worker", list[Member]()
    if isinstance(error, ReachError) and error.owner is not None:
        role, rank = error.owner
        source = batch.current.source if batch.current is not None else ""
        members = [(source if role == "source" else batch.other(source), rank)]
        who = f"{members[0][0]} rank {rank}"
    if isinstance(error, FaultError) and (found := _tensor_at(batch, error)) is not None:
        (side, rank), name = found
        members = [(side, rank)]
        who = f"{side} rank {rank} at its tensor {name!r}"
    match error:
        case WorkerGoneError():
            return PeerLostError(f"{who} died in the transfer", reason="died", culprits=members)
        case RevokedError():
            return TransferError(f"the call of {who} has ended and taken its memory back", culprits=members)
        case ReachError():
            return TransferError(f"the memory of {who} could not be reached: {error}", culprits=members)
    log.error("batch %s: a lane failed", batch.name, exc_info=error)
    return TransferError(f"the agent's lane failed, a bug of Etha: {type(error).__name__}: {error}")


def _tensor_at(batch: RegisteredBatch, error: FaultError) -> tuple[tuple[str, int], str] | None:
    """The registered tensor of this agent's workers at the unmapped address: ((side, rank), name).

    The address decides, because ``error.owner`` is a guess if one process is several ranks.
    """
    source = batch.current.source if batch.current is not None else ""
    found: list[tuple[tuple[str, int], str]] = []
    for (side, rank), tensors in batch.tensors.items():
        if tensors.session.memory.process.pid != error.pid:
            continue
        for name, handle in tensors.handles.items():
            nbytes = span_nbytes(handle.shape, handle.strides, DTYPES[handle.dtype].itemsize)
            if handle.segment is None and handle.offset <= error.address < handle.offset + nbytes:
                if error.owner == ("source" if side == source else "target", rank):
                    return (side, rank), name
                found.append(((side, rank), name))
    return found[0] if found else None


class ProgressReporter:
    """Progress of all transfers of this agent. ``TransferProgress`` holds the numbers of one."""

    def __init__(self, links: PeerLinks, calls: OpenCalls) -> None:
        self._links, self._calls = links, calls

    def went(self, batch: RegisteredBatch, current: RunningProgram, done: int) -> None:
        """This agent's own part of ``current`` has moved ``done`` bytes."""
        if batch.current is not current or current.progress is None:
            return
        share = current.progress.own(done)
        for agent in batch.read_from(current.source):
            self._links.tell(agent, batch.scope, Copied(seq=current.seq, share=share))
        self._push(batch, current, current.progress.fraction)

    def heard(self, batch: RegisteredBatch, agent: str, message: Copied) -> None:
        """An agent that copies from workers here reports its progress."""
        current = batch.current
        if current is not None and current.seq == message.seq and current.progress is not None:
            current.progress.heard(agent, message.share)
            self._push(batch, current, current.progress.fraction)

    def _push(self, batch: RegisteredBatch, current: RunningProgram, fraction: float) -> None:
        program = current.program
        assert program is not None
        for (side, rank), key in current.calls.items():
            ask = batch.asks.get(key)
            if ask is not None and ask.progress:
                total = program.nbytes["source" if side == current.source else "target", rank]
                self._calls.push(key, Progress(done=int(total * fraction), total=total))


class IdleTracker:
    """The registrations whose transfer runs; each has one at a time. Loop thread only."""

    def __init__(self) -> None:
        self._moving: dict[Key, RegisteredBatch] = {}
        self._ended = asyncio.Event()

    @property
    def running(self) -> int:
        """How many transfers run."""
        return len(self._moving)

    @property
    def moving(self) -> tuple[RegisteredBatch, ...]:
        """The registrations whose transfer runs."""
        return tuple(self._moving.values())

    def begin(self, batch: RegisteredBatch) -> None:
        """Its transfer begins."""
        self._moving[batch.key] = batch

    def end(self, batch: RegisteredBatch) -> None:
        """Its transfer has ended."""
        del self._moving[batch.key]
        self._ended.set()

    async def wait(self) -> None:
        """Return when none runs. The caller can rely on that until it awaits again."""
        while self._moving:
            self._ended.clear()
            await self._ended.wait()

    async def wait_for(self, batches: Iterable[RegisteredBatch]) -> None:
        """``wait`` for these registrations only, because on a busy agent some transfer always runs."""
        keys = {batch.key for batch in batches}
        while not keys.isdisjoint(self._moving):
            self._ended.clear()
            await self._ended.wait()
