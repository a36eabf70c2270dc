"""Publications: what publishers and subscribers of this agent ask, and the hops on which their memory is sent.

    worker: publish, subscribe   --> ranks enter in Redis --> LocalSide, which follows its key there
    worker: put                  --> a slot that nobody reads; announced
    worker: next                 --> a claim: who sends which version. The worker receives it as any transfer
    Redis: a claim reads a side  --> each agent of the side begins a hop for its ranks (``hop_worker``)

Which holder feeds whom is decided in Redis (``store.publications``). A holder's agents send without its workers, from
memory that they hold themselves, so a worker that is busy, stopped or dead delays no hop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from etha.agent.protocol.effects import name_ranks
from etha.agent.protocol.hops import HopBuffer, ended_hops, hop_batch, hop_pair, new_hops
from etha.agent.runtime.hop_worker import HopWorker, StandingTensors
from etha.agent.runtime.in_process_worker import Dispatcher
from etha.agent.runtime.sessions import HopClaim, OpenCalls, WorkerSession
from etha.agent.runtime.tasks import EndableTask, Spawn, outage
from etha.agent.services.registration import RegistrationService
from etha.agent.services.side_tables import SideMeeting, misfits
from etha.bus.codec import Request
from etha.bus.messages import (
    Announced,
    BeginPut,
    ClaimLost,
    ClaimVersion,
    ClosePublication,
    CloseSubscription,
    DescribePublication,
    EndHop,
    FinishPut,
    GetSubscribers,
    Holders,
    Ok,
    PublicationDescribed,
    Publish,
    Published,
    SlotGiven,
    Subscribe,
    Subscribed,
    Subscribers,
    VersionClaimed,
    WaitHeld,
    WaitHolders,
)
from etha.config import MAX_WORLD, check_name
from etha.errors import (
    HELD_HERE,
    ConfigError,
    EthaError,
    GroupLostError,
    PeerLostError,
    ProtocolError,
    RedisUnavailableError,
    RegistrationError,
    RendezvousTimeoutError,
    TransferTimeoutError,
)
from etha.memory.handles import TensorHandle
from etha.memory.mapping import StandingSegment
from etha.memory.samples import Samples
from etha.store.keys import CLAIM_BEAT
from etha.store.publication_records import (
    ClaimAnswer,
    ClaimRequest,
    HeldVersion,
    PublicationRank,
    PublicationSide,
    PutSlot,
    Role,
    SourceClaim,
)
from etha.store.records import RankHolder
from etha.store.registry import Store
from etha.transport.arrival import ArrivingVersion
from etha.transport.rate_limit import RateLimit
from etha.transport.wire.differences import BaseVersion

log = logging.getLogger(__name__)

#: Subscribers that a publisher serves at once, unless it says otherwise.
FAN_OUT = 2
#: Earlier claims whose holders are remembered, and holders with which a subscriber keeps a pair (as its client does).
MAX_SOURCES, MAX_LINKS = 64, 4
#: Seconds for which a subscriber prefers to wait for others than the holders that have just failed it.
AVOIDED = 1.0
#: Seconds after which a Redis that has not answered counts as unavailable.
PATIENCE = 1.0
#: Seconds after a claim for which it is kept although no transfer runs.
HOP_IDLE = 30.0
#: Seconds that Redis is given to hear that a side has left, and that all have to leave a pair before it is removed.
_LAST_WORDS, _FORGET = 5.0, 30.0
#: Seconds for which a rank that has left in order counts as there, until all others have put what it has put last.
_LAST_PUT = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SetAside:
    """A put of one rank that is set aside in a slot."""

    number: int
    slot: PutSlot
    version: int | str | None


class _NotHeldError(Exception):
    """Redis has given a claim of a version that the buffer does not hold."""


class _SpoiltError(_NotHeldError):
    """Somebody has written to a buffer since its version has come."""


@dataclass(slots=True, kw_only=True, eq=False)
class LocalRank:
    """A rank of a side on this agent. ``session`` is None once its worker has left."""

    number: int
    holder: RankHolder
    session: WorkerSession | None
    entrance: PublicationRank
    tensors: StandingTensors
    segments: tuple[StandingSegment, ...]
    #: One for each slot; empty for a subscriber that serves nobody.
    buffers: list[HopBuffer]
    #: Of the version that a subscriber received last, while its buffer holds that.
    samples: Samples | None = None
    #: Towards each subscriber (SIDE/SERIAL).
    workers: dict[str, HopWorker] = field(default_factory=dict)
    #: What it has asked for last, and the claim that was given; None between hops.
    asked: ClaimRequest | None = None
    claim: SourceClaim | None = None
    #: Holders of earlier claims, by their numbers; and those with which a pair was formed, the last one at the end.
    sources: dict[int, str] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    #: Pairs with holders that its worker may be in, the last one at the end, and the batches of each.
    pairs: dict[str, set[str]] = field(default_factory=dict)
    #: Of a publisher: the put that has a slot now, and why one has none yet; "" before Redis has answered.
    put: tuple[int, PutSlot] | None = None
    waits: str = ""
    #: The put that it has set aside, until all ranks have.
    announced: _SetAside | None = None
    #: The last claim of which it has heard.
    last_claim: int = 0
    #: The number of its last question, however that has ended. A call that was cancelled has a number, too, and Redis
    #: may still have its question, or its answer: the next one is another question.
    last_call: int = 0

    def may_hold(self, slot: int, seq: int, upstream: int) -> bool:
        """Whether a buffer holds version ``seq``, or may, once its worker has said how its hop or its put has ended.

        ``upstream``: the claim that brings the version, of which this agent may have yet to hear.
        """
        if self.buffers[slot].holds(seq) or self.claim is not None or self.announced is not None:
            return True
        if upstream > self.last_claim and self.session is not None:
            return True
        publishes, newest = self.entrance.role == "publisher", max(buffer.seq for buffer in self.buffers)
        return publishes and self.session is not None and seq > newest

    def spoilt(self) -> str:
        """What has been written to since the version came that its buffer holds; "" if nothing has."""
        changed = self.samples.changed() if self.samples is not None else None
        if changed is None:
            return ""
        return (
            f"tensor {self.tensors.entries[changed].name!r} of {self.tensors.side} rank {self.number} has been written "
            f"to since its version came, and others receive what it holds: subscribe with atomic=True or serve=False, "
            f"or change a copy"
        )


@dataclass(slots=True)
class _Hop:
    """A hop that reads a side here."""

    claim: SourceClaim
    task: EndableTask[None]


@dataclass(slots=True, kw_only=True, eq=False)
class LocalSide:
    """The ranks of one launch of a side on this agent, and the hops that read their memory."""

    publication: str
    name: str
    serial: int
    role: Role
    world: int
    ranks: dict[int, LocalRank] = field(default_factory=dict)
    #: claim -> its hop here.
    hops: dict[int, _Hop] = field(default_factory=dict)
    #: Claims whose hop was begun, as long as Redis has them. None is begun twice.
    begun: set[int] = field(default_factory=set)
    #: Claims whose hops a put ends.
    overwritten: set[int] = field(default_factory=set)
    #: Set when Redis may have something new about it.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set, and replaced by another, when a buffer or a hop has changed here.
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    #: Held while Redis is told how a hop has ended, so that the next claim comes after that.
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The newest version of which it has heard, the one that it has received last, and since when (loop time) that one
    #: is not the newest; None while it is.
    seq: int = 0
    received: int = 0
    behind_since: float | None = None
    #: What its last claim brings, and may be passed on.
    arriving: ArrivingVersion | None = None
    #: How fast its hops may send from here, all together.
    limit: RateLimit = field(default_factory=RateLimit)

    @property
    def holder(self) -> str:
        """SIDE/SERIAL."""
        return f"{self.name}/{self.serial}"

    @property
    def attended(self) -> bool:
        """Whether a worker here still belongs to it."""
        return any(rank.session is not None for rank in self.ranks.values())

    def note(self, now: float, *, newest: int = 0, received: int | None = None) -> None:
        """A version was announced, or was received by a subscriber, which may be an older one that it has pinned."""
        self.seq = max(self.seq, newest)
        self.received = self.received if received is None else received
        if self.received >= self.seq:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now

    def reading(self) -> set[int]:
        """Claims whose hops read a buffer here."""
        return {claim for rank in self.ranks.values() for buffer in rank.buffers for claim in buffer.readers}

    def notify(self) -> None:
        """Wake whoever waits for a buffer or a hop."""
        self.moved.set()
        self.moved = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, which depends on buffers and hops here."""
        while not condition():
            await self.moved.wait()


class PublicationService:
    """All publications of this agent's workers."""

    def __init__(
        self,
        *,
        store: Store,
        calls: OpenCalls,
        registrations: RegistrationService,
        dispatcher: Dispatcher,
        spawn: Spawn,
        zone: str,
        pass_on: bool,
    ) -> None:
        self._zone, self._pass_on = zone, pass_on
        self._store, self._calls, self._registrations = store, calls, registrations
        self._dispatcher, self._spawn = dispatcher, spawn
        #: (publication, SIDE/SERIAL) -> it.
        self._sides: dict[tuple[str, str], LocalSide] = {}
        #: What each worker has entered, by (session, publication, role).
        self._entered: dict[tuple[str, str, Role], tuple[LocalSide, LocalRank]] = {}
        #: Ranks that are about to: (publication, holder, role, side, rank).
        self._entering: set[tuple[str, RankHolder, Role, str, int]] = set()
        #: What Redis has not heard yet: ranks that have left, by (publication, side, rank).
        self._farewells: dict[tuple[str, str, int], EndableTask[None]] = {}
        self._leaving = False

    # ---- requests of workers ------------------------------------------------------------------

    def handle(self, session: WorkerSession, request: Request) -> None:
        """A worker's request about a publication."""
        match request.message:
            case Publish() as message:
                self._enter(session, request, message, "publisher", message.publisher)
            case DescribePublication(publication=publication):
                check_name("publication", publication)
                self._answer(session, request, self._describe(publication), lambda: _description_late(publication))
            case Subscribe() as message:
                self._enter(session, request, message, "subscriber", message.subscriber)
            case BeginPut() as message:
                side, rank = self._find(session, message.publication, "publisher")
                unanswered = self._unanswered(f"put of publication {side.publication!r}")
                work = self._begin_put(side, rank, message)
                self._answer(session, request, work, lambda: _slot_late(side, rank, unanswered))
            case FinishPut() as message:
                side, rank = self._find(session, message.publication, "publisher")
                late = self._unanswered(f"put of publication {side.publication!r}")
                self._answer(session, request, self._finish_put(side, rank, message), late)
            case WaitHeld() as message:
                side, _ = self._find(session, message.publication, "publisher")
                received: list[str] = []
                waiting = self._wait_held(side, message, received)
                self._answer(session, request, waiting, partial(_held_late, side, message, received))
            case WaitHolders() as message:
                side, _ = self._find(session, message.publication, "publisher")
                self._answer(session, request, self._wait_holders(side, message), _holders_late(side, message))
            case GetSubscribers(publication=publication):
                side, _ = self._find(session, publication, "publisher")
                late = self._unanswered(f"subscribers of publication {publication!r}")
                self._answer(session, request, self._subscribers(side), late)
            case ClaimVersion() as message:
                side, rank = self._find(session, message.publication, "subscriber")
                self._claim(session, request, side, rank, message)
            case EndHop() as message:
                side, rank = self._find(session, message.publication, "subscriber")
                self._end_hop(side, rank, message)
                session.peer.reply(request.id, Ok())
            case ClosePublication(publication=publication):
                self._leave(session, publication, "publisher", "closed")
                session.peer.reply(request.id, Ok())
            case CloseSubscription(publication=publication):
                self._leave(session, publication, "subscriber", "closed")
                session.peer.reply(request.id, Ok())
            case _:
                raise ProtocolError(f"{type(request.message).__name__} is not about a publication")

    def on_worker_lost(self, session: WorkerSession, reason: str) -> None:
        """A worker has died or closed its connection: its sides end. What a publisher has set aside stays."""
        for key, publication, role in [key for key in self._entered if key[0] == session.key]:
            assert key == session.key
            self._leave(session, publication, role, reason)
        session.drop_standing(list(session.standing))

    def close(self) -> None:
        """This agent leaves: all hops end."""
        self._leaving = True
        for side in list(self._sides.values()):
            self._end_side(side)

    # ---- sides --------------------------------------------------------------------------------------

    def _find(self, session: WorkerSession, publication: str, role: Role) -> tuple[LocalSide, LocalRank]:
        found = self._entered.get((session.key, publication, role))
        if found is None:
            call = "publish" if role == "publisher" else "subscribe"
            raise ConfigError(f"this client is no {role} of publication {publication!r}: call {call} first")
        return found

    def _enter(
        self, session: WorkerSession, request: Request, message: Publish | Subscribe, role: Role, side: str
    ) -> None:
        publication = message.publication
        check_name("publication", publication)
        check_name(role, side)
        if (session.key, publication, role) in self._entered:
            raise ConfigError(f"this client is {side} of publication {publication!r} already: close that first")
        if not 1 <= message.world_size <= MAX_WORLD or not 0 <= message.rank < message.world_size:
            raise ConfigError(
                f"publication {publication!r}: rank {message.rank} is no rank of a side of {message.world_size} ranks"
            )
        if isinstance(message, Publish) and not message.slots:
            raise ProtocolError(f"publication {publication!r}: a publisher needs a slot")
        if isinstance(message, Publish) and message.max_rate is not None and not 0 < message.max_rate < math.inf:
            raise ProtocolError(f"publication {publication!r}: {message.max_rate} bytes per second are no rate")
        self._check_free(session, publication, role, side, message.rank)
        handles = (
            message.slots if isinstance(message, Publish) else (() if message.serves is None else (message.serves,))
        )
        segments = self._take(session, handles, len(message.entries))
        meeting = SideMeeting(publication=publication, side=side, rank=message.rank, world=message.world_size)

        def late() -> EthaError:
            missing = meeting.missing
            who = name_ranks({side: missing}) if missing else f"a rank of {side} that has not entered it"
            return RendezvousTimeoutError(
                f"{side} rank {message.rank} ended at its deadline while it entered publication {publication!r}; "
                f"missing: {who}",
                missing={side: missing} if missing else {},
            )

        work = self._entered_by(session, message, role, side, meeting, handles, segments)
        self._answer(session, request, work, late)

    def _check_free(self, session: WorkerSession, publication: str, role: Role, side: str, number: int) -> None:
        """ConfigError for what another client of the process holds: Redis knows processes only, so it would take the
        second client for the first one."""
        mine = [
            (one.role, one.name, rank.number)
            for one, rank in self._entered.values()
            if (one.publication, rank.holder) == (publication, session.holder)
        ]
        mine += [entry[2:] for entry in self._entering if entry[:2] == (publication, session.holder)]
        where = f"publication {publication!r}"
        for other_role, name, rank in mine:
            if (other_role, name, rank) == (role, side, number):
                raise ConfigError(
                    f"rank {number} of {side} of {where} {HELD_HERE}, pid {session.holder.pid} on host "
                    f"{session.holder.shown_host}: close that one first"
                )
            if role == other_role == "publisher" and name != side:
                raise ConfigError(f"{where}: {name} of this process publishes it: a publication has one publisher")
            if name == side and other_role != role:
                raise ConfigError(f"{where}: {side} is its {other_role} in this process: give each side its own name")

    def _take(
        self, session: WorkerSession, slots: tuple[tuple[TensorHandle, ...], ...], count: int
    ) -> tuple[StandingSegment, ...]:
        """The segments that the handles name, which the worker has given to this agent."""
        names = dict.fromkeys(h.segment for handles in slots for h in handles if 0 not in h.shape)
        if any(len(handles) != count for handles in slots):
            raise ProtocolError(f"slots of {[len(handles) for handles in slots]} handles for {count} tensors")
        if missing := [name for name in names if name is None or name not in session.standing]:
            raise ProtocolError(f"segments {missing[:3]} were not given to this agent")
        return tuple(session.standing.pop(name) for name in names if name is not None)

    async def _entered_by(
        self,
        session: WorkerSession,
        message: Publish | Subscribe,
        role: Role,
        side: str,
        meeting: SideMeeting,
        handles: tuple[tuple[TensorHandle, ...], ...],
        segments: tuple[StandingSegment, ...],
    ) -> Published | Subscribed:
        publication, number = message.publication, message.rank
        store, entered, refused = self._store, False, False
        entering = (publication, session.holder, role, side, number)
        self._entering.add(entering)
        try:
            try:
                table = await meeting.table(message, store, self._registrations.manifests, session.holder)
            except RegistrationError:
                refused = True
                raise
            if role == "subscriber":
                await self._check_fits(publication, side, table)
            entrance = PublicationRank(
                publication=publication,
                side=side,
                role=role,
                rank=number,
                world=message.world_size,
                tensors=table,
                launch=message.launch,
                run=message.run,
                takeover=message.takeover,
                zone=self._zone,
                slots=max(1, len(handles)),
                places=_places(message, bool(handles)),
                passes=self._pass_on and role == "subscriber" and bool(handles),
            )
            async with store.changes(store.keys.publication_side(publication, side)) as changed:
                # The same process may come again before Redis has heard that it has left.
                while (farewell := self._farewells.get((publication, side, number))) is not None:
                    await farewell.over.wait()
                while True:
                    found = await store.publications.enter(entrance, session.holder, timeout=math.inf)
                    entered = True
                    if found.complete:
                        break
                    await changed()
            if session.peer.disconnected or self._leaving:
                raise PeerLostError(f"{side} rank {number} has left", reason="closed")
        except BaseException:
            for segment in segments:
                segment.close()
            if entered:
                self._say_left(publication, side, number, session.holder, "closed")
            raise
        finally:
            self._entering.discard(entering)
            # What does not fit stays for the other ranks, each of which finds that by itself.
            if message.world_size > 1 and not refused:
                self._spawn(self._leave_roster(publication, side, number))
        entrance = replace(entrance, serial=found.serial, launch=found.launch)
        rank = LocalRank(
            number=number,
            holder=session.holder,
            session=session,
            entrance=entrance,
            tensors=StandingTensors(
                side=side,
                world_size=message.world_size,
                rank=number,
                layouts=message.layouts,
                entries=message.entries,
                slots=handles,
            ),
            segments=segments,
            buffers=[HopBuffer() for _ in handles],
        )
        self._begin(session, rank, role, found)
        if isinstance(message, Publish) and message.max_rate is not None:
            rank_side, _ = self._entered[session.key, publication, role]
            rank_side.limit.lower(message.max_rate)
        if role == "publisher":
            return Published(seq=found.seq)
        return Subscribed(seq=found.seq, turn=0)

    async def _describe(self, publication: str) -> PublicationDescribed:
        store = self._store
        async with store.changes(store.keys.publication(publication)) as changed:
            while (found := await store.publications.description(publication, timeout=math.inf)) is None:
                await changed()
        return PublicationDescribed(
            tensors=tuple(
                {"name": name, "dtype": one.dtype, "shape": list(one.shape)}
                for name, one in sorted(found.tensors.items())
            )
        )

    async def _check_fits(self, publication: str, side: str, table: Any) -> None:
        description = await self._store.publications.description(publication, timeout=math.inf)
        if description is None:
            return
        wrong = misfits(table, description, side, f"publication {publication}")
        if wrong:
            listed = "\n  ".join(map(str, wrong[:20]))
            raise RegistrationError(
                f"{side} cannot follow publication {publication!r}, whose tensors are others:\n  {listed}",
                violations=wrong,
            )

    def _begin(self, session: WorkerSession, rank: LocalRank, role: Role, found: PublicationSide) -> None:
        entrance = rank.entrance
        key = (entrance.publication, f"{entrance.side}/{found.serial}")
        side = self._sides.get(key)
        if side is None:
            side = self._sides[key] = LocalSide(
                publication=entrance.publication,
                name=entrance.side,
                serial=found.serial,
                role=role,
                world=entrance.world,
                seq=found.seq,
            )
            self._spawn(self._follow(side))
            if role == "subscriber":
                self._spawn(self._follow_versions(side))
            self._store.publications.standing.add(key)
        side.ranks[rank.number] = rank
        self._entered[session.key, entrance.publication, role] = (side, rank)
        self._store.publications.held[entrance.publication, entrance.side, rank.number] = (entrance, session.holder)

    def _leave(self, session: WorkerSession, publication: str, role: Role, reason: str) -> None:
        """A worker's part in a side ends, and the side with it."""
        found = self._entered.pop((session.key, publication, role), None)
        if found is None:
            return
        side, rank = found
        rank.session = None
        self._store.publications.held.pop((publication, side.name, rank.number), None)
        rank.claim = rank.asked = None
        if side.arriving is not None:
            side.arriving.end(whole=False)
        side.notify()
        while rank.pairs:
            pair, batches = rank.pairs.popitem()
            if rank.number == 0 and not self._leaving:
                self._spawn(self._forget_pair(pair, batches))
        self._say_left(publication, side.name, rank.number, rank.holder, reason, side)
        if role == "subscriber" and not side.attended:
            self._end_side(side)
        else:
            side.changed.set()

    def _say_left(
        self, publication: str, name: str, rank: int, holder: RankHolder, reason: str, side: LocalSide | None = None
    ) -> None:
        """Tell Redis that a rank has left, however long Redis is away: others would be sent to its memory.

        ``side``: what it has entered.
        """
        key = publication, name, rank

        def over(task: EndableTask[None]) -> None:
            if self._farewells.get(key) is task:
                del self._farewells[key]
            if task.error is not None:
                text = "publication %s: %s rank %d could not be taken out: %s"
                outage(log, text, publication, name, rank, task.error)

        async def tell(before: EndableTask[None] | None) -> None:
            if before is not None:
                await before.over.wait()
            if side is not None and reason == "closed":
                await self._until_announced(side, rank)
            timeout = _LAST_WORDS if self._leaving else math.inf
            await self._store.publications.leave(publication, name, rank, holder, reason, timeout=timeout)
            if side is not None and side.role == "subscriber":
                await self._release_unread(side, timeout)

        self._farewells[key] = EndableTask(self._spawn, tell(self._farewells.get(key)), over)

    async def _until_announced(self, side: LocalSide, number: int) -> None:
        """What a rank has put before it left in order counts: the others may still be in that put."""
        rank = side.ranks[number]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_PUT):
                while rank.announced is not None and not self._leaving and not side.ended:
                    side.changed.set()  # so that it is asked again now
                    moved = side.moved
                    await moved.wait()

    async def _release_unread(self, side: LocalSide, timeout: float) -> None:
        """Take claims out of Redis that were given just before a side has left. Hops that read its memory go on."""
        claims = await self._store.publications.claims(side.publication, side.holder, timeout=timeout)
        for number, claim in claims.items():
            if number not in side.reading():
                await self._release(side, claim, f"{side.name} has left")

    async def _leave_roster(self, publication: str, side: str, rank: int) -> None:
        try:
            await self._store.publications.part(publication, side, rank)
        except EthaError as error:
            outage(log, "publication %s: %s rank %d stays in its roster: %s", publication, side, rank, error)

    # ---- puts ---------------------------------------------------------------------------------------

    async def _begin_put(self, side: LocalSide, rank: LocalRank, message: BeginPut) -> SlotGiven:
        held: tuple[HopBuffer, int] | None = None
        try:
            found = await self._until_ready(side, rank, message)
            buffer = rank.buffers[found.slot]
            held = (buffer, buffer.seq)
            buffer.clear()
            if rank.announced is not None and side.world > 1:
                # All ranks have come to that put, because this one has a slot.
                await self._announce_again(side, rank, rank.announced)
            rank.announced = None
            self._note_puts(side, message.number - 1)
            # Redis knows of no reader, so what still reads it here belongs to a claim that is over.
            await self._end_readers(side, rank, found.slot)
        except BaseException:  # the worker has not written: others may have the version on
            if held is not None:
                held[0].seq = held[1]
                side.notify()
            if side.world == 1:
                self._spawn(self._abandon(side, rank, message.number))
            raise
        rank.put = (message.number, found)
        return SlotGiven(slot=found.slot, seq=found.seq)

    async def _until_ready(self, side: LocalSide, rank: LocalRank, message: BeginPut) -> PutSlot:
        """The slot for a put, once nobody reads it. Its version may be read on until then."""
        store, loop = self._store, asyncio.get_running_loop()
        patience, rank.waits = loop.time() + message.grace, ""
        async with store.changes(store.keys.publication_side(side.publication, side.name)) as changed:
            while True:
                async with side.order:
                    found = await store.publications.prepare(
                        side.publication, side.name, side.serial, rank.number, message.number, timeout=math.inf
                    )
                rank.waits = (
                    "another rank has not come, or not put the version before" if found.behind else "others read it"
                )
                if found.ready:
                    return found
                unprotected = {reader.claim for reader in found.readers if not reader.protected}
                left = patience - loop.time()
                if unprotected and left <= 0:
                    self._cut(side, unprotected)
                waits = [t for t in (found.wait, left if unprotected and left > 0 else 0.0) if t > 0]
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(waits, default=None)):
                        await changed()

    async def _abandon(self, side: LocalSide, rank: LocalRank, number: int) -> None:
        try:
            async with side.order:
                await self._store.publications.abandon(
                    side.publication, side.name, side.serial, rank.number, number, timeout=math.inf
                )
        except EthaError as error:
            outage(
                log,
                "publication %s: put %d of %s could not be given up: %s",
                side.publication,
                number,
                side.name,
                error,
            )

    def _cut(self, side: LocalSide, claims: set[int]) -> None:
        """End hops whose slot a put needs."""
        for claim in claims & side.hops.keys():
            if claim not in side.overwritten:
                side.overwritten.add(claim)
                self._spawn(self._overwrite(side, side.hops[claim]))

    async def _overwrite(self, side: LocalSide, hop: _Hop) -> None:
        """Redis hears of it first: the subscriber, which releases its claim when the hop has failed, does not know why,
        and its next hop must not be ended in the same way."""
        text = f"{side.name} has put a newer version where this one was"
        await self._release(side, hop.claim, text, overwritten=True)
        hop.task.end()

    async def _end_readers(self, side: LocalSide, rank: LocalRank, slot: int) -> None:
        """Return once nobody here reads a buffer, which is cleared."""
        buffer = rank.buffers[slot]
        for claim in buffer.readers & side.hops.keys():
            side.hops[claim].task.end()
        await side.until(lambda: not buffer.readers)

    async def _finish_put(self, side: LocalSide, rank: LocalRank, message: FinishPut) -> Published:
        number, found = rank.put or (0, None)
        if found is None or number != message.number:
            raise ProtocolError(f"publication {side.publication!r}: put {message.number} has no slot")
        rank.put = None
        rank.buffers[found.slot].fill(found.seq)
        side.notify()
        rank.announced = put = _SetAside(number=number, slot=found, version=message.version)
        try:
            seq = await self._announce(side, rank, put)
        except ConfigError:  # another rank has put another version
            rank.announced = None
            raise
        side.seq = max(side.seq, found.seq)
        self._remember(side, rank, found.slot, seq or found.seq, message.version)
        return Published(seq=seq or found.seq)

    async def _announce(self, side: LocalSide, rank: LocalRank, put: _SetAside) -> int:
        """Tell Redis that a rank has set its part aside. Returns the version's seq once all have, else 0.

        It is asked again after each wake-up until then, because a Redis that has lost its data needs to be told by all
        ranks anew, and may give another seq than the one that was meant.
        """
        seq = await self._store.publications.announce(
            side.publication,
            side.name,
            side.serial,
            rank.number,
            put.number,
            put.slot,
            put.version,
            timeout=math.inf,
        )
        if seq and rank.announced is put:
            rank.announced = None
            self._note_puts(side, put.number)
            buffer = rank.buffers[put.slot.slot]
            if seq != put.slot.seq and buffer.seq == put.slot.seq:
                buffer.renumber(seq)
                self._remember(side, rank, put.slot.slot, seq, put.version)
            side.notify()
        return seq

    async def _announce_again(self, side: LocalSide, rank: LocalRank, put: _SetAside) -> None:
        try:
            await self._announce(side, rank, put)
        except RedisUnavailableError:
            raise
        except (GroupLostError, PeerLostError) as error:  # this launch is over
            log.debug("publication %s: put %d of %s: %s", side.publication, put.number, side.name, error)
            if rank.session is None:
                rank.announced = None
                side.notify()
        except EthaError as error:  # not all ranks have come back yet
            log.debug("publication %s: put %d of %s: %s", side.publication, put.number, side.name, error)

    def _note_puts(self, side: LocalSide, number: int) -> None:
        """So many puts were announced: to put that back if Redis loses it."""
        puts, key = self._store.publications.puts, (side.publication, side.holder)
        if number > puts.get(key, 0):
            puts[key] = number

    def _remember(self, side: LocalSide, rank: LocalRank, slot: int, seq: int, version: int | str | None) -> None:
        """Note what a side has, in buffers or, if it serves nobody, in tensors: to put it back if Redis loses it.
        The agent of rank 0 does."""
        if rank.number != 0:
            return
        held = {one.slot: one for one in self._store.publications.versions.get((side.publication, side.holder), ())}
        if seq:
            digest = rank.entrance.tensors.digest
            held[slot] = HeldVersion(slot=slot, seq=seq, version=version, description=digest)
        else:
            held.pop(slot, None)
        self._store.publications.versions[side.publication, side.holder] = tuple(held.values())

    async def _wait_held(self, side: LocalSide, message: WaitHeld, received: list[str]) -> Ok:
        """``received``: those that have it so far, for the error at the deadline."""
        store = self._store
        async with store.changes(store.keys.publication_side(side.publication, side.name)) as changed:
            while True:
                received[:] = await store.publications.receivers(side.publication, message.seq, timeout=math.inf)
                if len(received) >= message.count:
                    return Ok()
                await changed()

    async def _wait_holders(self, side: LocalSide, message: WaitHolders) -> Holders:
        store, known = self._store, set(message.known)
        async with store.changes(store.keys.publication_side(side.publication, side.name)) as changed:
            while True:
                names = store.publications.receivers if message.left else store.publications.holding_names
                found = await names(side.publication, message.seq, timeout=math.inf)
                if set(found) != known:
                    return Holders(subscribers=found)
                if await store.publications.superseded(side.publication, side.name, side.serial, timeout=math.inf):
                    raise PeerLostError(
                        f"publication {side.publication!r}: this launch of {side.name} is over, because another one "
                        f"publishes it now",
                        reason="relaunched",
                        outcome="withdrawn",
                    )
                await changed()

    async def _subscribers(self, side: LocalSide) -> Subscribers:
        view = await self._store.publications.view(side.publication, timeout=math.inf)
        found = [] if view is None else view.subscribers
        return Subscribers(
            subscribers=tuple(
                {
                    "name": one.name,
                    "ranks": one.world,
                    "seq": one.seq,
                    "version": one.version,
                    "lag": one.lag,
                    "lag_seconds": one.lag_seconds,
                    "source": one.source.partition("/")[0],
                    "state": one.state,
                    "error": one.error,
                }
                for one in found
            )
        )

    def lags(self) -> list[float]:
        """For each subscriber with a worker here, for how many seconds there has been a newer version than it holds."""
        now = asyncio.get_running_loop().time()
        sides = {id(side): side for side, _ in self._entered.values() if side.role == "subscriber"}
        return [0.0 if one.behind_since is None else now - one.behind_since for one in sides.values()]

    # ---- claims -------------------------------------------------------------------------------------

    def _claim(
        self, session: WorkerSession, request: Request, side: LocalSide, rank: LocalRank, message: ClaimVersion
    ) -> None:
        rank.last_call = max(message.turn, rank.last_call + 1)
        asking = _Asking(
            ClaimRequest(
                publication=side.publication,
                subscriber=side.name,
                serial=side.serial,
                call=rank.last_call,
                newer_than=message.newer_than,
                version=message.version,
                links=tuple(rank.links),
                avoid=tuple(sorted({rank.sources[claim] for claim in message.avoid if claim in rank.sources})),
            ),
            message.avoid,
        )
        unanswered = self._unanswered(f"{side.name}, which asked for a version of publication {side.publication!r},")
        self._answer(
            session, request, self._claiming(side, rank, asking), lambda: _claim_late(side, asking, unanswered)
        )

    async def _claiming(self, side: LocalSide, rank: LocalRank, asking: _Asking) -> VersionClaimed:
        store = self._store
        loop = asyncio.get_running_loop()
        granted, avoided, unfit, differs = False, loop.time() + AVOIDED, "", math.inf
        try:
            async with store.changes(store.keys.publication_side(side.publication, side.name)) as changed:
                while True:
                    async with side.order:
                        answer = await self._ask(side, rank, asking.request)
                    if answer.differs:
                        # A question of another rank whose call has ended may not be taken back yet.
                        differs = min(differs, loop.time() + PATIENCE)
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(differs):
                                await changed()
                                continue
                        raise ConfigError(answer.differs)
                    asking.answer, differs = answer, math.inf
                    if rank.number == 0 and answer.unfit and answer.unfit != unfit:
                        unfit = answer.unfit
                        log.warning("publication %s: %s waits: %s", side.publication, side.name, unfit)
                    side.note(loop.time(), newest=answer.seq)
                    if answer.claim is not None and not answer.over:
                        break
                    if answer.over:
                        call = asking.request.call
                        rank.last_call = max(rank.last_call, answer.last, call + 1)
                        asking.request = replace(asking.request, call=rank.last_call)
                        continue
                    left = avoided - loop.time()
                    if asking.request.avoid and left <= 0:
                        rank.last_call = max(rank.last_call, asking.request.call + 1)
                        asking.request = replace(asking.request, call=rank.last_call, avoid=())
                        continue
                    waits = [t for t in (answer.wait, left if asking.request.avoid else 0.0) if t > 0]
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(waits, default=None)):
                            await changed()
            claim = answer.claim
            rank.asked, rank.claim, rank.last_claim = asking.request, claim, claim.number
            rank.sources = {**rank.sources, claim.number: claim.holder}
            while len(rank.sources) > MAX_SOURCES:
                del rank.sources[next(iter(rank.sources))]
            pair = hop_pair(side.publication, claim.holder, side.holder)
            batch = hop_batch(pair, claim.slot)
            self._note_pair(rank, pair, batch)
            if rank.number == 0:
                self._spawn(self._renew(side, rank, claim))
            if rank.session is not None and rank.buffers:
                held = rank.buffers[0].seq
                if held and (text := rank.spoilt()):
                    log.warning("publication %s: no difference to version %d: %s", side.publication, held, text)
                    held = 0
                rank.session.hops[batch] = HopClaim(
                    claim=claim.number,
                    held=held,
                    arriving=self._arriving(side, claim, asking.failed),
                )
            rank.samples = None
            for slot, buffer in enumerate(rank.buffers):
                buffer.clear()
                self._remember(side, rank, slot, 0, None)
                await self._end_readers(side, rank, slot)
            granted = True
        finally:
            if not granted:
                rank.asked = rank.claim = None
                self._spawn(self._withdraw(side, asking.request.call))
        return VersionClaimed(
            claim=claim.number,
            turn=asking.request.call,
            source=claim.source,
            pair=pair,
            batch=batch,
            seq=claim.seq,
            version=claim.version,
        )

    async def _ask(self, side: LocalSide, rank: LocalRank, request: ClaimRequest) -> ClaimAnswer:
        try:
            return await self._store.publications.claim(request, timeout=math.inf)
        except RegistrationError:
            await self._check_fits(side.publication, side.name, rank.entrance.tensors)  # says all that is wrong
            raise

    def _arriving(self, side: LocalSide, claim: SourceClaim, failed: Collection[int]) -> ArrivingVersion:
        """What a claim brings to all ranks here, for those to whom it is passed on. ``failed``: earlier claims of the
        same call. Between these the memory is the call's alone, so what they have brought of the version is kept."""
        before = side.arriving
        if before is None or before.claim != claim.number:
            if before is not None:
                before.end(whole=False)
            goes_on = before is not None and before.claim in failed and before.goes_on(claim.seq, claim.version)
            side.arriving = ArrivingVersion(
                claim.number, claim.seq, side.notify, label=claim.version, earlier=before if goes_on else None
            )
        assert side.arriving is not None
        return side.arriving

    def _note_pair(self, rank: LocalRank, pair: str, batch: str) -> None:
        """A worker that enters one more pair leaves that of the longest ago (``client.subscription.MAX_PAIRS``)."""
        rank.pairs[pair] = rank.pairs.pop(pair, set()) | {batch}
        while len(rank.pairs) > MAX_LINKS:
            oldest = next(iter(rank.pairs))
            batches = rank.pairs.pop(oldest)
            if rank.number == 0:
                self._spawn(self._forget_pair(oldest, batches))

    async def _withdraw(self, side: LocalSide, call: int) -> None:
        try:
            await self._store.publications.withdraw(side.publication, side.name, side.serial, call)
        except EthaError as error:
            outage(log, "publication %s: %s could not take its claim back: %s", side.publication, side.name, error)

    async def _renew(self, side: LocalSide, rank: LocalRank, claim: SourceClaim) -> None:
        """Keep the lease of a claim while its hop runs. A worker that is stopped does not keep its source's place: its
        claim lapses, and counts all the same if the worker goes on."""
        batch = hop_batch(hop_pair(side.publication, claim.holder, side.holder), claim.slot)
        loop = asyncio.get_running_loop()
        until = loop.time() + HOP_IDLE
        while True:
            await asyncio.sleep(CLAIM_BEAT)
            session = rank.session
            if rank.claim is not claim or session is None:
                return
            if not self._registrations.moves(session, batch) and loop.time() > until:
                log.info("publication %s: claim %d of %s is idle", claim.publication, claim.number, side.name)
                return
            try:
                if not await self._store.publications.renew(claim):
                    return
            except EthaError as error:
                outage(log, "publication %s: claim %d could not be renewed: %s", claim.publication, claim.number, error)

    def _end_hop(self, side: LocalSide, rank: LocalRank, message: EndHop) -> None:
        claim = rank.claim
        if claim is None or claim.number != message.claim:
            return
        rank.claim = rank.asked = None
        if message.error and side.arriving is not None and side.arriving.claim == claim.number:
            side.arriving.end(whole=False)
        if rank.session is not None:
            rank.session.hops.pop(hop_batch(hop_pair(side.publication, claim.holder, side.holder), claim.slot), None)
        side.notify()
        if not message.error:
            side.note(asyncio.get_running_loop().time(), received=claim.seq)
            rank.links = [*(one for one in rank.links if one != claim.holder), claim.holder][-MAX_LINKS:]
            for slot, buffer in enumerate(rank.buffers):
                buffer.fill(claim.seq)
                self._remember(side, rank, slot, claim.seq, claim.version)
                # Its worker, which could write to it, goes on once this is answered.
                rank.samples = Samples(rank.tensors.slots[slot], rank.segments)
            if not rank.buffers:
                # It asks for newer versions than this, so a Redis that has lost its data has to go on from it.
                self._remember(side, rank, 0, claim.seq, claim.version)
        if rank.number == 0 or message.error:
            self._spawn(self._release(side, claim, message.error))

    async def _release(self, side: LocalSide, claim: SourceClaim, error: str, *, overwritten: bool = False) -> None:
        try:
            async with side.order:
                await self._store.publications.release(
                    claim, committed=not error, error=error, overwritten=overwritten, timeout=math.inf
                )
        except EthaError as failed:
            outage(log, "publication %s: claim %d was not released: %s", claim.publication, claim.number, failed)

    # ---- what Redis says ------------------------------------------------------------------------------

    async def _follow(self, side: LocalSide) -> None:
        """Read what concerns a side after every wake-up: claims that read it, and its own claim."""
        key = self._store.keys.publication_side(side.publication, side.name)
        with self._store.watch(key, side.changed.set, ticks=lambda: bool(side.hops) or not side.attended):
            while True:
                await side.changed.wait()
                side.changed.clear()
                if side.ended:
                    return
                try:
                    await self._look(side)
                except EthaError as error:
                    outage(log, "publication %s: %s could not be read: %s", side.publication, side.name, error)

    async def _look(self, side: LocalSide) -> None:
        publications = self._store.publications
        for rank in list(side.ranks.values()):
            if rank.announced is not None:
                await self._announce_again(side, rank, rank.announced)
        if any(rank.buffers for rank in side.ranks.values()):
            claims = await publications.claims(side.publication, side.holder)
            if side.ended:
                return
            wanted = {number: one.reader for number, one in claims.items()}
            for number in ended_hops(wanted, {n: hop.claim.reader for n, hop in side.hops.items()}, side.reading()):
                side.hops[number].task.end()
            for number in new_hops(claims, side.hops, side.begun):
                self._begin_hop(side, claims[number])
        if not side.attended and await publications.holder(side.publication, side.holder) is None:
            self._end_side(side)
            return
        for rank in side.ranks.values():
            asked, claim = rank.asked, rank.claim
            if asked is None or claim is None or rank.session is None:
                continue
            answer = await publications.claim(asked)
            over = answer.over or answer.claim is None or answer.claim.number != claim.number
            batch = hop_batch(hop_pair(side.publication, claim.holder, side.holder), claim.slot)
            # A transfer that runs ends by itself, even if its source has left: its agents still hold the memory.
            if rank.claim is claim and over and not self._registrations.moves(rank.session, batch):
                text = "its claim has ended: the source has left, or could not send"
                rank.session.peer.push(
                    ClaimLost(publication=side.publication, subscriber=side.name, claim=claim.number, text=text)
                )

    async def _follow_versions(self, side: LocalSide) -> None:
        """Tell the workers of a subscriber which version is the newest."""
        store, changed = self._store, asyncio.Event()
        with store.watch(store.keys.publication(side.publication), changed.set, ticks=lambda: False):
            while not side.ended:
                await changed.wait()
                changed.clear()
                with suppress(EthaError):
                    seq = await store.publications.newest(side.publication)
                    if seq > side.seq:
                        side.note(asyncio.get_running_loop().time(), newest=seq)
                        for rank in side.ranks.values():
                            if rank.session is not None:
                                rank.session.peer.push(Announced(publication=side.publication, seq=seq))

    # ---- hops that read a side here ----------------------------------------------------------------------

    def _begin_hop(self, side: LocalSide, claim: SourceClaim) -> None:
        def ended(hop: EndableTask[None]) -> None:
            side.hops.pop(claim.number, None)
            side.overwritten.discard(claim.number)
            side.notify()
            if hop.error is not None:
                error = hop.error.exceptions[0] if isinstance(hop.error, ExceptionGroup) else hop.error
                self._hop_failed(side, claim, error)

        side.hops[claim.number] = _Hop(claim, EndableTask(self._spawn, self._hop(side, claim), ended))

    def _hop_failed(self, side: LocalSide, claim: SourceClaim, error: Exception) -> None:
        """Take the claim out of Redis, so that its subscriber asks again."""
        text = f"{side.name} could not send: {error}"
        log.info("publication %s: the hop to %s has failed: %s", claim.publication, claim.subscriber, text)
        if not isinstance(error, EthaError | _NotHeldError):
            log.error("publication %s: a hop has failed, a bug of Etha", claim.publication, exc_info=error)
        spoilt = isinstance(error, _SpoiltError)
        if spoilt:
            log.warning(
                "publication %s: %s serves version %d no more: %s", side.publication, side.name, claim.seq, error
            )
            for rank in side.ranks.values():
                for slot, buffer in enumerate(rank.buffers):
                    if buffer.holds(claim.seq):
                        buffer.clear()
                        self._remember(side, rank, slot, 0, None)
            side.notify()
        # What was to be passed on and has not come is out of Redis already.
        correct = isinstance(error, _NotHeldError) and not (claim.upstream and not spoilt)
        self._spawn(self._give_up(side, claim, text, correct=correct, why=str(error) if spoilt else ""))

    async def _give_up(self, side: LocalSide, claim: SourceClaim, text: str, *, correct: bool, why: str = "") -> None:
        """``correct``: first say in Redis what the buffers hold, and ``why``, or the next claim would be the same."""
        if correct:
            try:
                await self._store.publications.forget(side.publication, side.holder, why)
                if not side.ended:
                    await self._store.publications.hold(side.publication, side.holder)
            except EthaError as error:
                outage(log, "publication %s: %s could not be corrected: %s", side.publication, side.holder, error)
        await self._release(side, claim, text)

    async def _hop(self, side: LocalSide, claim: SourceClaim) -> None:
        """Send a version from all ranks here."""
        async with asyncio.TaskGroup() as group:
            for rank in side.ranks.values():
                group.create_task(self._send(side, rank, claim))

    async def _send(self, side: LocalSide, rank: LocalRank, claim: SourceClaim) -> None:
        buffer = rank.buffers[claim.slot]
        pair = hop_pair(side.publication, claim.holder, claim.reader)
        worker, batch = self._worker(side, rank, claim, pair), hop_batch(pair, claim.slot)

        def passed() -> ArrivingVersion | None:
            """What this hop can pass on: its own bytes and those that come here go over streams."""
            found = side.arriving if claim.upstream else None
            if found is None or found.claim != claim.upstream or not found.begun or found.lost:
                return None
            return found if self._registrations.over_streams(worker.session, batch) else None

        async def ready() -> None:
            # The worker of a subscriber may not have said yet that it holds what the others of its side hold.
            await side.until(
                lambda: (
                    buffer.holds(claim.seq)
                    or passed() is not None
                    or not rank.may_hold(claim.slot, claim.seq, claim.upstream)
                )
            )
            if not buffer.holds(claim.seq):
                if (arriving := passed()) is None:
                    raise _NotHeldError(f"rank {rank.number} does not hold version {claim.seq} whole any more")
                buffer.pass_on(claim.seq)
                worker.session.hops[batch] = replace(worker.session.hops[batch], passed=arriving)
            elif text := rank.spoilt():
                raise _SpoiltError(text)
            buffer.readers.add(claim.number)

        try:
            await worker.send(
                batch,
                claim.slot,
                claim.seq,  # two versions may have the same label
                ready,
                HopClaim(claim=claim.number, find=lambda seq: _base(worker, rank, claim.slot, seq)),
            )
        finally:
            buffer.readers.discard(claim.number)
            side.notify()

    def _worker(self, side: LocalSide, rank: LocalRank, claim: SourceClaim, pair: str) -> HopWorker:
        towards = claim.reader
        if towards not in rank.workers:

            def left() -> None:
                if (worker := rank.workers.pop(towards, None)) is not None:
                    asyncio.get_running_loop().call_soon(worker.close)
                    self._forget_source_pair(rank, pair)

            rank.workers[towards] = HopWorker(
                self._dispatcher,
                rank.tensors,
                rank.segments,
                pair=pair,
                remote=claim.subscriber,
                left=left,
                limit=side.limit,
            )
        return rank.workers[towards]

    def _forget_source_pair(self, rank: LocalRank, pair: str) -> None:
        """The agent of rank 0 removes a pair from Redis from which it has sent."""
        if rank.number == 0 and not self._leaving:
            self._spawn(self._forget_pair(pair, {hop_batch(pair, slot) for slot in range(len(rank.buffers))}))

    async def _forget_pair(self, pair: str, batches: Collection[str]) -> None:
        """Remove a pair from Redis that nobody needs any more, if all leave it soon. Both its sides do, so that the one
        which leaves last finds it."""
        with suppress(EthaError, TimeoutError):
            async with asyncio.timeout(_FORGET), self._store.changes(self._store.keys.pair(pair)) as changed:
                first, *others = sorted(batches)
                while not await self._store.pairs.forget(pair, first):
                    await changed()
                for batch in others:
                    await self._store.pairs.forget(pair, batch)

    def _end_side(self, side: LocalSide) -> None:
        """Nobody reads this launch of a side any more: end its hops, and close its memory."""
        if side.ended:
            return
        side.ended = True
        side.changed.set()
        side.notify()
        self._sides.pop((side.publication, side.holder), None)
        key = side.publication, side.holder
        self._store.publications.versions.pop(key, None)
        self._store.publications.puts.pop(key, None)
        self._store.publications.standing.discard(key)
        self._spawn(self._close_side(side))

    async def _close_side(self, side: LocalSide) -> None:
        reading = side.reading()
        for number, hop in list(side.hops.items()):
            if number not in reading or self._leaving:
                hop.task.end()
        await side.until(lambda: not side.hops)
        for rank in side.ranks.values():
            while rank.workers:
                towards, worker = rank.workers.popitem()
                worker.close()
                self._forget_source_pair(rank, hop_pair(side.publication, side.holder, towards))
            segments, rank.segments = rank.segments, ()
            await asyncio.to_thread(_close_all, segments)

    # ---- answers -------------------------------------------------------------------------------------

    def _unanswered(self, what: str) -> Callable[[], EthaError]:
        """The error of a call whose deadline comes before Redis has answered. A short deadline says nothing about
        Redis."""
        loop = asyncio.get_running_loop()
        begun = loop.time()

        def late() -> EthaError:
            text, trouble = f"{what} ended at its deadline before Redis had answered", self._store.trouble
            if trouble or loop.time() - begun >= PATIENCE:
                return RedisUnavailableError(f"{text}: {trouble}" if trouble else text)
            return TransferTimeoutError(f"{text}: give it a longer timeout", outcome="withdrawn")

        return late

    def _answer(
        self,
        session: WorkerSession,
        request: Request,
        work: Coroutine[Any, Any, Any],
        late: Callable[[], EthaError],
    ) -> None:
        """Answer a request with what ``work`` returns or raises; with ``late()`` at its deadline."""

        def over(task: EndableTask[Any]) -> None:
            if task.ended:
                self._calls.fail(key, late())
            elif task.error is None:
                self._calls.answer(key, task.value)
            elif isinstance(task.error, GroupLostError):  # a script's word for a launch that is over
                self._calls.fail(key, PeerLostError(task.error.message, reason="died", outcome="withdrawn"))
            elif isinstance(task.error, EthaError):
                self._calls.fail(key, task.error)
            else:
                log.error("a request about a publication failed", exc_info=task.error)
                self._calls.fail(key, ProtocolError(f"the agent failed, a bug of Etha: {task.error!r}"))

        task = EndableTask(self._spawn, work, over)
        key = self._calls.open(session.peer, request, lambda _, expired: task.end())


@dataclass(slots=True)
class _Asking:
    """What a subscriber asks for, the claims of the same call that have failed, and what Redis has answered last."""

    request: ClaimRequest
    failed: tuple[int, ...]
    answer: ClaimAnswer | None = None


def _base(worker: HopWorker, rank: LocalRank, slot: int, seq: int) -> BaseVersion | None:
    """Version ``seq`` in another slot of a rank that sends ``slot``."""
    others = [other for other, buffer in enumerate(rank.buffers) if other != slot and buffer.holds(seq)]
    if not others:
        return None
    before = rank.buffers[others[0]]
    return BaseVersion(seq=seq, views=worker.views_between(slot, others[0]), intact=lambda: before.holds(seq))


def _places(message: Publish | Subscribe, serves: bool) -> int:
    """How many subscribers a side serves at once."""
    if isinstance(message, Publish):
        return FAN_OUT if message.fan_out is None else message.fan_out
    return int(serves)


def _close_all(segments: tuple[StandingSegment, ...]) -> None:
    for segment in segments:
        segment.close()


def _slot_late(side: LocalSide, rank: LocalRank, unanswered: Callable[[], EthaError]) -> EthaError:
    if not rank.waits:
        return unanswered()
    return TransferTimeoutError(
        f"put of publication {side.publication!r} ended at its deadline before {side.name} rank {rank.number} had a "
        f"slot: {rank.waits}",
        outcome="withdrawn",
    )


def _held_late(side: LocalSide, message: WaitHeld, received: Sequence[str]) -> EthaError:
    shown = ", ".join(received[:5]) + (f" and {len(received) - 5} more" if len(received) > 5 else "")
    return TransferTimeoutError(
        f"put of publication {side.publication!r}: seq {message.seq} is announced, and fewer than wait="
        f"{message.count} subscribers had received it by the deadline: {shown or 'none'}; subscribers() says what the "
        f"others do",
        outcome="withdrawn",
    )


def _description_late(publication: str) -> EthaError:
    return TransferTimeoutError(
        f"nobody has published {publication!r} by the deadline, so it is not known which tensors it has: start its "
        f"publisher, or `etha publish`",
        outcome="withdrawn",
    )


def _holders_late(side: LocalSide, message: WaitHolders) -> Callable[[], EthaError]:
    return lambda: TransferTimeoutError(
        f"holders of publication {side.publication!r}: seq {message.seq} is held by no others than before by the "
        f"deadline",
        outcome="withdrawn",
    )


def _claim_late(side: LocalSide, asking: _Asking, unanswered: Callable[[], EthaError]) -> EthaError:
    request, answer = asking.request, asking.answer
    if answer is None:
        return unanswered()
    newest = max(answer.seq, side.seq)
    if request.version is not None:
        why = f"nobody who holds version {json.dumps(request.version)} had a free place"
    elif not newest:
        why = "nothing was announced yet"
    elif newest <= request.newer_than:
        why = f"seq {newest} is the newest version that was announced"
        if newest < request.newer_than:
            why += ". Numbers begin again if Redis has lost them: newer_than=0 receives the newest version in any case"
    elif answer.unfit:
        why = f"seq {newest} was announced, and {answer.unfit}"
    else:
        why = f"seq {newest} was announced, and all who hold a newer one were busy, or nobody holds one any more"
    return TransferTimeoutError(
        f"{side.name} got no version of publication {side.publication!r} newer than seq {request.newer_than} by its "
        f"deadline: {why}",
        outcome="withdrawn",
    )
