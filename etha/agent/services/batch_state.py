"""A batch on one agent: a ``LocalRegistration`` from the first rank on, a ``RegisteredBatch`` once all agents agree.

State only: ``RegistrationService`` and ``TransferService`` drive it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from etha.agent.protocol.capabilities import Terms
from etha.agent.protocol.effects import CallKey, Member
from etha.agent.protocol.evaluation import Evaluation
from etha.agent.protocol.participant import Participant
from etha.agent.protocol.registration import BatchRegistration
from etha.agent.runtime.host_sharing import SharedSnapshots, SharedTensors, serves
from etha.agent.runtime.run import DirectionProgram, TransferProgress, TransferRun
from etha.agent.runtime.sessions import WorkerSession
from etha.agent.runtime.transports import BatchTransport, NcclBatchTransport
from etha.agent.runtime.verification import ReceivedSums
from etha.bus.messages import AttachShadows, AttachSnapshot, Register
from etha.errors import EthaError, PeerLostError, ProtocolError
from etha.memory.cuda import Mappings
from etha.memory.handles import TensorHandle
from etha.peer.introductions import Exhibits, HeldBase, HeldPart, Sums, UniqueId
from etha.peer.messages import Message, Verb, Version
from etha.peer.wire import Scope
from etha.phases import Phases
from etha.store.records import PairView
from etha.transport.wire.routing import Routing

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tensors:
    """One local rank's tensors by name. ``shadows``: the memory into which it receives if the batch is atomic.

    ``snapshot``: its memory for snapshots, once it has one.
    """

    session: WorkerSession
    handles: Mapping[str, TensorHandle]
    order: tuple[str, ...]
    shadows: Mapping[str, TensorHandle] | None = None
    snapshot: Mapping[str, TensorHandle] | None = None
    #: The numbers of the tables of pulls, and of streams, that its worker has.
    pull_tables: set[int] = field(default_factory=set)
    stream_tables: set[int] = field(default_factory=set)
    #: The segments that the handles name.
    segments: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.segments = _segments(self.handles)

    def attach(self, message: AttachShadows | AttachSnapshot) -> None:
        """Add memory of the worker. ProtocolError if it does not match its tensors or is sent twice."""
        if len(message.handles) != len(self.order):
            raise ProtocolError(f"{len(message.handles)} handles for {len(self.order)} tensors")
        handles = dict(zip(self.order, message.handles, strict=True))
        self.segments |= _segments(handles)
        if isinstance(message, AttachShadows):
            self.shadows = handles
        elif self.snapshot is not None:
            raise ProtocolError("a registration sets its tensors aside in one place only")
        else:
            self.snapshot = handles

    def exchange(self, pairs: Sequence[tuple[str, str]]) -> None:
        """The segments of each pair have changed places: name them as they lie now."""
        now: dict[str | None, str] = {**dict(pairs), **{second: first for first, second in pairs}}
        self.handles = _renamed(self.handles, now)
        self.shadows = None if self.shadows is None else _renamed(self.shadows, now)


def _renamed(handles: Mapping[str, TensorHandle], now: Mapping[str | None, str]) -> dict[str, TensorHandle]:
    """The handles, those in a segment of ``now`` in the other one."""
    return {
        name: handle if handle.segment not in now else msgspec.structs.replace(handle, segment=now[handle.segment])
        for name, handle in handles.items()
    }


def _segments(handles: Mapping[str, TensorHandle]) -> set[str]:
    return {handle.segment for handle in handles.values() if handle.segment is not None}


#: (primary pair, batch, generation)
Key = tuple[str, str, int]
#: A value that ``BatchRecords.set_fields`` accepts.
Field = int | float | str | None


@dataclass(slots=True)
class Ask:
    """A local rank's waiting transfer call: the data that the machines do not need. ``since`` is when it came."""

    session: WorkerSession
    slot: int
    progress: bool
    member: Member
    verb: Verb
    trace_id: str = ""
    #: Whether the caller's thread is blocked, so that the worker can move its bytes itself.
    blocks: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, kw_only=True)
class RunningProgram:
    """The transfer that moves now. ``program``, ``run`` and ``progress`` are None until the program is compiled.

    ``booking``: seconds for which the coordinator booked. ``started``, ``submitted``, ``moved``: when GO was heard, the
    program was submitted, and this agent's part was done; 0 until then, and if it ended otherwise.
    """

    seq: int
    source: str
    snapshot: bool
    calls: Mapping[Member, CallKey]
    started: float
    booking: float = 0.0
    submitted: float = 0.0
    moved: float = 0.0
    #: When each call came; kept because the calls are forgotten one by one.
    asked: Mapping[Member, float] = field(default_factory=dict)
    #: OpenTelemetry's ids of the calls, while a trace is written.
    trace_ids: tuple[str, ...] = ()
    program: DirectionProgram | None = None
    run: TransferRun | None = None
    progress: TransferProgress | None = None
    stopped: bool = False
    #: Set while a finished move waits for a better error.
    late: asyncio.TimerHandle | None = None
    touched: bool = False

    @property
    def phase(self) -> str:
        """The name of the phase in which it is."""
        if self.moved:
            return "commit"
        if not self.submitted:
            return "compile"
        return "verify" if self.run is not None and self.run.verifying else "move"

    def phases(self, member: Member, now: float) -> Phases:
        """The seconds of the phases that this transfer has reached for the call of a local rank."""
        compiled = self.submitted or now
        moved = self.moved or now
        verify = self.run.verify_seconds if self.run is not None else 0.0
        waited = self.started - self.asked[member]
        book = min(self.booking, waited)  # another agent measured it, with its own clock
        return Phases(
            wait=waited - book,
            book=book,
            compile=compiled - self.started,
            move=max(0.0, moved - compiled - verify),
            verify=verify,
            commit=now - moved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolment:
    """A local rank's call of ``register_tensors``, at these ``epochs`` of its pairs.

    ``deadline`` is loop time. ``box`` holds the registration in which the rank waits, and is empty until it does.
    """

    session: WorkerSession
    key: CallKey
    member: Member
    epochs: Mapping[str, int]
    message: Register
    deadline: float
    box: list[LocalRegistration]


@dataclass(slots=True, kw_only=True)
class LocalRegistration:
    """One ``generation`` of a batch, from its first rank's enrolment here until the last rank here has left.

    ``pairs`` are the batch's, primary (first by name) first, at these ``epochs``. ``view`` is the primary pair's.
    """

    name: str
    pairs: tuple[str, ...]
    epochs: Mapping[str, int]
    generation: int
    view: PairView
    machine: BatchRegistration
    shared_tensors: SharedTensors
    shared_snapshots: SharedSnapshots
    tensors: dict[Member, Tensors] = field(default_factory=dict)
    #: What the calls that have not been answered yet ask for.
    enrolments: dict[CallKey, Enrolment] = field(default_factory=dict)
    #: Highest transfer number before this registration, from Redis.
    seq: int = 0
    #: What other agents said before this one knew that all agree.
    early: list[tuple[str, Message]] = field(default_factory=list)
    #: Which rank has closed the batch first, on this agent or another.
    closed: PeerLostError | None = None
    #: Set once all agents agree.
    registered: RegisteredBatch | None = None
    #: Whether no transfer can begin any more, because a rank of this agent has left or a pair is lost.
    over: bool = False
    #: Set once it holds no worker's memory any more.
    released: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def begin(
        cls,
        me: str,
        name: str,
        pairs: tuple[str, ...],
        epochs: Mapping[str, int],
        generation: int,
        view: PairView,
        mappings: Mappings | None,
    ) -> LocalRegistration:
        """A registration whose first local rank is in the roster. ``mappings`` are those of this agent's card."""
        agents = {s: tuple(side.members[r].agent for r in sorted(side.members)) for s, side in view.sides.items()}
        machine = BatchRegistration(f"{name!r} of pair {pairs[0]!r}", me=me, agents=agents, generation=generation)
        return cls(
            name=name,
            pairs=pairs,
            epochs=epochs,
            generation=generation,
            view=view,
            machine=machine,
            shared_tensors=SharedTensors(mappings),
            shared_snapshots=SharedSnapshots(mappings),
        )

    @property
    def epoch(self) -> int:
        """The primary pair's epoch, which messages carry."""
        return self.epochs[self.pairs[0]]

    @property
    def key(self) -> Key:
        """The registration's name on this agent."""
        return (self.pairs[0], self.name, self.generation)

    @property
    def agents(self) -> frozenset[str]:
        """All agents of the batch."""
        return self.machine.everybody

    @property
    def scope(self) -> Scope:
        """The registration's name between agents."""
        return Scope(pair=self.pairs[0], epoch=self.epoch, batch=self.name, generation=self.generation)

    def other(self, side: str) -> str:
        """The side opposite ``side``."""
        return next(name for name in self.view.sides if name != side)

    def show(self, agent: str, message: Exhibits) -> None:
        """Another agent tells where its worker's tensors or snapshots lie."""
        if not message.snapshot:
            self.shared_tensors.take(agent, message)
        elif serves(self.machine.agents, agent, (message.side, message.rank)):
            self.shared_snapshots.take(agent, message)
        else:
            log.warning("agent %s shows a snapshot of %s rank %d, not its own", agent, message.side, message.rank)

    def check_epoch(self, epoch: int) -> None:
        """Raise PeerLostError for a call that refers to another epoch."""
        if self.epoch != epoch:
            raise PeerLostError(
                f"batch {self.name!r} was registered at epoch {epoch}, the pair is at {self.epoch}; register it again",
                reason="relaunched",
                outcome="withdrawn",
            )

    def drop(self, key: CallKey) -> None:
        """A registration failed for one worker: remove its tensors."""
        self.enrolments.pop(key, None)
        for member in [m for m, t in self.tensors.items() if t.session.key == key[0]]:
            session = self.tensors.pop(member).session
            if session.batches.get(self.name) == (self.pairs[0], self.generation):
                del session.batches[self.name]

    def segments(self, session: WorkerSession) -> set[str]:
        """A worker's segments that hold its tensors or their staging, while it has the batch open."""
        held = [t for member, t in self.tensors.items() if t.session is session and member in self.machine.open]
        return set().union(*(tensors.segments for tensors in held))

    @property
    def moving(self) -> bool:
        """Whether a transfer of it runs here."""
        return self.registered is not None and self.registered.current is not None

    def serves(self, session: WorkerSession) -> bool:
        """Whether a worker's tensors are among this registration's."""
        return any(tensors.session is session for tensors in self.tensors.values())

    async def release(self) -> None:
        """Let go of workers' memory, whoever has shown it; no lane and no stream may be inside it any more."""
        programs = [] if self.registered is None else await self.registered.release()
        # Not on the loop: unmapping large memory takes seconds, and GPU memory waits for running work.
        await asyncio.to_thread(_drop, programs, self.shared_tensors, self.shared_snapshots)

    def forget(self) -> None:
        """Closed: only the outcome of the last transfer is kept, because others may still ask for it."""
        self.tensors = {}
        self.enrolments.clear()
        self.early.clear()
        self.machine.forget()
        if self.registered is not None:
            self.registered.forget()

    def records(self, fields: Mapping[str, Field]) -> dict[str, dict[str, Field]]:
        """The fields for Redis under each pair of this batch.

        The generation, which only the primary pair counts, keeps a late write from changing a newer registration.
        """
        return {p: {**fields, **({"generation": self.generation} if p == self.pairs[0] else {})} for p in self.pairs}


class RegisteredBatch:
    """A registration on which all agents agree: how its bytes go, and its transfers.

    ``transport`` is None if this agent is the only one. ``can_hold(batch, source)``: whether what a transfer from side
    ``source`` needs of this agent is free.
    """

    def __init__(
        self,
        registration: LocalRegistration,
        evaluation: Evaluation,
        terms: Terms,
        transport: BatchTransport | None,
        can_hold: Callable[[RegisteredBatch, str], bool],
    ) -> None:
        self.registration, self.evaluation, self.terms, self.transport = registration, evaluation, terms, transport
        # What never changes is looked up once, because each transfer asks for it several times.
        #: The batch's.
        self.name = registration.name
        #: The batch's, the primary one first.
        self.pairs = registration.pairs
        #: The registration's name on this agent.
        self.key = registration.key
        #: What the registration is called between agents.
        self.scope = registration.scope
        #: All agents of the batch.
        self.agents = registration.agents
        #: This agent.
        self.me = registration.machine.me
        first, second = registration.machine.agents
        self._other = {first: second, second: first}
        self._directions = {source: _Direction.of(self, source) for source in self._other}
        self.participant = Participant(
            f"{registration.name!r} of pair {registration.pairs[0]!r}",
            me=registration.machine.me,
            agents=registration.machine.agents,
            digests=evaluation.digests,
            seq=max(registration.seq, evaluation.seq, terms.seq),
            atomic=evaluation.atomic,
            can_hold=lambda source: can_hold(self, source),
        )
        #: Number of the last transfer that failed.
        self.failed = 0
        self.received_sums = ReceivedSums()
        #: What target ranks of other agents hold before a hop: (claim, seq).
        self.held_bases: dict[int, tuple[int, int]] = {}
        #: Other agents at whose targets a hop goes on that was broken off, and the claim of that.
        self.held_parts: dict[str, int] = {}
        #: By source side, and whether it sends a snapshot.
        self.programs: dict[tuple[str, bool], DirectionProgram] = {}
        self.asks: dict[CallKey, Ask] = {}
        self.current: RunningProgram | None = None
        #: The ranks that the oldest waiting call waits for, from the last status report.
        self.missing: tuple[Member, ...] = ()
        self.offers: dict[CallKey, str] = {}
        self.version: Version = None
        self.last_seconds: float | None = None
        #: The side that sent in the last transfer.
        self.last_source = ""
        self.last_error: EthaError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that a transfer moves, over all targets: in the direction of the last one, before any in the larger
        one."""
        if self.last_source:
            return self.evaluation.nbytes(self.last_source)
        return max((self.evaluation.nbytes(side) for side in self.evaluation.sides), default=0)

    @property
    def tensors(self) -> Mapping[Member, Tensors]:
        """Those of the ranks here."""
        return self.registration.tensors

    def other(self, side: str) -> str:
        """The side opposite ``side``."""
        return self._other[side]

    def routing(self, source: str) -> Routing:
        """How bytes go in the direction from side ``source``."""
        return self._directions[source].routing

    def read_from(self, source: str) -> frozenset[str]:
        """Agents from whose workers this one copies in the direction from side ``source``."""
        return self._directions[source].read_from

    def read_by(self, source: str) -> frozenset[str]:
        """Agents that copy from this one's workers in the direction from side ``source``."""
        return self._directions[source].read_by

    @property
    def over_nccl(self) -> bool:
        """Whether bytes go by NCCL; the same on all agents of the batch."""
        return bool(self.terms.nccl) and "nccl" in self.transports

    @property
    def transports(self) -> str:
        """ "local", "host", "tcp", "nccl", joined by "+": the transports between the agents of the two sides."""
        found, wire = set(), "nccl" if self.terms.nccl else "tcp"
        for source in self.registration.machine.agents:
            routing = self.routing(source)
            givers, takers = set(routing.source), set(routing.target)
            # Counted, because a thousand agents have a million pairs.
            here = len(givers & takers)
            read = sum(taker in takers and giver in givers for taker, giver in routing.reads)
            counts = {"local": here, "host": read, wire: len(givers) * len(takers) - here - read}
            found |= {way for way, count in counts.items() if count}
        return "+".join(sorted(found))

    def take(self, agent: str, message: Sums | UniqueId | HeldBase | HeldPart) -> None:
        """Take another agent's message that a transfer of this batch needs."""
        if isinstance(message, Sums):
            self.received_sums.take(agent, message)
        elif isinstance(message, HeldBase):
            self.held_bases[message.rank] = message.claim, message.seq
        elif isinstance(message, HeldPart):
            self.held_parts[agent] = message.claim
        elif isinstance(self.transport, NcclBatchTransport):
            self.transport.hear(agent, message)

    def fail(self, seq: int, error: EthaError) -> None:
        """A transfer has failed for all. Stop its streams, because nobody will take their bytes."""
        self.failed = seq
        if self.transport is not None:
            self.transport.stop(error)

    async def release(self) -> list[DirectionProgram]:
        """Close the transport, which keeps views of workers' memory, and hand over the programs, which do, too."""
        transport, self.transport = self.transport, None
        if transport is not None:
            await transport.close()
        programs, self.programs = list(self.programs.values()), {}
        if self.last_error is not None:  # the frames of its traceback may hold views
            self.last_error.__cause__ = self.last_error.__traceback__ = None
        return programs

    def forget(self) -> None:
        """Closed: the plans are needed no more, and they may be large."""
        self.evaluation = replace(self.evaluation, plans={}, parts={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Direction:
    """How bytes go from one side to the other: what ``RegisteredBatch`` answers under the same names."""

    routing: Routing
    read_from: frozenset[str]
    read_by: frozenset[str]

    @classmethod
    def of(cls, batch: RegisteredBatch, source: str) -> _Direction:
        agents, me, reads = batch.registration.machine.agents, batch.me, batch.terms.reads
        givers, takers = agents[source], agents[batch.other(source)]
        return cls(
            routing=Routing(me=me, source=givers, target=takers, reads=reads),
            read_from=frozenset(a for a in givers if (me, a) in reads) if me in takers else frozenset(),
            read_by=frozenset(a for a in takers if (a, me) in reads) if me in givers else frozenset(),
        )


def _drop(programs: list[DirectionProgram], shared_tensors: SharedTensors, shared_snapshots: SharedSnapshots) -> None:
    """Drop the last references to views of workers' memory."""
    while programs:
        programs.pop().near.release()
    shared_tensors.release()
    shared_snapshots.release()
