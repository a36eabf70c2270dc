"""Elastic groups: what workers of this agent ask of Redis to be in the next epoch, and what they must hear of others.

A worker that enters waits here, not in Redis: whenever the group has changed, or time alone may have changed the
answer, the same question is asked again. No byte of a collective call and no vote passes here, and a group goes on if
this agent ends: its workers then come to another one and say that they are there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.runtime.tasks import Spawn, outage
from etha.bus.codec import Request
from etha.bus.messages import (
    AddValue,
    AskGroupProgress,
    DepartGroup,
    EnterGroup,
    GetValues,
    GroupChanging,
    GroupFormed,
    GroupNoted,
    GroupProgress,
    GroupSeat,
    Ok,
    PutValues,
    SwapValue,
    Values,
)
from etha.config import LOAD_BATCH, load_epoch
from etha.errors import ConfigError, EthaError, GroupTimeoutError
from etha.store.groups import Entrance
from etha.store.process import alive
from etha.store.records import Absentee, Seating
from etha.store.registry import Store

log = logging.getLogger(__name__)

#: Seconds to take a wish back when its call has ended. The worker gets its error after that.
_TAKEN_BACK = 0.5

#: Seconds that a status waits for workers to say how far they are. Of one that is late it has the last that it said.
_PROGRESS = 0.3

#: Seconds for which a replica that could not reach another one stays away if its agent cannot reach the other's.
_PROOF = 60.0

_Key = tuple[str, str, int]  # group, replica, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownGroups:
    """A line of each group for ``etha status``. ``stale``: why they could not be read again and may be outdated."""

    lines: tuple[dict[str, Any], ...] = ()
    stale: str = ""


@dataclass(slots=True)
class _Held:
    """A rank that a worker here holds, or asks for."""

    session: WorkerSession
    entrance: Entrance
    #: Ends the wait of its open call.
    limit: asyncio.Timeout | None = None
    #: Held while a call waits, and until its wish is taken back. ``ending``: its worker waits for it no more.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    ending: bool = False
    lost: str = ""
    #: The launch under which Redis has had this rank.
    seated: str | None = None
    #: Epoch and step that it has last said, and who waits for it to say them again.
    progress: tuple[int, int] = (0, 0)
    asked: asyncio.Event = field(default_factory=asyncio.Event)


class GroupService:
    """All elastic groups of this agent's workers."""

    def __init__(self, *, store: Store, links: PeerLinks, calls: OpenCalls, spawn: Spawn) -> None:
        self._store, self._links, self._calls, self._spawn = store, links, calls, spawn
        self._held: dict[_Key, _Held] = {}
        self._followed: set[str] = set()
        self._shown = ShownGroups()

    def enter(self, session: WorkerSession, request: Request, message: EnterGroup) -> None:
        """A worker wants to be in the next epoch, or says that it is there."""
        entrance = Entrance(
            group=message.group,
            replica=message.replica,
            rank=message.rank,
            world=message.world,
            launch=message.launch,
            epoch=message.epoch,
            last=message.last,
            step=message.step,
            committed=message.committed,
            least=message.least,
            timeout=message.patience,
            grace=message.grace,
            suspects=message.suspects,
            unmet=message.unmet,
            asked=message.asked,
        )
        key = (message.group, message.replica, message.rank)
        held = self._held.get(key)
        if held is not None and held.session is not session and held.session.holder == session.holder:
            raise ConfigError(
                f"rank {message.rank} of replica {message.replica} of group {message.group} is held by another "
                f"Members of this process: close that one first"
            )
        if held is not None and held.limit is not None and held.session is session and not held.ending:
            raise ConfigError(f"rank {message.rank} of replica {message.replica} is entering group {message.group} now")
        if held is None or held.session is not session:
            held = self._held[key] = _Held(session, entrance)
        if message.group not in self._followed:
            self._followed.add(message.group)
            self._spawn(self._follow(message.group))
        if message.wants:
            self._open(key, held, entrance, request)
        else:
            held.entrance = entrance
            self._spawn(self._attend(held, request))

    def depart(self, session: WorkerSession, request: Request, message: DepartGroup) -> None:
        """A worker leaves."""
        held = self._held.get((message.group, message.replica, message.rank))
        launch = None
        if held is not None and held.session is session:
            launch = held.seated
            del self._held[message.group, message.replica, message.rank]
            self._store.groups.held.pop((message.group, message.replica, message.rank), None)
        self._answer(session, request, self._departed(session, message, launch))

    def on_worker_lost(self, session: WorkerSession, reason: str) -> None:
        """A worker has died or closed its connection: its replicas end."""
        for key, held in list(self._held.items()):
            if held.session is session:
                del self._held[key]
                self._store.groups.held.pop(key, None)
                held.lost = reason
                if held.limit is not None:  # the call ends first, so that it cannot put the rank back
                    held.limit.reschedule(asyncio.get_running_loop().time())
                else:
                    self._spawn(self._take_out(key, held))

    def values(
        self, session: WorkerSession, request: Request, message: PutValues | GetValues | AddValue | SwapValue
    ) -> None:
        """Members of an epoch exchange values."""
        self._answer(session, request, self._exchange(message, request.deadline))

    def take_progress(self, session: WorkerSession, request: Request, message: GroupProgress) -> None:
        """A worker says how far it is, because it was asked."""
        held = self._held.get((message.group, message.replica, message.rank))
        if held is not None and held.session is session:
            held.progress = (message.epoch, message.step)
            held.asked.set()
        session.peer.reply(request.id, Ok())

    async def shown(self, timeout: float) -> ShownGroups:
        """All groups of the namespace as Redis has them, and how far the members are that this agent's workers are in.

        A trainer writes its step nowhere, so workers are asked. If Redis does not answer, the lines are the last ones.
        """
        stale, _ = await asyncio.gather(self._read_shown(timeout), self._ask_progress())
        lines = [self._with_progress(line) for line in self._shown.lines]
        return ShownGroups(lines=tuple(lines), stale=stale)

    # ---- inside -------------------------------------------------------------------------------

    def _with_progress(self, line: dict[str, Any]) -> dict[str, Any]:
        """A group's line with the steps since its epoch has formed. All members that count have as many, and one that
        was behind counts after the epoch's first step."""
        steps = {
            key[1]: held.progress[1]
            for key, held in self._held.items()
            if key[0] == line["group"] and held.progress[0] == line["epoch"]
        }
        top = max([line["step"], *(steps.get(one["replica"], 0) for one in line["members"])])
        members = []
        for one in line["members"]:
            counts = one["counts"] or top > line["step"]
            members.append({**one, "counts": counts, "step": top if counts else one["step"]})
        return {**line, "step": top, "members": members}

    async def _read_shown(self, timeout: float) -> str:
        try:
            self._shown = ShownGroups(
                lines=tuple(view.line() for view in await self._store.groups.views(timeout=timeout))
            )
        except EthaError as error:
            return error.message
        return ""

    async def _ask_progress(self) -> None:
        asked = list(self._held.items())
        for key, held in asked:
            held.asked.clear()
            held.session.peer.push(AskGroupProgress(group=key[0]))
        with suppress(TimeoutError):
            async with asyncio.timeout(_PROGRESS):
                for _, held in asked:
                    await held.asked.wait()

    def _answer(self, session: WorkerSession, request: Request, work: Coroutine[Any, Any, Any]) -> None:
        """Answer a request with what ``work`` returns, or with its error."""
        ended = asyncio.Event()
        key = self._calls.open(session.peer, request, lambda _, expired: ended.set())

        async def answer() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(work)
                    waiter = group.create_task(ended.wait())
                    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
                    waiter.cancel()
                    if not task.done():
                        task.cancel()
                if task.cancelled():
                    raise GroupTimeoutError("the deadline has passed while other members of the group were waited for")
                self._calls.answer(key, task.result())
            except* EthaError as errors:
                found = errors.exceptions[0]
                assert isinstance(found, EthaError)
                self._calls.fail(key, found)

        self._spawn(answer())

    async def _departed(self, session: WorkerSession, message: DepartGroup, launch: str | None) -> Ok:
        place = (message.group, message.replica, message.rank)
        await self._store.groups.depart(*place, session.holder, "closed", launch=launch, timeout=math.inf)
        return Ok()

    async def _exchange(self, message: PutValues | GetValues | AddValue | SwapValue, deadline: float) -> Ok | Values:
        groups, group, epoch = self._store.groups, message.group, message.epoch
        match message:
            case PutValues(values=values):
                await groups.put(group, epoch, values)
                return Ok()
            case AddValue(name=name, amount=amount):
                sum_ = await groups.add(group, epoch, name, amount)
                return Values(values={name: b"%d" % sum_})
            case SwapValue(name=name, expected=expected, desired=desired):
                return Values(values={name: await groups.compare_set(group, epoch, name, expected, desired)})
            case GetValues(names=names, wait=wait):
                found = await groups.values(group, epoch, list(names), timeout=math.inf)
                if wait and len(found) < len(set(names)):
                    async with self._store.changes(self._store.keys.group_values(group, epoch)) as changed:
                        while len(found) < len(set(names)):
                            await changed()
                            found = await groups.values(group, epoch, list(names), timeout=math.inf)
                return Values(values=found)

    async def _attend(self, held: _Held, request: Request) -> None:
        peer = held.session.peer
        try:
            seating = await self._store.groups.enter(held.entrance, held.session.holder, wants=False)
        except EthaError as error:
            peer.fail(request.id, error, None)
            return
        mine = held.entrance.epoch
        self._seated(held, seating, mine)
        # If a later epoch has formed, only the member's own is over: it may be in that one, and not have heard it yet.
        over = seating.state == "changing" or seating.epoch != mine
        peer.reply(request.id, GroupNoted(epoch=mine, launch=seating.launch, changing=over))

    def _seated(self, held: _Held, seating: Seating, epoch: int) -> None:
        """Remember what Redis has of a rank, to put it back if Redis loses it."""
        held.entrance = replace(held.entrance, launch=seating.launch, epoch=epoch)
        held.seated = seating.launch
        if not held.lost:
            key = (held.entrance.group, held.entrance.replica, held.entrance.rank)
            self._store.groups.held[key] = (held.entrance, held.session.holder)

    def _open(self, key: _Key, held: _Held, entrance: Entrance, request: Request) -> None:
        """Open a call at once, because the next message may be that its worker has cancelled it."""
        limit = asyncio.timeout_at(None if request.deadline == math.inf else request.deadline)
        over = asyncio.Event()

        def end(_: object, expired: bool) -> None:
            over.set()
            if held.limit is limit:
                held.ending = True
                limit.reschedule(asyncio.get_running_loop().time())

        call = self._calls.open(held.session.peer, request, end)
        self._spawn(self._enter(key, held, entrance, limit, call, over))

    async def _enter(
        self, key: _Key, held: _Held, entrance: Entrance, limit: asyncio.Timeout, call: Any, over: asyncio.Event
    ) -> None:
        async with held.turn:  # a call that was interrupted may be taking its wish back
            if over.is_set() or held.lost:
                self._calls.fail(call, GroupTimeoutError(f"group {key[0]}: the call ended before it had asked Redis"))
                return
            held.entrance, held.limit, held.ending = entrance, limit, False
            await self._wait_for_epoch(key, held, limit, call)

    async def _wait_for_epoch(self, key: _Key, held: _Held, limit: asyncio.Timeout, call: Any) -> None:
        wishes = self._store.groups.wishes
        wishes.add(key)
        missing: tuple[Absentee, ...] = ()
        proof = _Proof(self._links, key)
        try:
            async with limit, proof:
                async with self._store.changes(self._store.keys.group(key[0])) as changed:
                    while True:
                        wants = proof.over
                        seating = await self._ask(held, wants=wants)
                        missing = seating.missing
                        if seating.formed and wants:
                            break
                        await self._bury(key[0], held, seating)
                        proof.heed(seating.apart)
                        if proof.over is not wants:
                            continue  # while it lasts the wish is taken back, so that the others train on
                        with suppress(TimeoutError):
                            async with asyncio.timeout(seating.wait or None) as pause:
                                proof.ends = pause
                                await changed()
            self._calls.answer(call, _formed(seating))
            if (seating.members[0].replica, 0) == key[1:]:  # one agent is enough
                self._spawn(self._forget_loads(key[0], seating.epoch))
        except TimeoutError:
            held.limit = None
            wishes.discard(key)
            await self._give_up(key, held, call, missing)
        except EthaError as error:
            self._calls.fail(call, error)
        finally:
            held.limit = None
            wishes.discard(key)
            if held.lost:
                await self._take_out(key, held)

    async def _forget_loads(self, group: str, epoch: int) -> None:
        """Remove the pairs by which newcomers of earlier epochs have loaded, as far as all their members have left."""
        try:
            for name in await self._store.pairs.names(timeout=math.inf):
                found = load_epoch(group, name)
                if found is not None and found < epoch:
                    await self._store.pairs.forget(name, LOAD_BATCH, timeout=math.inf)
        except EthaError as error:
            outage(log, "pairs of earlier epochs of group %s could not be removed: %s", group, error)

    async def _ask(self, held: _Held, *, wants: bool) -> Seating:
        seating = await self._store.groups.enter(held.entrance, held.session.holder, wants=wants, timeout=math.inf)
        # What is put back is the rank as the worker described it, until it has heard the answer.
        self._seated(held, seating, seating.epoch if seating.formed else held.entrance.epoch)
        return seating

    async def _give_up(self, key: _Key, held: _Held, call: Any, missing: tuple[Absentee, ...]) -> None:
        """A call has ended early: take its wish back, unless the epoch has formed meanwhile."""
        if held.lost:
            return
        before = held.entrance.epoch
        try:
            async with asyncio.timeout(_TAKEN_BACK):
                seating = await self._ask(held, wants=False)
            if seating.formed and seating.epoch > before:
                self._calls.answer(call, _formed(seating))
                return
        except (EthaError, TimeoutError) as error:
            log.debug("a wish to be in group %s could not be taken back: %s", key[0], error)
        names = ", ".join(_shown(one) for one in missing[:20])
        if not names:
            names = f"at least {held.entrance.least} replicas, or for Redis, or a pause after it could not reach others"
        text = f"group {key[0]}: the next epoch has not formed in time; it waits for {names}"
        self._calls.fail(call, GroupTimeoutError(text))

    async def _bury(self, group: str, held: _Held, seating: Seating) -> None:
        """Take out processes of this host that have ended while no agent watched them."""
        for one in seating.missing:
            holder = one.holder
            if holder is None or holder.host != held.session.holder.host or alive(holder.pid, holder.start):
                continue
            await self._store.groups.depart(group, one.replica, one.rank, holder, "died", timeout=math.inf)

    async def _take_out(self, key: _Key, held: _Held) -> None:
        try:
            await self._store.groups.depart(*key, held.session.holder, held.lost, launch=held.seated, timeout=math.inf)
        except EthaError as error:
            outage(log, "rank %d of replica %s of group %s could not be taken out: %s", key[2], key[1], key[0], error)

    async def _follow(self, group: str) -> None:
        """Tell this agent's members whenever somebody waits for the next epoch, as long as there are members."""
        async with self._store.changes(self._store.keys.group(group), ticks=False) as changed:
            while True:
                await changed()
                if not any(key[0] == group for key in self._held):
                    break
                try:
                    state = await self._store.groups.state(group)
                except EthaError as error:
                    outage(log, "group %s could not be read: %s", group, error)
                    continue
                for key, held in self._held.items():
                    if key[0] != group or state is None:
                        continue
                    # One that enters now knows more about the epoch before; it ignores what is said of that.
                    left_out = held.limit is None and state.epoch > held.entrance.epoch
                    if state.state == "changing" or state.broken or left_out:
                        push = GroupChanging(group=group, epoch=state.epoch, broken=state.broken)
                        held.session.peer.push(push)
        self._followed.discard(group)


class _Proof:
    """A replica could not reach another one, and pauses: its agent links the other's, and so proves that it can now.

    Each try without a proof would cost the others a step and the seconds of a connection that does not come. Entered
    while a rank asks for an epoch.
    """

    def __init__(self, links: PeerLinks, key: _Key) -> None:
        self._links, self._key = links, key
        self._task: asyncio.Task[bool] | None = None
        #: The pause that ends when the proof is over.
        self.ends: asyncio.Timeout | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._tasks.__aexit__(None, None, None)

    @property
    def over(self) -> bool:
        """Whether the rank may ask."""
        return self._task is None or self._task.done()

    def heed(self, apart: tuple[str, ...]) -> None:
        """Begin if there is somebody whom the replica could not reach; end if there is nobody any more."""
        if self._task is not None:
            if not apart:
                self._task.cancel()
        elif apart:
            self._task = self._tasks.create_task(self._prove(apart))
            self._task.add_done_callback(self._woken)

    def _woken(self, _: asyncio.Task[bool]) -> None:
        if self.ends is not None and not self.ends.expired():
            with suppress(RuntimeError):  # it has ended already
                self.ends.reschedule(asyncio.get_running_loop().time())

    async def _prove(self, apart: tuple[str, ...]) -> bool:
        group, replica, _ = self._key
        what = f"group {group}: replica {replica}, which could not reach another one"
        try:
            return await self._links.prove(what, apart, _PROOF)
        except EthaError as error:
            outage(log, "%s: %s", what, error)
            return False


def _formed(seating: Seating) -> GroupFormed:
    seats = tuple(
        GroupSeat(replica=one.replica, last=one.last, step=one.step, committed=one.committed, counts=one.counts)
        for one in seating.members
    )
    return GroupFormed(epoch=seating.epoch, launch=seating.launch, seats=seats)


def _shown(one: Absentee) -> str:
    where = "which has not come" if one.holder is None else f"pid {one.holder.pid} on host {one.holder.shown_host}"
    return f"rank {one.rank} of replica {one.replica} ({where})"
