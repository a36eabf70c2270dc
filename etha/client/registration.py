"""An open batch of a worker: how it is registered, its tensors and their staging, and the version that they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from etha.bus.codec import Reply
from etha.bus.link import Answer
from etha.bus.messages import AttachShadows, BatchLost, CloseBatch, Entry, Moved, Register, Registered, Verify
from etha.client.arguments.checks import check_bucket_size, shown
from etha.client.connection import AgentConnection
from etha.client.manifest import TensorManifest
from etha.client.memory.base import StagedTensors, TensorMemory, Unmoved
from etha.client.memory.exchange import PageExchange
from etha.client.memory.segments import SegmentUse
from etha.client.results import AsyncPair, TransferResult, Version
from etha.errors import ConfigError, EthaError, PeerLostError, RegistrationError, with_again
from etha.memory.handles import span_nbytes
from etha.plan import Layout

if TYPE_CHECKING:
    from etha.memory.pull import PullTable
    from etha.memory.worker_stream import StreamRows

#: Of a worker that cannot copy what it has received into its own tensors.
COMMITTED_ALL_THE_SAME = "The transfer is committed, and this worker alone has not received it. "


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A snapshot. ``task`` ends when nobody reads it any more."""

    task: asyncio.Task[TransferResult] | None = None
    superseded: bool = False


@dataclass(slots=True, kw_only=True)
class Registration:
    """A client's record of one open batch.

    ``source`` stages tensors that the agent cannot read directly. ``shadows`` stand for tensors that the agent must not
    (atomic) or cannot write directly.
    """

    batch: str
    pair: AsyncPair
    #: All pairs of the batch, including ``pair``. An error of one of its transfers fails them all.
    pairs: tuple[AsyncPair, ...]
    #: The number of this registration of the batch, equal on all ranks.
    generation: int
    connection: AgentConnection
    manifest: TensorManifest
    #: The segments that the agent has mapped for this batch.
    segments: SegmentUse
    source: StagedTensors
    shadows: StagedTensors | None = None
    atomic: bool = False
    #: Whether this worker receives into shadows. They may not be allocated yet.
    shadowed: bool = False
    #: Which shadows change places with their tensors, if the user wants that (``atomic="swap"``).
    pages: PageExchange | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    version: Version = None
    #: The agent's answer to the last transfer that is committed.
    moved: Moved | None = None
    torn: bool = False
    open: bool = True
    #: Calls of this worker that have not ended, including offered snapshots.
    calls: int = 0
    #: Whether a blocked thread may ask the agent itself: not once the agent had to say more to it than the answer.
    direct: bool = True
    #: Why nobody can transfer it although its pairs are formed: a rank cannot take part.
    forsaken: PeerLostError | None = None
    #: Whether the agent knows that this worker is done with the batch, or will learn it from the next registration.
    left: bool = False
    #: Whether the agent was asked to unmap what only this batch used.
    released: bool = False
    leaving: asyncio.Lock = field(default_factory=asyncio.Lock)
    unmoved: Unmoved = field(default_factory=lambda: Unmoved(()))
    #: Held while a call stages or applies, so that two calls of one worker never mix versions.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The memory for snapshots once one was taken, the newest snapshot, and how many had no label.
    aside: StagedTensors | None = None
    snapshot: Snapshot | None = None
    snapshots: int = 0
    #: What this worker copies itself in a blocking ``recv``, and moves over streams, by the agent's numbers.
    pull_tables: dict[int, PullTable] = field(default_factory=dict)
    stream_tables: dict[int, StreamRows] = field(default_factory=dict)

    #: The tensors whose change autograd must hear of.
    owners: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        self.unmoved = self.manifest.unmoved()
        self.owners = tuple(item.owner for item in self.manifest.items if item.of is None)

    @property
    def stage(self) -> StagedTensors:
        """The memory into which a transfer receives, if it is not the tensors themselves."""
        return self.shadows or self.source

    @property
    def locals(self) -> list[torch.Tensor]:
        """The plain local tensors, in order."""
        return [item.local for item in self.manifest.items]

    def check_unmoved(self) -> None:
        """RegistrationError that names every tensor whose memory, shape, stride or dtype has changed."""
        self.unmoved.check(f"batch {self.batch!r}")

    @property
    def in_place(self) -> bool:
        """Whether bytes are written into the tensors as they arrive, so that a failure may leave them half-written."""
        staged = zip(self.locals, self.source.tensors, strict=True)
        return not self.atomic and any(stage is None and local.numel() > 0 for local, stage in staged)

    def moves_directly(self, verb: Literal["send", "recv"]) -> bool:
        """Whether its transfers stage nothing in this process, so that a call needs only the agent's answer."""
        aside = self.shadowed and verb == "recv"
        return self.direct and not aside and self.shadows is None and not self.source.serves

    def check_backed(self, stage: StagedTensors, *, committed: bool) -> None:
        """RegistrationError that names every tensor of ``stage`` whose own memory was taken away."""
        if freed := self._failing(stage, stage.home.backed):
            raise RegistrationError(
                f"batch {self.batch!r}: {len(freed)} registered tensors have no memory now: {', '.join(freed[:10])}; "
                f"it was freed, or unmapped as a sleep mode does. {COMMITTED_ALL_THE_SAME if committed else ''}"
                f"Give the memory back (wake the engine up), then transfer again"
            )

    def check_writable(self, stage: StagedTensors, *, committed: bool) -> None:
        """RegistrationError that names every tensor of ``stage`` into which this worker could not copy what it
        received."""
        if refused := self._failing(stage, stage.home.writable):
            way_out = "Receive into other tensors (clones): register them under these names"
            if committed:
                way_out = f"{COMMITTED_ALL_THE_SAME}Make the memory writable, then transfer again"
            raise RegistrationError(
                f"batch {self.batch!r}: {len(refused)} registered tensors cannot be written: "
                f"{', '.join(refused[:10])}; their memory is read-only, as that of a file mapped with PROT_READ, or "
                f"was unmapped. {way_out}"
            )

    def _failing(self, stage: StagedTensors, usable: Callable[[torch.Tensor], bool]) -> list[str]:
        """The names of the staged tensors that are not ``usable``."""
        items = [item for item, staged in zip(self.manifest.items, stage.tensors, strict=True) if staged is not None]
        return [repr(item.name) for item in items if not usable(item.local)]

    def lost(self) -> PeerLostError | None:
        """Why no transfer of it can begin any more: the epoch of one of its pairs is over, or a rank cannot take part.

        None if it is usable.
        """
        for pair in self.pairs:
            if pair.lost.is_set():
                assert pair.lost.reason is not None
                text, lost = with_again(pair.lost.text), pair.lost
                return PeerLostError(text, reason=lost.reason, outcome="withdrawn", culprits=lost.culprits)
        if (error := self.forsaken) is not None:
            return PeerLostError(error.message, reason=error.reason, outcome="withdrawn")
        return None

    def check_stands(self) -> None:
        """Raise PeerLostError if no transfer of it can begin any more."""
        if (error := self.lost()) is not None:
            raise error

    def hear(self, news: BatchLost) -> bool:
        """Take the agent's news about a registration of this batch; False if they are about another registration."""
        if (news.pair, news.epoch, news.generation) != (self.pair.name, self.pair.epoch, self.generation):
            return False
        self.forsaken = PeerLostError(news.text, reason=news.reason)
        return True

    def let_go(self) -> None:
        """Drop the tensors and their staging, once the batch is over here and no call uses them.

        So a handle that somebody keeps, and the client's own record of a lost batch, hold no memory.
        """
        if self.calls or (self.open and self.lost() is None):
            return
        self.manifest = replace(self.manifest, items=(), refusals=())
        self.unmoved, self.owners = Unmoved(()), ()
        self.source = StagedTensors(home=self.source.home, tensors=[])
        self.shadows = self.pages = self.aside = self.snapshot = None
        self.pull_tables, self.stream_tables = {}, {}
        if self.connection.lost:  # its agent is gone, and will not be asked to unmap them
            self.segments.let_go()

    def received(self) -> None:
        """Tell autograd that the tensors have changed."""
        torch.autograd.graph.increment_version(self.owners)


#: Most seconds that an agent has to inform all others of a rank that cannot take part.
_PATIENCE = 5.0


def check_options(direction: object, bucket_size: object, atomic: object, verify: object) -> None:
    """ConfigError for wrong options of a registration."""
    if direction not in (None, "send", "recv", "both"):
        raise ConfigError(f"direction={shown(direction)} must be 'send', 'recv', 'both' or None")
    check_bucket_size(bucket_size)
    if not (isinstance(atomic, bool) or (isinstance(atomic, str) and atomic == "swap")):
        raise ConfigError(f"atomic={shown(atomic)} must be True, False or 'swap'")
    if verify not in (None, "sample", "full"):
        raise ConfigError(f"verify={shown(verify)} must be 'sample', 'full' or None")


async def register(
    connection: AgentConnection,
    batch: str,
    pairs: tuple[AsyncPair, ...],
    manifest: TensorManifest,
    *,
    direction: Literal["send", "recv", "both"] | None,
    bucket_size: int | None,
    atomic: bool | Literal["swap"],
    verify: Verify | None,
    seq: int,
    timeout: Callable[[], float],
    shadows: StagedTensors | None = None,
) -> Registration:
    """Register ``manifest`` with the agent. ``timeout()`` gives the remaining seconds. Raises the agent's refusal.

    ``shadows``: memory into which an atomic batch is received, if other registrations of these tensors use it, too.
    """
    segments = connection.segments.use()
    try:
        return await _register(
            connection,
            batch,
            pairs,
            manifest,
            segments,
            direction=direction,
            bucket_size=bucket_size,
            atomic=atomic,
            verify=verify,
            seq=seq,
            timeout=timeout,
            shadows=shadows,
        )
    except BaseException:
        with contextlib.suppress(EthaError):  # the original error is raised, and the end of the session unmaps as well
            await segments.release(0)
        raise


async def _register(
    connection: AgentConnection,
    batch: str,
    pairs: tuple[AsyncPair, ...],
    manifest: TensorManifest,
    segments: SegmentUse,
    *,
    direction: Literal["send", "recv", "both"] | None,
    bucket_size: int | None,
    atomic: bool | Literal["swap"],
    verify: Verify | None,
    seq: int,
    timeout: Callable[[], float],
    shadows: StagedTensors | None,
) -> Registration:
    pair = pairs[0]
    locals_ = [item.local for item in manifest.items]
    home = connection.home
    async with connection.segments.exchanging:
        segments.hold(locals_)
    live = [home.describe(tensor) for tensor in locals_]
    # This process stages what the agent cannot reach in memory that it can reach.
    hidden = [h.segment is None and not connection.reaches and 0 not in h.shape for h in live]
    source = await stage(home, locals_, hidden)
    if source.serves:
        connection.warn_staged(batch)
    handles = source.handles(live)
    await segments.show(handles, timeout())
    layouts: dict[Layout, int] = {}
    entries = tuple(
        Entry(
            name=item.name,
            pair=item.pair,
            layout=layouts.setdefault(item.layout, len(layouts)),
            shape=item.shape,
            handle=handle,
            of=item.of,
            tied=item.tied,
        )
        for item, handle in zip(manifest.items, handles, strict=True)
    )
    message = Register(
        batch=batch,
        epoch=pair.epoch,
        form=manifest.form,
        pairs=manifest.pairs,
        layouts=tuple(layout.to_plain() for layout in layouts),
        entries=entries,
        refusals=manifest.refusals,
        direction=direction,
        bucket_size=bucket_size,
        atomic=bool(atomic),
        verify=verify,
        seq=seq,
        staged=(home.refused or connection.why_not)[:500] if source.serves else "",
    )
    answers: list[Answer | None] = []
    try:
        registered = await connection.link.request(message, timeout=timeout(), on_cancel=answers.append)
    except asyncio.CancelledError:
        # The batch is registered already, but nobody here will have its handle.
        if answers and isinstance(answers[0], Reply):
            await _leave(connection, batch, pair, "its register_tensors was cancelled", 0)
        raise
    assert isinstance(registered, Registered)
    registration = Registration(
        batch=batch,
        pair=pair,
        pairs=pairs,
        generation=registered.generation,
        connection=connection,
        manifest=manifest,
        segments=segments,
        source=source,
        atomic=registered.atomic,
        shadowed=registered.shadows,
        plan=registered.summary,
    )
    if atomic == "swap" and registered.shadows:
        registration.pages = PageExchange(f"batch {batch!r}", [item.name for item in manifest.items], locals_, segments)
    private = [t for t, handle in zip(locals_, handles, strict=True) if handle.segment is None and not t.is_cuda]
    connection.collapser.ask((t.data_ptr(), span_nbytes(t.shape, t.stride(), t.itemsize)) for t in private)
    if registered.shadows and registered.receives:
        try:
            await attach_shadows(registration, timeout, shadows)
        except BaseException as error:
            await leave(registration, no_place(error), 0 if isinstance(error, asyncio.CancelledError) else timeout())
            raise
    return registration


async def attach_shadows(
    registration: Registration, timeout: Callable[[], float], shadows: StagedTensors | None = None
) -> None:
    """Allocate the memory into which this worker receives an atomic batch, unless there are ``shadows``, and share it
    with the agent.

    A worker that may never receive allocates none until it does.
    """
    connection, tensors = registration.connection, registration.locals
    if shadows is None and registration.pages is not None:
        shadows = await asyncio.to_thread(registration.pages.stage, connection.home, tensors)
    elif shadows is None:
        shadows = await stage(connection.home, tensors, [tensor.numel() > 0 for tensor in tensors])
    registration.check_writable(shadows, committed=False)
    handles = shadows.handles([connection.home.describe(tensor) for tensor in tensors])
    await registration.segments.show(handles, timeout())
    message = AttachShadows(batch=registration.batch, epoch=registration.pair.epoch, handles=tuple(handles))
    await connection.link.request(message, timeout=timeout())
    registration.shadows = shadows


def no_place(error: BaseException) -> str:
    """The text by which all ranks learn that this one cannot receive."""
    return f"it has no place to receive in: {error or type(error).__name__}"


async def leave(registration: Registration, why: str, timeout: float) -> None:
    """Leave a batch that is registered but that this worker cannot use. On return all others have received ``why``."""
    text = f"this worker could not take part in batch {registration.batch!r}, register it again: {why}"
    registration.forsaken = PeerLostError(text, reason="closed")
    registration.left = True
    await _leave(registration.connection, registration.batch, registration.pair, why, min(timeout, _PATIENCE))


async def _leave(connection: AgentConnection, batch: str, pair: AsyncPair, why: str, timeout: float) -> None:
    with contextlib.suppress(EthaError):  # an agent that does not get this message sees the session's end
        message = CloseBatch(batch=batch, epoch=pair.epoch, why=why[:2000])
        await connection.link.request(message, timeout=timeout)


async def stage(home: TensorMemory, tensors: list[torch.Tensor], chosen: list[bool]) -> StagedTensors:
    """Allocate staging memory off the loop, because touching fresh pages is slow (1.8 GB/s)."""
    return await asyncio.to_thread(home.stage, tensors, chosen) if any(chosen) else home.stage(tensors, chosen)
