"""The interface of every transport (a lane's local copies, ``tcp``, ``nccl``) and the values it is given.

    open(peers) once per batch and epoch -> run(bucket) any number of times -> close()

``abort`` may be called at any time, from any task. A run that it ends raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from etha.errors import PeerLostError
from etha.memory.revocation import Guard
from etha.transport.arrival import ArrivingVersion
from etha.transport.copy.program import Member
from etha.transport.loan import Lender
from etha.transport.rate_limit import RateLimit
from etha.transport.wire.differences import BaseVersion
from etha.transport.wire.flows import WireProgram

#: Length in bytes of a transfer's key, by which its two ends recognise each other.
KEY_BYTES = 32

Bucket_contra = TypeVar("Bucket_contra", contravariant=True)

#: Called with the number of bytes done so far, about ten times a second, on the event loop. It must be cheap.
Progress = Callable[[int], None]


class StreamLost(PeerLostError):
    """A data stream ended during a run, or could not be opened.

    Usually the peer has ended the transfer and reports the cause itself, or is gone. Otherwise something between the
    data ports is the cause; the agent knows, because then the link stands and says nothing.
    """


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
    """One transfer's use of a program. (``key``, ``seq``) names it to the other ends; ``key`` has KEY_BYTES bytes.

    ``guards`` are the calls that lend memory to it, as in an ``Execution``. ``after`` is the number of the batch's last
    failed transfer, 0 if none failed. ``bases``: versions that the sources here still have, by the agent whose targets
    hold them. ``held``: the number of the version that the targets here hold whole, 0 for none. After the run,
    ``touched`` says whether targets may have been written, and ``wired`` how many bytes have come over the wire.
    ``limit``: how fast this agent may send, None for no limit. ``arriving``: what is told of all that comes.
    ``passed``: what is sent is itself still arriving here. ``resumed``: agents to whose targets an earlier run has
    brought a part of this version. ``lender``: lends streams to workers that move the bytes themselves.
    """

    program: WireProgram
    guards: Mapping[Member, Guard] = field(default_factory=dict)
    key: bytes = bytes(KEY_BYTES)
    seq: int
    prepared: bool = False
    after: int = 0
    bases: Mapping[str, BaseVersion] = field(default_factory=dict)
    held: int = 0
    limit: RateLimit | None = None
    arriving: ArrivingVersion | None = None
    passed: ArrivingVersion | None = None
    resumed: frozenset[str] = frozenset()
    lender: Lender | None = None
    touched: bool = False
    wired: int = 0


class Transport(Protocol[Bucket_contra]):
    """Moves buckets of its kind between this agent and its peers."""

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Prepare to exchange data with exactly these peers."""
        ...

    async def run(self, bucket: Bucket_contra, on_progress: Progress | None = None) -> int:
        """Move one bucket and return its bytes. Buckets of one peer run in the order of the calls.

        Once it returns or raises, even when cancelled, nothing touches the bucket's memory any more.
        """
        ...

    def abort(self, cause: BaseException) -> None:
        """End all current and future runs with ``cause``. Idempotent; returns at once."""
        ...

    async def close(self) -> None:
        """Wait for current runs to end, then release everything. Idempotent."""
        ...
