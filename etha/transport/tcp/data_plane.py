"""DataPlane: an agent's data port, its streams by peer, its staging and its counters.

The sender opens streams, in sets. A run has one set to each agent that it sends to, until its transfer is settled. So a
run waits for no other batch's network, and a run that fails closes only its own streams. A set that is free again
serves the next run of any batch, the set with the lowest slot first; so one that was not used for a while is one too
many, and is closed. Streams' headers name the run, so that either end may be ahead of the other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from etha.config import STAGING
from etha.errors import ConfigError, PeerLostError, ProtocolError
from etha.transport.base import Progress, StreamLost, Traffic, WireRun
from etha.transport.copy.staging import Budget, CopySlots, Pool, StagingChunk, StagingMemory, rounded_up
from etha.transport.geometry.iovec import Op
from etha.transport.tcp.listener import OPENING_BYTES, Admit, DataAddress, DataListener, connect
from etha.transport.tcp.run import TcpRun
from etha.transport.tcp.streams import Header, ReceiveStream, SendStream, difference_room
from etha.transport.tcp.tls import Identity
from etha.transport.wire.differences import BaseVersion, DifferenceChoice
from etha.transport.wire.flows import STREAMS, WireProgram

log = logging.getLogger(__name__)

#: Sets of streams that are kept open although no run has them, over all peers.
SPARE_SETS = 64
#: After how many seconds without a run a set is closed, when the next run ends. A peer's lowest set stays.
IDLE = 60.0
_SLOT_BYTES = 2


@dataclass(slots=True, eq=False)
class StreamSet:
    """Streams to ``peer``, all used by one run at a time. ``slot`` is the lowest that was free at that peer."""

    peer: str
    slot: int
    outlets: list[SendStream] = field(default_factory=list)
    busy: bool = True
    #: When its last run gave it back, by time.monotonic().
    free_since: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether the other end still listens, as far as the kernel knows."""
        return all(outlet.healthy for outlet in self.outlets)


class DataPlane:
    """An agent's half of the data connections. ``run()`` accepts streams; ``traffic`` counts per peer; end with
    close().

    ``listener`` is the data port, listening and non-blocking; ``admit`` judges the tokens of those who connect.
    ``memory`` is where staging lies on a GPU's agent. With an ``identity`` all connections must be encrypted.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        token_bytes: int,
        admit: Admit,
        staging: int = STAGING,
        streams: int = STREAMS,
        copy_slots: int | None = None,
        memory: StagingMemory | None = None,
        identity: Identity | None = None,
        differences: str = "auto",
    ) -> None:
        self._choices: dict[str, DifferenceChoice] = defaultdict(lambda: DifferenceChoice(differences))
        self.budget = Budget(staging)
        self.memory = StagingMemory() if memory is None else memory
        self.copy_slots = CopySlots(self.budget, copy_slots, self.memory)
        self.streams = streams
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self._data_listener = DataListener(
            listener, token_bytes=token_bytes, admit=admit, entered=self._entered, identity=identity
        )
        self._changed = threading.Condition(threading.Lock())
        self.pool = Pool(self.budget, self.memory)
        self._slabs = Pool(self.budget)
        self._sets: dict[str, list[StreamSet]] = defaultdict(list)
        self._inlets: dict[str, set[ReceiveStream]] = defaultdict(set)
        self._running: dict[tuple[bytes, int], TcpRun] = {}
        #: For each run and peer, the openings of the peer's streams that have begun with the run, one per stream.
        self._begun: dict[tuple[tuple[bytes, int], str], list[bytes]] = defaultdict(list)
        self._closed = False

    async def run(self) -> None:
        """Accept streams until cancelled."""
        await self._data_listener.run()

    @property
    def peak_staging(self) -> int:
        """Most bytes of staging in use at once so far."""
        return self.budget.peak

    # ---- streams ------------------------------------------------------------------------------

    async def connect(self, peer: str, address: DataAddress) -> None:
        """Make sure that a free set of healthy streams to ``peer`` exists, or raise PeerLostError."""
        self.release([await self.lease(peer, address)])

    async def lease(self, peer: str, address: DataAddress) -> StreamSet:
        """Lease a set of healthy streams to ``peer`` for one run; opens one if none is free. PeerLostError if that
        fails.

        Give it back with ``release``, or with ``discard`` if its run was not committed.
        """
        dead: list[StreamSet] = []
        with self._changed:
            for one in [s for s in sorted(self._sets[peer], key=lambda s: s.slot) if not s.busy]:
                if one.healthy:
                    one.busy = True
                    break
                self._sets[peer].remove(one)
                dead.append(one)
            else:
                taken = {s.slot for s in self._sets[peer]}
                one = StreamSet(peer, next(slot for slot in range(len(taken) + 1) if slot not in taken))
                self._sets[peer].append(one)
        self._shut(dead)
        if not one.outlets:
            try:
                await self._open(one, address)
            except BaseException:
                self.discard([one])
                raise
        return one

    async def _open(self, one: StreamSet, address: DataAddress) -> None:
        opening = one.slot.to_bytes(_SLOT_BYTES, "big") + secrets.token_bytes(OPENING_BYTES - _SLOT_BYTES)
        conns = await connect(one.peer, address, opening, self.streams)
        with self._changed:
            if not self._closed and one in self._sets[one.peer]:
                one.outlets = [SendStream(conn, one.peer, self) for conn in conns]
        if not one.outlets:
            for conn in conns:
                conn.close()
            text = "this agent's data plane is closed" if self._closed else f"agent {one.peer} is lost"
            raise PeerLostError(text, reason="died")
        for outlet in one.outlets:
            outlet.start()

    def release(self, sets: Iterable[StreamSet]) -> None:
        """Make these streams available to the next run, because everything sent over them has been received.
        Idempotent."""
        over: list[StreamSet] = []
        now = time.monotonic()
        with self._changed:
            for one in sets:
                one.busy, one.free_since = False, now
                spare = sum(not other.busy for some in self._sets.values() for other in some)
                if spare > SPARE_SETS and one in self._sets[one.peer]:
                    self._sets[one.peer].remove(one)
                    over.append(one)
            for some in self._sets.values():
                lowest = min((one.slot for one in some), default=0)
                idle = [one for one in some if not one.busy and one.slot != lowest and now - one.free_since > IDLE]
                for one in idle:
                    some.remove(one)
                over += idle
        self._shut(over)

    def discard(self, sets: Iterable[StreamSet]) -> None:
        """Close the streams of a run that was not committed, because bytes left in them must not reach the next.
        Idempotent."""
        sets = list(sets)
        with self._changed:
            for one in sets:
                if one in self._sets[one.peer]:
                    self._sets[one.peer].remove(one)
        self._shut(sets)

    def _entered(self, conn: socket.socket, agent: str, opening: bytes) -> None:
        inlet = ReceiveStream(conn, agent, self, opening)
        slot = opening[:_SLOT_BYTES]
        with self._changed:
            # Streams of an earlier opening of this set belong to a run that failed at the other end.
            old = [i for i in self._inlets[agent] if i.opening[:_SLOT_BYTES] == slot and i.opening != opening]
            self._inlets[agent].add(inlet)
            closed = self._closed
        inlet.start()
        self._shut(inlets=[*old, *([inlet] if closed else [])])

    def _shut(self, sets: Iterable[StreamSet] = (), inlets: Iterable[ReceiveStream] = ()) -> None:
        for stream in [*(outlet for one in sets for outlet in one.outlets), *inlets]:
            stream.shut()
        with self._changed:
            self._changed.notify_all()

    def drop(self, peer: str) -> None:
        """The peer is lost: end its streams, and fail the runs that use them with PeerLostError."""
        with self._changed:
            running = [e for e in self._running.values() if peer in e.program.sends or peer in e.program.receives]
        for run in running:
            run.fail(PeerLostError(f"agent {peer} is lost", reason="died"))
        with self._changed:
            sets, inlets = self._sets.pop(peer, []), list(self._inlets.get(peer, ()))
        self._shut(sets, inlets)

    # ---- what streams ask (any thread) --------------------------------------------------------

    def match(self, inlet: ReceiveStream, header: Header) -> TcpRun | None:
        """The run of a header. Waits for it, because a sender may be ahead of this agent."""
        label = (header.key, header.seq)
        with self._changed:
            while label not in self._running:
                if inlet.closed or self._closed:
                    return None
                self._changed.wait()
            self._begun[label, inlet.peer].append(inlet.opening)
            return self._running[label]

    def left(self, inlet: ReceiveStream, error: Exception) -> None:
        """The other end closed a stream between two runs: fail a run that still waits for a header on it.

        If no stream of its set has begun with a run, it is not known to be meant for that run. Then the other end
        reports its cause over the link, or opens another set.
        """
        with self._changed:
            waiting = [
                run
                for label, run in self._running.items()
                if (flow := run.program.receives.get(inlet.peer)) is not None
                and inlet.opening in self._begun[label, inlet.peer]
                and len(self._begun[label, inlet.peer]) < len(flow.lanes)
            ]
        for run in waiting:
            run.fail(error)

    def forget(self, inlet: ReceiveStream) -> None:
        """A stream's thread has ended."""
        with self._changed:
            self._inlets[inlet.peer].discard(inlet)

    def count(self, peer: str, sent: int, received: int) -> None:
        with self._changed:
            traffic = self.traffic[peer]
            traffic.sent += sent
            traffic.received += received

    # ---- runs ---------------------------------------------------------------------------------

    def begin(self, wire_run: WireRun, sets: Mapping[str, StreamSet], on_progress: Progress | None) -> TcpRun:
        """Start a run with a set of streams to each agent that it sends to. ConfigError if staging has no room for
        it."""
        program, label = wire_run.program, (wire_run.key, wire_run.seq)
        if (most := self.need(program)) > self.room:
            raise ConfigError(
                f"this transfer may need {most} bytes of staging, this agent has {self.room} besides what its "
                f"{self.copy_slots.count} copy slots use: give it more staging memory, or fewer streams per peer"
            )
        slabs: list[StagingChunk] = []
        try:
            for nbytes in (*program.slabs, program.ring):
                slabs.append(self._slabs.take(nbytes))
            with self._changed:
                if self._closed:
                    raise PeerLostError("this agent's data plane is closed", reason="died")
                if label in self._running:
                    raise ProtocolError(f"transfer {wire_run.seq} runs already")
                run = self._running[label] = TcpRun(
                    program, wire_run.guards, label, copy_slots=self.copy_slots, budget=self.budget, slabs=slabs,
                    bases=self._chosen(wire_run), held=wire_run.held if program.differs else 0,
                    on_progress=on_progress, on_fail=lambda: self.discard(sets.values()), limit=wire_run.limit,
                    arriving=wire_run.arriving, passed=wire_run.passed, resumed=wire_run.resumed,
                    lender=wire_run.lender,
                )  # fmt: skip
                self._changed.notify_all()
        except BaseException:
            for slab in slabs:
                self._slabs.give(slab)
            raise
        for peer, flow in program.sends.items():
            outlets = sets[peer].outlets
            if len(outlets) < len(flow.lanes) or any(outlet.closed for outlet in outlets):
                run.fail(StreamLost(f"the data streams to agent {peer} are closed", reason="died"))
                break
            for lane in range(len(flow.lanes)):
                outlets[lane].send(run, flow, lane)
        return run

    def finish(self, run: TcpRun) -> None:
        """The run is over. Headers that come late do not find it any more."""
        run.leave()
        with self._changed:
            self._running.pop(run.label, None)
            for peer in run.program.receives:
                self._begun.pop((run.label, peer), None)
        for slab in run.slabs:
            self._slabs.give(slab)

    def need(self, program: WireProgram) -> int:
        """Most bytes of staging that a run of it needs, besides what copy slots use for anybody."""
        slabs = sum(map(rounded_up, (*program.slabs, program.ring)))
        return (
            program.packed * rounded_up(program.chunk)
            + (program.lanes * rounded_up(difference_room(program.chunk)) if program.differs else 0)
            + slabs
            + program.staged
            + self.copy_slots.count * program.scratch
        )

    @property
    def room(self) -> int:
        """Bytes of staging for all runs together."""
        return self.budget.limit - self.copy_slots.scratch

    def _chosen(self, wire_run: WireRun) -> dict[str, BaseVersion]:
        """The agents to which this run sends differences. Of what is forwarded nobody here has the version before."""
        sends = wire_run.program.sends
        return {
            peer: base
            for peer, base in wire_run.bases.items()
            if wire_run.program.differs
            and peer in sends
            and not sends[peer].forwards
            and self._choices[peer].choose(sends[peer].nbytes)
        }

    def note(self, run: TcpRun, seconds: float) -> None:
        """A run has ended well, after ``seconds``."""
        for peer, flow in run.program.sends.items():
            if peer not in run.resumed:  # else it has sent less than that
                self._choices[peer].note(flow.nbytes, seconds, differed=peer in run.bases)

    async def prepare(self, run: WireRun) -> None:
        """Copy what must be read before anything is written. The rest of the transfer may begin only after it."""
        if not run.prepared:
            run.prepared = True
            if run.program.early:
                await asyncio.to_thread(self._early, run)

    def _early(self, run: WireRun) -> None:
        with self.copy_slots.one() as copy_slot:
            for end, stage, owners in run.program.early:
                assert end.view is not None
                with copy_slot.inside(run.guards, owners):
                    copy_slot.run([Op(tile, end.view, stage, offset, at) for tile, offset, at in end.steps])

    async def close(self) -> None:
        """End all runs and streams, and wait for their threads. Idempotent."""
        with self._changed:
            self._closed = True
            running = list(self._running.values())
            sets = [one for some in self._sets.values() for one in some]
            inlets = [inlet for some in self._inlets.values() for inlet in some]
            self._changed.notify_all()
        for run in running:
            run.fail(PeerLostError("this agent's data plane is closed", reason="died"))
        self._shut(sets, inlets)
        streams: list[SendStream | ReceiveStream] = [*(outlet for one in sets for outlet in one.outlets), *inlets]
        await asyncio.to_thread(lambda: [stream.join() for stream in streams])
        self.copy_slots.close()
        self.pool.close()
        self._slabs.close()
