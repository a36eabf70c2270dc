"""A subscriber's rank: its tensors get the newest version from whoever can send it now.

    next:  claim (the agents choose a holder)  -->  hop: one ordinary transfer from that holder
           the hop has failed                  -->  claim again, until the deadline

The pair with a holder, and the batch for each of its slots, are kept between hops, so that rendezvous and plan happen
once. A subscriber that serves is sent from by its agents, out of memory that they hold themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

from etha.bus.messages import (
    Announced,
    ClaimLost,
    ClaimVersion,
    CloseSubscription,
    EndHop,
    Moved,
    Subscribe,
    Subscribed,
    VersionClaimed,
)
from etha.client.active_calls import ActiveCall, ActiveCalls
from etha.client.arguments.checks import check_callback, check_timeout, check_version, shown
from etha.client.arguments.world import RankInfo
from etha.client.connection import AgentConnection
from etha.client.manifest import PairDefaults, TensorManifest
from etha.client.memory.base import StagedTensors
from etha.client.memory.segments import SegmentUse
from etha.client.publication import Lost, Slots, entries_of, give_segments
from etha.client.registration import Registration
from etha.client.results import AsyncPair, OfOneProcess, OnCommit, OnProgress, TransferResult, Version
from etha.client.tasks import Deadline, Shield, on_loop
from etha.errors import (
    AgentLostError,
    AgentUnavailableError,
    ConfigError,
    EthaError,
    PeerLostError,
    ProtocolError,
    RedisUnavailableError,
    RegistrationError,
    RendezvousTimeoutError,
    TransferError,
    TransferTimeoutError,
)
from etha.memory.handles import TensorHandle

log = logging.getLogger(__name__)

#: What taking a version returns.
Taken = TypeVar("Taken")
#: Seconds that a holder's agents have to come to a hop: longer than the lease of an agent that is dead.
HOP_START = 20.0
#: Seconds without an answer after which Redis, and not a deadline, is why a hop could not begin.
REDIS_PATIENCE = 1.0
#: Pairs with holders that a subscription keeps.
MAX_PAIRS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A version that this rank's tensors hold now, and all other ranks' of its subscriber.

    ``source``: the side that has sent it, which is the publisher or another subscriber. ``bytes``: this rank's payload.
    ``seconds``: of the transfer, without the wait for a holder. ``wire_bytes``: what came over the network for it, to
    all ranks that share this one's agent; 0 on one host, less than ``bytes`` where only what has changed was sent.
    """

    seq: int
    version: Version
    source: str
    bytes: int
    seconds: float
    wire_bytes: int = 0


class HopClient(Protocol):
    """What a subscription asks of its client (``client.aio``, which imports this file)."""

    async def join_hop(self, pair: str, defaults: PairDefaults, side: str, remote: str, *, timeout: float) -> AsyncPair:
        """The pair with a holder, formed now if it is not."""
        ...

    async def register_hop(
        self,
        batch: str,
        manifest: TensorManifest,
        *,
        atomic: bool,
        shadows: StagedTensors | None,
        timeout: float,
    ) -> Registration:
        """The batch for a holder's slot, registered now if it is not."""
        ...

    async def receive_hop(
        self,
        registration: Registration,
        *,
        on_commit: OnCommit | None,
        progress: OnProgress | None,
        timeout: float,
        seq: int,
    ) -> TransferResult:
        """Receive version ``seq``, and nothing else."""
        ...

    async def leave_hop(self, pair: str, batches: list[str]) -> None:
        """Close the batches and forget the pair."""
        ...


class AsyncVersions(ABC, Generic[Taken]):
    """Something that takes versions until it is closed: ``async for`` yields what ``next`` returns, ``async with``
    closes it."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it was not closed."""

    @abstractmethod
    async def next(self, *, timeout: float | None = None) -> Taken:
        """Take the next version."""

    @abstractmethod
    async def close(self) -> None:
        """Take no more. Idempotent."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Taken:
        """The next version, however long it takes. Ends when this is closed."""
        if not self.is_open:
            raise StopAsyncIteration
        try:
            return await self.next(timeout=math.inf)
        except EthaError:
            if not self.is_open:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class AsyncSubscription(OfOneProcess, AsyncVersions[Update]):
    """What ``AsyncTensorBusClient.subscribe`` returns. ``async with`` closes it, ``async for`` yields new versions."""

    def __init__(
        self,
        client: HopClient,
        *,
        connection: AgentConnection,
        calls: ActiveCalls,
        name: str,
        subscriber: str,
        defaults: PairDefaults,
        manifest: TensorManifest,
        atomic: bool,
        serve: bool,
        timeout: float,
        check_usable: Callable[[], None],
        closed: Callable[[AsyncSubscription], None],
    ) -> None:
        """Not for users."""
        self.name, self.subscriber = name, subscriber
        self._client, self._connection, self._calls = client, connection, calls
        self._defaults, self._manifest, self._atomic, self._serve = defaults, manifest, atomic, serve
        self._timeout, self._check_usable, self._closed = timeout, check_usable, closed
        self._unmoved = manifest.unmoved()
        self._shadows: StagedTensors | None = None
        #: Of the tensors from which it serves, if it serves from them.
        self._use: SegmentUse | None = None
        #: What it holds: the newest version received whole, or none.
        self._seq, self._version = 0, None  # type: tuple[int, Version]
        #: What ``next`` asks for something newer than: 0 after a hop in place that was aborted, although only some
        #: ranks may have been written to. Of what the ranks ask, the lowest counts.
        self._since = 0
        self._newest = 0
        self._turn = 0
        #: pair with a holder -> its batches here, the pair of the last hop at the end.
        self._pairs: OrderedDict[str, list[str]] = OrderedDict()
        #: The claim whose hop runs, the hop, and the claim that has ended last, whose hop may not have begun.
        self._claim = 0
        self._hop: asyncio.Task[Moved] | None = None
        self._loop = asyncio.get_running_loop()
        self._lost: ClaimLost | None = None
        self._open, self._busy = True, False
        #: The call of ``next`` that runs, and whether a callback of it has closed this.
        self._call: ActiveCall | None = None
        self._leaves = False

    @property
    def _what(self) -> str:
        return f"subscription of {self.subscriber} to publication {self.name!r}"

    @property
    def _place(self) -> RankInfo:
        return self._defaults.place

    @property
    def version(self) -> Version:
        """The label of the version that the tensors hold, its ``seq`` if it has none; None if they hold no version."""
        return self._version

    @property
    def seq(self) -> int:
        """The number of the version that the tensors hold whole; 0 if they hold none."""
        return self._seq

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return self._open

    @property
    def is_lost(self) -> bool:
        """Whether its agent is lost, so that it receives nothing any more: call ``subscribe`` again."""
        return self._connection.lost

    @property
    def lag(self) -> int:
        """How many versions newer than that of the tensors have been announced, as far as this worker has heard."""
        return max(0, self._newest - self._seq)

    async def open(self, deadline: Deadline) -> None:
        """Not for users. Give the agent what it serves, and wait until all ranks of the subscriber have come."""
        connection, items = self._connection, self._manifest.items
        if self._serve and not self._atomic:  # its agents keep what its tensors lie in
            self._use = connection.segments.use()
            async with connection.segments.exchanging:
                self._use.hold(item.local for item in items)
        live = [connection.home.describe(item.local) for item in items]
        serves: tuple[TensorHandle, ...] | None = None
        if self._atomic:
            slots = await asyncio.to_thread(Slots, items, 1, f"shadow memory of the {self._what}")
            chosen = [tensor if tensor.numel() else None for tensor in slots.tensors[0]]
            self._shadows = StagedTensors(home=connection.home, tensors=chosen, memory=slots)
            serves = tuple(self._shadows.handles(live)) if self._serve else None
        elif self._serve:
            self._check_mapped(live)
            serves = tuple(live)
        if serves is not None:
            await give_segments(connection, serves, deadline.left)
        entries, layouts = entries_of(self._manifest, live)
        message = Subscribe(
            publication=self.name,
            subscriber=self.subscriber,
            world_size=self._place.world_size,
            rank=self._place.rank,
            launch=self._place.launch,
            run=self._place.run,
            takeover=self._place.takeover,
            layouts=layouts,
            entries=entries,
            refusals=self._manifest.refusals,
            serves=serves,
        )
        subscribed = await connection.link.request(message, timeout=deadline.left)
        assert isinstance(subscribed, Subscribed)
        self._newest, self._turn = subscribed.seq, subscribed.turn

    async def next(
        self,
        *,
        newer_than: int | None = None,
        version: Version = None,
        on_commit: OnCommit | None = None,
        progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> Update:
        """Receive the newest version, once there is one that the tensors do not hold. Collective over the subscriber's
        ranks, in the same order on all: all of them get the same version, or an error.

        ``newer_than``: a ``seq``; by default that of the tensors. ``version``: the label of the version to receive,
        which may be an older one that somebody still holds. ``on_commit`` and ``progress`` as for ``transfer``.

        If a holder fails, another one is asked, until the deadline. Raises TransferTimeoutError at the deadline (with
        the last hop's error in it), RegistrationError if the tensors do not fit the publisher's or have moved,
        ConfigError if nobody holds the pinned ``version``, RedisUnavailableError, AgentLostError, AgentUnavailableError
        (its agent takes no new work, because it was told to stop).
        """
        seconds = self._timeout if timeout is None else check_timeout(timeout, "timeout")
        check_version(version)
        check_callback("on_commit", on_commit)
        check_callback("progress", progress)
        if on_commit is not None and not self._atomic:
            raise ConfigError("on_commit= needs subscribe(..., atomic=True)")
        if newer_than is not None and not (type(newer_than) is int and 0 <= newer_than < 1 << 53):
            raise ConfigError(f"newer_than={shown(newer_than)} must be the seq of a version")
        self._check()
        if self._busy:
            raise ConfigError(f"{self._what}: another call of next() waits: await that one first")
        self._busy = True
        deadline = Deadline(seconds)
        try:
            with self._calls.begin(f"next of {self.name!r}") as call, Lost(self._connection, "call subscribe again"):
                self._call = call
                return await self._next(
                    self._since if newer_than is None else newer_than, version, on_commit, progress, deadline
                )
        except EthaError as error:
            if not self._open and not self._connection.lost:
                raise ConfigError(f"{self._what} was closed while next() waited") from error
            raise
        finally:
            self._busy, self._call = False, None
            if self._leaves:
                await self._close()

    async def close(self) -> None:
        """Follow the publication no more. The tensors keep what they hold. Idempotent.

        An ``on_commit`` may call it: then ``next`` leaves when it has put the version in place.
        """
        if not self._open:
            return
        if self._loop is not asyncio.get_running_loop() and self._loop.is_running():
            return await on_loop(self._loop, self.close)
        self._open = False
        self._closed(self)
        callback = self._calls.calling_back()
        if callback is not None and self._call is not None and callback.is_part_of(self._call):
            self._leaves = True
        else:
            await self._close()

    async def _close(self) -> None:
        try:
            # What a loop that has ended had opened is closed.
            if self._loop is asyncio.get_running_loop():
                if self._hop is not None:
                    self._hop.cancel()
                if not self._connection.lost:
                    await self._leave()
        finally:
            self._shadows = None
            if self._use is not None:
                self._use.let_go()

    def hear(self, message: Announced | ClaimLost) -> None:
        """Not for users. News from the agent."""
        if isinstance(message, Announced):
            self._newest = max(self._newest, message.seq)
            return
        self._lost = message
        if message.claim == self._claim and self._hop is not None:
            self._hop.cancel()

    # ---- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        self._check_usable()
        if not self._open:
            raise ConfigError(f"{self._what} is closed: call subscribe again")
        if self._connection.lost:
            raise AgentLostError(f"the agent with which the {self._what} was made is gone: call subscribe again")

    def _check_mapped(self, live: list[TensorHandle]) -> None:
        hidden = [
            item.name
            for item, handle in zip(self._manifest.items, live, strict=True)
            if handle.segment is None and item.local.numel()
        ]
        if hidden:
            names = ", ".join(repr(name) for name in hidden[:5])
            raise ConfigError(
                f"{self._what}: serve=True sends from these tensors to other subscribers, and {len(hidden)} of them "
                f"lie in memory that no agent can hold: {names}. Allocate them by etha.empty, move the module by "
                f"etha.share_module, give atomic=True (which sends from the shadow memory), or serve=False"
            )

    async def _next(
        self,
        newer_than: int,
        version: Version,
        on_commit: OnCommit | None,
        progress: OnProgress | None,
        deadline: Deadline,
    ) -> Update:
        failed: EthaError | None = None
        avoid: list[int] = []
        while True:
            self._unmoved.check(self._what)
            claimed = await self._ask(newer_than, version, tuple(avoid), failed, deadline)
            commit, begun = _Commit(on_commit), time.monotonic()
            try:
                moved = await self._receive(claimed, commit, progress, deadline)
            except (TransferError, RendezvousTimeoutError, AgentUnavailableError) as error:
                if isinstance(error, TransferError) and not self._atomic and error.outcome != "withdrawn":
                    self._since = 0
                await self._settle(claimed, commit, error.message)
                if isinstance(error, TransferError) and error.outcome in ("unknown", "committed"):
                    raise
                failed = error
                avoid.append(claimed.claim)
                if deadline.left == 0:
                    raise TransferTimeoutError(
                        f"{self._what}: no version by the deadline; the last hop, from {claimed.source}, has failed: "
                        f"{error.message}",
                        outcome="withdrawn",
                        torn=getattr(error, "torn", False),
                    ) from error
                log.info("%s: the hop from %s has failed, asking again: %s", self._what, claimed.source, error)
                continue
            except asyncio.CancelledError:
                await Shield().finish(self._settle(claimed, commit, "the call was cancelled"))
                raise
            except RedisUnavailableError as error:
                await self._settle(claimed, commit, error.message)
                if deadline.left == 0 and time.monotonic() - begun < REDIS_PATIENCE:
                    raise TransferTimeoutError(
                        f"{self._what}: no version by the deadline, which came while the hop from {claimed.source} "
                        f"was prepared: {error.message}",
                        outcome="withdrawn",
                    ) from error
                raise
            except EthaError as error:
                await self._settle(claimed, commit, error.message)
                raise
            await self._settle(claimed, commit, "")
            commit.check()
            return Update(
                seq=claimed.seq,
                version=claimed.version,
                source=claimed.source,
                bytes=moved.nbytes,
                seconds=moved.seconds,
                wire_bytes=moved.wired,
            )

    async def _settle(self, claimed: VersionClaimed, commit: _Commit, error: str) -> None:
        """A hop has ended: note what the tensors hold, and tell the agent. One that takes no more work, or has just
        died, need not hear it: the claim lapses, and what the tensors hold is known here."""
        if commit.moved is not None:
            self._seq, self._version = claimed.seq, claimed.version
            self._since = claimed.seq
            self._newest = max(self._newest, claimed.seq)
        elif commit.torn:
            self._seq, self._version, self._since = 0, None, 0
        await self._end(claimed, "" if commit.moved is not None else error)

    async def _ask(
        self, newer_than: int, version: Version, avoid: tuple[int, ...], failed: EthaError | None, deadline: Deadline
    ) -> VersionClaimed:
        message = ClaimVersion(
            publication=self.name,
            subscriber=self.subscriber,
            turn=self._turn + 1,
            newer_than=newer_than,
            version=version,
            avoid=avoid,
        )
        try:
            claimed = await self._connection.link.request(message, timeout=deadline.left)
        except (ConfigError, RegistrationError):
            self._turn += 1  # that question was refused, and stays so
            raise
        except TransferTimeoutError as error:
            if failed is None:
                raise
            raise TransferTimeoutError(
                f"{error.message}; the last hop has failed: {failed.message}", **error.data()
            ) from failed
        assert isinstance(claimed, VersionClaimed)
        self._turn = claimed.turn
        return claimed

    async def _receive(
        self, claimed: VersionClaimed, commit: _Commit, progress: OnProgress | None, deadline: Deadline
    ) -> Moved:
        """One hop. It ends early if its source cannot send, unless it is committed."""
        if (lost := self._lost_text(claimed.claim)) is not None:  # heard before this task ran
            raise PeerLostError(f"{claimed.source} cannot send: {lost}", reason="died", outcome="withdrawn")
        self._claim = claimed.claim
        self._hop = hop = asyncio.ensure_future(self._hop_from(claimed, commit, progress, deadline))
        shield = Shield(cut=lambda: self._cut(hop))
        try:
            await shield.wait(hop)
        finally:
            self._claim, self._hop = 0, None
        if shield.cancelled is not None:
            if not hop.cancelled():
                hop.exception()  # what a hop raises whose call was cancelled says nothing more
            raise shield.cancelled
        if not hop.cancelled():
            return hop.result()
        if commit.moved is not None:
            return commit.moved
        why = self._lost_text(claimed.claim) or "the subscription was closed"
        raise PeerLostError(f"{claimed.source} cannot send: {why}", reason="died", outcome="aborted")

    def _lost_text(self, claim: int) -> str | None:
        """Why the source of a claim cannot send; None if nothing of that kind was heard."""
        return self._lost.text if self._lost is not None and self._lost.claim == claim else None

    async def _hop_from(
        self, claimed: VersionClaimed, commit: _Commit, progress: OnProgress | None, deadline: Deadline
    ) -> Moved:
        start = Deadline(min(deadline.left, HOP_START))
        await self._keep_pairs(claimed.pair)
        await self._client.join_hop(claimed.pair, self._defaults, self.subscriber, claimed.source, timeout=start.left)
        batches = self._pairs[claimed.pair]
        if claimed.batch not in batches:
            batches.append(claimed.batch)
        registration = await self._client.register_hop(
            claimed.batch,
            replace(self._manifest, pairs=(claimed.pair,)),
            atomic=self._atomic,
            shadows=self._shadows,
            timeout=start.left,
        )
        before = registration.moved
        registration.torn = False  # what an earlier hop has left was settled with it
        try:
            await self._client.receive_hop(
                registration, on_commit=commit.callback, progress=progress, timeout=deadline.left, seq=claimed.seq
            )
        finally:  # a call that is cancelled may have been committed all the same
            if registration.moved is not before:
                commit.moved = registration.moved
            commit.torn = registration.torn
        assert commit.moved is not None
        moved = commit.moved
        if moved.version != claimed.seq:
            commit.moved, commit.torn = None, True
            raise ProtocolError(
                f"{self._what}: {claimed.source} has sent version {moved.version!r} instead of {claimed.seq}, "
                f"a bug of Etha"
            )
        return moved

    @staticmethod
    def _cut(hop: asyncio.Task[Moved]) -> None:
        hop.cancel()

    async def _keep_pairs(self, pair: str) -> None:
        """Make room for one more pair with a holder: that of the longest ago is left."""
        self._pairs.setdefault(pair, [])
        self._pairs.move_to_end(pair)
        while len(self._pairs) > MAX_PAIRS:
            left, batches = self._pairs.popitem(last=False)
            await self._client.leave_hop(left, batches)

    async def _end(self, claimed: VersionClaimed, error: str) -> None:
        message = EndHop(publication=self.name, subscriber=self.subscriber, claim=claimed.claim, error=error[:1000])
        if not self._connection.lost:
            try:
                await self._connection.link.request(message, timeout=self._timeout)
            except (AgentLostError, AgentUnavailableError) as failed:
                log.info("%s: the end of the hop from %s was not noted: %s", self._what, claimed.source, failed)

    async def _leave(self) -> None:
        try:
            message = CloseSubscription(publication=self.name, subscriber=self.subscriber)
            await self._connection.link.request(message, timeout=self._timeout)
            while self._pairs:
                pair, batches = self._pairs.popitem()
                await self._client.leave_hop(pair, batches)
        except AgentLostError:
            if not self._connection.lost:
                raise


class _Commit:
    """Whether a hop is committed, and the user's ``on_commit``, whose exception must not hide that."""

    def __init__(self, on_commit: OnCommit | None) -> None:
        self._on_commit = on_commit
        #: The agent's answer, once the tensors hold the version.
        self.moved: Moved | None = None
        #: Whether the tensors may be half-written.
        self.torn = False
        self._error: BaseException | None = None

    @property
    def callback(self) -> OnCommit | None:
        return None if self._on_commit is None else self._call

    async def _call(self) -> None:
        assert self._on_commit is not None
        try:
            found = self._on_commit()
            if found is not None:
                await found
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what it has raised."""
        if self._error is not None:
            raise self._error
