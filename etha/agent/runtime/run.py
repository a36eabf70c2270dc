"""One agent's part of a transfer while it moves: copies on the lane and streams, side by side.

Part              what this agent does in a direction of a batch: its own copies, what it exchanges, its checks
Move              one run of it; ``over`` is called once, when nothing touches memory any more, however it ended
Execution         a program as a job of the lane, of which each piece runs only while the calls lend their memory
TransferProgress  how far a transfer has come, here and in the agents that copy from this one's workers
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from etha.agent.protocol.verification import VerificationPlan
from etha.agent.runtime.lane import NOTHING, Lane, Running, WorkspacePool
from etha.agent.runtime.pulls import WorkerPulls
from etha.agent.runtime.transports import BatchTransport
from etha.agent.runtime.verification import TransferVerification
from etha.agent.runtime.worker_streams import WorkerStreams
from etha.bus.messages import Pulled
from etha.errors import TransferError
from etha.memory.reach import AccessError, ReachError, RevokedError
from etha.memory.revocation import Guard
from etha.observe import trace
from etha.observe.records import NO_PAYLOAD, Payload
from etha.transport.arrival import ArrivingVersion, may_arrive
from etha.transport.base import WireRun
from etha.transport.copy.program import CopyPiece, Member, Program
from etha.transport.copy.pulling import PullPlan
from etha.transport.copy.staging import Peak
from etha.transport.rate_limit import RateLimit
from etha.transport.tcp.data_plane import DataPlane
from etha.transport.tcp.run import NOT_COME
from etha.transport.wire.differences import BaseVersion
from etha.transport.wire.flows import WireProgram
from etha.transport.wire.worker_rows import StreamLane, Stretch

#: Programs of at most this many bytes run on the loop itself, in about ten microseconds.
_SHORT = 64 << 10

#: (error or None, whether anything may have been written)
Over = Callable[[BaseException | None, bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionProgram:
    """``nbytes`` and ``peers`` are those of each ("source" | "target", rank) of this agent, however they travel;
    ``peers`` are sorted (side, rank).

    ``verification_plan`` is None if nothing is verified. ``payload`` is what records say of it.
    """

    near: Program
    nbytes: Mapping[Member, int]
    peers: Mapping[Member, tuple[tuple[str, int], ...]]
    wire: WireProgram | None = None
    key: bytes = b""
    #: Whether this agent takes part in the wire even if it has nothing to exchange.
    joins: bool = False
    verification_plan: VerificationPlan | None = None
    #: What receiving workers that wait in a blocking call can copy themselves.
    pull: PullPlan | None = None
    #: What workers that wait in a blocking call can send or receive themselves.
    stretches: Mapping[StreamLane, Mapping[int, Stretch]] = field(default_factory=dict)
    payload: Payload = NO_PAYLOAD

    @property
    def work(self) -> int:
        """Total of the progress, in bytes."""
        return self.near.work + (self.wire.total if self.wire is not None else 0)

    @property
    def left_to_readers(self) -> int:
        """Bytes of this agent's workers that other agents copy."""
        given = sum(nbytes for (role, _), nbytes in self.nbytes.items() if role == "source")
        sent = 0
        if self.wire is not None:
            sent = sum(flow.nbytes for flow in self.wire.sends.values()) - self.wire.passed
        return max(0, given - sent - self.near.total)


class TransferRun:
    """One run of a part as transfer ``seq``. ``stop`` may be called at any time. ``progress(bytes done)`` is called."""

    def __init__(
        self,
        program: DirectionProgram,
        seq: int,
        guards: Mapping[Member, Guard],
        *,
        lane: Lane,
        plane: DataPlane | None,
        wire: BatchTransport | None,
        after: int,
        bases: Mapping[str, BaseVersion],
        held: int,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        progress: Callable[[int], None],
        over: Over,
        soon: Callable[[Callable[[], None]], object] | None = None,
        verification: TransferVerification | None = None,
        pulls: WorkerPulls | None = None,
        streams: WorkerStreams | None = None,
        about: Mapping[str, Any] = NOTHING,
        limit: RateLimit | None = None,
        arriving: ArrivingVersion | None = None,
        passed: ArrivingVersion | None = None,
        resumed: frozenset[str] = frozenset(),
    ) -> None:
        """``bases`` and ``held``: see ``WireRun``. ``pulls``, ``streams``: what workers move themselves.

        ``soon(copy)`` has a short copy made on the loop, after ``start`` has returned; the loop's ``call_soon`` if not
        given. ``about``: what the trace says of its pieces. ``limit``: how fast this agent may send to others.
        ``arriving``, ``passed``, ``resumed``: see ``WireRun``; one that passes a version on ends well only once that
        has come whole.
        """
        self.arriving, self._passed, self._resumed = arriving, passed, resumed
        #: Set when what is passed on may be whole, or when this run fails.
        self._come = asyncio.Event()
        self._limit = limit
        self._pulls = pulls
        self.streams = streams
        self._about = about
        self._program, self._seq, self._guards = program, seq, guards
        self._lane, self._plane, self._wire, self._after = lane, plane, wire, after
        self._bases, self._held = bases, held
        #: Bytes that have come over streams.
        self.wired = 0
        self._spawn, self._progress, self._tell, self._soon = spawn, progress, over, soon
        self._running: list[Running] = []
        self._left = 0
        self._near = self._far = self._pulled = 0
        self._job: Execution | None = None
        self._run: WireRun | None = None
        self._error: BaseException | None = None
        self._verification = verification
        if verification is not None and about:
            verification.about = {**about, "name": "checksum"}
        self._verified = verification is None
        self._peak: Peak | None = None
        self.peak_staging = 0
        #: Seconds of checks before and after the bytes moved.
        self.verify_seconds = 0.0
        #: Those before alone.
        self.verify_first = 0.0
        #: Whether it checks now, or ended while it did.
        self.verifying = False

    def start(self) -> None:
        """Begin. Returns at once."""
        if self._verification is None:
            self._begin()
        else:
            self._spawn(self._after_reading(self._verification))

    def stop(self) -> None:
        """End it soon. Idempotent; returns at once."""
        self._fail(TransferError("stopped"))

    def hear(self, member: Member, pulled: Pulled) -> None:
        """A receiving worker says how far it has come with its copies."""
        if self._pulls is not None:
            self._pulls.hear(member, pulled)

    # ---- inside -------------------------------------------------------------------------------

    @property
    def _plain(self) -> bool:
        """Whether nobody has to know of each byte when it travels."""
        return self._limit is None and self.arriving is None and self._passed is None and self._verification is None

    async def _after_reading(self, verification: TransferVerification) -> None:
        begun, self.verifying = time.monotonic(), True
        try:
            await verification.before()
        except Exception as raised:
            self._fail(raised)
        self.verify_first = self.verify_seconds = time.monotonic() - begun
        if self._error is None:
            self.verifying = False
            self._begin()
        else:
            self._end()

    async def _inspect(self, verification: TransferVerification) -> None:
        error: BaseException | None = None
        begun, self.verifying = time.monotonic(), True
        try:
            await verification.after()
        except Exception as raised:
            error = raised
        self.verify_seconds += time.monotonic() - begun
        self._half(error)

    def _begin(self) -> None:
        program, pulls = self._program, self._pulls
        without = frozenset[int]() if pulls is None else pulls.plan.pieces
        job = Execution(program.near, self._guards, self._lane.workspaces, without)
        self._job = job
        self.peak_staging = program.near.peak_staging(self._lane.threads)
        if program.wire is not None and (program.joins or not program.wire.empty):
            assert self._plane is not None and self._wire is not None
            run = WireRun(
                program=program.wire,
                seq=self._seq,
                guards=self._guards,
                key=program.key,
                after=self._after,
                bases=self._bases,
                held=self._held,
                limit=self._limit,
                passed=self._passed,
                resumed=self._resumed,
                lender=self.streams if self._plain else None,
            )
            arriving = self.arriving
            if arriving is not None and not job.pieces and pulls is None and may_arrive(program.wire):
                run.arriving = arriving
                arriving.begin(program.wire)
            self._run = run
            self._peak = self._plane.budget.watch()
            if program.wire.aliased:  # what lies under targets is read before anything is written
                self._left = 1
                self._spawn(self._in_turn(run, job, self._wire))
                return
            self._left = 1 + bool(job.pieces) + (pulls is not None)
            self._spawn(self._exchange(run, self._wire))
            if job.pieces:
                self._submit(job, self._half)
            if pulls is not None:
                pulls.start(self._went, self._pulls_over)
        elif pulls is not None:
            self._left = 1 + bool(job.pieces)
            if job.pieces:
                self._submit(job, self._half)
            pulls.start(self._went, self._pulls_over)
        elif program.near.work <= _SHORT and job.pieces <= 2 and self._lane.idle and not self._lane.workspaces.device:
            # The round trip to a lane thread takes longer than such a copy.
            self._left = 1
            (self._soon or asyncio.get_running_loop().call_soon)(lambda: self._here(job))
        else:
            self._left = 1
            self._submit(job, self._half)

    def _submit(self, job: Execution, done: Callable[[BaseException | None], None]) -> None:
        running = self._lane.submit(job, on_progress=self._copied, on_done=done, about=self._about)
        self._running.append(running)
        if self._error is not None:
            running.abort(self._error)

    def _fail(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        self._come.set()
        for running in self._running:
            running.abort(error)
        if self._wire is not None:
            self._wire.stop(error)
        if self._pulls is not None:
            self._pulls.stop()
        if self._verification is not None:
            self._verification.stop(error)

    def _here(self, job: Execution) -> None:
        """Run a short program on the loop, with the thread number after the lane's last."""
        piece = 0
        tracer = trace.active
        while self._error is None and piece < job.pieces:
            begun = 0 if tracer is None else time.monotonic_ns()
            n = 0
            try:
                n = job.run(piece, self._lane.threads)
            except Exception as raised:  # passed on, as from a lane
                self._error = raised
            if tracer is not None:
                tracer.piece("loop", begun, self._about, piece, n, self._error)
            piece += 1
        self._half(None)

    async def _exchange(self, run: WireRun, wire: BatchTransport) -> None:
        error: BaseException | None = None
        try:
            # A stop before this task began did not reach the transport, which did not know the run yet.
            if self._error is None:
                await wire.run(run, self._carried)
                if self._passed is not None:
                    await self._await_whole(self._passed)
        except Exception as raised:
            error = raised
        self._half(error)

    async def _await_whole(self, passed: ArrivingVersion) -> None:
        """All has been sent on. It counts once the hop that has brought it is committed."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            loop.call_soon_threadsafe(self._come.set)

        passed.listen(heard)
        try:
            while not passed.over and self._error is None:
                await self._come.wait()
                self._come.clear()
        finally:
            passed.ignore(heard)
        if self._error is None and not passed.whole:
            raise TransferError(NOT_COME)

    async def _in_turn(self, run: WireRun, job: Execution, wire: BatchTransport) -> None:
        try:
            await wire.prepare(run)
            copied: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
            if job.pieces and self._error is None:
                self._submit(job, copied.set_result)
                if (error := await copied) is not None:
                    self._fail(error)
        except Exception as raised:
            self._fail(raised)
        if self._error is not None:
            self._half(self._error)
            return
        await self._exchange(run, wire)

    def _copied(self, done: int) -> None:
        self._near = done
        self._tell_progress()

    def _carried(self, done: int) -> None:
        self._far = done
        self._tell_progress()

    def _went(self, done: int) -> None:
        self._pulled = done
        self._tell_progress()

    def _tell_progress(self) -> None:
        self._progress(self._near + self._far + self._pulled)

    def _pulls_over(self, error: ReachError | None) -> None:
        """Workers have ended their copies. If they do not reach each other's memory, the lane copies all of it."""
        if not isinstance(error, AccessError) or self._error is not None:
            return self._half(error)
        assert self._pulls is not None
        self._pulled = 0
        program = self._program.near
        rest = frozenset(range(len(program.pieces))) - self._pulls.plan.pieces
        self._submit(Execution(program, self._guards, self._lane.workspaces, rest), self._half)

    def _half(self, error: BaseException | None) -> None:
        """One of the halves is over."""
        if error is not None:
            self._fail(error)
        self._left -= 1
        if self._left:
            return
        if not self._verified and self._verification is not None and self._error is None:
            self._verified, self._left = True, 1
            self._spawn(self._inspect(self._verification))
            return
        self._end()

    def _end(self) -> None:
        """Nothing touches memory any more."""
        touched = (self._job is not None and self._job.touched) or (self._run is not None and self._run.touched)
        self.wired = self._run.wired if self._run is not None else 0
        touched = touched or (self._pulls is not None and self._pulls.touched)
        if self._peak is not None and self._plane is not None:
            self.peak_staging += self._plane.budget.seen(self._peak)
        if self._verification is not None:
            # Copies and checks of one lane run one after the other, so the larger of the two counts.
            self.peak_staging = max(self.peak_staging, self._verification.close())
        self._running = []
        self._job = self._run = self._pulls = self.streams = None  # they hold this move or workers' memory
        self._tell(self._error, touched)


#: The workspaces of threads whose agent has no card.
_workspaces = WorkspacePool()


class Execution:
    """One run of a program, guarded by the revocation words of the calls that lend memory to it.

    A member without a guard (an in-process test, staging) always lends. ``workspaces`` are those of the agent's
    threads. ``without``: pieces that somebody else copies, of a program without barriers.
    """

    def __init__(
        self,
        program: Program,
        guards: Mapping[Member, Guard],
        workspaces: WorkspacePool = _workspaces,
        without: frozenset[int] = frozenset(),
    ) -> None:
        self.program = program
        pieces = range(len(program.pieces))
        self._order = tuple(piece for piece in pieces if piece not in without) if without else pieces
        self._workspaces = workspaces
        self._guards = guards
        #: Whether targets may have been written.
        self.touched = False

    @property
    def pieces(self) -> int:
        return len(self._order)

    @property
    def barriers(self) -> tuple[int, ...]:
        """Where the program's phases begin."""
        return self.program.barriers

    def run(self, piece: int, thread: int) -> int:
        """Run a piece. RevokedError if a call has returned, other ReachErrors as memory raises them."""
        piece = self._order[piece]
        what = self.program.pieces[piece]
        entered: list[Guard] = []
        work = self._workspaces.mine()
        work.wrote = False
        try:
            for member in what.owners:
                guard = self._guards.get(member)
                if guard is not None:
                    if not guard.enter(thread):
                        raise RevokedError(f"{member[0]} rank {member[1]} took its memory back", owner=member)
                    entered.append(guard)
            return self.program.run(piece, work)
        except ReachError as error:
            if error.owner is None:
                error.owner = _owner(self.program, what, error.pid)
            raise
        finally:
            self.touched = self.touched or work.wrote
            for guard in entered:
                guard.leave(thread)


def _owner(program: Program, piece: CopyPiece, pid: int | None) -> Member | None:
    """The member of a piece whose memory belongs to process ``pid``."""
    for pair in program.pairs:
        for member in pair.owners:
            view = pair.source if member[0] == "source" else pair.target
            if member in piece.owners and view.process is not None and view.process.pid == pid:
                return member
    return piece.owners[0] if len(piece.owners) == 1 else None


class TransferProgress:
    """How far a transfer has come. ``readers`` are the agents that copy from this one's workers."""

    def __init__(self, program: DirectionProgram, readers: Collection[str]) -> None:
        self._own = program.work
        self._theirs = program.left_to_readers if readers else 0
        self._done = 0
        self._shares = dict.fromkeys(readers, 0.0)

    def own(self, done: int) -> float:
        """Set the bytes that this agent's part has done. Returns them as a share of the part."""
        self._done = max(self._done, min(done, self._own))
        return self._done / self._own if self._own else 1.0

    def heard(self, agent: str, share: float) -> None:
        """A reader has copied this share of its part."""
        if agent in self._shares:
            self._shares[agent] = max(self._shares[agent], min(max(share, 0.0), 1.0))

    @property
    def fraction(self) -> float:
        """The share (0.0 to 1.0) that is done of all bytes that this agent's workers give and take."""
        whole = self._own + self._theirs
        if not whole:
            return 0.0
        theirs = self._theirs * sum(self._shares.values()) / len(self._shares) if self._shares else 0.0
        return (self._done + theirs) / whole
