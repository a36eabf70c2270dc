"""A publisher's rank: versions are copied into slots, which agents send to subscribers without this process.

    publish: slots (memory that the agent holds itself) --> all ranks of the publisher have come
    put:     a slot that nobody reads --> copy the tensors --> announced once all ranks have copied

No subscriber is waited for, except with ``wait=`` and with ``slots=1``.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from etha.bus.messages import (
    BeginPut,
    ClosePublication,
    Entry,
    FinishPut,
    GetSubscribers,
    Holders,
    Publish,
    Published,
    SlotGiven,
    Subscribers,
    WaitHeld,
    WaitHolders,
)
from etha.client.active_calls import ActiveCalls
from etha.client.arguments.checks import check_flag, check_timeout, check_version, shown
from etha.client.arguments.world import RankInfo
from etha.client.connection import AgentConnection
from etha.client.manifest import Item, TensorManifest
from etha.client.memory.base import Mark, TensorMemory
from etha.client.results import OfOneProcess, Version
from etha.client.tasks import Deadline, Shield, on_loop
from etha.config import MAX_WORLD
from etha.errors import AGAIN, AgentLostError, ConfigError, TransferTimeoutError
from etha.memory import shared
from etha.memory.handles import TensorHandle, describe
from etha.memory.room import check_room
from etha.plan import Layout

#: Most slots of a publication.
MAX_SLOTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """A version as its publisher put it: ``seq`` counts the versions of a publication, ``version`` is its label."""

    seq: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberState:
    """A subscriber as Redis knows it.

    ``seq`` and ``version`` are those that it holds (0 and None: none yet). ``lag`` is how many newer versions there
    are, ``lag_seconds`` for how long there has been one. ``source``: who sends to it now, or has sent last.
    ``state``: "forming" (ranks are missing), "receiving", "waiting" (for a place at a holder), "current" (it holds the
    newest version), "behind" (it has not asked for it), "lost" (an agent of it is silent). ``error``: why no
    holder can feed it, or why its last hop failed; "" if neither.
    """

    name: str
    ranks: int
    seq: int
    version: Version
    lag: int
    lag_seconds: float
    source: str
    state: Literal["forming", "receiving", "waiting", "current", "behind", "lost"]
    error: str


class Slots:
    """Memory for ``count`` copies of a rank's tensors, one segment each, which the agent maps and keeps."""

    def __init__(self, items: tuple[Item, ...], count: int, what: str) -> None:
        """Allocate and touch it: blocking. ConfigError if it does not fit."""
        own = [item for item in items if item.tied is None and item.local.numel()]
        sizes = [item.local.numel() * item.local.itemsize for item in own]
        check_room(count * sum(sizes), what)
        #: For each slot the copy of each item. Items that share memory share their copy.
        self.tensors: list[list[torch.Tensor]] = []
        for _ in range(count):
            storages = dict(zip((item.name for item in own), shared.storages(sizes), strict=True))
            made = []
            for item in items:
                local, name = item.local, item.tied or item.name
                if not local.numel():
                    made.append(torch.empty(tuple(local.shape), dtype=local.dtype))
                    continue
                strides = torch.empty(tuple(local.shape), device="meta").stride()
                made.append(shared.strided(storages[name], tuple(local.shape), strides, local.dtype))
            self.tensors.append(made)
        self._copied = [i for i, item in enumerate(items) if item.tied is None and item.local.numel()]
        self.nbytes = sum(sizes)

    def handles(self, slot: int) -> tuple[TensorHandle, ...]:
        """Where the tensors of a slot lie."""
        return tuple(describe(tensor) for tensor in self.tensors[slot])

    def copy(self, slot: int, locals_: list[torch.Tensor], home: TensorMemory) -> None:
        """Copy the live tensors, which lie in ``home``, into a slot. Any thread."""
        home.copy([(self.tensors[slot][i], locals_[i]) for i in self._copied], live=False)


async def give_segments(connection: AgentConnection, handles: tuple[TensorHandle, ...], timeout: float) -> None:
    """Let the agent hold the segments that the handles name, so that they outlive this process."""
    for name in dict.fromkeys(handle.segment for handle in handles if handle.segment is not None):
        header, descriptors = connection.home.show(name)
        await connection.link.send_descriptors({**header, "standing": True}, descriptors, timeout=timeout)


def entries_of(manifest: TensorManifest, handles: Sequence[TensorHandle]) -> tuple[tuple[Entry, ...], tuple[Any, ...]]:
    """(entries, layouts) of what a rank has registered and of where it lies."""
    layouts: dict[Layout, int] = {}
    entries = tuple(
        Entry(
            name=item.name,
            pair=0,
            layout=layouts.setdefault(item.layout, len(layouts)),
            shape=item.shape,
            handle=handle,
            of=item.of,
            tied=item.tied,
        )
        for item, handle in zip(manifest.items, handles, strict=True)
    )
    return entries, tuple(layout.to_plain() for layout in layouts)


class AsyncPublication(OfOneProcess):
    """What ``AsyncTensorBusClient.publish`` returns. ``async with`` closes it."""

    def __init__(
        self,
        *,
        connection: AgentConnection,
        calls: ActiveCalls,
        name: str,
        publisher: str,
        place: RankInfo,
        manifest: TensorManifest,
        timeout: float,
        check_usable: Callable[[], None],
    ) -> None:
        """Not for users."""
        self.name, self.publisher = name, publisher
        self._connection, self._calls, self._place = connection, calls, place
        self._manifest, self._timeout, self._check_usable = manifest, timeout, check_usable
        self._unmoved = manifest.unmoved()
        self._slots: Slots | None = None
        self._turn, self._loop = asyncio.Lock(), asyncio.get_running_loop()
        #: What waits for subscribers.
        self._waits: set[asyncio.Future[Any]] = set()
        self._number, self._failed = 0, False
        self._newest = PublishedVersion(seq=0, version=None)
        self._open = True

    @property
    def _what(self) -> str:
        return f"publication {self.name!r} of {self.publisher}"

    @property
    def version(self) -> Version:
        """The label of the version that this rank has put last; None before the first."""
        return self._newest.version

    @property
    def seq(self) -> int:
        """The number of the version that this rank has put last; that of an earlier launch before the first."""
        return self._newest.seq

    async def open(self, slots: int, fan_out: int | None, max_rate: float | None, deadline: Deadline) -> None:
        """Not for users. Make the slots and wait until all ranks have come."""
        connection, items = self._connection, self._manifest.items
        self._slots = await asyncio.to_thread(Slots, items, slots, f"{slots} slots of {self._what}")
        handles = tuple(self._slots.handles(slot) for slot in range(slots))
        for one in handles:
            await give_segments(connection, one, deadline.left)
        entries, layouts = entries_of(self._manifest, handles[0])
        message = Publish(
            publication=self.name,
            publisher=self.publisher,
            world_size=self._place.world_size,
            rank=self._place.rank,
            launch=self._place.launch,
            run=self._place.run,
            takeover=self._place.takeover,
            layouts=layouts,
            entries=entries,
            refusals=tuple(one for one in self._manifest.refusals if not one.target_only),
            slots=handles,
            fan_out=fan_out,
            max_rate=max_rate,
        )
        published = await connection.link.request(message, timeout=deadline.left)
        assert isinstance(published, Published)
        self._newest = PublishedVersion(seq=published.seq, version=None)

    def put(
        self, version: Version = None, *, wait: int = 0, grace: float = 5.0, timeout: float | None = None
    ) -> Coroutine[Any, Any, PublishedVersion]:
        """Set the tensors aside as the next version. Collective over the publisher's ranks, in the same order on all.

        Returns once this rank's tensors are copied, so that they may change. The version is announced when all ranks
        have copied theirs. ``version``: its label, equal on all ranks. ``wait``: until so many subscribers have
        received it, or a newer one. One that has left since counts.

        With two or more slots it neither waits for a transfer nor ends one. With ``slots=1`` it waits at most ``grace``
        seconds for transfers of the slot, then ends these; their subscribers go on with this version. On a GPU the copy
        comes after the work that the current stream has queued when this method is called, even if it is awaited later.

        Raises RegistrationError if a tensor has moved, TransferTimeoutError if fewer than ``wait`` have it by the
        deadline, RedisUnavailableError, AgentLostError.
        """
        return self._put(version, wait, grace, timeout, self._connection.home.mark())

    async def _put(
        self, version: Version, wait: int, grace: float, timeout: float | None, mark: Mark
    ) -> PublishedVersion:
        deadline = Deadline(self._timeout if timeout is None else check_timeout(timeout, "timeout"))
        check_version(version)
        _check_count("wait", wait, least=0, most=MAX_WORLD)
        check_timeout(grace, "grace")
        self._check()
        link = self._connection.link
        with self._calls.begin(f"put of {self.name!r}"), self._lost():
            await self._take_turn(deadline)
            try:
                self._check()
                self._unmoved.check(self._what)
                self._check_whole()
                await self._reach(mark, deadline)
                number = self._number + 1
                if self._place.world_size == 1:  # a put that fails may be announced all the same: the next is another
                    self._number = number
                # A rank that fails cannot tell the others. If it then put another version under this number, the two
                # would be mixed, unless their labels differ, which Redis finds.
                self._failed = self._place.world_size > 1 and version is None
                begin = BeginPut(publication=self.name, number=number, grace=grace)
                found = await link.request(begin, timeout=deadline.left)
                assert isinstance(found, SlotGiven)
                self._failed = self._place.world_size > 1
                await self._copy(found.slot)
                finish = FinishPut(publication=self.name, number=number, version=version)
                finished = await link.request(finish, timeout=deadline.left)
                assert isinstance(finished, Published)
                self._number, self._failed = number, False
                self._newest = put = PublishedVersion(seq=finished.seq, version=version)
            finally:
                self._turn.release()
            if wait:
                held = WaitHeld(publication=self.name, seq=put.seq, count=wait)
                await self._unless_closed(link.request(held, timeout=deadline.left))
        return put

    async def subscribers(self, *, timeout: float | None = None) -> list[SubscriberState]:
        """Who follows this publication, by name."""
        seconds = self._timeout if timeout is None else check_timeout(timeout, "timeout")
        self._check()
        with self._calls.begin(f"subscribers of {self.name!r}"), self._lost():
            found = await self._connection.link.request(GetSubscribers(publication=self.name), timeout=seconds)
        assert isinstance(found, Subscribers)
        return [SubscriberState(**one) for one in found.subscribers]

    async def holders(
        self, *, other_than: Collection[str] | None = None, left: bool = False, timeout: float | None = None
    ) -> frozenset[str]:
        """Names of the subscribers that hold the version that this rank has put last, or a newer one.

        ``left``: also those that have received it and have left since, as ``put(wait=)`` counts them. ``other_than``:
        wait until they are others than these. Raises TransferTimeoutError at the deadline, PeerLostError once another
        launch publishes.
        """
        seconds = self._timeout if timeout is None else check_timeout(timeout, "timeout")
        known = _check_names("other_than", other_than)
        check_flag("left", left)
        self._check()
        # No subscriber has an empty name, so nobody is waited for.
        message = WaitHolders(publication=self.name, seq=self.seq, known=("",) if known is None else known, left=left)
        with self._calls.begin(f"holders of {self.name!r}"), self._lost():
            found = await self._unless_closed(self._connection.link.request(message, timeout=seconds))
        assert isinstance(found, Holders)
        return frozenset(found.subscribers)

    async def close(self) -> None:
        """End this rank's part. Subscribers keep what they hold, and may go on feeding each other. Idempotent.

        A later launch of the publisher goes on with the next ``seq``.
        """
        if not self._open:
            return
        if self._loop is not asyncio.get_running_loop() and self._loop.is_running():
            return await on_loop(self._loop, self.close)
        self._open = False
        for wait in self._waits:
            wait.cancel()
        try:
            # What a loop that has ended had opened is closed.
            if not self._connection.lost and self._loop is asyncio.get_running_loop():
                try:
                    await self._connection.link.request(ClosePublication(publication=self.name), timeout=self._timeout)
                except AgentLostError:
                    if not self._connection.lost:
                        raise
        finally:
            self._slots = None

    async def __aenter__(self) -> AsyncPublication:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_usable()
        if not self._open:
            raise ConfigError(f"{self._what} is closed: call publish again")
        if self._connection.lost:
            raise AgentLostError(f"the agent with which {self._what} was made is gone: call publish again")

    def _check_whole(self) -> None:
        if self._failed:
            raise ConfigError(
                f"{self._what}: a put of this rank has failed, so the ranks may not be at the same version any more: "
                f"close it and call publish again on all ranks"
            )

    async def _take_turn(self, deadline: Deadline) -> None:
        """Puts of one rank follow each other. TransferTimeoutError if the one before runs at the deadline."""
        try:
            async with asyncio.timeout(None if deadline.left == math.inf else deadline.left):
                await self._turn.acquire()
        except TimeoutError:
            raise TransferTimeoutError(
                f"put of publication {self.name!r} ended at its deadline, while another put of this rank ran: "
                f"await that one first",
                outcome="withdrawn",
            ) from None

    async def _unless_closed(self, asking: Coroutine[Any, Any, Any]) -> Any:
        """The agent's answer; ConfigError once this publication is closed."""
        wait = asyncio.ensure_future(asking)
        self._waits.add(wait)
        try:
            return await wait
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._open or (task is not None and task.cancelling()):
                raise
            raise ConfigError(f"{self._what} was closed while this call waited for subscribers") from None
        finally:
            self._waits.discard(wait)

    def _lost(self) -> Lost:
        return Lost(self._connection, "call publish again")

    async def _reach(self, mark: Mark, deadline: Deadline) -> None:
        """Wait for the work that the caller had queued on a GPU. TransferTimeoutError at the deadline."""
        mark.check()
        if not mark.event:
            return
        stop, home = threading.Event(), self._connection.home
        try:
            async with asyncio.timeout(None if deadline.left == math.inf else deadline.left):
                await asyncio.to_thread(home.reach, mark, stop)
        except TimeoutError:
            raise TransferTimeoutError(
                f"put of {self._what} ended at its deadline: this worker's own GPU is behind with the work that was "
                f"queued before",
                outcome="withdrawn",
            ) from None
        finally:
            stop.set()
            mark.end()

    async def _copy(self, slot: int) -> None:
        self._check()  # it may have been closed while the agent was asked
        slots, locals_, home = self._slots, [item.local for item in self._manifest.items], self._connection.home
        assert slots is not None
        if home.quick(slots.nbytes):
            slots.copy(slot, locals_, home)
            return
        shield = Shield()
        await shield.in_thread(lambda: slots.copy(slot, locals_, home))
        shield.release()


class Lost:
    """Enter while a call asks the agent: if the agent is lost, the error says what to call again."""

    def __init__(self, connection: AgentConnection, again: str) -> None:
        self._connection, self._again = connection, again

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AgentLostError) and self._connection.link.agent_lost:
            text = error.message.replace(f"; {AGAIN}", "")  # which is for pairs
            raise AgentLostError(f"{text}; {self._again}", **error.data()) from error.__cause__


def check_slots(slots: Any) -> int:
    """``slots`` itself; ConfigError for anything but a number from 1 to 16."""
    return _check_count("slots", slots, least=1, most=MAX_SLOTS)


def check_fan_out(fan_out: Any) -> int | None:
    """``fan_out`` itself; ConfigError for anything but None or a number from 1 to ``MAX_WORLD``."""
    return None if fan_out is None else _check_count("fan_out", fan_out, least=1, most=MAX_WORLD)


def check_max_rate(rate: Any) -> float | None:
    """``max_rate`` as a float; ConfigError for anything but None or a finite number above 0."""
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ConfigError(f"max_rate={shown(rate)} must be bytes per second, above 0; None is no limit")
    return float(rate)


def _check_names(what: str, names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(one, str) for one in names):
        raise ConfigError(f"{what}={shown(names)} must be a set of subscribers' names")
    return tuple(sorted(names))


def _check_count(what: str, value: Any, *, least: int, most: float = math.inf) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limits = f"{least} to {most}" if most < math.inf else f"at least {least}"
        raise ConfigError(f"{what}={shown(value)} must be a whole number, {limits}")
    return value
