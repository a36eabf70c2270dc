"""A registered batch on the worker's side: its tensors, their shadows, what they hold now."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from etha.bus.messages import BatchLost
from etha.client.connection import Connection
from etha.client.inspect import memory_of
from etha.client.manifest import Manifest
from etha.client.memory.base import Stage
from etha.client.memory.segments import SegmentUse
from etha.client.results import Pair, TransferResult, Version
from etha.errors import PeerLostError, RegistrationError, with_again
from etha.memory.handles import Fingerprint, fingerprint, moved


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """One that was set aside; ``task`` ends when nobody reads it any more."""

    task: asyncio.Task[TransferResult] | None = None
    superseded: bool = False


@dataclass(slots=True, kw_only=True)
class Registration:
    """What a client keeps of one open batch. ``source`` stages what the agent cannot read directly,
    ``shadows`` what it must not write directly (atomic) or cannot.
    """

    batch: str
    pair: Pair
    #: All pairs of the batch, ``pair`` among them: what fails one of its transfers fails them all.
    pairs: tuple[Pair, ...]
    #: Numbers the registrations of the batch, alike on all ranks.
    generation: int
    connection: Connection
    manifest: Manifest
    #: What the agent has mapped for this batch.
    segments: SegmentUse
    source: Stage
    shadows: Stage | None = None
    atomic: bool = False
    #: Whether this worker receives into shadows, which it may not have yet.
    shadowed: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    version: Version = None
    torn: bool = False
    open: bool = True
    #: Calls of this worker that have not ended, snapshots that are offered among them.
    calls: int = 0
    #: Why nobody can transfer it although its pairs stand: a rank cannot take part.
    forsaken: PeerLostError | None = None
    #: Whether the agent has been told that this worker is done with the batch, or hears it with the next registration.
    left: bool = False
    #: Whether the agent has been told to unmap what only this batch used.
    released: bool = False
    leaving: asyncio.Lock = field(default_factory=asyncio.Lock)
    fingerprints: tuple[Fingerprint, ...] = ()
    #: Held while a call stages or applies, so that two calls of one worker never mix versions.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Where snapshots are set aside once one was taken, the newest of them, and how many had no label.
    aside: Stage | None = None
    snapshot: Snapshot | None = None
    snapshots: int = 0

    def __post_init__(self) -> None:
        self.fingerprints = tuple(fingerprint(memory_of(item.owner)) for item in self.manifest.items)

    @property
    def stage(self) -> Stage:
        """Where a transfer that receives leaves what is still to be put in place."""
        return self.shadows or self.source

    @property
    def locals(self) -> list[torch.Tensor]:
        """The plain local tensors, in order."""
        return [item.local for item in self.manifest.items]

    def check_unmoved(self) -> None:
        """RegistrationError naming every tensor whose memory, shape, stride or dtype has changed."""
        changed = moved([memory_of(item.owner) for item in self.manifest.items], self.fingerprints)
        if changed:
            names = ", ".join(repr(self.manifest.items[i].name) for i in changed[:10])
            raise RegistrationError(
                f"batch {self.batch!r}: memory, shape, stride or dtype of {len(changed)} registered tensors has "
                f"changed since register_tensors: {names}; close the handle and register them again"
            )

    @property
    def in_place(self) -> bool:
        """Whether what comes is written into the tensors themselves as it comes, so that a failure may tear them."""
        staged = zip(self.locals, self.source.tensors, strict=True)
        return not self.atomic and any(stage is None and local.numel() > 0 for local, stage in staged)

    def check_backed(self, stage: Stage, *, committed: bool) -> None:
        """RegistrationError naming every tensor of ``stage`` whose own memory was taken away."""
        items = [item for item, staged in zip(self.manifest.items, stage.tensors, strict=True) if staged is not None]
        gone = [item.name for item in items if not stage.home.backed(item.local)]
        if gone:
            names = ", ".join(repr(name) for name in gone[:10])
            raise RegistrationError(
                f"batch {self.batch!r}: {len(gone)} registered tensors have no memory now: {names}; it was freed, or "
                f"unmapped as a sleep mode does. "
                + ("The transfer is committed, and this worker alone has not received it. " if committed else "")
                + "Give the memory back (wake the engine up), then transfer again"
            )

    def lost(self) -> PeerLostError | None:
        """Why no transfer of it can begin any more: the epoch of one of its pairs is over, or a rank cannot take part.

        None while it stands.
        """
        for pair in self.pairs:
            if pair.lost.is_set():
                assert pair.lost.reason is not None
                return PeerLostError(with_again(pair.lost.text), reason=pair.lost.reason, outcome="withdrawn")
        if (error := self.forsaken) is not None:
            return PeerLostError(error.message, reason=error.reason, outcome="withdrawn")
        return None

    def check_stands(self) -> None:
        """PeerLostError where no transfer of it can begin any more."""
        if (error := self.lost()) is not None:
            raise error

    def hear(self, news: BatchLost) -> bool:
        """What the agent says of a registration of this batch; False if that is another one than this."""
        if (news.pair, news.epoch, news.generation) != (self.pair.name, self.pair.epoch, self.generation):
            return False
        self.forsaken = PeerLostError(news.text, reason=news.reason)
        return True

    def let_go(self) -> None:
        """Drop tensors and what stands for them, once the batch is over here and no call uses them.

        A handle that somebody keeps, and the client's own record of a batch whose pair is lost, keep no memory.
        """
        if self.calls or (self.open and self.lost() is None):
            return
        self.manifest = replace(self.manifest, items=(), refusals=())
        self.fingerprints = ()
        self.source = Stage(home=self.source.home, tensors=[])
        self.shadows = self.aside = self.snapshot = None

    def received(self) -> None:
        """Autograd must see that the tensors have changed."""
        torch.autograd.graph.increment_version([item.owner for item in self.manifest.items if item.of is None])
