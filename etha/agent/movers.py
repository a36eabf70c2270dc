"""The shell around transfers: worker calls in, programs on the lane, results and errors out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable

from etha.agent.bookings import Bookings, Granted, Recalled
from etha.agent.calls import Calls
from etha.agent.chronicle import Chronicle
from etha.agent.effects import (
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
from etha.agent.lane import Lane
from etha.agent.links import Links
from etha.agent.live import Ask, Current, Live
from etha.agent.move import Move, Part
from etha.agent.pairs import Spawn
from etha.agent.parts import Parts
from etha.agent.session import Session
from etha.agent.transfer import TransferEffect
from etha.agent.translate import translate
from etha.agent.waiting import Call
from etha.bus.codec import Request
from etha.bus.messages import Moved, Offered, Progress, Transfer
from etha.errors import (
    EthaError,
    PeerLostError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
)
from etha.peer.messages import Message
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Seconds that agents which have lost their coordinator ask each other.
DOUBT = 1.0


class Movers:
    """All transfers of this agent, on one lane."""

    def __init__(self, *, store: Store, links: Links, calls: Calls, lane: Lane, spawn: Spawn) -> None:
        self._links, self._calls, self._lane, self._spawn = links, calls, lane, spawn
        self.parts = Parts(links)
        self._bookings = Bookings()
        self._booked: dict[Hashable, Live] = {}
        self.chronicle = Chronicle(store, spawn)
        self.running = 0
        #: Set while no transfer moves on this agent.
        self.idle = asyncio.Event()
        self.idle.set()

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
        key = self._calls.open(session.peer, request, lambda key, expired: self._ended(live, key, expired))
        live.asks[key] = Ask(session=session, slot=message.slot, progress=message.progress)
        call = Call(key=key, member=member, verb=message.verb, version=message.version)
        self._perform(live, live.transfers.wait(call))

    def wait_offer(self, session: Session, request: Request, live: Live) -> None:
        """A worker calls ``wait_offer``."""
        assert live.transfers is not None
        side = session.seats[live.pairs[0]].side
        key = self._calls.open(session.peer, request, lambda key, expired: self._no_offer(live, key, expired))
        live.offers[key] = live.other(side)
        self._tell_offers(live)

    # ---- what happens around ------------------------------------------------------------------

    def withdraw(self, live: Live, member: Member, error: PeerLostError) -> None:
        """A worker leaves the batch: its waiting calls end, and a transfer that it is part of."""
        for key in [key for key, side in live.offers.items() if side == live.other(member[0])]:
            if live.tensors[member].session.key == key[0]:
                del live.offers[key]
                self._calls.fail(key, error)
        if live.transfers is not None:
            for key in [k for k, a in live.asks.items() if a.session is live.tensors[member].session]:
                self._perform(live, live.transfers.end(key, expired=False))

    def break_up(self, live: Live, error: PeerLostError) -> None:
        """The batch is over for everybody."""
        for key in list(live.offers):
            del live.offers[key]
            self._calls.fail(key, error)
        if live.transfers is not None:
            self._perform(live, live.transfers.break_up(error))

    # ---- inside -------------------------------------------------------------------------------

    def _ended(self, live: Live, key: CallKey, expired: bool) -> None:
        assert live.transfers is not None
        self._perform(live, live.transfers.end(key, expired=expired))

    def _no_offer(self, live: Live, key: CallKey, expired: bool) -> None:
        if (side := live.offers.pop(key, None)) is not None:
            how = "ended at its deadline" if expired else "was cancelled"
            text = f"wait_offer on batch {live.name!r} {how}: {side} is not waiting to send"
            self._calls.fail(key, TransferTimeoutError(text, outcome="withdrawn"))

    def _tell_offers(self, live: Live, going: str | None = None) -> None:
        """Answer who waits for an offer that stands, or for one that GO has just taken up (from ``going``)."""
        assert live.transfers is not None and live.evaluation is not None
        standing = dict(live.transfers.offers)
        if going is not None and live.transfers.current is not None:
            standing[going] = live.transfers.current.version
        for key, side in list(live.offers.items()):
            if side in standing:
                del live.offers[key]
                offered = Offered(version=standing[side], nbytes=live.evaluation.nbytes(side))
                self._calls.answer(key, offered)

    def hear(self, live: Live, agent: str, message: Message) -> None:
        """What another agent of the batch says."""
        assert live.transfers is not None
        self._perform(live, live.transfers.hear(agent, message))

    def lose_agent(self, live: Live, agent: str) -> None:
        """The link to an agent of the batch is lost."""
        if live.transfers is not None:
            self._perform(live, live.transfers.lose_agent(agent))

    def _perform(self, live: Live, effects: list[TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case StartMove(seq=seq, source=source, calls=calls):
                    self.running += 1
                    self.idle.clear()
                    live.current = Current(seq=seq, source=source, calls=calls, started=time.monotonic())
                    self._tell_offers(live, going=source)
                    self._start(live, live.current)
                case StopMove():
                    assert live.current is not None
                    live.current.stopped = True
                    if live.current.move is not None:
                        live.current.move.stop()
                case Fail(call=key, error=error):
                    live.asks.pop(key, None)
                    self._calls.fail(key, error)
                case Settled():
                    self._settled(live, effect)
                case OfferChanged():
                    self._tell_offers(live)
                case Tell(agent=agent, message=message):
                    self._links.tell(agent, live.scope, message)
                case Doubt(seq=seq):
                    asyncio.get_running_loop().call_later(DOUBT, self._undecided, live, seq)
                case WantLane(ticket=ticket):
                    self._booked[live.key] = live
                    self._lanes(self._bookings.want(live.key, ticket))
                case BeginLane():
                    self._bookings.begin(live.key)
                case FreeLane():
                    self._booked.pop(live.key, None)
                    self._lanes(self._bookings.free(live.key))

    def _undecided(self, live: Live, seq: int) -> None:
        assert live.transfers is not None
        self._perform(live, live.transfers.undecided(seq))

    def _lanes(self, changes: list[Granted | Recalled]) -> None:
        for change in changes:
            live = self._booked.get(change.key)
            if live is None or live.transfers is None:
                continue
            granted = isinstance(change, Granted)
            self._perform(live, live.transfers.granted() if granted else live.transfers.recalled())

    def _start(self, live: Live, current: Current) -> None:
        part = live.parts.get(current.source)
        if part is not None:
            self._submit(live, current, part)
        else:
            self._spawn(self._compile(live, current))

    async def _compile(self, live: Live, current: Current) -> None:
        """The first transfer in a direction resolves every handle and lays out the pieces, off the loop."""
        try:
            part = await self.parts.compile(live, current.source)
        except EthaError as error:
            self._over(live, current, error, touched=False)
            return
        except Exception as error:
            log.exception("batch %s: compiling failed", live.name)
            text = f"batch {live.name!r}: the agent could not lay out the transfer, a bug of Etha: {error!r}"
            self._over(live, current, TransferError(text), touched=False)
            return
        live.parts[current.source] = part
        self._submit(live, current, part)

    def _submit(self, live: Live, current: Current, part: Part) -> None:
        if current.stopped:
            self._over(live, current, None, touched=False)
            return
        guards = {}
        for member, key in current.calls.items():
            ask = live.asks[key]
            if ask.session.revocation is not None:
                role = "source" if member[0] == current.source else "target"
                guards[role, member[1]] = ask.session.revocation.guard(ask.slot)
        current.move = Move(
            part,
            current.seq,
            guards,
            lane=self._lane,
            plane=self._links.plane,
            transport=live.transport,
            spawn=self._spawn,
            progress=lambda done: self._progress(live, current, part, done),
            over=lambda error, touched: self._over(
                live, current, None if error is None else translate(live, error), touched=touched
            ),
        )
        current.move.start()

    def _progress(self, live: Live, current: Current, part: Part, done: int) -> None:
        if live.current is not current or part.work == 0:
            return
        for (side, rank), key in current.calls.items():
            ask = live.asks.get(key)
            if ask is not None and ask.progress:
                total = part.nbytes["source" if side == current.source else "target", rank]
                self._calls.push(key, Progress(done=total * done // part.work, total=total))

    def _over(self, live: Live, current: Current, error: EthaError | None, *, touched: bool) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()
        assert live.transfers is not None
        self._perform(live, live.transfers.moved(current.seq, error, touched=touched))

    def _settled(self, live: Live, effect: Settled) -> None:
        current, live.current = live.current, None
        assert current is not None and live.evaluation is not None
        if effect.error is not None and live.transport is not None:
            live.transport.stop(effect.error)  # its streams may hold what nobody will take
        seconds = time.monotonic() - current.started
        fields: dict[str, int | float | str | None] = {"seq": effect.seq}
        if effect.error is None:
            live.version, live.last_seconds, live.last_error = effect.version, seconds, None
            self._answer(live, effect, current, seconds)
            fields |= {"version": effect.version, "last_seconds": round(seconds, 6), "last_error": ""}
        else:
            live.last_error = effect.error
            fields |= {"last_error": effect.error.message[:1000]}
        for pair in live.pairs:
            self.chronicle.tell(pair, live.name, fields)

    def _answer(self, live: Live, effect: Settled, current: Current, seconds: float) -> None:
        part = live.parts[effect.source]
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
