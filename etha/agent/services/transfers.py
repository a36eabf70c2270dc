"""The shell around transfers: worker calls in, programs on the lane, results and errors out."""

from __future__ import annotations

import asyncio
import logging
import time

from etha.agent.protocol.effects import (
    BeginLane,
    CallKey,
    Doubt,
    Fail,
    FreeLane,
    Member,
    OfferChanged,
    Settled,
    StartMove,
    StopMove,
    Tell,
    WantLane,
)
from etha.agent.protocol.participant import TransferEffect
from etha.agent.protocol.waiting import Call
from etha.agent.runtime.calls import Calls
from etha.agent.runtime.gauge import Gauge
from etha.agent.runtime.lane import Lane
from etha.agent.runtime.peers import Links
from etha.agent.runtime.run import Move, Part
from etha.agent.runtime.sessions import Session
from etha.agent.runtime.status_writer import Chronicle
from etha.agent.services.batch_state import Ask, Current, Live
from etha.agent.services.compile import Parts
from etha.agent.services.lane_scheduler import Turns
from etha.agent.services.needs import Needs
from etha.agent.services.offers import Offers
from etha.agent.services.pace import Pace
from etha.agent.services.rendezvous import Spawn
from etha.agent.services.rest import Rest
from etha.agent.services.stragglers import Inquiries
from etha.agent.services.stream_order import Behind
from etha.agent.services.translate import translate
from etha.bus.codec import Request
from etha.bus.messages import Moved, Transfer
from etha.errors import EthaError, PeerLostError, ProtocolError, RegistrationError, TransferError
from etha.peer.introductions import Sums, UniqueId
from etha.peer.messages import Message
from etha.store.registry import Store
from etha.transport.base import StreamLost

log = logging.getLogger(__name__)

#: Seconds that agents which have lost their coordinator ask each other.
DOUBT = 1.0
#: Seconds that a closed data stream waits for the cause, which comes another way.
GRACE = 0.3


class Movers:
    """All transfers of this agent; their copies share one lane."""

    def __init__(self, *, store: Store, links: Links, calls: Calls, lane: Lane, spawn: Spawn, behind: Behind) -> None:
        self._behind = behind
        self._links, self._calls, self._lane, self._spawn = links, calls, lane, spawn
        self.parts = Parts(links)
        self.offers = Offers(calls)
        self.inquiries = Inquiries(links)
        self.turns = Turns(self._perform, self._needs)
        self.chronicle = Chronicle(store, spawn)
        self._known_needs: Needs | None = None
        self.pace = Pace(links, calls)
        self.rest = Rest()

    # ---- what workers ask ---------------------------------------------------------------------

    def transfer(self, session: Session, request: Request, message: Transfer, live: Live) -> None:
        """A worker calls ``transfer``; the batch stands."""
        member = session.seats[live.pairs[0]].member
        assert live.evaluation is not None and live.transfers is not None
        source = member[0] if message.verb == "send" else live.other(member[0])
        if violations := live.evaluation.violations[source]:
            listed = "\n  ".join(map(str, violations[:20]))
            raise RegistrationError(
                f"batch {live.name!r} cannot move from {source} to {live.other(source)}:\n  {listed}",
                violations=violations,
            )
        if message.version is not None and message.verb == "recv":
            raise TransferError("version= is a label that the sender sets; recv learns it", outcome="withdrawn")
        if session.revocation is not None and not session.revocation.lends(message.slot):
            # This agent was frozen: the worker waits no more, and nobody is to be bound to its call.
            raise TransferError(f"batch {live.name!r}: the call had ended before it was heard", outcome="withdrawn")
        if message.edition and (message.verb == "recv" or live.tensors[member].snapshot is None):
            raise ProtocolError(f"batch {live.name!r}: {member[0]} rank {member[1]} has attached no snapshot to send")
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(live, key, expired))
        live.asks[key] = Ask(session=session, slot=message.slot, progress=message.progress)
        call = Call(key=key, member=member, verb=message.verb, version=message.version, edition=message.edition)
        transfers = live.transfers
        self._behind.pass_on(live, session, key, message.mark, lambda: self._perform(live, transfers.wait(call)))

    def supersede(self, session: Session, live: Live) -> None:
        """A worker takes a newer snapshot than the one that it offers."""
        assert live.transfers is not None
        self._perform(live, live.transfers.supersede(session.seats[live.pairs[0]].member))

    # ---- what happens around ------------------------------------------------------------------

    def withdraw(self, live: Live, member: Member, error: PeerLostError) -> None:
        """A worker leaves the batch: its waiting calls end, and a transfer that it is part of."""
        self.offers.withdraw(live, member, error)
        self._behind.leave(live, live.tensors[member].session, error)
        if live.transfers is not None:
            for key in [k for k, a in live.asks.items() if a.session is live.tensors[member].session]:
                self._perform(live, live.transfers.end(key, expired=False))

    def break_up(self, live: Live, error: PeerLostError) -> None:
        """The batch is over for everybody."""
        self.offers.end(live, list(live.offers), error)
        self._behind.break_up(live, error)
        if live.transfers is not None:
            self._perform(live, live.transfers.break_up(error))

    # ---- inside -------------------------------------------------------------------------------

    def _ended(self, live: Live, key: CallKey, expired: bool) -> None:
        assert live.transfers is not None
        if self._behind.end(key, expired=expired):
            return
        if expired and not live.machine.alone:
            self._spawn(self._expire(live, key))
        else:
            self._perform(live, live.transfers.end(key, expired=expired))

    async def _expire(self, live: Live, key: CallKey) -> None:
        assert live.transfers is not None
        await self.inquiries.learn(live, key)
        self._perform(live, live.transfers.end(key, expired=True))

    def hear(self, live: Live, agent: str, message: Message | Sums | UniqueId) -> None:
        """What another agent of the batch says."""
        assert live.transfers is not None
        if isinstance(message, Sums | UniqueId):
            live.take(agent, message)
        else:
            self._perform(live, live.transfers.hear(agent, message))

    def lose_agent(self, live: Live, agent: str) -> None:
        """The link to an agent of the batch is lost."""
        if live.transfers is not None:
            self._perform(live, live.transfers.lose_agent(agent))

    def _perform(self, live: Live, effects: list[TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case StartMove():
                    self._begin(live, effect)
                case StopMove():
                    assert live.current is not None
                    self._stop(live, live.current)
                case Fail(call=key, error=error):
                    live.asks.pop(key, None)
                    self._calls.fail(key, error)
                case Settled():
                    self._settled(live, effect)
                case OfferChanged():
                    self.offers.tell(live)
                case Tell(agent=agent, message=message):
                    self._links.tell(agent, live.scope, message)
                case Doubt(seq=seq):
                    asyncio.get_running_loop().call_later(DOUBT, self._undecided, live, seq)
                case WantLane(ticket=ticket, source=source):
                    self.turns.want(live, ticket, source)
                case BeginLane():
                    self.turns.begin(live)
                case FreeLane():
                    self.turns.free(live)

    def _needs(self) -> Needs:
        if self._known_needs is None:  # its links are opened after this was made
            self._known_needs = Needs(self._links.plane, self._lane.threads)
        return self._known_needs

    def _undecided(self, live: Live, seq: int) -> None:
        assert live.transfers is not None
        self._perform(live, live.transfers.undecided(seq))

    def _begin(self, live: Live, start: StartMove) -> None:
        self.rest.begin(live)
        current = live.current = Current(
            seq=start.seq, source=start.source, snapshot=start.snapshot, calls=start.calls, started=time.monotonic()
        )
        self.offers.tell(live, going=start.source)
        part = live.parts.get((start.source, start.snapshot))
        if part is not None:
            self._submit(live, current, part)
        else:
            self._spawn(self._compile(live, current))

    def _stop(self, live: Live, current: Current) -> None:
        current.stopped = True
        if current.late is not None:
            current.late.cancel()
            asyncio.get_running_loop().call_soon(self._over, live, current, None, current.touched)
        elif current.move is not None:
            current.move.stop()
        else:
            live.snapshots.wake()  # what is compiled may wait for one that will not be shown

    async def _compile(self, live: Live, current: Current) -> None:
        """The first transfer in a direction resolves every handle and lays out the pieces, off the loop."""
        if live.over:  # GO was on its way when a rank here left: its vote ends the transfer
            text = f"batch {live.name!r}: a rank of this agent has left it"
            self._over(live, current, PeerLostError(text, reason="closed", outcome="aborted"), False)
            return
        try:
            part = await self.parts.compile(live, current)
        except EthaError as error:
            self._moved(live, current, error, False)
            return
        except Exception as error:
            log.exception("batch %s: compiling failed", live.name)
            text = f"batch {live.name!r}: the agent could not lay out the transfer, a bug of Etha: {error!r}"
            self._over(live, current, TransferError(text), False)
            return
        if part is not None:
            live.parts[current.source, current.snapshot] = part
        self._submit(live, current, part)

    def _submit(self, live: Live, current: Current, part: Part | None) -> None:
        if current.stopped or part is None:
            self._over(live, current, None, False)
            return
        current.part = part
        guards = {}
        for member, key in current.calls.items():
            ask = live.asks[key]
            if ask.session.revocation is not None:
                role = "source" if member[0] == current.source else "target"
                guards[role, member[1]] = ask.session.revocation.guard(ask.slot)
        current.gauge = Gauge(part, live.read_by(current.source))
        current.move = Move(
            part,
            current.seq,
            guards,
            lane=self._lane,
            plane=self._links.plane,
            wire=live.wire,
            after=live.failed,
            spawn=self._spawn,
            progress=lambda done: self.pace.went(live, current, done),
            over=lambda error, touched: self._moved(live, current, error, touched),
            inspection=self.parts.inspection(live, current.seq, part, guards, self._lane),
        )
        current.move.start()

    def _moved(self, live: Live, current: Current, error: BaseException | None, touched: bool) -> None:
        self._behind.failed(error)
        if isinstance(error, StreamLost) and not current.stopped:
            # Its other end has most likely ended the transfer, and the cause is on its way over the link.
            current.late = asyncio.get_running_loop().call_later(
                GRACE, self._over, live, current, translate(live, error), touched
            )
            current.touched = touched
            return
        self._over(live, current, None if error is None else translate(live, error), touched)

    def _over(self, live: Live, current: Current, error: EthaError | None, touched: bool) -> None:
        current.late = None
        assert live.transfers is not None
        self._perform(live, live.transfers.moved(current.seq, error, touched=touched))

    def _settled(self, live: Live, effect: Settled) -> None:
        current, live.current = live.current, None
        assert current is not None
        if effect.error is not None:
            live.fail(effect.seq, effect.error)
        seconds = time.monotonic() - current.started
        fields: dict[str, int | float | str | None] = {"seq": effect.seq}
        if effect.error is None:
            live.version, live.last_seconds, live.last_error = effect.version, seconds, None
            if live.wire is not None:
                live.wire.settled()
            self._answer(live, effect, current, seconds)
            fields |= {"version": effect.version, "last_seconds": round(seconds, 6), "last_error": ""}
        else:
            live.last_error = effect.error
            fields |= {"last_error": effect.error.message[:1000]}
        for pair in live.pairs:
            self.chronicle.tell(pair, live.name, fields)
        # The move knows its end and its end the move: undone here, workers' memory does not wait for the collector.
        current.part = current.move = current.gauge = None
        self.rest.end(live)

    def _answer(self, live: Live, effect: Settled, current: Current, seconds: float) -> None:
        part = current.part
        assert part is not None
        for (side, rank), key in effect.calls.items():
            live.asks.pop(key, None)
            role = "source" if side == effect.source else "target"
            sides = {"source": effect.source, "target": live.other(effect.source)}
            peers = tuple(sorted((sides[where], peer) for where, peer in part.peers[role, rank]))
            moved = Moved(
                seq=effect.seq,
                version=effect.version,
                nbytes=part.nbytes[role, rank],
                seconds=seconds,
                peers=peers,
                peak_staging=current.move.peak_staging if current.move is not None else 0,
            )
            self._calls.answer(key, moved)
