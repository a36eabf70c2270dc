"""Every request that a worker is waiting on: its deadline, who must be told when it ends, its one answer.

The shell around ``CallKey``: a request is opened once, ends once, and its timer never outlives it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from etha.agent.protocol.effects import CallKey
from etha.bus.codec import Request
from etha.bus.peer import Peer
from etha.errors import EthaError

log = logging.getLogger(__name__)

#: Told that a call's deadline passed (True) or that its worker cancelled it (False).
End = Callable[[CallKey, bool], None]


@dataclass(slots=True)
class _Open:
    peer: Peer
    id: int
    timer: asyncio.TimerHandle | None = None
    end: End | None = None


class Calls:
    """The open calls of all workers of this agent."""

    def __init__(self) -> None:
        self._open: dict[CallKey, _Open] = {}

    def __contains__(self, key: CallKey) -> bool:
        return key in self._open

    def __iter__(self) -> Iterator[CallKey]:
        return iter(tuple(self._open))

    def open(self, peer: Peer, request: Request, end: End) -> CallKey:
        """Take a request in; ``end`` hears of its deadline and of its cancellation, at most once each."""
        key = (peer.key, request.id)
        call = self._open[key] = _Open(peer, request.id, end=end)
        if request.deadline < math.inf:
            call.timer = asyncio.get_running_loop().call_at(request.deadline, self._ended, key, True)
        return key

    def cancelled(self, peer: Peer, request_id: int) -> None:
        """The worker does not want the answer any more; it still gets one."""
        self._ended((peer.key, request_id), False)

    def answer(self, key: CallKey, message: Any) -> None:
        """Reply; a call of a worker that is gone is forgotten."""
        if (call := self._close(key)) is not None:
            call.peer.reply(call.id, message)

    def fail(self, key: CallKey, error: EthaError) -> None:
        """Reply with an error."""
        if (call := self._close(key)) is not None:
            call.peer.fail(call.id, error)

    def push(self, key: CallKey, message: Any) -> None:
        """News about a call that is still open."""
        if (call := self._open.get(key)) is not None:
            call.peer.push(message, call.id)

    def drop(self, peer: Peer) -> None:
        """The worker is gone: nobody waits for these answers."""
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
