"""A transport in memory, ordered like a wire, with faults put in on purpose; for the tests of what is above.

network = FakeNetwork(); a, b = network.join("a"), network.join("b")
network.inject("a", "b", Fault(kind="corrupt", message=3))
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from etha.errors import PeerLostError, ProtocolError
from etha.transport.base import Peer, Progress, WireBucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to message number ``message`` (from 0) of one direction.

    ``delay``: it and what follows are held until ``release`` is set; ``drop``: it is lost; ``close``: the
    link closes instead, for both ends; ``corrupt``: its first byte arrives inverted.
    """

    kind: Literal["delay", "drop", "close", "corrupt"]
    message: int
    release: asyncio.Event | None = None


class _Channel:
    """One direction between two agents."""

    def __init__(self) -> None:
        self.sent = 0
        self.faults: dict[int, Fault] = {}
        self._arrived: deque[tuple[bytes, asyncio.Event | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.turn = asyncio.Lock()

    def put(self, payload: bytes) -> bool:
        """Deliver a message as its fault says; False when the link closes instead."""
        fault = self.faults.get(self.sent)
        self.sent += 1
        match fault.kind if fault is not None else None:
            case "close":
                return False
            case "drop":
                return True
            case "corrupt":
                payload = bytes([payload[0] ^ 0xFF]) + payload[1:] if payload else payload
        self._arrived.append((payload, fault.release if fault is not None and fault.kind == "delay" else None))
        self.wake(None)
        return True

    def wake(self, error: BaseException | None) -> None:
        """Tell who waits that something came, or that nothing will."""
        if self._waiter is not None and not self._waiter.done():
            if error is None:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(error)

    async def get(self) -> bytes:
        """The next message."""
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        payload, held = self._arrived[0]
        if held is not None:
            await held.wait()
        self._arrived.popleft()
        return payload


class FakeNetwork:
    """Agents that reach each other through this process's memory."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, str], _Channel] = defaultdict(_Channel)
        self._closed: set[frozenset[str]] = set()
        self.joined: dict[str, FakeTransport] = {}

    def join(self, agent: str) -> FakeTransport:
        """A transport for ``agent``."""
        self.joined[agent] = FakeTransport(agent, self)
        return self.joined[agent]

    def inject(self, sender: str, receiver: str, fault: Fault) -> None:
        """Have a fault wait for its message."""
        self.channel(sender, receiver).faults[fault.message] = fault

    def channel(self, sender: str, receiver: str) -> _Channel:
        """The direction from one agent to another."""
        return self._channels[sender, receiver]

    def cut(self, a: str, b: str) -> None:
        """Close the link between two agents: what waits on it ends with PeerLostError, later runs too."""
        self._closed.add(frozenset((a, b)))
        for here, there in ((a, b), (b, a)):
            self.channel(here, there).wake(lost(here, there))

    def is_cut(self, a: str, b: str) -> bool:
        """Whether the link was closed."""
        return frozenset((a, b)) in self._closed


def lost(peer: str, here: str) -> PeerLostError:
    """The error of ``here`` when its link to ``peer`` is closed."""
    return PeerLostError(f"the link of agent {here!r} to agent {peer!r} is closed", reason="closed")


class FakeTransport:
    """One agent's end of a FakeNetwork: a ``Transport[WireBucket]``."""

    def __init__(self, agent: str, network: FakeNetwork) -> None:
        self.agent = agent
        self.network = network
        self.peers: frozenset[str] = frozenset()
        self._cause: BaseException | None = None
        self._runs: set[asyncio.Timeout] = set()

    async def open(self, peers: Sequence[Peer]) -> None:
        """Remember the peers; a bucket for any other is refused."""
        self.peers = frozenset(p.agent for p in peers)

    async def run(self, bucket: WireBucket, on_progress: Progress | None = None) -> int:
        """Exchange one bucket; ProtocolError when the ends' cuts differ, PeerLostError on a closed link."""
        self._check(bucket.peer)
        try:
            async with asyncio.timeout(None) as scope:  # abort() brings its end forward
                self._runs.add(scope)
                return await self._exchange(bucket, on_progress)
        except TimeoutError:
            raise self._cause or lost(bucket.peer, self.agent) from None
        finally:
            self._runs.discard(scope)

    def _check(self, peer: str) -> None:
        if self._cause is not None:
            raise self._cause
        if peer not in self.peers:
            raise ProtocolError(f"agent {self.agent!r} has not opened a link to {peer!r}, only to {sorted(self.peers)}")
        if self.network.is_cut(self.agent, peer):
            raise lost(peer, self.agent)

    async def _exchange(self, bucket: WireBucket, on_progress: Progress | None) -> int:
        done = 0
        out, back = self.network.channel(self.agent, bucket.peer), self.network.channel(bucket.peer, self.agent)
        for tensor in bucket.send:
            if not out.put(tensor.contiguous().view(torch.uint8).numpy().tobytes()):
                self.network.cut(self.agent, bucket.peer)
                raise lost(bucket.peer, self.agent)
            done += int(tensor.numel()) * tensor.itemsize
        async with back.turn:
            for tensor in bucket.receive:
                payload = await back.get()
                room = int(tensor.numel()) * tensor.itemsize
                if len(payload) != room:
                    raise ProtocolError(f"{bucket.peer!r} sent {len(payload)} bytes, {room} were planned")
                if room:
                    tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                done += room
                if on_progress is not None:
                    on_progress(done)
        return done

    def abort(self, cause: BaseException) -> None:
        """End all runs with ``cause`` and refuse more."""
        self._cause = self._cause or cause
        for scope in self._runs:
            scope.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Let go; runs that still wait end as if the link had closed."""
        self.abort(lost("everybody", self.agent))
