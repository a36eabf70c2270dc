"""What every way of moving bytes offers: a lane's copies (``agent/runtime/pipeline.py``), ``tcp``, ``nccl``.

    open(peers) once per batch and epoch -> run(bucket) any number of times -> close()

``abort`` may come at any time, from any task; a run that it ends raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from etha.errors import PeerLostError

Bucket_contra = TypeVar("Bucket_contra", contravariant=True)

#: Called with the bytes done so far; cheap, on the event loop, some ten times a second.
Progress = Callable[[int], None]


class StreamLost(PeerLostError):
    """A peer has closed a data stream in a run: mostly because it has ended the transfer, for a cause it will tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a transport: an agent, and how this kind of transport reaches it."""

    agent: str
    address: Any = None


class Transport(Protocol[Bucket_contra]):
    """Moves buckets of its kind between this agent and its peers."""

    async def open(self, peers: Sequence[Peer]) -> None:
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
