"""The I/O around the pair machines: joins and leaves in Redis, wake-ups, pushes to workers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from etha.agent.protocol.effects import Answer, CallKey, Fail
from etha.agent.protocol.epoch_links import EpochLinks
from etha.agent.protocol.pair import Broken, Formed, Join, JoinRequest, Leave, Missed, PairEffect, PairMachine, Sever
from etha.agent.runtime import tasks
from etha.agent.runtime.peers import Epoch, PeerLinks
from etha.agent.runtime.sessions import OpenCalls, Seat, WorkerSession
from etha.agent.runtime.tasks import Spawn, ends_within, outage
from etha.agent.services.hints import LIMIT, Hints
from etha.bus.codec import Request
from etha.bus.messages import InitPair, PairLost
from etha.config import check_name
from etha.errors import HELD_HERE, ConfigError, EthaError, PeerLostError, from_wire
from etha.store.records import PairView, Reason
from etha.store.records import RankHolder as Holder
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Seconds after which all pairs are read again without a wake-up, in one request.
LOOK_AGAIN = 60.0
#: Seconds that a status report waits for Redis. Then it shows what this agent knows, marked as stale.
PATIENCE = 1.0
#: Waiting pairs for which a status report looks for others that may be meant.
_MOST_HINTS = 4
#: Seconds to wait before the store is asked to join a pair whose last epochs were over before their agents had met: no
#: wait after the first such epoch, FIRST_PAUSE after the second, twice as long after each further one.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
#: Pairs that status shows although no worker here belongs to them any more.
_MAX_ENDED = 64


@dataclass(slots=True)
class _Known:
    """A pair in use here. ``order`` keeps Redis's answers in the order of the requests."""

    machine: PairMachine
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: dict[CallKey, tuple[WorkerSession, JoinRequest, float]] = field(default_factory=dict)
    #: Set when the pair may have changed, or is forgotten.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    forgotten: bool = False
    #: Running tasks, except the one that reads the pair.
    working: int = 0
    #: When (loop time) the oldest call that waits here came.
    since: float = 0.0
    #: Epochs in a row that were over before their agents had met, and until when (loop time) nobody joins therefore.
    missed: int = 0
    paused_until: float = 0.0
    #: Calls that wait for that.
    paused: set[CallKey] = field(default_factory=set)
    #: Whether Redis may still show an epoch as formed that this agent knows to be over.
    ahead: bool = False


class RendezvousService:
    """All pairs of this agent. Calls ``broken(pair, epoch, error)`` when a pair's epoch is over."""

    def __init__(
        self,
        *,
        store: Store,
        links: PeerLinks,
        calls: OpenCalls,
        sessions: Callable[[], Iterable[WorkerSession]],
        spawn: Spawn,
        broken: Callable[[str, int, PeerLostError], None],
        hints: Hints,
    ) -> None:
        self._hints = hints
        self._store, self._links, self._calls = store, links, calls
        self._sessions, self._spawn, self._broken = sessions, spawn, broken
        self._known: dict[str, _Known] = {}
        self._ended: OrderedDict[str, _Known] = OrderedDict()
        self._looking = False

    def init(self, session: WorkerSession, request: Request, message: InitPair) -> None:
        """A worker calls ``init_pair``."""
        check_name("pair", message.pair)
        check_name("side", message.side)
        check_name("side", message.remote)
        known = self._known.get(message.pair)
        self._check_free(known, session, message)
        if known is None:
            known = self._known[message.pair] = self._fresh(message.pair)
            self._spawn(self._follow(known))
            if not self._looking:
                self._looking = True
                self._spawn(self._look_again())
        key = self._calls.open(session.peer, request, lambda key, expired: self._over(known, key, expired))
        asked = JoinRequest(
            key=key,
            side=message.side,
            rank=message.rank,
            remote=message.remote,
            world_size=message.world_size,
            launch=message.launch,
            run=message.run,
            takeover=message.takeover,
            give_up=message.give_up,
            holder=session.holder,
        )
        if not known.asked:
            known.since = asyncio.get_running_loop().time()
        known.asked[key] = (session, asked, request.deadline)
        self._perform(known, known.machine.ask(asked))

    def _fresh(self, pair: str) -> _Known:
        """A pair that is asked for. Calls that fail and come again must not make a pause any shorter."""
        ended = self._ended.pop(pair, None)
        if ended is None:
            return _Known(PairMachine(pair, self._store.url))
        machine = PairMachine(pair, self._store.url, unmet=ended.machine.unmet_because)
        return _Known(machine, missed=ended.missed, paused_until=ended.paused_until)

    def _check_free(self, known: _Known | None, session: WorkerSession, message: InitPair) -> None:
        """ConfigError for a client that is another rank already, and for a rank that another client of the process
        holds.

        Redis knows processes only, so it would take the second client for the same call. It does recognize a newer
        launch.
        """
        asked = [] if known is None else [(owner, (one.side, one.rank)) for owner, one, _ in known.asked.values()]
        mine = [member for owner, member in asked if owner is session]
        if (seat := session.seats.get(message.pair)) is not None:
            mine.append(seat.member)
        wanted = (message.side, message.rank)
        for side, rank in mine:
            if (side, rank) != wanted:
                raise ConfigError(
                    f"this client is {side} rank {rank} of pair {message.pair!r} already; "
                    f"use another client to be {message.side} rank {message.rank}"
                )
        takes_over = message.takeover and message.launch is not None
        if known is None or known.machine.launched_again(message.side, message.launch) or takes_over:
            return
        held = [owner for owner, member in asked if member == wanted]
        held += [
            other
            for other in self._sessions()
            if (theirs := other.seats.get(message.pair)) is not None
            and theirs.member == wanted
            and known.machine.error(theirs.epoch) is None
        ]
        for other in held:
            if other is not session and other.holder == session.holder:
                raise ConfigError(
                    f"rank {message.rank} of side {message.side} on pair {message.pair} {HELD_HERE}, "
                    f"pid {session.holder.pid} on host {session.holder.shown_host}: close that one first"
                )

    def error(self, seat: Seat) -> PeerLostError | None:
        """Why a call of this seat's epoch cannot continue; None if it can."""
        return self._known[seat.pair].machine.error(seat.epoch)

    def view(self, pair: str) -> PairView:
        """Who holds which rank in the current epoch."""
        view = self._known[pair].machine.view
        assert view is not None
        return view

    def shown(self) -> list[tuple[PairMachine, bool]]:
        """The pairs known here and the last ones that were, for the status report; and whether each is one of the
        latter."""
        found = self._ended | self._known
        return [(found[name].machine, name not in self._known) for name in sorted(found)]

    def waits(self) -> dict[str, float]:
        """The pairs for which workers of this agent wait, and for how many seconds."""
        now = asyncio.get_running_loop().time()
        return {name: now - known.since for name, known in self._known.items() if known.asked}

    async def hints(self) -> dict[str, str]:
        """For pairs at which workers here wait for a side of which nobody has come: other pairs that may be meant."""
        views = [(known.machine.pair, known.machine.view) for known in self._known.values() if known.asked]
        alone = [(pair, view) for pair, view in views if view and not all(s.members for s in view.sides.values())]
        texts = await asyncio.gather(
            *(self._hints.of_pair(pair, view.sides, alone=False) for pair, view in alone[:_MOST_HINTS])
        )
        return {pair: text.removeprefix(". ") for (pair, _), text in zip(alone, texts, strict=False) if text}

    async def refresh(self) -> str:
        """Read all pairs that status shows, because an idle agent may have missed the latest; returns why that failed,
        or "".

        Pairs in use are read, too, because the wake-up for a recent change may still be on its way.
        """
        # Pairs may be added or forgotten meanwhile, so each read updates the object that was known at the beginning.
        reads = [self._read(known) for known in self._known.values()]
        reads += [self._read_ended(name, ended) for name, ended in self._ended.items()]
        try:
            async with asyncio.timeout(PATIENCE):
                failed = [why for why in await asyncio.gather(*reads) if why]
        except TimeoutError:
            return f"Redis at {self._store.url} has not answered within {PATIENCE:g} s"
        return failed[0] if failed else ""

    async def _read(self, known: _Known) -> str:
        try:
            async with known.order:
                view = await self._store.pairs.get(known.machine.pair, timeout=PATIENCE)
                if view is not None and known.forgotten:  # forgotten while this waited: only the view matters
                    known.machine.view = view
                elif view is not None:
                    self._perform(known, known.machine.viewed(view))
        except EthaError as error:
            return error.message
        return ""

    async def _read_ended(self, name: str, ended: _Known) -> str:
        try:
            view = await self._store.pairs.get(name, timeout=PATIENCE)
        except EthaError as error:
            return error.message
        if self._ended.get(name) is ended:
            if view is None:
                del self._ended[name]
            else:
                ended.machine.view = view
        return ""

    def on_agent_lost(self, agent: str, text: str, epoch: Epoch | None = None) -> None:
        """An agent is lost, and with it every pair in which it takes part, or ``epoch`` alone."""
        for name, known in self._known.items():
            if epoch is None or epoch == (name, known.machine.epoch):
                self._perform(known, known.machine.on_agent_lost(agent, text))

    def on_worker_lost(self, session: WorkerSession, reason: Reason) -> None:
        """A worker's connection is gone, and so are its ranks, unless the same process holds them through another
        client."""
        held = {(pair, seat.side, seat.rank) for pair, seat in session.seats.items()}
        for name, known in self._known.items():
            for key in [key for key, (owner, _, _) in known.asked.items() if owner is session]:
                _, asked, _ = known.asked.pop(key)
                held.add((name, asked.side, asked.rank))
        kept = {
            (pair, seat.side, seat.rank)
            for other in self._sessions()
            if other is not session and other.holder == session.holder
            for pair, seat in other.seats.items()
        }
        session.seats.clear()
        for name, side, rank in sorted(held - kept):
            known = self._known[name]
            self._perform(known, known.machine.depart(side, rank, session.holder, reason))
        for name in {name for name, _, _ in held}:
            if (left := self._known.get(name)) is not None:
                self._forget_unused(left)

    def leave(self, session: WorkerSession, pair: str) -> None:
        """A worker gives up its rank in a pair. Does nothing if it has none."""
        known, seat = self._known.get(pair), session.seats.pop(pair, None)
        if known is not None and seat is not None:
            self._perform(known, known.machine.depart(seat.side, seat.rank, session.holder, "closed"))
            self._forget_unused(known)

    def _over(self, known: _Known, key: CallKey, expired: bool) -> None:
        if expired and known.machine.waits_for_others(key):
            self._work(known, self._expire(known, key))
        else:
            paused = key in known.paused
            self._end_early(known, key, known.machine.expire(key, cancelled=not expired, paused=paused))

    async def _expire(self, known: _Known, key: CallKey) -> None:
        """A deadline has passed: look for hints and who has come, then end the call, unless it has been answered."""
        if key not in known.asked:
            return  # it was answered or has left before this began
        asked = known.asked[key][1]
        already = known.machine.missing(asked)
        alone = known.machine.absent(already)
        hint, _ = await asyncio.gather(
            self._hints.of_pair(known.machine.pair, (asked.side, asked.remote), alone=bool(alone)),
            ends_within(LIMIT, self._read(known)),  # not every rank that comes to a large side is announced
        )
        self._end_early(known, key, known.machine.expire(key, cancelled=False, hint=hint, already=already))

    def _end_early(self, known: _Known, key: CallKey, effects: list[PairEffect]) -> None:
        """Give the rank of a call up, then fail the call.

        The worker gets its error last. Otherwise another rank could complete an epoch with a rank that has given up,
        and all would have to meet once more.
        """
        owner, _, _ = known.asked.pop(key, (None, None, 0.0))
        fails = [effect for effect in effects if isinstance(effect, Fail)]
        given_up = asyncio.Event()
        for effect in effects:
            if isinstance(effect, Leave):
                leave = self._leave(known, effect.side, effect.rank, effect.holder, effect.reason)
                self._work(known, _then(leave, given_up))
        for fail in fails:
            self._work(known, self._fail(fail, owner, given_up))

    async def _fail(self, fail: Fail, owner: WorkerSession | None, given_up: asyncio.Event) -> None:
        # Without Redis this takes longer than the worker waits for its answer.
        await ends_within(tasks.TAKEN_BACK, given_up.wait())
        self._calls.fail(fail.call, fail.error if owner is None else _with_wishes(owner, fail.error))

    def _work(self, known: _Known, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that needs the pair. Afterwards forget the pair if nothing needs it."""

        async def working() -> None:
            try:
                await work
            finally:
                known.working -= 1
                self._forget_unused(known)

        known.working += 1
        self._spawn(working())

    def _forget_unused(self, known: _Known) -> None:
        """Stop following a pair once no worker here belongs to it or wants to, and Redis knows that."""
        name = known.machine.pair
        needed = known.asked or known.machine.waiting or known.working or known.ahead
        if needed or known.forgotten or any(name in session.seats for session in self._sessions()):
            return
        known.forgotten = True
        known.changed.set()
        self._links.forget(name, known.machine.epoch)
        del self._known[name]
        self._ended[name] = known
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _perform(self, known: _Known, effects: list[PairEffect]) -> None:
        pair = known.machine.pair
        for effect in effects:
            match effect:
                case Join(asked=asked):
                    self._work(known, self._join(known, asked))
                case Leave(side=side, rank=rank, holder=holder, reason=reason):
                    self._work(known, self._leave(known, side, rank, holder, reason))
                case Answer(call=key, message=message):
                    session, asked, _ = known.asked.pop(key)
                    session.seats[pair] = Seat(
                        pair=pair,
                        side=asked.side,
                        rank=asked.rank,
                        remote=asked.remote,
                        holder=asked.holder,
                        epoch=message.epoch,
                    )
                    self._calls.answer(key, message)
                case Fail(call=key, error=error):
                    owner, _, _ = known.asked.pop(key, (None, None, 0.0))
                    self._calls.fail(key, error if owner is None else _with_wishes(owner, error))
                case Sever():
                    self._work(known, self._sever(known, effect))
                case Missed():
                    known.missed += 1
                    known.paused_until = asyncio.get_running_loop().time() + _pause(known.missed)
                case Formed(epoch=epoch):
                    log.info("pair %s formed, epoch %d", pair, epoch)
                    members = {
                        name: [(side.members[rank].agent, side.members[rank].host) for rank in sorted(side.members)]
                        for name, side in effect.view.sides.items()
                    }
                    links = EpochLinks.of(self._links.me, members)
                    if len(links.agents) > 1:
                        self._work(known, self._meet(known, epoch, links))
                    else:
                        self._met(known, epoch)
                case Broken(epoch=epoch, error=error):
                    self._links.forget(pair, epoch)
                    log.info("pair %s lost: %s", pair, error.message)
                    # First the push, then the calls that end by it, so that no worker gets the error without the push.
                    for session in self._sessions():
                        seat = session.seats.get(pair)
                        if seat is not None and seat.epoch == epoch:
                            session.peer.push(
                                PairLost(
                                    pair=pair,
                                    epoch=epoch,
                                    reason=error.reason,
                                    text=error.message,
                                    culprits=error.culprits,
                                )
                            )
                    self._broken(pair, epoch, error)

    async def _join(self, known: _Known, asked: JoinRequest) -> None:
        await self._sit_out(known, asked.key)
        _, _, deadline = known.asked.get(asked.key, (None, None, 0.0))
        left = math.inf if deadline == math.inf else deadline - asyncio.get_running_loop().time()
        if left <= 0 or asked.key not in known.asked:
            return  # it has ended already
        try:
            async with known.order:
                view = await self._store.pairs.join(
                    known.machine.pair,
                    asked.side,
                    asked.remote,
                    rank=asked.rank,
                    world_size=asked.world_size,
                    launch=asked.launch,
                    run=asked.run,
                    takeover=asked.takeover,
                    member=asked.holder,
                    known_epoch=known.machine.epoch,
                    timeout=left,
                )
                if asked.key not in known.asked:  # the call was given up meanwhile, and its Leave may have come first
                    await self._store.pairs.leave(known.machine.pair, asked.side, asked.rank, asked.holder, "closed")
                self._perform(known, known.machine.joined(asked.key, view))
        except EthaError as error:
            self._perform(known, known.machine.refused(asked.key, error))

    async def _sit_out(self, known: _Known, key: CallKey) -> None:
        """Wait until a call may join the pair: agents that could not meet could not at once, either."""
        known.paused.add(key)
        try:
            await asyncio.sleep(max(0.0, known.paused_until - asyncio.get_running_loop().time()))
        finally:
            known.paused.discard(key)

    async def _meet(self, known: _Known, epoch: int, links: EpochLinks) -> None:
        try:
            await self._links.form((known.machine.pair, epoch), links)
        except EthaError as error:
            # Agents that have heard that the epoch is over do not come to it, so nothing is wrong then.
            level = logging.WARNING if known.machine.error(epoch) is None else logging.DEBUG
            log.log(level, "pair %s epoch %d: %s", known.machine.pair, epoch, error.message)
            self._perform(known, known.machine.unmet(epoch, error))
            return
        self._met(known, epoch)

    def _met(self, known: _Known, epoch: int) -> None:
        if epoch == known.machine.epoch:
            known.missed, known.paused_until = 0, 0.0
        self._perform(known, known.machine.met(epoch))

    async def _sever(self, known: _Known, lost: Sever) -> None:
        pair = known.machine.pair
        try:
            async with known.order:
                await self._store.pairs.sever(pair, lost.epoch, "died", lost.text, lost.culprits)
        except EthaError as error:
            # The next rank that joins finds the epoch formed in Redis and severs it again.
            known.ahead = True
            outage(log, "pair %s: Redis does not know that epoch %d is over: %s", pair, lost.epoch, error)

    async def _leave(self, known: _Known, side: str, rank: int, holder: Holder, reason: Reason) -> None:
        try:
            async with known.order:
                await self._store.pairs.leave(known.machine.pair, side, rank, holder, reason)
        except EthaError as error:
            # The end of this agent's lease, or the next join, finds that the holder is dead.
            known.ahead = True
            outage(log, "pair %s: %s rank %d could not be taken out: %s", known.machine.pair, side, rank, error)

    async def _follow(self, known: _Known) -> None:
        """Read the pair after every wake-up, as long as a worker here belongs to it.

        While a call waits for others, the pair is read at every tick, too. A formed pair is read when it has changed.
        """
        name = known.machine.pair
        with self._store.watch(
            self._store.keys.pair(name), known.changed.set, ticks=lambda: bool(known.machine.waiting)
        ):
            while True:
                await known.changed.wait()
                known.changed.clear()
                if known.forgotten:
                    return
                try:
                    async with known.order:
                        # The members of a large side are read only if a call waits or something has changed.
                        state, seen = await self._store.pairs.state(name), known.machine.view
                        same = state is not None and seen is not None and state.same_as(seen)
                        if not same or known.machine.waiting:
                            view = await self._store.pairs.get(name)
                            if view is not None:
                                self._perform(known, known.machine.viewed(view))
                    known.ahead = known.ahead and state is not None and state.state == "formed"
                    self._forget_unused(known)
                except EthaError as error:
                    outage(log, "pair %s could not be read: %s", name, error)

    async def _look_again(self) -> None:
        """Wake-ups may be lost: read each pair again whose state differs from Redis."""
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            names = sorted(self._known)
            try:
                states = await self._store.pairs.states(names)
            except EthaError as error:
                log.debug("the pairs could not be read: %s", error)
                continue
            for name, state in states.items():
                known = self._known.get(name)
                seen = known.machine.view if known is not None else None
                same = state is not None and seen is not None and state.same_as(seen)
                if known is not None and (known.ahead or not same):
                    known.changed.set()


def _pause(missed: int) -> float:
    """Seconds after so many epochs in a row that were over before their agents had met."""
    return 0.0 if missed < 2 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(missed - 2, 20))


async def _then(work: Coroutine[Any, Any, None], done: asyncio.Event) -> None:
    try:
        await work
    finally:
        done.set()


def _with_wishes(session: WorkerSession, error: EthaError) -> EthaError:
    """``error``, and a note if this agent's settings differ from those that the worker wants, which may be the
    cause."""
    if not session.differs or isinstance(error, ConfigError):
        return error
    wire = error.to_wire()
    return from_wire({**wire, "text": f"{wire['text']}. {session.differs}"})
