"""A registered batch on the worker's side: its tensors, their shadows, what they hold now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from etha.client.connection import Connection
from etha.client.inspect import memory_of
from etha.client.manifest import Manifest
from etha.client.results import Pair, TransferResult, Version
from etha.client.tensors import empty
from etha.errors import RegistrationError
from etha.memory.handles import Fingerprint, TensorHandle, describe, fingerprint, moved


@dataclass(slots=True, kw_only=True)
class Stage:
    """Mapped memory that stands for tensors of this worker, by entry (None: the tensor itself serves)."""

    tensors: list[torch.Tensor | None]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], chosen: Sequence[bool]) -> Stage:
        """Mapped memory of the same shapes, dense, for the chosen tensors; pages are touched here."""
        return cls(
            tensors=[
                empty(tuple(t.shape), dtype=t.dtype) if take else None for t, take in zip(tensors, chosen, strict=True)
            ]
        )

    @property
    def serves(self) -> bool:
        """Whether any tensor is staged."""
        return any(tensor is not None for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes that are staged."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def handles(self, live: Sequence[TensorHandle]) -> list[TensorHandle]:
        """Where the agent reads or writes, by entry."""
        return [describe(t) if t is not None else handle for t, handle in zip(self.tensors, live, strict=True)]

    def pull(self, tensors: Sequence[torch.Tensor]) -> None:
        """Live tensors -> stage, before sending."""
        for staged, tensor in zip(self.tensors, tensors, strict=True):
            if staged is not None:
                staged.copy_(tensor)

    def push(self, tensors: Sequence[torch.Tensor]) -> None:
        """Stage -> live tensors, after receiving."""
        for staged, tensor in zip(self.tensors, tensors, strict=True):
            if staged is not None:
                tensor.copy_(staged)


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
    connection: Connection
    manifest: Manifest
    source: Stage
    shadows: Stage | None = None
    atomic: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    version: Version = None
    torn: bool = False
    open: bool = True
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

    def received(self) -> None:
        """Autograd must see that the tensors have changed."""
        torch.autograd.graph.increment_version([item.owner for item in self.manifest.items if item.of is None])
