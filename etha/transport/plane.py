"""DataPlane: the data half of an agent: its port, its streams by peer, its staging and its counters.

Streams are opened by who sends, stay open between runs of any batch, and are gone after a run that failed.
A run is found by what its streams' headers call it, so that either end may be ahead of the other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from etha.config import STAGING
from etha.errors import ConfigError, PeerLostError, ProtocolError
from etha.memory.revocation import Guard
from etha.transport.base import Progress, StreamLost
from etha.transport.door import OPENING_BYTES, Admit, DataAddress, Door, knock
from etha.transport.exchange import Exchange
from etha.transport.flows import CHUNK, STREAMS, WireProgram
from etha.transport.header import KEY_BYTES, Header
from etha.transport.inlets import Inlet
from etha.transport.outlets import Outlet
from etha.transport.program import Member
from etha.transport.segments import Op
from etha.transport.staging import Budget, Desks, StagingMemory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Payload exchanged with one peer, in bytes."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True, kw_only=True)
class WireRun:
    """One transfer's use of a program. (``key``, ``seq``) names it to the other ends; key has KEY_BYTES.

    ``guards`` are the calls that lend memory to it, as for an ``Execution``. ``after``: number of the batch's last
    transfer that failed, 0 for none.
    """

    program: WireProgram
    guards: Mapping[Member, Guard] = field(default_factory=dict)
    key: bytes = bytes(KEY_BYTES)
    seq: int
    prepared: bool = False
    after: int = 0


class DataPlane:
    """The data half of an agent. ``run()`` accepts streams; ``traffic`` counts per peer; close() in the end.

    ``listener`` is the data port, listening and non-blocking; ``admit`` judges the tokens of those who knock.
    ``memory``: where staging lies, on a GPU's agent.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token_bytes: int,
        admit: Admit,
        staging: int = STAGING,
        streams: int = STREAMS,
        desks: int | None = None,
        memory: StagingMemory | None = None,
    ) -> None:
        self.budget = Budget(staging)
        self.memory = StagingMemory() if memory is None else memory
        self.desks = Desks(self.budget, desks, self.memory)
        self.streams = streams
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self._door = Door(listener, token_bytes=token_bytes, admit=admit, entered=self._entered)
        self._changed = threading.Condition(threading.Lock())
        self._outlets: dict[str, list[Outlet]] = defaultdict(list)
        self._inlets: dict[str, set[Inlet]] = defaultdict(set)
        self._running: dict[tuple[bytes, int], Exchange] = {}
        #: How many streams of a peer have begun with a run.
        self._begun: dict[tuple[tuple[bytes, int], str], int] = defaultdict(int)
        self._slabs = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
        self._opening: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._closed = False

    async def run(self) -> None:
        """Let streams in until cancelled."""
        await self._door.run()

    @property
    def peak_staging(self) -> int:
        """Most bytes of staging in use at once since ``budget.restart()``."""
        return self.budget.peak

    # ---- streams ------------------------------------------------------------------------------

    async def connect(self, peer: str, address: DataAddress) -> None:
        """Have healthy streams to ``peer``: opens them where they are missing; PeerLostError."""
        async with self._opening[peer]:
            with self._changed:
                outlets = self._outlets[peer]
                if outlets and all(o.healthy for o in outlets):
                    return
            self._shut(outlets=[peer])
            conns = await knock(peer, address, secrets.token_bytes(OPENING_BYTES), self.streams)
            with self._changed:
                if self._closed:
                    for conn in conns:
                        conn.close()
                    raise PeerLostError("this agent's data plane is closed", reason="closed")
                found = self._outlets[peer] = [Outlet(conn, peer, self) for conn in conns]
            for outlet in found:
                outlet.start()

    def _entered(self, conn: socket.socket, agent: str, opening: bytes) -> None:
        inlet = Inlet(conn, agent, self, opening)
        with self._changed:
            # Streams of an earlier opening belong to a run that failed at the other end.
            old = [i for i in self._inlets[agent] if i.opening != opening]
            self._inlets[agent].add(inlet)
            closed = self._closed
            self._changed.notify_all()
        for stream in old:
            self._shut_inlet(stream)
        inlet.start()
        if closed:
            self._shut_inlet(inlet)

    def _shut_inlet(self, inlet: Inlet) -> None:
        inlet.shut()
        with self._changed:
            self._changed.notify_all()

    def _shut(self, outlets: Sequence[str] = (), inlets: Sequence[str] = ()) -> None:
        with self._changed:
            found: list[Outlet | Inlet] = [o for peer in outlets for o in self._outlets.pop(peer, ())]
            found += [i for peer in inlets for i in self._inlets.get(peer, ())]
        for stream in found:
            stream.shut()
        with self._changed:
            self._changed.notify_all()

    def drop(self, peer: str) -> None:
        """The peer is lost: its streams end, and the runs that use them, with PeerLostError."""
        with self._changed:
            running = [e for e in self._running.values() if peer in e.program.sends or peer in e.program.receives]
        for exchange in running:
            exchange.fail(PeerLostError(f"agent {peer} is lost", reason="died"))
        self._shut([peer], [peer])

    # ---- what streams ask (any thread) --------------------------------------------------------

    def match(self, inlet: Inlet, header: Header) -> Exchange | None:
        """The run of a header; a sender may be ahead of this agent, so it is waited for."""
        label = (header.key, header.seq)
        with self._changed:
            while label not in self._running:
                if inlet.closed or self._closed:
                    return None
                self._changed.wait()
            self._begun[label, inlet.peer] += 1
            return self._running[label]

    def left(self, inlet: Inlet, error: Exception) -> None:
        """The other end has closed a stream between two runs: those that still wait for its header fail."""
        with self._changed:
            waiting = [
                exchange
                for label, exchange in self._running.items()
                if (flow := exchange.program.receives.get(inlet.peer)) is not None
                and self._begun[label, inlet.peer] < len(flow.lanes)
            ]
        for exchange in waiting:
            exchange.fail(error)

    def forget(self, inlet: Inlet) -> None:
        """The thread of a stream has ended."""
        with self._changed:
            self._inlets[inlet.peer].discard(inlet)

    def count(self, peer: str, sent: int, received: int) -> None:
        """Add to the peer's counters."""
        with self._changed:
            traffic = self.traffic[peer]
            traffic.sent += sent
            traffic.received += received

    # ---- runs ---------------------------------------------------------------------------------

    def begin(self, run: WireRun, on_progress: Progress | None) -> Exchange:
        """Start a run whose streams are open; ConfigError where it does not fit the staging."""
        program, label = run.program, (run.key, run.seq)
        with self._changed:
            if self._closed:
                raise PeerLostError("this agent's data plane is closed", reason="closed")
            if label in self._running:
                raise ProtocolError(f"transfer {run.seq} runs already")
            self._provide(program)
            exchange = self._running[label] = Exchange(
                program, run.guards, label, desks=self.desks, budget=self.budget, slabs=self._slabs,
                on_progress=on_progress, on_fail=self._failed,
            )  # fmt: skip
            outlets = {peer: list(self._outlets[peer]) for peer in program.sends}
            self._changed.notify_all()
        for peer, flow in program.sends.items():
            if len(outlets[peer]) < len(flow.lanes):
                exchange.fail(StreamLost(f"the data streams to agent {peer} are closed", reason="closed"))
                break
            for lane in range(len(flow.lanes)):
                outlets[peer][lane].send(exchange, flow, lane)
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """The run is over: what comes late finds nothing."""
        with self._changed:
            self._running.pop(exchange.label, None)
            for peer in exchange.program.receives:
                self._begun.pop((exchange.label, peer), None)

    def _failed(self, exchange: Exchange) -> None:
        self.discard(exchange.program)

    def discard(self, program: WireProgram) -> None:
        """Close the streams of a transfer that was aborted: what lies in them must not meet the next one."""
        self._shut(list(program.sends), list(program.receives))

    def _provide(self, program: WireProgram) -> None:
        """The memory of a run, all that it may come to being within the budget."""
        streams = sum(len(f.lanes) for flows in (program.sends, program.receives) for f in flows.values())
        streams = max(streams, sum(map(len, self._outlets.values())) + sum(map(len, self._inlets.values())))
        chunks = streams * max(CHUNK, program.chunk)
        most = chunks + self.desks.scratch(program.scratch) + sum(program.slabs) + program.staged
        if most > self.budget.limit:
            raise ConfigError(
                f"{streams} streams, {self.desks.count} desks and reductions may need {most} bytes of staging, this "
                f"agent has {self.budget.limit}: give it more staging memory, or fewer streams per peer"
            )
        if any(need > slab.numel() for need, slab in zip(program.slabs, self._slabs, strict=True)):
            if self._running:
                raise ConfigError("two transfers with reductions at once: the lanes of these agents are not in order")
            self.budget.take(-sum(s.numel() for s in self._slabs))
            sizes = [max(need, slab.numel()) for need, slab in zip(program.slabs, self._slabs, strict=True)]
            self._slabs = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
            self.budget.take(sum(sizes))
            self._slabs = (torch.empty(sizes[0], dtype=torch.uint8), torch.empty(sizes[1], dtype=torch.uint8))

    async def prepare(self, run: WireRun) -> None:
        """Copy what must be read before anything is written; the rest of the transfer only after it."""
        if not run.prepared:
            run.prepared = True
            if run.program.early:
                await asyncio.to_thread(self._early, run)

    def _early(self, run: WireRun) -> None:
        with self.desks.one() as desk:
            for end, stage, owners in run.program.early:
                assert end.view is not None
                with desk.inside(run.guards, owners):
                    desk.run([Op(tile, end.view, stage, offset, at) for tile, offset, at in end.steps])

    async def close(self) -> None:
        """End all runs and streams and wait for their threads; idempotent."""
        with self._changed:
            self._closed = True
            running = list(self._running.values())
            streams: list[Outlet | Inlet] = [o for some in self._outlets.values() for o in some]
            streams += [i for some in self._inlets.values() for i in some]
            self._changed.notify_all()
        for exchange in running:
            exchange.fail(PeerLostError("this agent's data plane is closed", reason="closed"))
        self._shut(list(self._outlets), list(self._inlets))
        await asyncio.to_thread(lambda: [stream.join() for stream in streams])
        self.desks.close()
