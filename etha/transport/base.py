"""What every way of moving bytes offers, and what it is given: a lane's copies, ``tcp``, ``nccl``.

    open(peers) once per batch and epoch -> run(bucket) any number of times -> close()

``abort`` may come at any time, from any task; a run that it ends raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from etha.errors import PeerLostError
from etha.memory.revocation import Guard
from etha.transport.copy.program import Member
from etha.transport.wire.flows import WireProgram

#: Bytes of the key of a transfer, which its two ends know it by.
KEY_BYTES = 32

Bucket_contra = TypeVar("Bucket_contra", contravariant=True)

#: Called with the bytes done so far; cheap, on the event loop, some ten times a second.
Progress = Callable[[int], None]


class StreamLost(PeerLostError):
    """A peer has closed a data stream in a run: mostly because it has ended the transfer, for a cause it will tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPeer:
    """The other end of a transport: an agent, and how this kind of transport reaches it."""

    agent: str
    address: Any = None


@dataclass(slots=True)
class Traffic:
    """Payload exchanged with one peer, in bytes."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True, kw_only=True)
class WireRun:
    """One transfer's use of a program. (``key``, ``seq``) names it to the other ends; key has KEY_BYTES.

    ``guards`` are the calls that lend memory to it, as for an ``Execution``. ``after``: number of the batch's last
    transfer that failed, 0 for none. ``touched`` tells afterwards whether targets may have been written.
    """

    program: WireProgram
    guards: Mapping[Member, Guard] = field(default_factory=dict)
    key: bytes = bytes(KEY_BYTES)
    seq: int
    prepared: bool = False
    after: int = 0
    touched: bool = False


class Transport(Protocol[Bucket_contra]):
    """Moves buckets of its kind between this agent and its peers."""

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Get ready to exchange with exactly these peers."""
        ...

    async def run(self, bucket: Bucket_contra, on_progress: Progress | None = None) -> int:
        """Move one bucket and return its bytes. Buckets of one peer run in the order of the calls.

        When it returns or raises, nothing touches the bucket's memory any more, cancelled or not.
        """
        ...

    def abort(self, cause: BaseException) -> None:
        """End all runs, now and from now on, with ``cause``; idempotent, returns at once."""
        ...

    async def close(self) -> None:
        """Let what runs end, then let go of everything; idempotent."""
        ...
