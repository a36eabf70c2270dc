"""Connected workers: the process, memory, ranks and batches of each, and its open requests.

A request is opened once and answered once, and its timer never outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from etha.agent.protocol.effects import CallKey, Member
from etha.bus.codec import Request
from etha.bus.sessions import Peer
from etha.errors import EthaError, ProtocolError
from etha.memory.mapping import StandingSegment, WorkerMemory
from etha.memory.reach import ReachError
from etha.memory.revocation import LentPage
from etha.store.records import RankHolder as Holder
from etha.transport.arrival import ArrivingVersion
from etha.transport.rate_limit import RateLimit
from etha.transport.wire.differences import BaseVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank that this worker holds in a pair. ``epoch`` is the one to which it was admitted."""

    pair: str
    side: str
    rank: int
    remote: str
    holder: Holder
    epoch: int

    @property
    def member(self) -> Member:
        return (self.side, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopClaim:
    """What a rank brings to hop number ``claim``, of which others may send it the difference to what it has.

    A receiving rank ``held`` this version whole when the hop began, 0: none. A sending rank's ``find(seq)`` gives that
    version as it still has it, None if it does not. ``arriving``: at a receiving rank, what others may be sent on.
    ``passed``: what a sending rank has is itself still arriving.
    """

    claim: int
    held: int = 0
    find: Callable[[int], BaseVersion | None] | None = None
    arriving: ArrivingVersion | None = None
    passed: ArrivingVersion | None = None


@dataclass(slots=True, kw_only=True)
class WorkerSession:
    """What the agent knows of one worker's connection. A process may have several."""

    peer: Peer
    holder: Holder
    memory: WorkerMemory
    revocation: LentPage | None = None
    #: Which of the worker's wishes for an agent this one does not meet; empty if none.
    differs: str = ""
    #: Whether the worker reaches the memory of others; True until it has said that it does not.
    pulls: bool = True
    #: Whether it can take streams; True until it has said that it cannot.
    streams: bool = True
    #: Why the worker copies some of its tensors through shared memory; empty if it does not.
    staged: str = ""
    #: How fast this agent may send what the worker has; None: as fast as it can.
    rate_limit: RateLimit | None = None
    seats: dict[str, Seat] = field(default_factory=dict)
    #: batch name -> (primary pair, generation) of the registration that this worker takes part in.
    batches: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: Segments that the worker has given to this agent to hold, and that no publication or subscription has taken yet.
    standing: dict[str, StandingSegment] = field(default_factory=dict)
    #: batch name -> the hop of a publication for which the batch's next transfer is.
    hops: dict[str, HopClaim] = field(default_factory=dict)

    @property
    def reach(self) -> str:
        """How its tensors are reached, for ``status``: "direct", "staged" and why, or "mapped" if only memory that the
        worker has shown is within reach, and it has registered no other."""
        if self.staged:
            return f"staged: {self.staged}"
        return "direct" if self.memory.private or self.memory.on_device else "mapped"

    @property
    def key(self) -> str:
        return self.peer.key

    def show(self, header: dict[str, Any], fds: list[int]) -> None:
        """Take memory that the worker shows: a segment, an allocation of a GPU, or its revocation page. Owns ``fds``.

        ProtocolError or RegistrationError for anything else.
        """
        match header, fds:
            case {"segment": str(segment), "nbytes": int(nbytes), "standing": True}, [fd]:
                if self.memory.on_device:
                    os.close(fd)
                    raise ProtocolError("the agent of a GPU holds no segments")
                self.drop_standing([segment])
                self.standing[segment] = StandingSegment(segment, fd, nbytes)
            case {"segment": str(segment), "nbytes": int(nbytes)}, [fd]:
                self.memory.attach(segment, fd, nbytes)
            case {"segment": _, "device": _}, []:
                self.memory.attach_allocation(header)
            case {"revocation": True}, [fd]:
                self.revocation = LentPage(fd)
            case _:
                for fd in fds:
                    os.close(fd)
                raise ProtocolError(f"descriptors of unknown kind {sorted(map(str, header))}")

    def drop_standing(self, segments: Iterable[str]) -> None:
        """Close segments that the worker has given to this agent, as far as nothing has taken them."""
        for segment in list(segments):
            if (found := self.standing.pop(segment, None)) is not None:
                found.close()

    def probe(self, address: int, token: bytes) -> str:
        """Find out whether the worker's private memory is within reach. Returns why not; empty if it is."""
        try:
            self.memory.process.probe(address, token)
        except ReachError as error:
            self.memory.private = False
            return str(error)
        self.memory.private = True
        return ""


#: Called when a call's deadline passed (True), or its worker cancelled it (False).
End = Callable[[CallKey, bool], None]


@dataclass(slots=True)
class _Open:
    peer: Peer
    id: int
    message: Any
    timer: asyncio.TimerHandle | None = None
    end: End | None = None


class OpenCalls:
    """The open calls of all workers of this agent.

    ``on_failed(peer, message, error)`` is called for each that ends with an error and is not recorded elsewhere.
    """

    def __init__(self, on_failed: Callable[[Peer, Any, EthaError], None] = lambda *_: None) -> None:
        self._open: dict[CallKey, _Open] = {}
        self._on_failed = on_failed

    def __contains__(self, key: CallKey) -> bool:
        return key in self._open

    def __iter__(self) -> Iterator[CallKey]:
        return iter(tuple(self._open))

    def open(self, peer: Peer, request: Request, end: End) -> CallKey:
        """Open a request. ``end`` is called at its deadline and when it is cancelled, at most once."""
        key = (peer.key, request.id)
        call = self._open[key] = _Open(peer, request.id, request.message, end=end)
        if request.deadline < math.inf:
            call.timer = asyncio.get_running_loop().call_at(request.deadline, self._ended, key, True)
        return key

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """The worker does not want the answer any more; it still gets one."""
        self._ended((peer.key, request_id), False)

    def answer(self, key: CallKey, message: Any) -> None:
        """Reply. A call whose worker has left is forgotten."""
        if (call := self._close(key)) is not None:
            call.peer.reply(call.id, message)

    def fail(self, key: CallKey, error: EthaError, *, recorded: bool = False) -> None:
        """Reply with an error. ``recorded``: the caller has made a record of it, or will."""
        if (call := self._close(key)) is not None:
            call.peer.fail(call.id, error)
            if not recorded:
                self._on_failed(call.peer, call.message, error)

    def push(self, key: CallKey, message: Any) -> None:
        """Send news about a call that is still open."""
        if (call := self._open.get(key)) is not None:
            call.peer.push(message, call.id)

    def hand(self, key: CallKey, message: Any, fds: Sequence[int]) -> bool:
        """Send news about a call with descriptors, which stay the caller's. False if the call is over, or if the
        worker does not read."""
        call = self._open.get(key)
        return call is not None and call.peer.hand(message, call.id, fds)

    def drop(self, peer: Peer) -> None:
        """The worker has left: forget its calls."""
        for key in [key for key in self._open if key[0] == peer.key]:
            self._close(key)

    def _ended(self, key: CallKey, expired: bool) -> None:
        call = self._open.get(key)
        if call is None or call.end is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        end, call.end = call.end, None
        end(key, expired)

    def _close(self, key: CallKey) -> _Open | None:
        call = self._open.pop(key, None)
        if call is not None and call.timer is not None:
            call.timer.cancel()
        return call
